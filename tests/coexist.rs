//! Probes and patches sit on the same functions, in every order of coming and going.

use cmt_tests::{Rung, Trace, Victim, built, cmt, require};
use serde_json::Value;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Probe,
    Unprobe,
    Patch,
    Unpatch,
}
use Step::{Patch, Probe, Unpatch, Unprobe};

/// Every order in which the two can come and go.
const ORDERS: [[Step; 4]; 6] = [
    [Probe, Patch, Unpatch, Unprobe],
    [Probe, Patch, Unprobe, Unpatch],
    [Probe, Unprobe, Patch, Unpatch],
    [Patch, Probe, Unprobe, Unpatch],
    [Patch, Probe, Unpatch, Unprobe],
    [Patch, Unpatch, Probe, Unprobe],
];

/// Runs a `cmt` command on the victim that must succeed.
#[track_caller]
fn run(args: &[&str]) {
    let finished = cmt(args);
    assert_eq!(finished.code, Some(0), "{args:?}: {finished:#?}");
}

fn attach(pid: &str) {
    run(&["attach", pid, "--before", "0s", "--after", "0s"]);
}

/// Copies that a report holds.
fn calls(report: &Value) -> u64 {
    let processes = report["processes"].as_array().into_iter().flatten();
    let copies = processes.flat_map(|process| process["copies"].as_array().into_iter().flatten());
    copies.filter_map(|copy| copy["calls"].as_u64()).sum()
}

/// Lets the victim copy for a while: it reports progress once a second.
fn let_it_copy(victim: &Victim) {
    victim.next_line().expect("it copies");
}

#[track_caller]
fn go_through(order: [Step; 4], libraries: &std::path::Path) {
    let mut command = Victim::command("victim-drv");
    command.env("LD_LIBRARY_PATH", libraries);
    command.args(["--threads", "2", "--bytes", "64K,4M"]);
    let mut victim = Victim::spawn(command);
    let pid = victim.pid.to_string();
    let code = victim.code("libcuda.so");
    let mut trace = None;
    for step in order {
        match step {
            Probe => trace = Some(Trace::start([&pid])),
            Unprobe => {
                let report = trace.take().expect("it was started").interrupt();
                assert!(calls(&report) > 0, "{order:?}: nothing was seen");
            }
            Patch => attach(&pid),
            Unpatch => run(&["detach", &pid]),
        }
        let_it_copy(&victim);
        assert!(victim.is_alive(), "{order:?}: dead after {step:?}");
    }
    let now = victim.code("libcuda.so");
    let differs = now
        .iter()
        .zip(&code)
        .position(|(now, before)| now != before);
    assert_eq!(differs, None, "{order:?}: libcuda's code at this offset");
    assert_eq!(victim.stop()["mismatches"], 0, "{order:?}");
}

#[test]
fn in_every_order() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for order in ORDERS {
        go_through(order, &built().folder);
    }
}

#[test]
fn in_every_order_behind_endbr64() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for order in ORDERS {
        go_through(order, &built().folder.join("endbr"));
    }
}

/// The functions begin with a compare, which attach leaves in place: its jump stands where the push was, and a probe there would
/// end the program. (Probes behind the compare: the victim died.) With a probe there first, attach is refused.
#[test]
fn in_every_order_behind_a_compare() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for order in ORDERS.iter().filter(|order| order[0] == Patch) {
        go_through(*order, &built().folder.join("compares"));
    }
}

#[test]
fn a_trace_across_attach_and_detach_counts_every_call() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let args = ["--threads", "2", "--bytes", "64K,4M", "--hold"];
    let victim = Victim::start("victim-drv", args);
    let pid = victim.pid.to_string();
    let trace = Trace::start([&pid]);
    victim.signal(libc::SIGUSR1);
    for _ in 0..2 {
        let_it_copy(&victim);
        attach(&pid);
        let_it_copy(&victim);
        run(&["detach", &pid]);
    }
    let account = victim.stop();
    let (report, _) = trace.finish();
    assert_eq!(report["lost"], 0, "{report}");
    let functions = account["functions"].as_object().expect("functions");
    let own: u64 = functions
        .values()
        .filter_map(|function| function["calls"].as_u64())
        .sum();
    assert_eq!(calls(&report), own, "{report}\n{account}");
}
