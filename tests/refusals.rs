//! What `cmt attach` and `cmt detach` cannot do they refuse with one sentence, and the process goes on untouched.
#![expect(unsafe_code, reason = "traces a process, as a debugger would")]

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Command;

use cmt_tests::{Finished, Rung, Victim, built, cmt, cmt_command, require};

/// An ordinary program that has nothing to do with CUDA.
fn bystander() -> Victim {
    Victim::start("victim-nocuda", [""; 0])
}

fn attach(pid: u32) -> Finished {
    cmt([
        "attach",
        &pid.to_string(),
        "--before",
        "1s",
        "--after",
        "1s",
    ])
}

/// Attach refuses `victim` with a sentence that holds all of `words`, and leaves it as it was.
#[track_caller]
fn assert_refused(victim: &mut Victim, words: &[&str]) {
    let before = victim.footprint();
    let refused = attach(victim.pid);
    let sentence = refused.refusal();
    for word in words {
        assert!(sentence.contains(word), "no {word:?} in {sentence:?}");
    }
    victim.assert_untouched(&before);
}

#[test]
fn a_process_that_does_not_exist() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    // Beyond what the kernel gives out: pid_max is at most 2^22.
    let pid = 1 << 23;
    for command in ["attach", "detach", "status"] {
        let refused = cmt([command, &pid.to_string()]);
        assert!(
            refused.refusal().contains("no process 8388608"),
            "{refused:#?}"
        );
    }
}

#[test]
fn a_kernel_thread() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    // kthreadd, unless we are in a pid namespace of our own.
    if fs::read_to_string("/proc/2/comm").is_ok_and(|comm| comm.trim() == "kthreadd") {
        let refused = attach(2);
        assert!(refused.refusal().contains("kernel thread"), "{refused:#?}");
    }
}

#[test]
fn a_program_without_libcuda() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    assert_refused(&mut bystander(), &["victim-nocuda", "libcuda"]);
}

#[test]
fn a_static_binary() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let mut victim = Victim::start("victim-static", [""; 0]);
    assert_refused(&mut victim, &["victim-static", "statically linked"]);
}

#[test]
fn a_stopped_process() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let mut victim = bystander();
    victim.signal(libc::SIGSTOP);
    while !state(victim.pid).starts_with('T') {
        std::thread::yield_now();
    }
    assert_refused(&mut victim, &["stopped", "kill -CONT"]);
    assert!(state(victim.pid).starts_with('T'), "still stopped");
}

/// The `State:` of a process, such as `S (sleeping)`.
fn state(pid: u32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("read its status");
    let line = status.lines().find_map(|line| line.strip_prefix("State:"));
    line.expect("a state").trim().to_string()
}

#[test]
fn a_process_under_a_debugger() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let mut victim = bystander();
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: PTRACE_SEIZE reads and writes no memory of ours.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, victim.pid as i32, none, none) };
    assert_eq!(seized, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: asks for a number. The kernel names the thread that traces.
    let tracer = unsafe { libc::gettid() };
    assert_refused(&mut victim, &["traced", &tracer.to_string()]);
}

/// Runs `cmt` as nobody, from a copy that nobody may execute.
fn as_nobody(args: &[&str]) -> Finished {
    let folder = tempfile::tempdir().expect("a folder");
    let anybody = fs::Permissions::from_mode(0o755);
    fs::set_permissions(folder.path(), anybody.clone()).expect("open the folder");
    let copy = folder.path().join("cmt");
    let original = cmt_command([""; 0]).get_program().to_owned();
    fs::copy(original, &copy).expect("copy cmt");
    fs::set_permissions(&copy, anybody).expect("make it executable");
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command.arg(&copy).args(args);
    command.output().expect("run setpriv").into()
}

#[test]
fn without_rights() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let mut victim = bystander();
    let before = victim.footprint();
    let pid = victim.pid.to_string();
    for args in [
        &["attach", &pid][..],
        &["detach", &pid],
        &["trace", &pid, "--for", "1s"],
    ] {
        let refused = as_nobody(args);
        let sentence = refused.refusal();
        assert!(sentence.contains("root"), "no remedy in {sentence:?}");
    }
    victim.assert_untouched(&before);
}

/// `cmt trace` of `victim` on a kernel that is pretended, under what `libconfine.so` forbids.
fn trace_on(kernel: &str, confine: Option<&str>, victim: &Victim) -> Finished {
    let mut command = cmt_command(["trace", &victim.pid.to_string(), "--for", "1s"]);
    command.env("CMT_PRETEND_KERNEL", kernel);
    if let Some(confine) = confine {
        command.env("LD_PRELOAD", built().victim("libconfine.so"));
        command.env("CONFINE", confine);
    }
    command.output().expect("start cmt").into()
}

#[test]
fn kernels_that_do_not_trace() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let mut victim = bystander();
    let before = victim.footprint();
    for (kernel, confine, words) in [
        ("old", None, ["Linux 5.10 is too old", "newer kernel"]),
        (
            "lockdown",
            Some("container"),
            ["BPF maps", "lockdown=integrity"],
        ),
        (
            "none",
            Some("container"),
            ["BPF maps", "seccomp=unconfined"],
        ),
    ] {
        let refused = trace_on(kernel, confine, &victim);
        let sentence = refused.refusal();
        for word in words {
            assert!(
                sentence.contains(word),
                "{kernel}: no {word:?} in {sentence:?}"
            );
        }
    }
    // Links with one site each take more than the others, and so it is also where all processes are traced.
    let pid = victim.pid.to_string();
    for whom in [pid.as_str(), "--all"] {
        let trace = cmt_command(["trace", whom, "--for", "1s"]);
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]);
        command.arg(trace.get_program()).args(trace.get_args());
        let refused = Finished::from(
            command
                .env("CMT_PRETEND_KERNEL", "single")
                .output()
                .expect("run setpriv"),
        );
        let sentence = refused.refusal();
        for word in ["a uprobe: CAP_SYS_ADMIN missing", "--cap-add SYS_ADMIN"] {
            assert!(sentence.contains(word), "no {word:?} in {sentence:?}");
        }
    }
    victim.assert_untouched(&before);
}

#[test]
fn a_user_namespace_of_its_own() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let victim = bystander();
    let pid = victim.pid.to_string();
    for args in [&["trace", &pid, "--for", "1s"][..], &["attach", &pid]] {
        let cmt = cmt_command(args);
        let mut command = Command::new("unshare");
        command
            .args(["--user", "--map-root-user"])
            .arg(cmt.get_program());
        let refused = Finished::from(command.args(args).output().expect("run unshare"));
        let sentence = refused.refusal();
        assert!(
            sentence.contains("user namespace") && sentence.contains("outside"),
            "{sentence}"
        );
    }
}

#[test]
fn detaching_what_was_never_attached() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let mut victim = bystander();
    let before = victim.footprint();
    let refused = cmt(["detach", &victim.pid.to_string()]);
    assert!(refused.refusal().contains("not attached"), "{refused:#?}");
    victim.assert_untouched(&before);
}

#[test]
fn attaching_twice() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-drv", [""; 0]);
    let pid = victim.pid.to_string();
    let attached = attach(victim.pid);
    assert_eq!(attached.code, Some(0), "{attached:#?}");
    let refused = attach(victim.pid);
    let sentence = refused.refusal();
    assert!(sentence.contains("already attached"), "{sentence}");
    assert!(victim.is_alive());
    assert_eq!(cmt(["detach", &pid]).code, Some(0));
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn a_forked_child_of_an_attached_process() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-odd", ["fork"]);
    let pid = victim.pid.to_string();
    assert_eq!(attach(victim.pid).code, Some(0));
    victim.signal(libc::SIGUSR1);
    let children = format!("/proc/{pid}/task/{pid}/children");
    let child = loop {
        let children = fs::read_to_string(&children).expect("its children");
        if let Some(child) = children.split_ascii_whitespace().next() {
            break child.to_owned();
        }
    };
    // It shares the parent's control block: a word to that would reach the parent.
    for command in ["attach", "detach"] {
        let refused = cmt([command, &child]);
        assert!(refused.refusal().contains("forked child"), "{refused:#?}");
    }
    let status = cmt(["status", &pid, "--json"]).json();
    assert_eq!(status["processes"][0]["state"], "attached", "{status:#}");
    assert!(victim.is_alive());
    assert_eq!(cmt(["detach", &pid]).code, Some(0));
    assert_eq!(victim.stop()["mismatches"], 0);
}

/// Address of the code of a function of the stand-in in a process. The victim does not call this one.
fn address_of(function: &str, pid: u32) -> u64 {
    let library = built().folder.join("libcuda.so.1");
    let mut nm = Command::new("nm");
    nm.args(["-D", "--defined-only"]).arg(&library);
    let symbols = nm.output().expect("run nm").stdout;
    let symbols = String::from_utf8_lossy(&symbols).into_owned();
    let symbol = symbols
        .lines()
        .find(|line| line.ends_with(&format!(" {function}")))
        .and_then(|line| line.split(' ').next())
        .expect("the function");
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its maps");
    let base = maps
        .lines()
        .find(|line| line.contains("/libcuda.so"))
        .and_then(|line| line.split('-').next())
        .expect("the library");
    let number = |text| u64::from_str_radix(text, 16).expect("hex");
    number(base) + number(symbol)
}

#[test]
fn code_that_somebody_else_has_changed() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-drv", ["--bytes", "1M,2M"]);
    let pid = victim.pid.to_string();
    assert_eq!(attach(victim.pid).code, Some(0));
    assert_eq!(cmt(["detach", &pid]).code, Some(0));
    // Behind its first instruction, where the patch would go; the victim does not call it.
    let place = address_of("cuMemcpyHtoDAsync_v2_ptsz", victim.pid) + 4;
    let memory = fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/mem"))
        .expect("its memory");
    let mut byte = [0];
    memory.read_exact_at(&mut byte, place).expect("read it");
    memory.write_all_at(&[!byte[0]], place).expect("change it");
    let before = victim.footprint();
    let refused = attach(victim.pid);
    let sentence = refused.refusal();
    assert!(sentence.contains("is not what it was"), "{sentence}");
    victim.assert_untouched(&before);
    memory.write_all_at(&byte, place).expect("change it back");
    assert_eq!(attach(victim.pid).code, Some(0));
    assert_eq!(cmt(["detach", &pid]).code, Some(0));
    assert_eq!(victim.stop()["mismatches"], 0);
}
