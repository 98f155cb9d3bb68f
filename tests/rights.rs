//! Each command does with exactly the capabilities that docs/rights.md lists for it, and without any one of them refuses,
//! names it and says what grants it.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{PoisonError, RwLock};
use std::thread;
use std::time::Duration;

use cmt_tests::{
    Finished, Footprint, Rung, Trace, Victim, attach, built, cmt_command, detach, require,
};
use serde_json::Value;

/// Runs `cmt`, and owns what it looks at.
const USER: u32 = 61_001;
/// Owns what is another user's.
const OTHER: u32 = 61_002;
const ROOT: u32 = 0;

/// A trace of all processes puts breakpoints into every victim, which would look touched.
static ALONE: RwLock<()> = RwLock::new(());

const LIBRARY: &str = "libcuda.so.1";
const BYTES: [&str; 4] = ["--bytes", "64K", "--pause-ms", "1"];

/// A folder in which any user may run `cmt` and a victim.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self {
            folder: tempfile::tempdir().expect("a folder"),
        };
        open_to_all(place.folder.path());
        place.put(Path::new(cmt_command([""; 0]).get_program()), "cmt");
        for file in ["victim-drv", LIBRARY] {
            place.put(&built().folder.join(file), file);
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn put(&self, from: &Path, to: &str) {
        fs::copy(from, self.path(to)).unwrap_or_else(|error| panic!("{from:?}: {error}"));
        open_to_all(&self.path(to));
    }

    /// A command line of a victim of `user`, with what stands before it, such as `unshare`.
    fn command(&self, user: u32, before: &[&str], libraries: &Path) -> Command {
        let mut command = as_user(user, before);
        command.arg(self.path("victim-drv")).args(BYTES);
        command.env("LD_LIBRARY_PATH", libraries);
        command
    }

    fn victim(&self, user: u32) -> Victim {
        Victim::spawn(self.command(user, &[], self.folder.path()))
    }

    /// `cmt` as [`USER`] with these capabilities and no others, nor any chance of more.
    fn cmt(&self, capabilities: &[&str], args: &[&str]) -> Command {
        let sets = capabilities
            .iter()
            .fold("-all".to_owned(), |sets, one| format!("{sets},+{one}"));
        let mut command = Command::new("setpriv");
        for set in ["--inh-caps", "--ambient-caps", "--bounding-set"] {
            command.arg(format!("{set}={sets}"));
        }
        command.args(["--reuid", &USER.to_string(), "--regid", &USER.to_string()]);
        command.arg("--clear-groups").arg(self.path("cmt"));
        command.args(args).env_remove("RUST_LOG");
        command
    }

    /// Without each single one of `capabilities` the command is refused for want of just that, and the victim is as it was.
    #[track_caller]
    fn each_is_needed(&self, victim: &mut Victim, capabilities: &[&str], args: &[&str]) {
        let before = settled(victim);
        for lacking in capabilities {
            let others: Vec<&str> = capabilities
                .iter()
                .copied()
                .filter(|one| one != lacking)
                .collect();
            let refused = run(self.cmt(&others, args));
            let name = lacking.to_uppercase();
            let sentence = refused.refusal();
            assert!(
                sentence.contains(&format!(": CAP_{name} missing; run it as root"))
                    && sentence.contains(&format!("--cap-add {name} "))
                    && sentence.contains(&format!("{{add: [{name}]}}")),
                "{args:?} without {lacking}: {sentence}"
            );
        }
        victim.assert_untouched(&before);
    }

    /// The same for a trace; with all of them it counts what the victim counts.
    #[track_caller]
    fn traces_with(&self, mut victim: Victim, capabilities: &[&str], whom: &str) {
        let pid = victim.pid.to_string();
        let whom = if whom == "--all" { whom } else { &pid };
        self.each_is_needed(&mut victim, capabilities, &["trace", whom, "--for", "1s"]);
        let trace = Trace::spawn(self.cmt(capabilities, &["trace", "--json", whom]));
        counts_right(trace, victim, whom == "--all");
    }
}

fn open_to_all(path: &Path) {
    fs::set_permissions(path, Permissions::from_mode(0o755)).expect("open it to all");
}

fn as_user(user: u32, program: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    if user != ROOT {
        let user = user.to_string();
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
    } else {
        command.args(["--reuid", "0"]);
    }
    command.args(program);
    command
}

fn run(mut command: Command) -> Finished {
    command.output().expect("run setpriv").into()
}

/// What a victim is once it has started all its threads.
fn settled(victim: &Victim) -> Footprint {
    let mut before = victim.threads();
    loop {
        thread::sleep(Duration::from_millis(300));
        let now = victim.threads();
        if now == before {
            return victim.footprint();
        }
        before = now;
    }
}

/// Lets a held victim go, and compares what the trace counted with what it counted itself.
#[track_caller]
fn counts_right(trace: Trace, victim: Victim, all: bool) {
    let pid = victim.pid;
    victim.signal(libc::SIGUSR1);
    let account = victim.finish();
    let report = match all {
        true => trace.interrupt(),
        false => trace.finish().0,
    };
    let copies = report["processes"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|process| process["pid"] == pid)
        .and_then(|process| process["copies"].as_array())
        .unwrap_or_else(|| panic!("no copies of {pid}: {report}"));
    let functions = account["functions"].as_object().expect("functions");
    assert!(!functions.is_empty(), "{account}");
    for (name, own) in functions {
        let calls: u64 = copies
            .iter()
            .filter(|copy| copy["function"] == **name)
            .filter_map(|copy| copy["calls"].as_u64())
            .sum();
        assert_eq!(Some(calls), own["calls"].as_u64(), "{name}: {report}");
    }
}

/// A victim that waits for its trace, makes a hundred calls, and ends.
fn held(mut command: Command) -> Command {
    command.args(["--hold", "--calls", "100"]);
    command
}

#[test]
fn trace_of_an_own_process() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new();
    let victim = Victim::spawn(held(place.command(USER, &[], place.folder.path())));
    place.traces_with(victim, &["bpf", "perfmon"], "it");
}

#[test]
fn trace_of_another_users_process() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new();
    for user in [OTHER, ROOT] {
        let victim = Victim::spawn(held(place.command(user, &[], place.folder.path())));
        place.traces_with(victim, &["bpf", "perfmon", "sys_ptrace"], "it");
    }
}

#[test]
fn trace_of_containers() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new();
    let folder = place.folder.path();
    let namespaces = ["unshare", "--user", "--map-root-user", "--mount", "--net"];
    let victim = Victim::spawn(held(place.command(ROOT, &namespaces, folder)));
    place.traces_with(victim, &["bpf", "perfmon", "sys_ptrace"], "it");

    let namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"];
    let command = held(place.command(ROOT, &namespaces, folder));
    let victim = Victim::spawn_in_pid_namespace(command);
    place.traces_with(victim, &["bpf", "perfmon", "sys_ptrace"], "it");
}

#[test]
fn trace_where_the_library_is_hard_to_open() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new();
    let private = place.path("private");
    fs::create_dir(&private).expect("a folder");
    place.put(&built().folder.join(LIBRARY), &format!("private/{LIBRARY}"));
    chown(&private, Some(OTHER), None).expect("give it away");
    fs::set_permissions(&private, Permissions::from_mode(0o700)).expect("close it");
    let start = || Victim::spawn(held(place.command(OTHER, &[], &private)));
    let closed = ["bpf", "perfmon", "sys_ptrace", "dac_read_search"];
    place.traces_with(start(), &closed, "it");

    let victim = start();
    fs::remove_dir_all(&private).expect("delete it");
    let deleted = [&closed[..], &["checkpoint_restore"]].concat();
    place.traces_with(victim, &deleted, "it");
}

#[test]
fn trace_of_all_processes() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _alone = ALONE.write().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new();
    let victim = Victim::spawn(held(place.command(OTHER, &[], place.folder.path())));
    place.traces_with(victim, &["bpf", "perfmon", "sys_ptrace"], "--all");
}

/// Attaches, reads the status and detaches with these capabilities; detaching and looking take `less`.
#[track_caller]
fn attaches_with(place: &Place, mut victim: Victim, sets: [&[&str]; 3]) {
    let [attaching, detaching, looking] = sets;
    let pid = victim.pid.to_string();
    let windows = ["--before", "100ms", "--after", "100ms"];
    let traced = [&["attach", &pid][..], &windows].concat();
    let bare = ["attach", &pid, "--before", "0s", "--after", "0s"];
    let probing = [attaching, &["bpf", "perfmon"]].concat();

    place.each_is_needed(&mut victim, attaching, &bare);
    place.each_is_needed(&mut victim, &probing, &traced);
    for (capabilities, args) in [(attaching, &bare[..]), (&probing, &traced)] {
        let attached = run(place.cmt(capabilities, args));
        assert_eq!(attached.code, Some(0), "{attached:#?}");
        place.each_is_needed(&mut victim, looking, &["status", &pid]);
        let status = run(place.cmt(looking, &["status", &pid, "--json"])).json();
        assert_eq!(status["processes"][0]["state"], "attached", "{status}");
        let all = run(place.cmt(looking, &["status", "--json"])).json();
        assert!(has_process(&all, victim.pid), "{all}");
        place.each_is_needed(&mut victim, detaching, &["detach", &pid]);
        let detached = run(place.cmt(detaching, &["detach", &pid]));
        assert_eq!(detached.code, Some(0), "{detached:#?}");
    }
    assert_eq!(victim.stop()["mismatches"], 0);
}

fn has_process(report: &Value, pid: u32) -> bool {
    let mut processes = report["processes"].as_array().into_iter().flatten();
    processes.any(|process| process["pid"] == pid)
}

#[test]
fn attach_to_an_own_process() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new();
    attaches_with(&place, place.victim(USER), [&["checkpoint_restore"]; 3]);
}

#[test]
fn attach_to_another_users_process() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new();
    let patching: &[&str] = &["checkpoint_restore", "sys_ptrace", "dac_override"];
    let looking: &[&str] = &["checkpoint_restore", "sys_ptrace", "dac_read_search"];
    attaches_with(&place, place.victim(OTHER), [patching, patching, looking]);
}

#[test]
fn attach_to_a_process_that_sees_no_proc() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new();
    let script = "umount --lazy /proc && exec \"$0\" \"$@\"";
    let hiding = ["unshare", "--mount", "sh", "-c", script];
    let mut victim = Victim::spawn(place.command(ROOT, &hiding, place.folder.path()));
    let pid = victim.pid.to_string();
    let bare = ["attach", &pid, "--before", "0s", "--after", "0s"];
    let needed = ["sys_ptrace", "dac_override", "sys_admin"];
    place.each_is_needed(&mut victim, &needed, &bare);
    // What is narrower does not do.
    let before = settled(&victim);
    let refused = run(place.cmt(&["sys_ptrace", "dac_override", "checkpoint_restore"], &bare));
    assert!(
        refused.refusal().contains("CAP_SYS_ADMIN missing"),
        "{refused:?}"
    );
    victim.assert_untouched(&before);
    assert_eq!(run(place.cmt(&needed, &bare)).code, Some(0));
    detach(&victim);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn status_of_all_says_what_it_may_not_see() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new();
    let victim = place.victim(OTHER);
    assert_eq!(attach(&victim).code, Some(0));
    let needed = ["checkpoint_restore", "sys_ptrace", "dac_read_search"];
    for lacking in needed {
        let others: Vec<&str> = needed.into_iter().filter(|one| *one != lacking).collect();
        let status = run(place.cmt(&others, &["status", "--json"]));
        assert!(!has_process(&status.json(), victim.pid), "{status:#?}");
        let name = lacking.to_uppercase();
        let said =
            format!("may not be inspected, so they may be attached too: CAP_{name} missing;");
        assert!(status.stderr.contains(&said), "{}", status.stderr);
    }
    detach(&victim);
    victim.stop();
}

/// Such a program is not dumpable, so what belongs to it in `/proc` belongs to root.
#[test]
fn capabilities_of_the_file_do_as_well() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
    let place = Place::new();
    let granted = |capabilities: &str, args: &[&str]| {
        let mut setcap = Command::new("setcap");
        setcap
            .arg(format!("{capabilities}+ep"))
            .arg(place.path("cmt"));
        assert!(setcap.status().expect("run setcap").success());
        let mut command = as_user(USER, &[]);
        command
            .arg(place.path("cmt"))
            .args(args)
            .env_remove("RUST_LOG");
        command
    };
    let victim = Victim::spawn(held(place.command(USER, &[], place.folder.path())));
    let pid = victim.pid.to_string();
    let refused = run(granted("cap_bpf", &["trace", &pid]));
    let sentence = refused.refusal();
    let remedy = "CAP_PERFMON missing; run it as root (sudo cmt …), or once: sudo setcap cap_bpf,cap_perfmon+ep $(command -v cmt)";
    assert!(sentence.ends_with(remedy), "{sentence}");
    let trace = Trace::spawn(granted("cap_bpf,cap_perfmon", &["trace", "--json", &pid]));
    counts_right(trace, victim, false);

    let victim = place.victim(OTHER);
    let pid = victim.pid.to_string();
    let refused = run(granted("cap_bpf,cap_perfmon", &["attach", &pid]));
    let all = "cap_bpf,cap_perfmon,cap_sys_ptrace,cap_checkpoint_restore,cap_dac_override";
    let remedy = format!("sudo setcap {all}+ep $(command -v cmt)");
    assert!(refused.refusal().ends_with(&remedy), "{refused:#?}");
    let attach = ["attach", &pid, "--before", "100ms", "--after", "100ms"];
    for args in [&attach[..], &["status", &pid], &["detach", &pid]] {
        let finished = run(granted(all, args));
        assert_eq!(finished.code, Some(0), "{args:?} {finished:#?}");
    }
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn every_command_refuses_in_the_same_words() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
    let mut victim = Victim::start("victim-drv", BYTES);
    let before = settled(&victim);
    let pid = victim.pid.to_string();
    for args in [
        &["trace", &pid, "--for", "1s"][..],
        &["attach", &pid],
        &["detach", &pid],
        &["status", &pid],
    ] {
        // Root, as in a container.
        let cmt = cmt_command(args);
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]);
        command.arg(cmt.get_program()).args(args);
        let refused = run(command);
        let sentence = refused.refusal();
        let words = "may not be inspected: CAP_SYS_PTRACE missing; run it as root of the host (sudo cmt …), or start the container with --cap-add SYS_PTRACE (Kubernetes: capabilities: {add: [SYS_PTRACE]})";
        assert!(sentence.ends_with(words), "{args:?}: {sentence}");
        assert!(
            sentence.starts_with(&format!("process {pid}")),
            "{sentence}"
        );
    }
    victim.assert_untouched(&before);
}
