//! `cmt tune` measures the best plan for the machine once, keeps it, and says where it comes from; `cmt profile` tells
//! sound profiles from others.
#![expect(unsafe_code, reason = "sends signals")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cmt_tests::{Finished, Rung, Victim, built, cmt, cmt_command, require, wait_until_staged};
use serde_json::Value;

/// Nothing here takes so long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// A place of its own for what is kept.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A command that keeps here, without libcuda: one that measured would fail.
    fn blind(&self, args: &[&str]) -> Command {
        let mut command = cmt_command(args);
        command
            .env("XDG_CACHE_HOME", self.path("cache"))
            .env_remove("LD_LIBRARY_PATH");
        command
    }

    /// `cmt tune` on a stand-in with room for copies of up to 4 MiB.
    fn tune(&self, args: &[&str]) -> Command {
        let mut command = self.blind(&["tune"]);
        command
            .args(args)
            .env("LD_LIBRARY_PATH", &built().folder)
            .env("STANDIN_MEMORY_MIB", "8");
        command
    }

    /// What is kept.
    fn kept(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path("cache/cmt"));
        let entries = entries.into_iter().flatten().flatten();
        // Beside the libraries that are loaded into programs.
        entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|ending| ending == "json"))
            .collect()
    }

    /// A machine by files that tell of it.
    fn machine(&self, files: &[(&str, &str)]) -> PathBuf {
        let root = self.path("machine");
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("below the root")).expect("a folder");
            fs::write(path, format!("{text}\n")).expect("a file");
        }
        root
    }
}

fn finish(mut command: Command) -> Finished {
    command.output().expect("run cmt").into()
}

#[track_caller]
fn number(value: &Value) -> f64 {
    value
        .as_f64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

/// Rows that stage something.
fn staged_rows(profile: &Value) -> usize {
    ["htod", "dtoh"]
        .iter()
        .flat_map(|direction| profile[direction].as_array().into_iter().flatten())
        .filter(|row| row["threads"] != 0)
        .count()
}

#[test]
fn a_plan_is_measured_once_and_then_known() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let place = Place::new();
    let saved = place.path("profile.json");
    let saved_name = saved.to_str().expect("a name");
    let report = finish(place.tune(&["--json", "--save", saved_name])).json();
    assert_eq!(report["schema"], "cmt/tune/1");
    assert_eq!(
        (&report["from"], &report["search"]),
        (&"search".into(), &"fast".into())
    );
    assert_eq!(report["interrupted"], false);
    assert!(number(&report["took_s"]) < 10.0, "{}", report["took_s"]);
    let profile = &report["profile"];
    assert!(staged_rows(profile) > 0);
    let classes = profile["measured"]["classes"].as_array().expect("classes");
    let found: Vec<(&str, u64)> = classes
        .iter()
        .map(|class| {
            let direction = class["direction"].as_str().expect("a direction");
            (direction, class["bytes"].as_u64().expect("a size"))
        })
        .collect();
    let wanted: Vec<(&str, u64)> = [("HtoD", 18), ("DtoH", 16)]
        .into_iter()
        .flat_map(|(direction, first)| (first..=22).map(move |shift| (direction, 1 << shift)))
        .collect();
    assert_eq!(found, wanted);
    for class in classes {
        assert!(number(&class["samples"]) >= 3.0, "{class}");
        assert!(number(&class["pinned_gbps"]) > 0.0, "{class}");
        // The stand-in's driver copies at 0.8 GB/s; whatever is worse than that is left to it.
        assert!(
            number(&class["tuned_gbps"]) >= number(&class["stock_gbps"]),
            "{class}"
        );
        if class["bytes"] == 4 << 20 {
            assert!(number(&class["tuned_gbps"]) > 1.0, "{class}");
        }
    }

    // What was saved is sound, and another process copies by it.
    let text = fs::read_to_string(&saved).expect("the profile");
    let file: Value = serde_json::from_str(&text).expect("an object");
    assert_eq!(file, *profile);
    let checked = finish(place.blind(&["profile", "check", saved_name]));
    assert_eq!(checked.code, Some(0), "{checked:#?}");
    let victim = Victim::start("victim-drv", ["--bytes", "4M"]);
    let pid = victim.pid.to_string();
    let args = [
        "attach",
        &pid,
        "--before",
        "0s",
        "--after",
        "0s",
        "--profile",
        saved_name,
    ];
    let attached = cmt(args);
    assert_eq!(attached.code, Some(0), "{attached:#?}");
    let status = cmt(["status", &pid, "--json"]).json();
    for direction in ["htod", "dtoh"] {
        assert_eq!(
            status["processes"][0]["plan"][direction],
            profile[direction]
        );
    }

    // The second time nothing is started: there is no libcuda any more.
    assert_eq!(place.kept().len(), 1);
    for args in [
        &["tune", "--json"][..],
        &["tune", "--json", "--search", "instant"],
    ] {
        let again = finish(place.blind(args)).json();
        assert_eq!(
            again["from"]["cache"],
            place.kept()[0].to_str().expect("a name")
        );
        assert_eq!(again["profile"], *profile);
        assert!(number(&again["took_s"]) < 0.1);
    }
    let text = finish(place.blind(&["tune"]));
    assert!(text.stdout.contains("--fresh measures anew"), "{text:#?}");
    for line in text.stdout.lines().filter(|line| !line.contains("kept in")) {
        assert!(line.chars().count() <= 80, "{line}");
    }
    for more in ["--fresh", "--search=full"] {
        let refused = finish(place.blind(&["tune", more]));
        assert!(refused.refusal().contains("no libcuda was found"), "{more}");
    }

    // It is listed, shown and passed on.
    let list = finish(place.blind(&["profile", "list", "--json"])).json();
    let entries = list["profiles"].as_array().expect("profiles");
    let name = entries
        .iter()
        .find(|entry| entry["path"] == place.kept()[0].to_str().expect("a name"))
        .and_then(|entry| entry["name"].as_str())
        .expect("the one that is kept");
    let exported = finish(place.blind(&["profile", "export", name])).json();
    assert_eq!(exported, *profile);
    let shown = finish(place.blind(&["profile", "show", name]));
    assert!(shown.stdout.contains(" HtoD, all cores"), "{shown:#?}");
    assert!(
        shown.stdout.contains("measured by --search fast"),
        "{shown:#?}"
    );

    // What is damaged is told of, and not used.
    fs::write(&place.kept()[0], &text.stdout).expect("no profile");
    let estimated = finish(place.blind(&["tune", "--json", "--search", "instant"]));
    assert!(
        estimated.stderr.contains("it is not used"),
        "{estimated:#?}"
    );
    assert_eq!(estimated.json()["from"], "estimate");
    let listed = finish(place.blind(&["profile", "list"]));
    assert!(listed.stdout.contains("damaged: "), "{listed:#?}");
    let anew = finish(place.tune(&["--json"]));
    assert!(anew.stderr.contains("it is not used"), "{anew:#?}");
    assert_eq!(anew.json()["from"], "search");
    let known = finish(place.blind(&["tune", "--json"])).json();
    assert!(known["from"]["cache"].is_string(), "{known}");
}

/// The process that a tune measures.
fn copier(tune: u32) -> Option<u32> {
    let wanted = format!("bench-copier\0{tune}\0");
    fs::read_dir("/proc")
        .expect("read /proc")
        .find_map(|entry| {
            let entry = entry.ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let tail = line.get(line.len().checked_sub(wanted.len())?..)?;
            (tail == wanted.as_bytes()).then_some(pid)
        })
}

/// Starts a tune and interrupts it once its copier has written so many bytes of answers.
fn interrupted(mut command: Command, answers: u64) -> (Finished, Option<u32>) {
    let child: Child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start cmt tune");
    let started = Instant::now();
    let pid = loop {
        assert!(started.elapsed() < PATIENCE, "cmt tune hangs");
        let io = copier(child.id()).and_then(|pid| {
            let io = fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
            let written = io.lines().find_map(|line| line.strip_prefix("wchar: "))?;
            Some((pid, written.parse::<u64>().expect("a number")))
        });
        match io {
            Some((pid, written)) if written >= answers => break pid,
            _ => thread::sleep(Duration::from_millis(2)),
        }
    };
    // SAFETY: no memory is touched; the process is our child and has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let id = child.id();
    let finished = child.wait_with_output().expect("wait for cmt tune").into();
    assert_eq!(copier(id), None, "the process that was measured still runs");
    (finished, Some(pid))
}

#[test]
fn every_copy_of_a_candidate_is_staged() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let place = Place::new();
    let mut tune = place
        .tune(&["--quiet", "--json"])
        .stdout(Stdio::null())
        .spawn()
        .expect("start cmt tune");
    let (mut staged, mut sampled) = (0, 0);
    while tune.try_wait().expect("look at cmt tune").is_none() {
        thread::sleep(Duration::from_millis(100));
        let Some(pid) = copier(tune.id()) else {
            continue;
        };
        // It may have ended meanwhile.
        let status = cmt(["status", &pid.to_string(), "--json"]);
        let Ok(report) = serde_json::from_str::<Value>(&status.stdout) else {
            continue;
        };
        let process = &report["processes"][0];
        let sum = |list: &Value, wanted: &dyn Fn(&Value) -> bool| -> u64 {
            let entries = list.as_array().into_iter().flatten();
            let wanted = entries.filter(|entry| wanted(entry));
            wanted.filter_map(|entry| entry["calls"].as_u64()).sum()
        };
        staged = staged.max(sum(&process["staged"], &|_| true));
        let compares = ["timed for comparison", "faster, by comparison"];
        let is_guards = |entry: &Value| {
            let reason = entry["reason"].as_str();
            reason.is_some_and(|reason| compares.contains(&reason))
        };
        sampled = sampled.max(sum(&process["passed"], &is_guards));
    }
    // The guard of other processes sends one of 256 copies of a class to stock.
    assert!(staged > 14 * 256, "{staged}");
    assert_eq!(sampled, 0, "of {staged}");
}

#[test]
fn a_command_that_is_not_there_leaves_no_profile() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let place = Place::new();
    let saved = place.path("profile.json");
    let saved_name = saved.to_str().expect("a name");
    let finished = finish(place.tune(&["--save", saved_name, "--", "no-such-program"]));
    assert_eq!(finished.code, Some(127), "{finished:#?}");
    assert!(!saved.exists(), "a profile that nothing was measured for");
}

#[test]
fn ctrl_c_keeps_the_best_so_far_but_not_as_the_result() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let place = Place::new();
    let saved = place.path("profile.json");
    let saved_name = saved.to_str().expect("a name");
    let (finished, _) = interrupted(place.tune(&["--json", "--save", saved_name]), 100 << 10);
    let report = finished.json();
    assert_eq!(report["interrupted"], true);
    let measured = &report["profile"]["measured"];
    assert_eq!(measured["interrupted"], true);
    let classes = measured["classes"].as_array().expect("classes").len();
    assert!((1..14).contains(&classes), "{classes}");
    // All sizes are there: what was not measured is estimated.
    for direction in ["htod", "dtoh"] {
        let rows = report["profile"][direction].as_array().expect("rows");
        let last = rows.last().expect("a row");
        assert_eq!(last["up_to_bytes"], u64::MAX, "{direction}");
    }
    let checked = finish(place.blind(&["profile", "check", saved_name]));
    assert_eq!(checked.code, Some(0), "{checked:#?}");
    assert_eq!(place.kept(), [] as [PathBuf; 0]);

    // Before there is anything, what was there stays.
    fs::write(&saved, "older").expect("write");
    let (finished, _) = interrupted(place.tune(&["--save", saved_name]), 1);
    let sentence = finished.refusal();
    assert!(
        sentence.contains("interrupted before anything was measured"),
        "{sentence}"
    );
    assert_eq!(fs::read_to_string(&saved).expect("still there"), "older");
    assert_eq!(place.kept(), [] as [PathBuf; 0]);
}

#[test]
fn what_is_no_profile_is_refused_with_the_reason() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let place = Place::new();
    let path = place.path("profile.json");
    let name = path.to_str().expect("a name");
    for (text, reason) in [
        (&b"\xff\xfe"[..], "not UTF-8"),
        (b"", "not a cmt/profile/1 object"),
        (br#"{"schema": "cmt/profile/2"}"#, "it needs a newer cmt"),
        (br#"{"schema": "cmt/bench/1"}"#, "its schema is \"cmt/bench/1\""),
        (
            br#"{"schema": "cmt/profile/1", "htod": [], "dtoh": [], "speed": 9}"#,
            "unknown field `speed`",
        ),
        (
            br#"{"schema": "cmt/profile/1", "dtoh": [], "htod": [{"up_to_bytes": 9, "threads": 4, "slot_bytes": 1,
                "slice_bytes": 2, "ring_bytes": 3, "store": "ordinary"}]}"#,
            "htod row 0 makes no sense",
        ),
        (&[b' '; 2 << 20], "longer than 1 MiB"),
    ] {
        fs::write(&path, text).expect("write");
        for args in [
            &["profile", "check", name][..],
            &["profile", "show", name],
            &["tune", "--profile", name],
        ] {
            let finished = finish(place.blind(args));
            let sentence = finished.refusal();
            assert!(sentence.contains(reason), "{args:?} {sentence}");
        }
    }
    fs::remove_file(&path).expect("remove");
    for args in [
        &["profile", "check", name][..],
        &["profile", "show", name],
        &["profile", "export", "none"],
    ] {
        finish(place.blind(args)).refusal();
    }
    // One that is written by hand is enough.
    fs::write(
        &path,
        br#"{"schema": "cmt/profile/1", "htod": [], "dtoh": []}"#,
    )
    .expect("write");
    let report = finish(place.blind(&["tune", "--json", "--profile", name])).json();
    assert_eq!(report["from"]["file"], name);
    let checked = finish(place.blind(&["profile", "check", name]));
    assert!(
        checked.stdout.contains("that stages nothing"),
        "{checked:#?}"
    );
}

#[test]
fn odd_machines_get_sane_plans() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // One CPU: nothing by estimate, and by measurement never worse than stock.
    let place = Place::new();
    let one = |args: &[&str]| {
        let tune = place.tune(args);
        let mut command = Command::new("taskset");
        command
            .args(["-c", "0"])
            .arg(tune.get_program())
            .args(tune.get_args());
        for (name, value) in tune.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        finish(command).json()
    };
    let instant = one(&["--json", "--search", "instant"]);
    assert_eq!(
        (&instant["threads"], staged_rows(&instant["profile"])),
        (&1.into(), 0)
    );
    let note = instant["notes"][0].as_str().expect("a note");
    assert!(note.contains("staging takes two"), "{note}");
    let fast = one(&["--json"]);
    for class in fast["profile"]["measured"]["classes"]
        .as_array()
        .expect("classes")
    {
        assert!(
            number(&class["tuned_gbps"]) >= number(&class["stock_gbps"]),
            "{class}"
        );
    }

    // One memory: not guessed at, and measured the payload is seen to leave all copies to the driver.
    let place = Place::new();
    let root = place.machine(&[
        (
            "proc/driver/nvidia/gpus/0/information",
            "Model: \t\t NVIDIA GH200 480GB",
        ),
        ("proc/self/status", "Cpus_allowed_list:\t0-1"),
        ("sys/devices/system/cpu/online", "0-1"),
    ]);
    let unified = |args: &[&str]| {
        let mut command = place.tune(args);
        command
            .env("CMT_PRETEND_MACHINE", &root)
            .env("STANDIN_HOST_PAGE_TABLES", "1");
        finish(command).json()
    };
    let instant = unified(&["--json", "--search", "instant"]);
    assert_eq!(
        (&instant["from"], staged_rows(&instant["profile"])),
        (&"estimate".into(), 0)
    );
    let note = instant["notes"][0].as_str().expect("a note");
    assert!(
        note.contains("GH200") && note.contains("--search fast or full"),
        "{note}"
    );
    let fast = unified(&["--json"]);
    assert_eq!(
        (&fast["from"], staged_rows(&fast["profile"])),
        (&"search".into(), 0)
    );
    let notes = fast["notes"].to_string();
    assert!(notes.contains("leaves all copies to the driver"), "{notes}");
    // What the stand-in measured is not kept as that GPU's.
    assert!(notes.contains("no GPU that the kernel knows"), "{notes}");
    assert_eq!(place.kept(), [] as [PathBuf; 0]);
    // The same machine whose copies are staged: measurement decides, not its name.
    let mut command = place.tune(&["--json"]);
    command.env("CMT_PRETEND_MACHINE", &root);
    assert!(staged_rows(&finish(command).json()["profile"]) > 0);
}

/// CPUs of the helpers of a process.
fn helpers_cpus(pid: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
    let of = |task: &Path| {
        let status = fs::read_to_string(task.join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let is_helper = field("Name:")?.trim().starts_with("cmt-copy-");
        is_helper.then(|| field("Cpus_allowed_list:").map(|list| list.trim().to_owned()))?
    };
    tasks
        .flatten()
        .filter_map(|task| of(&task.path()))
        .collect()
}

#[test]
fn helpers_run_on_the_cores_that_the_plan_names() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let place = Place::new();
    // Two threads of one core, whatever this machine has.
    let root = place.machine(&[
        ("sys/devices/system/cpu/online", "0-1"),
        (
            "sys/devices/system/cpu/cpu0/topology/thread_siblings_list",
            "0-1",
        ),
        (
            "sys/devices/system/cpu/cpu1/topology/thread_siblings_list",
            "0-1",
        ),
    ]);
    let ours = fs::read_to_string("/proc/self/status").expect("our status");
    let ours = ours
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .expect("our CPUs")
        .trim();
    let path = place.path("profile.json");
    for (cores, wanted) in [("one-per-core", "0"), ("all", ours), ("performance", "0-1")] {
        let row = r#"{"up_to_bytes": 18446744073709551615, "threads": 2, "slot_bytes": 262144, "slice_bytes": 65536,
            "ring_bytes": 4194304, "store": "ordinary"}"#;
        let text = format!(
            r#"{{"schema": "cmt/profile/1", "htod": [{row}], "dtoh": [{row}], "cores": "{cores}"}}"#
        );
        fs::write(&path, text).expect("write");
        let victim = Victim::start("victim-drv", ["--bytes", "4M"]);
        let pid = victim.pid.to_string();
        let mut attach = cmt_command([
            "attach",
            &pid,
            "--before",
            "0s",
            "--after",
            "0s",
            "--profile",
        ]);
        attach.arg(&path).env("CMT_PRETEND_MACHINE", &root);
        let attached = finish(attach);
        assert_eq!(attached.code, Some(0), "{attached:#?}");
        wait_until_staged(&victim);
        let helpers = helpers_cpus(victim.pid);
        assert!(!helpers.is_empty(), "{cores}");
        assert!(
            helpers.iter().all(|cpus| cpus == wanted),
            "{cores}: {helpers:?}"
        );
    }
}

#[test]
fn what_cannot_work_is_refused_before_anything_is_measured() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let place = Place::new();
    for args in [
        &["--search", "slow"][..],
        &["--profile", "x", "--search", "fast"],
        &["--profile", "x", "--fresh"],
        &["python3"],
    ] {
        let finished = finish(place.tune(args));
        assert_eq!(finished.code, Some(2), "{args:?} {finished:#?}");
    }
    for (args, reason) in [
        (&["--json", "--", "true"][..], "--json needs a FILE"),
        (
            &["--save", "/nonexistent/profile.json"],
            "nothing was measured",
        ),
        (
            &["--profile", "/nonexistent/profile.json"],
            "no name of `cmt profile list`, and no such file",
        ),
    ] {
        let finished = finish(place.tune(args));
        let sentence = finished.refusal();
        assert!(sentence.contains(reason), "{args:?} {sentence}");
    }
    let mut small = place.tune(&[]);
    small.env("STANDIN_MEMORY_MIB", "0");
    finish(small).refusal();
    let mut wrong = place.tune(&["--save", "profile.json"]);
    wrong
        .current_dir(place.folder.path())
        .env("STANDIN_CORRUPT_EVERY", "1");
    let finished = finish(wrong);
    let sentence = finished.refusal();
    assert!(sentence.starts_with("WRONG DATA: byte "), "{sentence}");
    assert_eq!(place.kept(), [] as [PathBuf; 0]);
    assert!(!place.path("profile.json").exists(), "there is none");
}
