//! Programs of another libc or architecture, and programs that another tool holds, are refused by name.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cmt_tests::{Rung, Victim, attach, built, cmt, refusal, require_packages, until, workspace};

/// Compiles the program without CUDA in another way.
#[track_caller]
fn bystander(name: &str, compiler: &str, flags: &[&str]) -> Victim {
    let program = built().victim(name);
    let mut command = Command::new(compiler);
    command.args(flags).arg("-o").arg(&program);
    command.arg(workspace().join("tests/victims/sleeper.c"));
    let status = command.status().expect("run the compiler");
    assert!(status.success(), "{command:?}: {status}");
    Victim::spawn(Command::new(program))
}

#[test]
fn musl() {
    let Some(_turn) = require_packages(Rung::Kernel, &[("musl-gcc", "musl-tools")]) else {
        return;
    };
    let mut victim = bystander("victim-musl", "musl-gcc", &[]);
    refusal(&mut victim, &["victim-musl", "musl", "glibc"]);
}

#[test]
fn thirty_two_bits() {
    let stubs = "/usr/include/x86_64-linux-gnu/gnu/stubs-32.h";
    let other = "/usr/include/gnu/stubs-32.h";
    let stubs = [stubs, other]
        .into_iter()
        .find(|path| std::path::Path::new(path).exists());
    let needed = [(stubs.unwrap_or(other), "gcc-multilib")];
    let Some(_turn) = require_packages(Rung::Kernel, &needed) else {
        return;
    };
    let mut victim = bystander("victim-32", "gcc", &["-m32"]);
    refusal(&mut victim, &["victim-32", "32-bit", "x86-64"]);
}

/// Ends a tracer when dropped.
struct Tracer(Child);

impl Drop for Tracer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Has a tool trace a copying victim; attach names the tool's process, and both go on.
#[track_caller]
fn held_by(tool: &str, args: &[&str]) {
    let Some(_turn) = require_packages(Rung::StandIn, &[(tool, tool)]) else {
        return;
    };
    let mut victim = Victim::start("victim-drv", ["--bytes", "1M,2M"]);
    victim.next_line().expect("all its threads are there");
    let mut command = Command::new(tool);
    command.args(args).arg(victim.pid.to_string());
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut tracer = Tracer(command.spawn().expect("start the tracer"));
    let id = tracer.0.id().to_string();
    let started = Instant::now();
    while traced_by(victim.pid) != id {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "{tool} does not attach"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    refusal(&mut victim, &["traced", &id]);
    assert!(
        tracer.0.try_wait().expect("look at it").is_none(),
        "{tool} has ended"
    );
    drop(tracer);
    // gdb attaches by SIGSTOP, and is ended while it does.
    victim.signal(libc::SIGCONT);
    assert_eq!(victim.stop()["mismatches"], 0);
}

fn traced_by(pid: u32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("TracerPid:"));
    line.expect("a tracer or 0").trim().to_string()
}

#[test]
fn under_strace() {
    held_by("strace", &["-f", "-o", "/dev/null", "-p"]);
}

/// On the program's threads that would be a cancellation point, and a sandbox may forbid it.
#[test]
fn copies_open_no_file() {
    let Some(_turn) = require_packages(Rung::StandIn, &[("strace", "strace")]) else {
        return;
    };
    let victim = Victim::start("victim-drv", ["--bytes", "16M", "--calls", "4", "--hold"]);
    assert_eq!(attach(&victim).code, Some(0));
    let opened = tempfile::NamedTempFile::new().expect("a file");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-e", "trace=open,openat,openat2", "-o"]);
    strace
        .arg(opened.path())
        .args(["-p", &victim.pid.to_string()]);
    let mut strace = strace.stderr(Stdio::null()).spawn().expect("run strace");
    until("it is traced", || traced_by(victim.pid) != "0");
    victim.signal(libc::SIGUSR1);
    assert_eq!(victim.finish()["mismatches"], 0);
    strace.wait().expect("wait for strace");
    let opened = std::fs::read_to_string(opened.path()).expect("text");
    // By which the stand-in names its streams' threads.
    let mut ours = opened.lines().filter(|line| !line.contains("/comm"));
    assert_eq!(ours.next(), None, "{opened}");
}

/// A debugger that looks at the process later opens its libraries by the names that the loader knows. (As `/proc/self/fd/4`
/// it opened a pipe of its own, and hung.)
#[test]
fn gdb_after_an_attach() {
    let Some(_turn) = require_packages(Rung::StandIn, &[("gdb", "gdb"), ("timeout", "coreutils")])
    else {
        return;
    };
    let victim = Victim::start("victim-drv", ["--bytes", "1M,2M"]);
    victim.next_line().expect("all its threads are there");
    let pid = victim.pid.to_string();
    let look = || {
        let mut command = Command::new("timeout");
        command.args(["-k", "1", "60", "gdb", "-nx", "-q", "-batch"]);
        command.args(["-ex", "info sharedlibrary", "-p", &pid]);
        let output = command.stdin(Stdio::null()).output().expect("run gdb");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{output:?}");
        assert!(!said.contains("/proc/self/fd"), "{said}");
        said
    };
    let attached = cmt(["attach", &pid, "--before", "0s", "--after", "0s"]);
    assert_eq!(attached.code, Some(0), "{attached:#?}");
    assert!(look().contains("memfd:cmt"), "the payload is not listed");
    let detached = cmt(["detach", &pid]);
    assert_eq!(detached.code, Some(0), "{detached:#?}");
    look();
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn under_gdb() {
    held_by("gdb", &["-nx", "-q", "-ex", "continue", "-p"]);
}
