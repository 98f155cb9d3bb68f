//! `cmt doctor` says what works, and where something does not, what that means and what to do.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use cmt_tests::{Finished, Rung, Victim, built, cmt, cmt_command, require};
use serde_json::Value;

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().expect("checks");
    checks
        .iter()
        .find(|check| check["name"] == name)
        .unwrap_or_else(|| panic!("no check {name}: {report:#}"))
}

#[test]
fn a_machine_that_can_trace_and_attach_passes() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let report = cmt(["doctor", "--json"]).json();
    assert_eq!(report["schema"], "cmt/doctor/1");
    assert_eq!(report["trace"], true);
    assert_eq!(report["attach"], true);
    for name in [
        "kernel",
        "BPF",
        "uprobes",
        "memfd",
        "CAP_BPF",
        "CAP_SYS_PTRACE",
        "user namespace",
    ] {
        assert_eq!(check(&report, name)["state"], "ok", "{name}");
    }

    let text = cmt(["doctor"]);
    assert_eq!(text.code, Some(0));
    for line in text.stdout.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn processes_that_map_libcuda_are_found() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-drv", [""; 0]);
    let report = cmt(["doctor", "--json"]).json();
    let processes = report["processes"].as_array().expect("processes");
    let found = processes
        .iter()
        .find(|process| process["pid"] == victim.pid)
        .expect("the victim is found");
    let library = found["libraries"][0].as_str().expect("a path");
    assert!(library.contains("libcuda.so"), "{library}");
}

/// `cmt doctor --json`, started by another program.
fn doctor_under(program: &str, args: &[&str]) -> Finished {
    let doctor = cmt_command(["doctor", "--json"]);
    let mut command = Command::new(program);
    command.args(args).arg(doctor.get_program());
    command.args(doctor.get_args()).env_remove("RUST_LOG");
    command.output().expect("run it").into()
}

/// The check `name` ended as `state`, means something, and has a remedy with all of `words`.
#[track_caller]
fn assert_check(report: &Value, name: &str, state: &str, words: &[&str]) {
    let check = check(report, name);
    assert_eq!(check["state"], state, "{check}");
    assert!(check["meaning"].is_string(), "{check}");
    let remedy = check["remedy"].as_str().expect("a remedy");
    for word in words {
        assert!(remedy.contains(word), "no {word:?}: {check}");
    }
}

#[test]
fn each_missing_capability_is_named_with_its_remedy() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    for (dropped, name, trace, attach) in [
        ("-bpf,-sys_admin", "CAP_BPF", false, false),
        ("-perfmon,-sys_admin", "CAP_PERFMON", false, false),
        ("-sys_ptrace", "CAP_SYS_PTRACE", true, false),
        (
            "-checkpoint_restore,-sys_admin",
            "CAP_CHECKPOINT_RESTORE",
            true,
            false,
        ),
    ] {
        // Dropped from the bounding set, they are not gained by root's exec.
        let args = ["--bounding-set", dropped, "--inh-caps", dropped];
        let finished = doctor_under("setpriv", &args);
        assert_eq!(finished.code, Some(1), "{finished:#?}");
        let report = finished.parse();
        let add = format!("--cap-add {}", &name[4..]);
        assert_check(&report, name, "failed", &["run it as root", &add]);
        assert_eq!(report["trace"], trace, "{name}");
        assert_eq!(report["attach"], attach, "{name}");
    }
}

#[test]
fn without_any_right_the_text_still_fits_and_holds_a_whole_command() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    // Any user may run it there.
    let folder = tempfile::tempdir().expect("a folder");
    let anybody = fs::Permissions::from_mode(0o755);
    fs::set_permissions(folder.path(), anybody.clone()).expect("open the folder");
    let copy = folder.path().join("cmt");
    fs::copy(cmt_command([""; 0]).get_program(), &copy).expect("copy cmt");
    fs::set_permissions(&copy, anybody).expect("make it executable");
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    let text = Finished::from(
        command
            .arg(&copy)
            .arg("doctor")
            .output()
            .expect("run setpriv"),
    );
    assert_eq!(text.code, Some(1), "{text:#?}");
    for line in text.stdout.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let granted = "\nsudo setcap \\\ncap_bpf,cap_perfmon,cap_sys_ptrace,cap_checkpoint_restore,cap_dac_override+ep \\\n$(command -v cmt)\n";
    assert!(text.stdout.contains(granted), "{}", text.stdout);
}

#[test]
fn what_surrounds_it_is_named() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    // As a rootless container, which holds every capability, but only there.
    let user = doctor_under("unshare", &["--user", "--map-root-user"]);
    assert_eq!(user.code, Some(1), "{user:#?}");
    let report = user.parse();
    assert_eq!(check(&report, "CAP_BPF")["state"], "ok");
    assert_check(&report, "user namespace", "failed", &["root of the host"]);
    assert_check(&report, "uprobes", "failed", &["root of the host"]);

    let pid = doctor_under("unshare", &["--pid", "--fork", "--mount-proc"]).json();
    assert_check(&pid, "pid namespace", "warning", &["--pid=host", "hostPID"]);

    let hidden = "mount -t proc -o hidepid=invisible proc /proc && exec \"$@\"";
    let args = ["--mount", "--pid", "--fork", "sh", "-c", hidden, "sh"];
    let found = doctor_under("unshare", &args).json();
    let found = check(&found, "/proc")["found"].to_string();
    assert!(found.contains("hidepid=invisible"), "{found}");
    let args = [&args[..], &["setpriv", "--bounding-set=-sys_ptrace"]].concat();
    let blind = doctor_under("unshare", &args).parse();
    assert_check(&blind, "/proc", "warning", &["CAP_SYS_PTRACE"]);
}

#[test]
fn a_seccomp_filter_is_named() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let preload = format!("LD_PRELOAD={}", built().victim("libconfine.so").display());
    let finished = doctor_under("env", &["CONFINE=container", &preload]);
    assert_eq!(finished.code, Some(1), "{finished:#?}");
    let report = finished.parse();
    assert_check(
        &report,
        "system calls",
        "info",
        &["seccomp=unconfined", "seccompProfile"],
    );
    assert_check(
        &report,
        "BPF",
        "failed",
        &["seccomp=unconfined", "seccompProfile"],
    );
}

#[test]
fn kernels_that_are_too_old_or_locked_down() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let pretending = |kernel: &str| doctor_under("env", &[&format!("CMT_PRETEND_KERNEL={kernel}")]);
    let old = pretending("old");
    assert_eq!(old.code, Some(1), "{old:#?}");
    let old = old.parse();
    assert_check(&old, "kernel", "failed", &["newer kernel"]);
    assert_eq!(check(&old, "uprobes")["state"], "failed");
    assert_eq!(old["trace"], false);

    let locked = pretending("lockdown").json();
    assert_check(&locked, "lockdown", "warning", &["lockdown=integrity"]);

    let single = pretending("single").json();
    assert_eq!(
        check(&single, "probe links")["found"],
        "one for each function"
    );
    assert_eq!(check(&single, "uprobes")["state"], "ok");
}
