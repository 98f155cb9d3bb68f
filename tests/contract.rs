//! What a program may rely on when it copies is the same before and after its copier is swapped.

use std::fs;
use std::process::ExitStatus;

use cmt_tests::{Rung, Victim, cmt, require};

/// What `contract` prints on the stand-in, one line a fact; `attached` says whether its copier is swapped before.
fn facts(attached: bool) -> (Vec<String>, ExitStatus) {
    let folder = tempfile::tempdir().expect("a folder");
    let go = folder.path().join("go");
    let victim = Victim::start("contract", ["--wait-file".as_ref(), go.as_os_str()]);
    let pid = victim.pid.to_string();
    if attached {
        let done = cmt(["attach", &pid, "--before", "0s", "--after", "0s"]);
        assert_eq!(done.code, Some(0), "{done:#?}");
    }
    fs::write(&go, "").expect("let it go");
    let mut staged = 0;
    let (facts, status) = victim.transcript(|_| {
        let report = cmt(["status", &pid, "--json"]);
        if attached && report.code == Some(0) {
            let calls =
                |index: usize| report.json()["processes"][0]["staged"][index]["calls"].as_u64();
            staged = calls(0).unwrap_or(0).min(calls(1).unwrap_or(0)).max(staged);
        }
    });
    assert!(!attached || staged > 0, "nothing was staged");
    (facts, status)
}

/// The same fact; only where stock waits for a busy stream a swapped copier need not.
fn keeps(stock: &str, swapped: &str) -> bool {
    stock == swapped || stock.replace("waited=1", "waited=0") == swapped
}

#[test]
fn a_swapped_copier_keeps_every_promise_of_the_stock_one() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let (stock, stock_status) = facts(false);
    assert!(stock_status.success(), "{stock_status}: {stock:#?}");
    let (swapped, swapped_status) = facts(true);
    assert!(stock.len() > 20, "{stock:#?}");
    let differences: Vec<_> = stock
        .iter()
        .zip(&swapped)
        .filter(|(stock, swapped)| !keeps(stock, swapped))
        .collect();
    assert!(differences.is_empty(), "stock, swapped: {differences:#?}");
    assert_eq!(stock.len(), swapped.len());
    assert!(swapped_status.success(), "{swapped_status}");
}
