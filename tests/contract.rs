//! What a program may rely on when it copies is the same before and after its copier is swapped.
//!
//! `contract` prints one line a fact; docs/contract.md says which line stands for which promise. What was broken once, and
//! a line that differed then:
//!
//! - pinned memory without the relaxed capture mode: `capture_other_thread/global` and, run alone,
//!   `capture_first_copy/global beside global` end with 901;
//! - no look at whether the stream captures: `capture_async_copy/1MiB` waits for ever;
//! - host memory that the driver knows counts as pageable: `straddling/out of` and `straddling_async/out of` succeed;
//! - no look at the end of the device range: `out_of_range/…` returns the error and has moved bytes;
//! - slots go out before they are full: `source_after_htod/…` has wrong bytes, and unmapping the source kills;
//! - a DtoH returns when its last slot is asked for: `destination_after_dtoh_busy/…` has wrong bytes;
//! - a synchronous HtoD does not wait for its last slots: `synchronous_waits/HtoD blocking`, `last_error/good`;
//! - an asynchronous HtoD waits for room in the ring: `does_not_wait/… 16 times 1MiB`, in all nine flavours;
//! - another context is made current and left so: `context_many`;
//! - every DMA goes into the legacy stream: `one_stream_order/non-blocking …`;
//! - an error midway is dropped: `end_broken_context/behind it`.
//!
//! A forked child that enters the engine shows in no line: the driver has nothing for it there, so the engine passes.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use cmt_tests::{Rung, Victim, built, cmt, require};
use serde_json::Value;

/// What a run of `contract` left.
struct Account {
    /// Its lines but the first, `ready PID`.
    facts: Vec<String>,
    stderr: String,
    status: ExitStatus,
    /// Copies that the swapped copier staged, the lesser of both directions, as far as anybody saw it.
    staged: u64,
}

/// How the copier is swapped: with the guard, as users have it, and so that short copies that come one at a time are staged, too.
const SWAPS: [&[&str]; 2] = [&[], &["--unguarded"]];

/// Runs `contract` on the stand-in with so many devices; `swap` says whether its copier is swapped before, and how.
fn run(swap: Option<&[&str]>, devices: u32, arguments: &[&str]) -> Account {
    let folder = tempfile::tempdir().expect("a folder");
    let (go, errors) = (folder.path().join("go"), folder.path().join("stderr"));
    let mut command = Victim::command("contract");
    command.args(arguments).arg("--wait-file").arg(&go);
    command.env("STANDIN_DEVICES", devices.to_string());
    command.env("STANDIN_PAGEABLE_GBPS", "3");
    command.stderr(File::create(&errors).expect("a file"));
    let victim = Victim::spawn(command);
    let pid = victim.pid.to_string();
    if let Some(swap) = swap {
        let whole = ["attach", &pid, "--before", "0s", "--after", "0s"];
        let done = cmt(whole.iter().chain(swap));
        assert_eq!(done.code, Some(0), "{done:#?}");
    }
    fs::write(&go, "").expect("let it go");
    let mut staged = 0;
    let (facts, status) = victim.transcript(|_| {
        let report = cmt(["status", &pid, "--json"]);
        if swap.is_some() && report.code == Some(0) {
            let calls =
                |index: usize| report.json()["processes"][0]["staged"][index]["calls"].as_u64();
            staged = calls(0).unwrap_or(0).min(calls(1).unwrap_or(0)).max(staged);
        }
    });
    Account {
        facts,
        stderr: fs::read_to_string(errors).expect("read it"),
        status,
        staged,
    }
}

/// Lines in which stock may wait for a busy stream where a swapped copier need not: asynchronous HtoD copies only.
const MAY_WAIT_LESS: [&str; 4] = [
    "source_after_htod_busy/",
    "does_not_wait/",
    "waits_for_word/HtoD",
    "two_d_busy/HtoD:",
];

/// The same fact, or one that a swapped copier may change.
fn keeps(stock: &str, swapped: &str) -> bool {
    let may_wait_less = MAY_WAIT_LESS.iter().any(|lines| stock.starts_with(lines));
    stock == swapped || may_wait_less && stock.replace("waited=1", "waited=0") == swapped
}

/// Runs it all three ways and compares everything. The account of the last one.
fn compare(devices: u32, arguments: &[&str]) -> Account {
    let stock = run(None, devices, arguments);
    let [_, last] = SWAPS.map(|swap| {
        let swapped = run(Some(swap), devices, arguments);
        let both = stock.facts.iter().zip(&swapped.facts);
        let differences: Vec<_> = both
            .filter(|(stock, swapped)| !keeps(stock, swapped))
            .collect();
        assert!(
            differences.is_empty(),
            "stock, swapped {swap:?}: {differences:#?}"
        );
        assert_eq!(
            stock.facts.len(),
            swapped.facts.len(),
            "{:#?}",
            swapped.facts
        );
        let end = |account: &Account| (account.status.code(), account.status.signal());
        assert_eq!(end(&stock), end(&swapped), "{arguments:?}: exit, signal");
        assert_eq!(stock.stderr, swapped.stderr, "{arguments:?}: stderr");
        swapped
    });
    last
}

#[test]
fn a_swapped_copier_keeps_every_promise_of_the_stock_one() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let swapped = compare(1, &[]);
    assert!(swapped.facts.len() > 400, "{:#?}", swapped.facts);
    assert!(swapped.status.success(), "{}", swapped.status);
    assert!(swapped.staged > 0, "nothing was staged");
}

/// On the second of two devices: nothing appears on the first one, and copies between both stay with the driver.
#[test]
fn a_program_on_the_second_device_leaves_no_trace_on_the_first() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for cases in ["context_", "memory_peer"] {
        let swapped = compare(2, &["--device", "1", "--only", cases]);
        assert!(swapped.status.success(), "{}", swapped.status);
        assert!(swapped.staged > 0, "nothing was staged");
        let says = |fact: &str| swapped.facts.iter().any(|line| line.starts_with(fact));
        assert!(
            says("context_other_device: active=0")
                || says("memory_peer/other device cuMemcpyPeer: ret=0,0 bytes_ok=1"),
            "{:#?}",
            swapped.facts
        );
    }
}

/// A trace names what the host side of a copy is. (That managed memory is passed through, the engine's own tests hold.)
#[test]
fn managed_memory_is_counted_as_managed() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("contract", ["--only", "driver_memory", "--loop"]);
    let pid = victim.pid.to_string();
    let done = cmt(["trace", &pid, "--for", "4s", "--json"]);
    assert_eq!(done.code, Some(0), "{done:#?}");
    let trace = done.json();
    let copies = trace["processes"][0]["copies"].as_array().expect("copies");
    for memory in ["pinned", "managed", "pageable"] {
        for direction in ["HtoD", "DtoH"] {
            let seen = |copy: &&Value| copy["memory"] == memory && copy["direction"] == direction;
            assert!(
                copies.iter().any(|copy| seen(&copy)),
                "{memory}, {direction}: {trace}"
            );
        }
    }
}

/// Processes that end amid their copies, in every way, and copies after which their context is broken.
#[test]
fn a_process_ends_as_it_would_have() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut list = Command::new(built().victim("contract"));
    list.arg("--ends").env("LD_LIBRARY_PATH", &built().folder);
    let list = list.output().expect("list them").stdout;
    let list = String::from_utf8(list).expect("text");
    assert!(list.lines().count() > 10, "{list}");
    for end in list.lines() {
        let swapped = compare(1, &["--end", end]);
        assert!(!swapped.facts.is_empty(), "{end} said nothing");
        assert_eq!(swapped.stderr, "", "{end}");
    }
}

#[test]
fn the_stand_in_and_the_victims_agree_without_cmt() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let script = cmt_tests::workspace().join("tests/stand-in/selftest.sh");
    let checked = Command::new("bash")
        .arg(script)
        .arg(folder.path())
        .output()
        .expect("bash");
    assert!(checked.status.success(), "{checked:#?}");
}
