//! `cmt doctor` says what works, and where something does not, what that means and what to do.

use cmt_tests::{Finished, Rung, Victim, cmt, cmt_command, require};
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

/// `cmt doctor --json` without some capabilities. Dropped from the bounding set, they are not gained by root's exec.
fn doctor_without(capabilities: &str) -> Finished {
    let doctor = cmt_command(["doctor", "--json"]);
    let mut command = std::process::Command::new("setpriv");
    command
        .args(["--bounding-set", capabilities, "--inh-caps", capabilities])
        .arg(doctor.get_program())
        .args(doctor.get_args());
    command.output().expect("run setpriv").into()
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
    ] {
        let finished = doctor_without(dropped);
        assert_eq!(finished.code, Some(1), "{finished:#?}");
        let report = finished.parse();
        let missing = check(&report, name);
        assert_eq!(missing["state"], "failed", "{name}");
        assert!(
            missing["remedy"]
                .as_str()
                .is_some_and(|remedy| remedy.contains("root")),
            "{missing}"
        );
        assert_eq!(report["trace"], trace, "{name}");
        assert_eq!(report["attach"], attach, "{name}");
    }
}
