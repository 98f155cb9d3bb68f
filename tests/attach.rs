//! `cmt attach` swaps the copier of a running program, compares, and `cmt detach` puts the old one back.

use std::process::Command;
use std::time::{Duration, Instant};

use cmt_tests::{Finished, Rung, Victim, built, cmt, require, spawn_cmt};
use serde_json::Value;

/// Attaches without looking at what the program does before and after.
fn attach(victim: &Victim) -> Finished {
    let pid = victim.pid.to_string();
    cmt(["attach", &pid, "--before", "0s", "--after", "0s"])
}

#[track_caller]
fn attach_and_expect_success(victim: &Victim) {
    let attached = attach(victim);
    assert_eq!(attached.code, Some(0), "{attached:#?}");
}

#[track_caller]
fn detach(victim: &Victim) {
    let detached = cmt(["detach", &victim.pid.to_string(), "--json"]).json();
    assert_eq!(detached["schema"], "cmt/detach/1");
    assert_eq!(detached["pid"], victim.pid);
    assert!(detached["restored"].as_u64() > Some(0), "{detached}");
}

/// The victim's entry in `cmt status --json`.
#[track_caller]
fn status(victim: &Victim) -> Value {
    let report = cmt(["status", &victim.pid.to_string(), "--json"]).json();
    assert_eq!(report["schema"], "cmt/status/1");
    report["processes"][0].clone()
}

/// Copies that went through the staging copier, one direction after the other.
fn staged(status: &Value) -> [u64; 2] {
    [0, 1].map(|index| status["staged"][index]["calls"].as_u64().expect("calls"))
}

/// Copies that went to the original function for this reason.
fn passed(status: &Value, reason: &str) -> u64 {
    let reasons = status["passed"].as_array().into_iter().flatten();
    reasons
        .filter(|one| one["reason"] == reason)
        .filter_map(|one| one["calls"].as_u64())
        .sum()
}

/// Waits until both directions have been staged: the victim copies all the time.
#[track_caller]
fn wait_until_staged(victim: &Victim) -> Value {
    for _ in 0..600 {
        let status = status(victim);
        if staged(&status).iter().all(|&calls| calls > 0) {
            return status;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("nothing is staged: {:#}", status(victim));
}

#[test]
fn unguarded_short_copies_are_staged_however_they_come() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-rt", ["--bytes", "1M", "--pause-ms", "2"]);
    let pid = victim.pid.to_string();
    let alone = |process: &Value| {
        let passed = process["passed"].as_array().expect("passed");
        let mut alone = passed.iter();
        alone.any(|entry| entry["reason"] == "short, one at a time")
    };
    let page = tempfile::NamedTempFile::new().expect("a file");
    let path = page.path().to_str().expect("text");
    for (more, guarded) in [(&[][..], true), (&["--unguarded"], false)] {
        let windows = ["--before", "1s", "--after", "1s"];
        let attach = ["attach", &pid, "--json", "--html", path];
        let report = cmt(attach.iter().chain(&windows).chain(more)).json();
        assert_eq!(report["guarded"], guarded);
        let of_htod = |row: &&Value| row["direction"] == "HtoD";
        let rows = report["compare"].as_array().expect("rows");
        let row = rows.iter().find(of_htod).expect("HtoD");
        assert_eq!(row["staged"], !guarded, "{row:#}");
        let page = std::fs::read_to_string(path).expect("a page");
        assert_eq!(page.contains("not staged"), guarded, "{page}");
        assert!(page.contains("The new copier stays."), "{page}");
        // What it would bring is told of what is not attached yet.
        let advice = |report: &Value| report["processes"][0]["gain"]["advice"].clone();
        assert_ne!(advice(&report["before"]), advice(&report["after"]));
        let traced = cmt(["trace", &pid, "--for", "300ms", "--json"]).json();
        for advice in [advice(&report["after"]), advice(&traced)] {
            assert_eq!(advice, "attached: cmt status shows what is staged");
        }
        std::thread::sleep(Duration::from_secs(1));
        let process = &cmt(["status", &pid, "--json"]).json()["processes"][0];
        assert_eq!(process["guarded"], guarded);
        assert_eq!(alone(process), guarded, "{process:#}");
        let staged = process["staged"][0]["calls"].as_u64();
        assert_eq!(staged > Some(100), !guarded, "{process:#}");
        let text = cmt(["status", &pid]).stdout;
        assert_eq!(text.contains("without guard"), !guarded, "{text}");
        assert_eq!(cmt(["detach", &pid]).code, Some(0));
    }
}

#[test]
fn before_and_after_are_compared() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-rt", ["--bytes", "1M,16M"]);
    let pid = victim.pid.to_string();
    let report = cmt(["attach", &pid, "--before", "2s", "--after", "2s", "--json"]).json();
    assert_eq!(report["schema"], "cmt/attach/1");
    assert_eq!(report["pid"], victim.pid);
    // Whichever this cmt was built with.
    assert!(
        ["builtin", "frida"]
            .iter()
            .any(|name| report["engine"] == *name)
    );
    assert_eq!(
        (&report["kept"], &report["guarded"]),
        (&true.into(), &true.into())
    );
    assert!(report["attach_ms"].as_f64().is_some_and(|ms| ms > 0.0));
    assert!(
        report["commit_pause_us"]
            .as_f64()
            .is_some_and(|us| us > 0.0)
    );
    let patched = report["patched"].as_array().expect("patched");
    for name in [
        "cuMemcpyHtoD_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyAsync_ptsz",
    ] {
        assert!(patched.iter().any(|one| one == name), "{name}: {patched:?}");
    }
    for window in ["before", "after"] {
        assert_eq!(report[window]["schema"], "cmt/trace/1", "{window}");
    }
    let compare = report["compare"].as_array().expect("compare");
    for direction in ["HtoD", "DtoH"] {
        for bytes in [1 << 20, 16 << 20] {
            let row = compare
                .iter()
                .find(|row| row["direction"] == direction && row["size_class_bytes"] == bytes)
                .unwrap_or_else(|| panic!("no {direction} {bytes}: {report:#}"));
            for field in [
                "calls_before",
                "calls_after",
                "p50_before_ns",
                "p50_after_ns",
                "gbps_before",
                "gbps_after",
                "speedup",
            ] {
                let value = row[field].as_f64();
                assert!(value.is_some_and(|value| value > 0.0), "{field}: {row}");
            }
        }
    }
    detach(&victim);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn reverting_takes_the_patch_out_again() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-drv", ["--bytes", "1M,16M"]);
    let code = victim.code("libcuda.so");
    let pid = victim.pid.to_string();
    let report = cmt([
        "attach", &pid, "--before", "1s", "--after", "1s", "--revert", "--json",
    ])
    .json();
    assert_eq!(report["kept"], false);
    assert!(victim.code("libcuda.so") == code, "libcuda's code differs");
    assert_eq!(status(&victim)["patched"], serde_json::json!([]));
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn a_hundred_cycles_leave_no_trace() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // Idle threads end the victim if a system call of theirs returns; the storm holds malloc's locks all the time.
    let mut victim = Victim::start(
        "victim-drv",
        [
            "--threads",
            "4",
            "--bytes",
            "64K,1M,4M",
            "--idle-threads",
            "6",
            "--malloc-storm",
            "2",
        ],
    );
    // Once it reports progress, all its threads are there, and those of its streams.
    victim.next_line().expect("it copies");
    let code = victim.code("libcuda.so");
    let threads = victim.threads();
    for cycle in 0..100 {
        attach_and_expect_success(&victim);
        if cycle == 0 {
            assert!(victim.code("libcuda.so") != code, "nothing was patched");
            wait_until_staged(&victim);
        }
        detach(&victim);
        assert!(victim.is_alive(), "cycle {cycle}");
        let now = victim.code("libcuda.so");
        let differs = now
            .iter()
            .zip(&code)
            .position(|(now, before)| now != before);
        assert_eq!(
            differs, None,
            "cycle {cycle}: libcuda's code at this offset"
        );
    }
    wait_for_threads(&victim, &threads);
    assert_eq!(victim.stop()["mismatches"], 0);
}

/// A thread that has ended may still be listed for a moment.
#[track_caller]
fn wait_for_threads(victim: &Victim, wanted: &[String]) {
    for _ in 0..100 {
        if victim.threads() == wanted {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(victim.threads(), wanted, "threads are left over");
}

#[test]
fn every_way_to_libcuda_is_staged() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for (name, args) in [
        ("victim-drv", vec!["--async"]),
        ("victim-rt", vec![]),
        ("victim-rt", vec!["--async"]),
        ("victim-rt", vec!["--per-thread"]),
        ("victim-rt", vec!["--async", "--per-thread"]),
        ("victim-drv", vec!["--default-kind"]),
        ("victim-static-rt", vec!["--fresh"]),
    ] {
        let mut all = vec!["--bytes", "4M,16M", "--threads", "2"];
        all.extend(args);
        let victim = Victim::start(name, &all);
        attach_and_expect_success(&victim);
        let by_address = all.contains(&"--default-kind");
        if by_address {
            wait_until_any_staged(&victim);
        } else {
            wait_until_staged(&victim);
        }
        detach(&victim);
        assert_eq!(victim.stop()["mismatches"], 0, "{name} {all:?}");
    }
}

/// A copy by addresses counts as HtoD, whatever it is.
#[track_caller]
fn wait_until_any_staged(victim: &Victim) {
    for _ in 0..600 {
        if staged(&status(victim)).iter().any(|&calls| calls > 0) {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("nothing is staged: {:#}", status(victim));
}

#[test]
fn functions_that_start_with_endbr64_are_patched_too() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut command = Victim::command("victim-drv");
    command.env("LD_LIBRARY_PATH", built().folder.join("endbr"));
    command.args(["--bytes", "4M"]);
    let victim = Victim::spawn(command);
    let code = victim.code("libcuda.so");
    attach_and_expect_success(&victim);
    wait_until_staged(&victim);
    detach(&victim);
    assert!(victim.code("libcuda.so") == code, "libcuda's code differs");
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn pinned_copies_stay_with_the_driver() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-drv", ["--bytes", "4M", "--pinned"]);
    attach_and_expect_success(&victim);
    let passed = |status: &Value| passed(status, "host memory not pageable");
    let mut now = status(&victim);
    for _ in 0..600 {
        if passed(&now) > 4 {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
        now = status(&victim);
    }
    assert!(passed(&now) > 4, "{now:#}");
    assert_eq!(staged(&now), [0, 0]);
    detach(&victim);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn a_forked_child_runs_the_original_functions() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let args = ["--bytes", "4M", "--fork-at", "signal"];
    let victim = Victim::start("victim-drv", args);
    attach_and_expect_success(&victim);
    let disabled = passed(&wait_until_staged(&victim), "disabled or forked");
    victim.signal(libc::SIGUSR1);
    for _ in 0..600 {
        if passed(&status(&victim), "disabled or forked") > disabled {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // Not for want of a context: the child's copy is not even looked at.
    let now = passed(&status(&victim), "disabled or forked");
    assert_eq!(now, disabled + 1, "the child's only copy");
    let account = victim.stop();
    assert_eq!(account["mismatches"], 0);
    assert_eq!(account["child_signal"], 0, "{account}");
}

#[test]
fn a_cmt_that_is_killed_leaves_the_target_running() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-drv", ["--threads", "3", "--bytes", "256K,4M"]);
    let code = victim.code("lib");
    let pid = victim.pid.to_string();
    for round in 0..30 {
        // Reaches from the preflight over the injection to the commit and beyond.
        let attaching = spawn_cmt(["attach", &pid, "--before", "0s", "--after", "0s"]);
        std::thread::sleep(Duration::from_millis(round * 2));
        let killed = Command::new("kill")
            .args(["-KILL", &attaching.pid().to_string()])
            .status();
        assert!(killed.expect("run kill").success());
        attaching.finish();
        assert!(victim.is_alive(), "round {round}");
        assert_stopped_nowhere(&victim, round);
        // Whatever was left behind, the next cmt clears it up.
        let _ = cmt(["detach", &pid]);
    }
    // A thread that waits for the cmt that was killed gives up after 10 s; the next cmt then takes its code out.
    for _ in 0..20 {
        attach_and_expect_success(&victim);
        wait_until_staged(&victim);
        detach(&victim);
        if victim.code("lib") == code {
            break;
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    assert!(victim.code("lib") == code, "something is left in the code");
    assert_eq!(victim.stop()["mismatches"], 0);
}

/// No thread is left in a ptrace stop.
#[track_caller]
fn assert_stopped_nowhere(victim: &Victim, round: u64) {
    for task in std::fs::read_dir(format!("/proc/{}/task", victim.pid)).expect("threads") {
        let path = task.expect("a thread").path().join("status");
        let Ok(status) = std::fs::read_to_string(path) else {
            continue;
        };
        let state = status
            .lines()
            .find(|line| line.starts_with("State:"))
            .expect("a state");
        assert!(
            !state.contains("stopped") && !state.contains("tracing"),
            "round {round}: {state}"
        );
    }
}

/// Copies whose addresses decide are counted where they went, each attach counts from its own begin, and a process that
/// stands still is listed like any other.
#[test]
fn status_tells_directions_begins_anew_and_lists_what_stands_still() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let arguments = ["--threads", "1", "--bytes", "4M", "--default-kind"];
    let victim = Victim::start("victim-rt", arguments);
    attach_and_expect_success(&victim);
    let deadline = Instant::now() + Duration::from_secs(20);
    while staged(&status(&victim)).into_iter().any(|calls| calls < 20) {
        assert!(Instant::now() < deadline, "{}", status(&victim));
        std::thread::sleep(Duration::from_millis(50));
    }
    let [there, back] = staged(&status(&victim));
    assert!(there.abs_diff(back) <= 2, "{there} there, {back} back");
    victim.signal(libc::SIGSTOP);
    let listed = cmt(["status"]);
    victim.signal(libc::SIGCONT);
    assert_eq!(listed.code, Some(0), "{listed:#?}");
    let pid = victim.pid.to_string();
    assert!(listed.stdout.contains(&pid), "{listed:#?}");
    detach(&victim);
    attach_and_expect_success(&victim);
    let [anew, _] = staged(&status(&victim));
    assert!(anew < there, "{anew} after {there}");
    detach(&victim);
    assert_eq!(victim.stop()["mismatches"], 0);
}
