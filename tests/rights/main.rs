//! Each command does with exactly the capabilities that docs/rights.md lists for it, and without any one of them refuses,
//! names it and says what grants it.

mod attach;
mod place;
mod serve;
mod trace;
mod tune;
mod unit;

use std::process::Command;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use cmt_tests::{Rung, Trace, Victim, cmt_command, require, require_packages};

use place::{BYTES, OTHER, Place, ROOT, USER, as_user, counts_right, held, run};

/// A trace of all processes puts breakpoints into every victim, which would look touched.
static ALONE: RwLock<()> = RwLock::new(());

fn with_others() -> RwLockReadGuard<'static, ()> {
    ALONE.read().unwrap_or_else(PoisonError::into_inner)
}

fn alone() -> RwLockWriteGuard<'static, ()> {
    ALONE.write().unwrap_or_else(PoisonError::into_inner)
}

/// Such a program is not dumpable, so what belongs to it in `/proc` belongs to root.
#[test]
fn capabilities_of_the_file_do_as_well() {
    let Some(_turn) = require_packages(Rung::StandIn, &[("setcap", "libcap2-bin")]) else {
        return;
    };
    let _others = with_others();
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
    let shown = victim.pid;
    counts_right(trace, victim, shown, false);

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
    let _others = with_others();
    let mut victim = Victim::start("victim-drv", BYTES);
    let before = victim.settled();
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

/// What Docker and Kubernetes leave a container's root by default.
const CONTAINER: &str = "-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,+net_raw,+sys_chroot,+mknod,+audit_write,+setfcap";

#[test]
fn in_the_targets_own_container_less_is_needed() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    let within = |more: &str| {
        let sets = format!("{CONTAINER}{more}");
        ["bounding-set", "inh-caps"].map(|which| format!("--{which}={sets}"))
    };
    let [bounding, inherited] = within("");
    let container = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ];
    let confined = [&container[..], &["setpriv", &bounding, &inherited]].concat();
    let cmt = |victim: &Victim, more: &str, args: &[&str]| {
        let mut command = Command::new("nsenter");
        command.args([
            "--mount",
            "--pid",
            "--target",
            &victim.pid.to_string(),
            "setpriv",
        ]);
        command.args(within(more)).arg(place.path("cmt")).args(args);
        command
    };
    let mut command = place.command(ROOT, &confined, place.folder.path());
    command.arg("--hold");
    let mut victim = Victim::spawn_in_pid_namespace(command);
    let before = victim.settled();
    let attach = ["attach", "1", "--before", "0s", "--after", "0s"];
    for (more, args, lacking) in [
        ("", &["trace", "1", "--for", "1s"][..], "BPF, CAP_PERFMON"),
        (",+bpf", &["trace", "1", "--for", "1s"], "PERFMON"),
        (",+perfmon", &["trace", "1", "--for", "1s"], "BPF"),
        (",+bpf,+perfmon", &attach, "CHECKPOINT_RESTORE"),
    ] {
        let refused = run(cmt(&victim, more, args));
        let sentence = refused.refusal();
        assert!(
            sentence.contains(&format!(": CAP_{lacking} missing;")),
            "{sentence}"
        );
    }
    victim.assert_untouched(&before);
    // Once process 1 ends so does everything in its namespace: it copies on.
    victim.signal(libc::SIGUSR1);
    let trace = ["trace", "1", "--json", "--for", "1s"];
    let report = run(cmt(&victim, ",+bpf,+perfmon", &trace)).json();
    let calls = &report["processes"][0]["copies"][0]["calls"];
    assert!(calls.as_u64() > Some(0), "{report}");
    for args in [&attach[..], &["status", "1"], &["detach", "1"]] {
        let finished = run(cmt(&victim, ",+checkpoint_restore", args));
        assert_eq!(finished.code, Some(0), "{finished:#?}");
        if args[0] == "attach" {
            let blind = run(cmt(&victim, "", &["status"]));
            let said = "cmt: 1 of the processes may not be inspected";
            assert!(blind.stderr.starts_with(said), "{blind:#?}");
        }
    }
}

#[test]
fn a_process_that_proc_hides_is_not_said_to_be_missing() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    let mut victim = place.victim(OTHER);
    let before = victim.settled();
    let pid = victim.pid.to_string();
    let hiding = "mount -t proc -o hidepid=invisible proc /proc && exec \"$@\"";
    for args in [
        &["trace", &pid, "--for", "1s"][..],
        &["attach", &pid],
        &["status", &pid],
    ] {
        let cmt = place.cmt(
            &["bpf", "perfmon", "checkpoint_restore", "dac_override"],
            args,
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", hiding, "sh"]);
        command.arg(cmt.get_program()).args(cmt.get_args());
        let refused = run(command);
        let sentence = refused.refusal();
        assert!(
            sentence.contains("may not be inspected: CAP_SYS_PTRACE missing;"),
            "{sentence}"
        );
    }
    victim.assert_untouched(&before);
}
