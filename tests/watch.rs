//! `cmt attach` watches what it did: what got slower goes back to stock, what began to fail is taken out.

use cmt_tests::{Rung, Victim, cmt, require};
use serde_json::{Value, json};

/// A profile whose only row stages every copy of these directions by itself in DMAs of `slot_bytes`.
fn profile(slot_bytes: u64, directions: &[&str]) -> tempfile::NamedTempFile {
    let row = json!({
        "up_to_bytes": 1u64 << 40, "threads": 2, "slot_bytes": slot_bytes, "slice_bytes": slot_bytes.min(65536),
        "ring_bytes": slot_bytes * 4, "store": "ordinary",
    });
    let mut profile = json!({"schema": "cmt/profile/1", "htod": [], "dtoh": []});
    for direction in directions {
        profile[direction] = json!([row]);
    }
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), profile.to_string()).expect("written");
    file
}

fn passed(victim: &Victim, reason: &str) -> u64 {
    let status = cmt(["status", &victim.pid.to_string(), "--json"]).json();
    let passed = status["processes"][0]["passed"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    passed
        .iter()
        .find(|entry| entry["reason"] == reason)
        .and_then(|entry| entry["calls"].as_u64())
        .unwrap_or(0)
}

#[test]
fn a_class_that_got_slower_is_handed_back() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // Units of 4 KiB cost more in calls, which are dear here, than the driver's own slow path. Uploads of 1 MiB would not show
    // it: they return with that much on its way.
    let profile = profile(4096, &["htod", "dtoh"]);
    let mut command = Victim::command("victim-drv");
    command
        .args(["--bytes", "4M", "--exact"])
        .env("STANDIN_CALL_NS", "80000");
    let victim = Victim::spawn(command);
    let pid = victim.pid.to_string();
    let path = profile.path().to_str().expect("a path");
    let report = cmt([
        "attach",
        &pid,
        "--before",
        "2s",
        "--after",
        "3s",
        "--profile",
        path,
        "--json",
    ])
    .json();
    let handed_back = report["handed_back"].as_array().expect("handed_back");
    for direction in ["HtoD", "DtoH"] {
        assert!(
            handed_back
                .iter()
                .any(|class| class["direction"] == direction
                    && class["size_class_bytes"] == 1 << 22
                    && class["ratio"].as_f64().is_some_and(|ratio| ratio < 0.95)),
            "{direction}: {report:#}"
        );
    }
    assert_eq!(report["kept"], true);
    let before = passed(&victim, "below the cut-over");
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(
        passed(&victim, "below the cut-over") > before,
        "copies go to stock"
    );
    assert_eq!(victim.stop()["mismatches"], 0);
}

/// Long after the attach, the payload by itself compares some of its copies with some of stock's.
#[test]
fn a_class_that_loses_later_goes_back_by_itself() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // Downloads alone: behind a staged upload the stream is seldom idle.
    let profile = profile(4096, &["dtoh"]);
    let mut command = Victim::command("victim-drv");
    command
        .args(["--bytes", "1M", "--exact"])
        .env("STANDIN_CALL_NS", "80000");
    let victim = Victim::spawn(command);
    let pid = victim.pid.to_string();
    let path = profile.path().to_str().expect("a path");
    let attach = [
        "attach",
        &pid,
        "--before",
        "0s",
        "--after",
        "0s",
        "--profile",
    ];
    let done = cmt(attach.into_iter().chain([path]));
    assert_eq!(done.code, Some(0), "{done:#?}");
    let started = std::time::Instant::now();
    while passed(&victim, "faster, by comparison") < 100 {
        let waited = started.elapsed();
        assert!(waited.as_secs() < 120, "{:#?}", cmt(["status", &pid]));
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    assert!(passed(&victim, "timed for comparison") >= 4);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn copies_that_begin_to_fail_are_taken_out() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // Stock makes one call of the driver for a copy, this plan 64: only then is the 3000th reached.
    let profile = profile(65536, &["htod", "dtoh"]);
    let mut command = Victim::command("victim-drv");
    command
        .args([
            "--bytes",
            "4M",
            "--exact",
            "--pause-ms",
            "20",
            "--allow-errors",
        ])
        .env("STANDIN_FAIL_COPY_EVERY", "3000");
    let victim = Victim::spawn(command);
    let pid = victim.pid.to_string();
    let path = profile.path().to_str().expect("a path");
    let done = cmt([
        "attach",
        &pid,
        "--before",
        "1s",
        "--after",
        "10s",
        "--profile",
        path,
    ]);
    assert_eq!(done.code, Some(1), "{done:#?}");
    assert!(done.stderr.contains("was detached again"), "{done:#?}");
    let status: Value = cmt(["status", &pid, "--json"]).json();
    assert_eq!(status["processes"][0]["state"], "detached");
    victim.stop();
}
