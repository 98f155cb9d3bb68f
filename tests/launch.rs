//! `cmt tune -- COMMAND`: a program's copies are staged from its first one on, in every process that it starts, and it is
//! otherwise as it would be without.
#![expect(unsafe_code, reason = "sends signals")]

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use cmt_tests::{Finished, Rung, Victim, built, cmt, cmt_command, require};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Stages everything from 64 KiB on, so that nothing has to be found out first.
fn profile() -> Value {
    let row = |up_to_bytes: u64, threads: u32| {
        json!({
            "up_to_bytes": up_to_bytes, "threads": threads, "slot_bytes": 1 << 20, "slice_bytes": 1 << 16,
            "ring_bytes": 4 << 20, "store": "ordinary",
        })
    };
    let rows = [row((64 << 10) - 1, 0), row(1 << 40, 2)];
    json!({"schema": "cmt/profile/1", "htod": rows, "dtoh": rows})
}

/// A program to be started by `cmt tune`, and where that keeps things.
struct Tune {
    folder: TempDir,
    command: Command,
}

impl Tune {
    fn new<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: impl IntoIterator<Item = S>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("profile.json");
        fs::write(&path, profile().to_string()).expect("written");
        let mut command = cmt_command([OsStr::new("tune"), OsStr::new("--profile"), path.as_ref()]);
        command
            .arg("--json")
            .arg(folder.path().join("run.json"))
            .arg("--")
            .arg(program)
            .args(args)
            .env("LD_LIBRARY_PATH", &built().folder)
            .env("XDG_CACHE_HOME", folder.path())
            .env_remove("LD_PRELOAD");
        Self { folder, command }
    }

    fn victim(name: &str, args: &[&str]) -> Self {
        Self::new(built().victim(name), args)
    }

    fn shell(script: &str) -> Self {
        Self::new("sh", ["-c", script])
    }

    fn python(script: &str) -> Self {
        Self::new("python3", ["-c", script])
    }

    fn finish(&mut self) -> Finished {
        self.command.output().expect("start cmt").into()
    }

    /// Starts it, and waits for its first line: `ready PID`.
    fn start(&mut self) -> Started {
        let mut child = self
            .command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start cmt");
        let mut lines = BufReader::new(child.stdout.take().expect("piped"));
        let mut ready = String::new();
        lines.read_line(&mut ready).expect("a line");
        let pid = ready
            .trim()
            .strip_prefix("ready ")
            .expect(&ready)
            .to_owned();
        Started { child, lines, pid }
    }

    /// What `--json` has kept.
    fn account(&self) -> Value {
        let text = fs::read_to_string(self.folder.path().join("run.json")).expect("it is kept");
        serde_json::from_str(&text).expect(&text)
    }
}

struct Started {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
    pid: String,
}

impl Started {
    fn signal(&self, whom: u32, signal: i32) {
        // SAFETY: no memory is touched, and both are alive: one is our child, the other waits for a signal.
        assert_eq!(unsafe { libc::kill(whom.cast_signed(), signal) }, 0);
    }

    /// Asks cmt to end, which asks the program; the program's account is its last line.
    fn stop(mut self) -> Value {
        self.signal(self.child.id(), libc::SIGTERM);
        let last = self.lines.by_ref_lines().last().expect("an account");
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}");
        serde_json::from_str(&last).expect(&last)
    }
}

trait Lines {
    fn by_ref_lines(&mut self) -> impl Iterator<Item = String>;
}

impl Lines for BufReader<std::process::ChildStdout> {
    fn by_ref_lines(&mut self) -> impl Iterator<Item = String> {
        self.lines().map_while(Result::ok)
    }
}

fn calls(account: &Value, reason: &str) -> u64 {
    let passed = account["passed"].as_array().expect("passed");
    let found = passed.iter().find(|entry| entry["reason"] == reason);
    found.map_or(0, |entry| entry["calls"].as_u64().expect("a number"))
}

fn staged(account: &Value) -> u64 {
    (0..2)
        .map(|at| account["staged"][at]["calls"].as_u64().expect("a number"))
        .sum()
}

/// All copies of programs that copy 1 MiB so many times in all, so many processes in sum.
#[track_caller]
fn assert_all_staged(account: &Value, copies: u64, processes: u64) {
    assert_eq!(account["processes"], processes, "{account:#}");
    let all = staged(account) + calls(account, "timed for comparison");
    assert_eq!(all, copies, "{account:#}");
    assert!(staged(account) >= copies * 9 / 10, "{account:#}");
}

#[test]
fn every_copy_is_staged_from_the_first_one_on() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // Linked to libcuda, through libcudart, and with a runtime of its own that loads libcuda by dlopen.
    for victim in ["victim-drv", "victim-rt", "victim-static-rt"] {
        let mut tune = Tune::victim(victim, &["--bytes", "2M", "--exact", "--calls", "60"]);
        let ended = tune.finish();
        assert_eq!(ended.code, Some(0), "{victim}: {ended:#?}");
        let said: Value =
            serde_json::from_str(ended.stdout.lines().last().expect("its account")).expect("JSON");
        assert_eq!(said["mismatches"], 0);
        let account = tune.account();
        assert_eq!(
            (&account["exit_code"], &account["errors"]),
            (&json!(0), &json!(0))
        );
        let copies = said["functions"].as_object().expect("functions").values();
        let copies = copies
            .map(|function| function["calls"].as_u64().expect("calls"))
            .sum();
        assert_all_staged(&account, copies, 1);
        assert!(copies >= 60, "{victim}: {said}");
        assert!(
            ended.stderr.ends_with("compared with the driver's own\n"),
            "{ended:#?}"
        );
        assert_eq!(ended.stderr.lines().count(), 1, "{ended:#?}");
    }
}

#[test]
fn processes_that_the_program_starts_are_tuned_too() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = built().victim("victim-drv").display().to_string();
    let copy = format!("{victim} --bytes 2M --exact --calls 20");
    let mut tune = Tune::shell(&format!("{copy} & bash -c '{copy}'; wait $!"));
    let ended = tune.finish();
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    assert_all_staged(&tune.account(), 40, 2);
}

/// A Python program that copies 1 MiB there and back with ctypes, whose libcuda is loaded in its own way.
const COPIES: &str = r#"
import ctypes, multiprocessing, os, sys
def load(mode=ctypes.DEFAULT_MODE):
    return ctypes.CDLL("libcuda.so.1", mode=mode)
def copies(cuda, count):
    context, device = ctypes.c_void_p(), ctypes.c_uint64()
    bytes = 2 << 20
    def must(code): assert code == 0, code
    must(cuda.cuInit(0))
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    must(cuda.cuCtxSetCurrent(context))
    must(cuda.cuMemAlloc_v2(ctypes.byref(device), ctypes.c_size_t(bytes)))
    for number in range(count):
        there, back = (ctypes.c_char * bytes)(), (ctypes.c_char * bytes)()
        there.value = os.urandom(1000).replace(b"\0", b"x")
        must(cuda.cuMemcpyHtoD_v2(device, there, ctypes.c_size_t(bytes)))
        must(cuda.cuMemcpyDtoH_v2(back, device, ctypes.c_size_t(bytes)))
        assert there.raw == back.raw
"#;

#[test]
fn pythons_processes_are_tuned_however_they_come_to_be() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for (how, script, copies, processes) in [
        ("by ctypes", "copies(load(), 10)", 20, 1),
        (
            "RTLD_DEEPBIND",
            "copies(load(os.RTLD_DEEPBIND | os.RTLD_NOW), 10)",
            20,
            1,
        ),
        // The child has its parent's libcuda, which nobody has started yet.
        (
            "fork before CUDA starts",
            "cuda = load()\nchild = multiprocessing.get_context('fork').Process(target=copies, args=(cuda, 10))\n\
             child.start(); child.join(); assert child.exitcode == 0\ncopies(cuda, 10)",
            40,
            2,
        ),
        (
            "subprocess",
            "import subprocess\nsubprocess.run([sys.executable, '-c', os.environ['COPIES'] + 'copies(load(), 10)'], check=True)",
            20,
            1,
        ),
        // Loaded, looked at, and unloaded again.
        (
            "loaded twice",
            "import _ctypes\ncuda = load()\n_ctypes.dlclose(cuda._handle)\ncopies(load(), 10)",
            20,
            1,
        ),
    ] {
        let mut tune = Tune::python(&format!("{COPIES}\n{script}"));
        let ended = tune
            .command
            .env("COPIES", COPIES)
            .output()
            .expect("start cmt");
        let ended = Finished::from(ended);
        assert_eq!(ended.code, Some(0), "{how}: {ended:#?}");
        assert_all_staged(&tune.account(), copies, processes);
    }
}

#[test]
fn a_spawned_pool_is_tuned() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let script = folder.path().join("pool.py");
    let main = "def work(number):\n    copies(load(), 10)\n    return os.getpid()\n\
                if __name__ == '__main__':\n    with multiprocessing.get_context('spawn').Pool(2) as pool:\n        \
                print(len(set(pool.map(work, range(2), chunksize=1))))\n";
    fs::write(&script, format!("{COPIES}\n{main}")).expect("written");
    let mut tune = Tune::new("python3", [&script]);
    let ended = tune.finish();
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let processes = ended.stdout.trim().parse().expect("a number");
    assert_all_staged(&tune.account(), 40, processes);
}

#[test]
fn the_program_ends_as_it_would_without() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for (script, code) in [("exit 0", 0), ("exit 7", 7), ("exit 255", 255)] {
        assert_eq!(Tune::shell(script).finish().code, Some(code), "{script}");
    }
    use std::os::unix::process::ExitStatusExt as _;
    for signal in [libc::SIGKILL, libc::SIGSEGV, libc::SIGTERM] {
        let mut tune = Tune::shell(&format!("kill -{signal} $$"));
        let ended = tune.command.output().expect("start cmt");
        assert_eq!(ended.status.signal(), Some(signal), "{ended:#?}");
        assert_eq!(
            (&tune.account()["signal"], &tune.account()["exit_code"]),
            (&json!(signal), &Value::Null)
        );
    }
    let missing = Tune::new("no-such-program", ["x"]).finish();
    assert_eq!(missing.code, Some(127));
    assert!(missing.stderr.contains("no-such-program"), "{missing:#?}");
    assert_eq!(Tune::new("/etc/passwd", ["x"]).finish().code, Some(126));
}

#[test]
fn input_output_and_environment_are_the_programs_own() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let script = "read line; echo \"got $line $WORD\"; echo err >&2; cat; ls /proc/self/fd";
    let mut tune = Tune::shell(script);
    let mut plain = Command::new("sh");
    plain.args(["-c", script]);
    let run = |command: &mut Command| {
        let mut child = command
            .env("WORD", "w")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start it");
        let mut stdin = child.stdin.take().expect("piped");
        stdin.write_all(b"one\ntwo\n").expect("written");
        drop(stdin);
        Finished::from(child.wait_with_output().expect("it ends"))
    };
    let (tuned, plain) = (run(&mut tune.command), run(&mut plain));
    // No descriptor of ours is open in it either.
    assert_eq!(tuned.stdout, plain.stdout);
    assert_eq!(
        tuned.stderr,
        "err\ncmt: no process was tuned: none copied between host and GPU, or none could be\n"
    );
    let mut quiet = Tune::shell("exit 0");
    let arguments: Vec<_> = quiet.command.get_args().map(OsStr::to_owned).collect();
    let mut command = cmt_command(["tune", "--quiet"]);
    command
        .args(&arguments[1..])
        .env("XDG_CACHE_HOME", quiet.folder.path());
    quiet.command = command;
    assert_eq!(quiet.finish().stderr, "");
}

#[test]
fn signals_reach_the_program_and_no_other() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let script = "trap 'echo usr1' USR1; trap 'echo int' INT; trap 'echo term; exit 3' TERM; echo ready $$\n\
                  while :; do sleep 0.05; done";
    let mut tune = Tune::shell(script);
    // A shell cannot trap what whoever started the tests has ignored, as `&` does with SIGINT.
    let heed = || -> std::io::Result<()> {
        // SAFETY: between fork and exec; only this process's own signals are concerned.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        Ok(())
    };
    // SAFETY: the function makes one system call.
    unsafe { tune.command.pre_exec(heed) };
    let mut started = tune.start();
    for (signal, name) in [
        (libc::SIGUSR1, "usr1"),
        (libc::SIGINT, "int"),
        (libc::SIGTERM, "term"),
    ] {
        started.signal(started.child.id(), signal);
        let mut line = String::new();
        started.lines.read_line(&mut line).expect("a line");
        assert_eq!(line.trim(), name);
    }
    assert_eq!(started.child.wait().expect("it ends").code(), Some(3));
}

#[test]
fn what_was_ignored_or_blocked_stays_so_in_the_program() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let words = ["SigBlk", "SigIgn"];
    let pick = |text: &str| -> Vec<String> {
        let lines = text
            .lines()
            .filter(|line| words.iter().any(|word| line.starts_with(word)));
        lines.map(str::to_owned).collect()
    };
    let block = || -> std::io::Result<()> {
        // SAFETY: between fork and exec; only this process's own signals are concerned.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGUSR2);
            libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            libc::signal(libc::SIGHUP, libc::SIG_IGN);
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        }
        Ok(())
    };
    let mut tune = Tune::new("cat", ["/proc/self/status"]);
    // SAFETY: the function makes system calls only.
    let tuned = Finished::from(
        unsafe { tune.command.pre_exec(block) }
            .output()
            .expect("start cmt"),
    );
    let mut plain = Command::new("cat");
    // SAFETY: as above; std's own reset comes before.
    let plain = unsafe { plain.arg("/proc/self/status").pre_exec(block) };
    let plain = Finished::from(plain.output().expect("start cat"));
    assert_eq!(pick(&tuned.stdout), pick(&plain.stdout));
    assert_eq!(pick(&plain.stdout).len(), 2);
}

#[test]
fn a_tuned_process_is_shown_detached_and_attached_like_any_other() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut tune = Tune::victim("victim-drv", &["--bytes", "2M", "--exact"]);
    let started = tune.start();
    let wait = || std::thread::sleep(Duration::from_millis(300));
    wait();
    let status = || cmt(["status", &started.pid, "--json"]).json()["processes"][0].clone();
    assert_eq!(status()["state"], "attached", "{:#}", status());
    assert!(staged(&status()) > 0);
    let again = cmt(["attach", &started.pid, "--before", "0s", "--after", "0s"]);
    assert!(again.refusal().contains("already"), "{again:#?}");
    let detached = cmt(["detach", &started.pid, "--json"]).json();
    assert!(detached["restored"].as_u64() > Some(10), "{detached}");
    assert!(
        !threads(&started.pid)
            .iter()
            .any(|name| name.starts_with("cmt-"))
    );
    wait();
    let attached = cmt([
        "attach",
        &started.pid,
        "--before",
        "0s",
        "--after",
        "300ms",
        "--json",
    ])
    .json();
    assert_eq!(attached["kept"], true, "{attached:#}");
    assert!(staged(&status()) > 0);
    assert_eq!(started.stop()["mismatches"], 0);
}

#[test]
fn a_process_that_is_about_to_begin_is_not_attached_to_as_well() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let script = "import ctypes, os, time\ncuda = ctypes.CDLL('libcuda.so.1')\nprint('ready', os.getpid(), flush=True)\n\
                  time.sleep(30)";
    let started = Tune::python(script).start();
    let refused = cmt(["attach", &started.pid, "--before", "0s", "--after", "0s"]);
    assert!(
        refused.refusal().contains("started by `cmt tune`"),
        "{refused:#?}"
    );
    started.signal(started.child.id(), libc::SIGTERM);
}

fn threads(pid: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
    tasks
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect()
}

#[test]
fn a_process_that_outlives_cmt_goes_on_and_its_children_copy_with_stock() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = built().victim("victim-drv").display().to_string();
    let copy = format!("{victim} --bytes 2M --exact --calls 20");
    let script = format!(
        "echo ready $$; while [ ! -e \"$GO\" ]; do sleep 0.01; done; {copy} > \"$GO.out\"; echo $? > \"$GO.code\""
    );
    let folder = tempfile::tempdir().expect("a folder");
    let go = folder.path().join("go");
    let mut tune = Tune::shell(&script);
    tune.command.env("GO", &go);
    let mut started = tune.start();
    started.signal(started.child.id(), libc::SIGKILL);
    started.child.wait().expect("it ends");
    fs::write(&go, "").expect("written");
    let code = wait_for(&folder.path().join("go.code"));
    assert_eq!(code.trim(), "0");
    let said = fs::read_to_string(folder.path().join("go.out")).expect("its account");
    assert!(said.contains("\"mismatches\":0"), "{said}");
}

fn wait_for(path: &Path) -> String {
    for _ in 0..3000 {
        match fs::read_to_string(path) {
            Ok(text) if text.ends_with('\n') => return text,
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    panic!("{} does not come", path.display());
}

#[test]
fn what_cannot_be_tuned_runs_as_it_would_without() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("plain.c");
    fs::write(
        &source,
        "#include <stdio.h>\nint main(void) { puts(\"fine\"); return 5; }\n",
    )
    .expect("written");
    let build = |compiler: &str, flag: &str| -> PathBuf {
        let program = folder.path().join(format!("{compiler}{flag}"));
        let status = Command::new(compiler)
            .arg(flag)
            .arg("-o")
            .arg(&program)
            .arg(&source)
            .status();
        assert!(status.expect("a compiler").success(), "{compiler} {flag}");
        program
    };
    // The loader says of a library for another architecture that it ignores it.
    for (compiler, flag, silent) in [
        ("gcc", "-static", true),
        ("musl-gcc", "-O1", true),
        ("gcc", "-m32", false),
    ] {
        let ended = Tune::new(build(compiler, flag), [""; 0]).finish();
        assert_eq!(
            (ended.code, &*ended.stdout),
            (Some(5), "fine\n"),
            "{compiler} {flag}: {ended:#?}"
        );
        assert!(
            ended.stderr.ends_with(
                "cmt: no process was tuned: none copied between host and GPU, or none could be\n"
            ),
            "{ended:#?}"
        );
        assert_eq!(
            ended.stderr.lines().count() == 1,
            silent,
            "{compiler} {flag}: {ended:#?}"
        );
    }
}

#[test]
fn what_the_user_preloads_stays_and_comes_first() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let jemalloc = "libjemalloc.so.2";
    let mut tune = Tune::victim("victim-drv", &["--bytes", "2M", "--exact", "--calls", "20"]);
    let ended = Finished::from(
        tune.command
            .env("LD_PRELOAD", jemalloc)
            .output()
            .expect("start cmt"),
    );
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    assert_all_staged(&tune.account(), 20, 1);
    let mut tune = Tune::shell("echo $LD_PRELOAD");
    let ended = Finished::from(
        tune.command
            .env("LD_PRELOAD", jemalloc)
            .output()
            .expect("start cmt"),
    );
    assert!(ended.stdout.starts_with("libjemalloc.so.2:/"), "{ended:#?}");
}

/// `cmt attach` brings the same library into a process whose threads may be anywhere; what the environment says is not for
/// it then.
#[test]
fn a_process_in_whose_environment_the_socket_is_named_can_be_attached_to() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut command = Victim::command("victim-drv");
    command
        .args(["--bytes", "2M", "--exact", "--threads", "4"])
        .env("CMT_TUNE_SOCKET", "/nowhere");
    let victim = Victim::spawn(command);
    let pid = victim.pid.to_string();
    for _ in 0..5 {
        let attached = cmt([
            "attach", &pid, "--before", "0s", "--after", "100ms", "--json",
        ])
        .json();
        assert_eq!(attached["kept"], true);
        assert_eq!(cmt(["detach", &pid]).code, Some(0));
    }
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn bad_input_is_refused_before_the_program_starts() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let damaged = folder.path().join("damaged.json");
    fs::write(
        &damaged,
        "{\"schema\": \"cmt/trace/1\", \"htod\": [], \"dtoh\": []}",
    )
    .expect("written");
    let mark = folder.path().join("started");
    let touch = mark.to_str().expect("a path");
    let damaged = damaged.to_str().expect("a path");
    for (args, reason) in [
        (
            vec!["tune", "--profile", damaged, "--", "touch", touch],
            "schema",
        ),
        (
            vec!["tune", "--profile", "/nowhere", "--", "touch", touch],
            "no such file",
        ),
        (
            vec![
                "tune",
                "--profile",
                touch,
                "--json",
                "/nowhere/x",
                "--",
                "touch",
                touch,
            ],
            "",
        ),
    ] {
        let refused = cmt(&args);
        assert!(refused.refusal().contains(reason), "{refused:#?}");
        assert!(!mark.exists(), "it was started");
    }
}

/// Each of them ended otherwise at first: by a signal, an abort, or wrong bytes.
#[test]
fn programs_that_are_easily_disturbed_are_not() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for (what, staged_at_least) in [
        ("small-stack", 15),
        ("signal-waits", 15),
        ("cancel-load", 0),
        ("cancel-copy", 0),
        // Without files no control block can be had: stock copies.
        ("file-limit", 0),
        ("file-limit-late", 0),
        ("closed", 30),
        ("errno", 15),
        ("no-environment", 15),
        ("loader", 15),
        ("forks", 15),
        ("constructor", 0),
        ("seccomp", 0),
    ] {
        let plain = Victim::command("victim-launched").arg(what).output();
        let plain = Finished::from(plain.expect("start it"));
        assert_eq!((plain.code, &*plain.stderr), (Some(0), ""), "{what}, plain");
        let mut tune = Tune::victim("victim-launched", &[what]);
        let ended = tune.finish();
        assert_eq!(ended.code, Some(0), "{what}: {ended:#?}");
        let account = tune.account();
        assert!(staged(&account) >= staged_at_least, "{what}: {account:#}");
    }
}

/// The threads of a library's constructor are in libcuda's code already when the payload is first told of it: it must not be
/// patched then, nor when some other library comes later.
#[test]
fn a_libcuda_that_threads_may_be_in_is_left_alone() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for _ in 0..20 {
        let mut tune = Tune::victim("victim-early", &[]);
        let ended = tune.finish();
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        assert_eq!(tune.account()["processes"], 0, "it was patched");
    }
}

/// SIGCHLD ignored, SIGPIPE ignored, standard error full or closed: none of them is between the program and its exit code.
#[test]
fn the_exit_code_comes_through_whatever_the_caller_is_like() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let ignore = |signal: i32| {
        move || {
            // SAFETY: between fork and exec; runs no code.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
            Ok(())
        }
    };
    for signal in [libc::SIGCHLD, libc::SIGPIPE] {
        let mut tune = Tune::shell("grep SigIgn /proc/self/status; exit 3");
        // SAFETY: the function makes one system call.
        unsafe { tune.command.pre_exec(ignore(signal)) };
        let ended = tune.finish();
        assert_eq!(ended.code, Some(3), "{ended:#?}");
        let ignored =
            u64::from_str_radix(ended.stdout.split_whitespace().last().expect("a mask"), 16);
        // A shell may reset SIGCHLD for itself.
        if signal == libc::SIGPIPE {
            assert!(ignored.expect("hex") & 1 << (signal - 1) != 0, "{ended:#?}");
        }
    }
    let mut tune = Tune::shell("exit 3");
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("a full device");
    assert_eq!(
        tune.command.stderr(full).status().expect("it ends").code(),
        Some(3)
    );
    let mut tune = Tune::shell("exit 3");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    assert_eq!(
        tune.command
            .stderr(writer)
            .status()
            .expect("it ends")
            .code(),
        Some(3)
    );
}

#[test]
fn a_program_that_its_terminal_stops_stops_us_and_goes_on_with_us() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut tune = Tune::shell("echo ready $$; kill -TSTP $$; echo on; exit 4");
    // A job of its own, as a shell makes it.
    tune.command.process_group(0);
    let mut started = tune.start();
    let cmt = started.child.id();
    let state = || {
        let stat = fs::read_to_string(format!("/proc/{cmt}/stat")).expect("it lives");
        stat.rsplit(')')
            .next()
            .and_then(|rest| rest.trim().chars().next())
            .expect("a state")
    };
    for _ in 0..1000 {
        if state() == 'T' {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(state(), 'T');
    // SAFETY: no memory is touched; the group is our child's own.
    assert_eq!(unsafe { libc::kill(-cmt.cast_signed(), libc::SIGCONT) }, 0);
    let mut line = String::new();
    started.lines.read_line(&mut line).expect("a line");
    let code = started.child.wait().expect("it ends").code();
    assert_eq!((line.trim(), code), ("on", Some(4)));
}

/// Who stops the program alone continues it alone.
#[test]
fn a_program_that_is_stopped_by_somebody_does_not_stop_us() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let script = "(sleep 0.3; kill -CONT $$) & kill -STOP $$; exit 6";
    assert_eq!(Tune::shell(script).finish().code, Some(6));
}

/// There the machine's root is nobody.
/// The search listens for signals by a thread, which must not be there any more when they are the program's.
#[test]
fn after_a_search_signals_and_the_programs_end_are_seen() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // Without libcuda the search is over at once, and the estimate does.
    let start = |script: &str| {
        let mut tune = Tune::shell("");
        let mut command = cmt_command(["tune", "--fresh", "--", "sh", "-c", script]);
        command
            .env("XDG_CACHE_HOME", tune.folder.path())
            .env_remove("LD_LIBRARY_PATH");
        tune.command = command;
        tune
    };
    for _ in 0..40 {
        let ended = start("sleep 0.05; exit 3").finish();
        assert_eq!(ended.code, Some(3), "{ended:#?}");
    }
    for _ in 0..10 {
        let mut tune = start("trap 'exit 4' TERM; echo ready $$; while :; do sleep 0.02; done");
        let mut started = tune.start();
        started.signal(started.child.id(), libc::SIGTERM);
        assert_eq!(started.child.wait().expect("it ends").code(), Some(4));
    }
}

#[test]
fn in_a_user_namespace_programs_start_too() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let tune = Tune::shell("exit 5");
    let mut command = Command::new("unshare");
    command.arg("-Ur").arg(tune.command.get_program());
    command
        .args(tune.command.get_args())
        .env("XDG_CACHE_HOME", tune.folder.path());
    let ended = Finished::from(command.output().expect("run unshare"));
    assert_eq!(ended.code, Some(5), "{ended:#?}");
}

#[test]
fn sanitized_programs_start() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("a.c");
    fs::write(&source, "int main(void) { return 4; }").expect("written");
    let program = folder.path().join("a");
    let built = Command::new("gcc")
        .arg("-fsanitize=address")
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .status();
    assert!(built.expect("a compiler").success());
    let ended = Tune::new(&program, [""; 0]).finish();
    assert_eq!(ended.code, Some(4), "{ended:#?}");
}
