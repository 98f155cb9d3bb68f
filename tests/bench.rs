//! `cmt bench` measures stock, tuned and pinned copies in a process of its own, checks their bytes, and leaves nothing.
#![expect(unsafe_code, reason = "sends signals")]

use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cmt_tests::{Finished, Rung, built, cmt, cmt_command, require};
use serde_json::Value;

/// Nothing here takes so long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// `cmt bench` on the stand-in.
fn bench(args: &[&str]) -> Command {
    let mut command = cmt_command(["bench"]);
    command.args(args).env("LD_LIBRARY_PATH", &built().folder);
    command
}

fn spawn(mut command: Command) -> Child {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start cmt bench")
}

fn finish(child: Child) -> Finished {
    child.wait_with_output().expect("wait for cmt bench").into()
}

/// The process that a bench measures.
fn copier(bench: u32) -> Option<u32> {
    let wanted = format!("bench-copier\0{bench}\0");
    fs::read_dir("/proc")
        .expect("read /proc")
        .find_map(|entry| {
            let entry = entry.ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let tail = line.get(line.len().checked_sub(wanted.len())?..)?;
            (tail == wanted.as_bytes()).then_some(pid)
        })
}

/// Waits until a bench's copier is as far as `is_there` says.
#[track_caller]
fn wait_for(bench: &mut Child, is_there: impl Fn(u32) -> bool) -> u32 {
    let started = Instant::now();
    loop {
        let copier = copier(bench.id());
        if let Some(pid) = copier.filter(|&pid| is_there(pid)) {
            return pid;
        }
        let ended = bench.try_wait().expect("look at cmt bench");
        assert!(ended.is_none(), "cmt bench has ended: {ended:?}");
        assert!(started.elapsed() < PATIENCE, "cmt bench hangs");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Whether it has answered many requests.
fn has_measured(pid: u32) -> bool {
    let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    let written = io.lines().find_map(|line| line.strip_prefix("wchar: "));
    written.is_some_and(|bytes| bytes.parse::<u64>().expect("a number") > 16 << 10)
}

fn is_attached(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    tasks.into_iter().flatten().flatten().any(|task| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "cmt-control")
    })
}

fn kill(pid: u32, signal: i32) {
    // SAFETY: no memory is touched; the process is our child, or a child of one that has not ended.
    let result = unsafe { libc::kill(pid as i32, signal) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// A number that must be there.
#[track_caller]
fn number(value: &Value) -> f64 {
    value
        .as_f64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

#[track_caller]
fn assert_close(value: &Value, wanted: f64) {
    let value = number(value);
    assert!((value / wanted - 1.0).abs() < 1e-9, "{value}, not {wanted}");
}

#[test]
fn every_cell_is_measured_and_its_figures_agree() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let page = folder.path().join("bench.html");
    let mut command = bench(&["--quick", "--json", "--largest", "1MiB", "--html"]);
    command.arg(&page);
    let child = spawn(command);
    let pid = child.id();
    let report = finish(child).json();
    assert_eq!(
        copier(pid),
        None,
        "the process that was measured still runs"
    );

    assert_eq!(report["schema"], "cmt/bench/1");
    assert_eq!(report["stand_in"], true);
    assert_eq!(report["interrupted"], false);
    assert_eq!(report["largest_bytes"], 1 << 20);
    assert_eq!(report["attach"]["patched"], cmt_common::api::HOOKED);
    assert!(number(&report["idle_synchronize_ns"]) > 0.0);
    let cells = report["cells"].as_array().expect("cells");
    let mut wanted = Vec::new();
    for direction in ["HtoD", "DtoH"] {
        for memory in ["reused", "fresh"] {
            for bytes in [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
                wanted.push((direction, memory, bytes));
            }
        }
    }
    let found: Vec<(&str, &str, u64)> = cells
        .iter()
        .map(|cell| {
            (
                cell["direction"].as_str().expect("a direction"),
                cell["memory"].as_str().expect("a kind of memory"),
                cell["bytes"].as_u64().expect("a size"),
            )
        })
        .collect();
    assert_eq!(found, wanted);
    for cell in cells {
        check(cell);
    }
    check_turns(report["turns"].as_array().expect("turns"), cells);
    for rates in ["one_core", "scaling"] {
        let rates = report["cpu_copies"][rates].as_array().expect("rates");
        assert!(rates.iter().any(|rate| rate["method"] == "memcpy"));
        for rate in rates {
            assert!(number(&rate["samples"]) >= 3.0, "{rate}");
            assert!(number(&rate["gbps"]) > 0.0, "{rate}");
        }
    }

    // The same report again, from a file.
    let file = folder.path().join("bench.json");
    fs::write(&file, report.to_string()).expect("write the report");
    let mut again = bench(&["--json", "--from"]);
    again.arg(&file);
    let again = finish(spawn(again)).json();
    for (again, cell) in again["cells"].as_array().into_iter().flatten().zip(cells) {
        assert_eq!(again["tuned"]["idle_ns"], cell["tuned"]["idle_ns"]);
    }
    assert_eq!(again["cells"].as_array().map(Vec::len), Some(cells.len()));
    assert_eq!(again["machine"]["cpu"], report["machine"]["cpu"]);

    let page = fs::read_to_string(page).expect("the page");
    assert!(page.contains("On the stand-in"));
    assert!(page.contains("attached and detached in turns (4 rounds)"));
    // Four pairs of graphs, and two for the CPU.
    assert_eq!(page.matches("<svg").count(), 10);
    for loading in ["http", "src=", "href", "@import", "url("] {
        assert!(!page.contains(loading), "the page has {loading}");
    }
}

/// Whatever was left to stock was measured in turns, and shorter copies and pinned ones with it.
fn check_turns(turns: &[Value], cells: &[Value]) {
    let kind = |one: &Value| {
        let text = |field: &str| one[field].as_str().expect("a name").to_owned();
        (text("direction"), text("memory"), number(&one["bytes"]))
    };
    let found: Vec<_> = turns.iter().map(kind).collect();
    for cell in cells {
        let is_left = number(&cell["staged"]) == 0.0;
        assert_eq!(found.contains(&kind(cell)), is_left, "{cell}");
    }
    for direction in ["HtoD", "DtoH"] {
        for (memory, bytes) in [("reused", 1), ("reused", 1 << 10), ("pinned", 1 << 20)] {
            let kind = (direction.to_owned(), memory.to_owned(), f64::from(bytes));
            assert!(found.contains(&kind), "{kind:?}");
        }
    }
    for turn in turns {
        assert_eq!(turn["rounds"], 4);
        for part in ["call", "idle"] {
            assert!(number(&turn[part]["stock_ns"]) > 0.0, "{turn}");
            let added = &turn[part]["added_ns"];
            let [p10, p50, p90] = [0, 1, 2].map(|at| number(&added[at]));
            assert!(p10 <= p50 && p50 <= p90, "{turn}");
        }
    }
}

fn check(cell: &Value) {
    let bytes = number(&cell["bytes"]);
    let idle = |copier: &str| number(&cell[copier]["idle_ns"]["p50"]);
    for copier in ["stock", "tuned", "pinned", "pinned_attached"] {
        let stat = &cell[copier];
        assert!(number(&stat["samples"]) >= 3.0, "{cell}");
        assert!(number(&stat["cpu_s_per_gib"]) > 0.0, "{cell}");
        for times in ["call_ns", "idle_ns"] {
            let [p10, p50, p90] = ["p10", "p50", "p90"].map(|name| number(&stat[times][name]));
            assert!(0.0 < p10 && p10 <= p50 && p50 <= p90, "{cell}");
        }
        assert!(number(&stat["call_ns"]["p50"]) <= idle(copier), "{cell}");
        assert_close(&stat["gbps"], bytes / idle(copier));
    }
    assert_close(&cell["share_of_pinned"], idle("pinned") / idle("tuned"));
    assert_close(&cell["speedup"], idle("stock") / idle("tuned"));
    assert!(number(&cell["drift"]) > 0.0);
    // The estimated plan stages from 1 MiB at most up, and nothing so small as a page. To the device the pace decides, too.
    let staged = number(&cell["staged"]);
    if bytes >= f64::from(1 << 20) && cell["direction"] == "DtoH" {
        assert!(staged > 0.9, "{cell}");
    } else if bytes <= 4096.0 {
        assert_eq!(staged, 0.0, "{cell}");
    }
}

#[test]
fn the_table_fits_a_terminal_and_says_what_was_left_out() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut command = bench(&["--quick", "--largest", "64MiB"]);
    command.env("STANDIN_MEMORY_MIB", "1");
    let finished = finish(spawn(command));
    assert_eq!(finished.code, Some(0), "{finished:#?}");
    let text = finished.stdout;
    assert!(text.starts_with("On the stand-in"), "{text}");
    assert!(
        text.contains("Copies above 512 KiB were left out: not enough device memory."),
        "{text}"
    );
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn ctrl_c_reports_what_there_is_and_leaves_nothing() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for (when, is_there) in [
        ("stock", has_measured as fn(u32) -> bool),
        ("attached", is_attached),
    ] {
        let mut child = spawn(bench(&["--quick", "--json", "--largest", "1MiB"]));
        let pid = child.id();
        let copier_pid = wait_for(&mut child, is_there);
        kill(pid, libc::SIGINT);
        let report = finish(child).json();
        assert_eq!(report["interrupted"], true, "{when}");
        let cells = report["cells"].as_array().expect("cells");
        assert!(!cells.is_empty(), "{when}");
        for cell in cells {
            assert!(number(&cell["stock"]["samples"]) >= 3.0, "{when} {cell}");
        }
        assert!(cells.iter().any(|cell| cell["tuned"].is_null()), "{when}");
        assert_eq!(copier(pid), None, "{when}");
        let remains = fs::read_link(format!("/proc/{copier_pid}/exe"));
        assert!(remains.is_err(), "{when}: {remains:?}");
    }
}

#[test]
fn a_bench_that_is_killed_takes_its_process_along() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut child = spawn(bench(&["--quick", "--largest", "1MiB"]));
    let pid = child.id();
    wait_for(&mut child, has_measured);
    kill(pid, libc::SIGKILL);
    assert_eq!(finish(child).code, None);
    let started = Instant::now();
    while copier(pid).is_some() {
        assert!(started.elapsed() < PATIENCE, "its process runs on");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_process_that_dies_is_no_result() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // While attached its counters are read as well, and may be gone first.
    for is_there in [has_measured as fn(u32) -> bool, is_attached] {
        let mut child = spawn(bench(&["--quick", "--json", "--largest", "1MiB"]));
        let copier = wait_for(&mut child, is_there);
        kill(copier, libc::SIGKILL);
        let finished = finish(child);
        let sentence = finished.refusal();
        assert!(sentence.contains("SIGKILL"), "{sentence}");
    }
}

#[test]
fn a_wrong_byte_is_said_loudly() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // The shortest that are staged, in a row only.
    let mut command = bench(&["--quick", "--json", "--largest", "64KiB"]);
    command.env("STANDIN_CORRUPT_EVERY", "1");
    let finished = finish(spawn(command));
    let sentence = finished.refusal();
    assert!(sentence.starts_with("WRONG DATA: byte "), "{sentence}");
}

#[test]
fn what_cannot_work_is_refused_before_anything_is_measured() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for args in [
        &["--largest", "3MiB"] as &[&str],
        &["--largest", "1KiB"],
        &["--largest", "many"],
        &["--quick", "7"],
        &["--quick", "--from", "bench.json"],
    ] {
        let finished = finish(spawn(bench(args)));
        assert_eq!(finished.code, Some(2), "{args:?} {finished:#?}");
        assert_eq!(finished.stdout, "");
    }
    let finished = finish(spawn(bench(&["--from", "/proc/self/status"])));
    let sentence = finished.refusal();
    assert!(sentence.contains("is no cmt/bench/1 object"), "{sentence}");
    let finished = finish(spawn(bench(&["--html", "/nonexistent/page.html"])));
    let sentence = finished.refusal();
    assert!(sentence.contains("cannot be written"), "{sentence}");

    let bench = bench(&["--quick"]);
    let mut command = Command::new("setpriv");
    let lacking = "-sys_admin,-checkpoint_restore";
    command
        .args(["--bounding-set", lacking, "--inh-caps", lacking])
        .arg(bench.get_program())
        .args(bench.get_args())
        .env("LD_LIBRARY_PATH", &built().folder);
    let finished: Finished = command.output().expect("run setpriv").into();
    let sentence = finished.refusal();
    assert!(sentence.contains("run it as root"), "{sentence}");
}

#[test]
fn without_libcuda_it_says_so() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let listed = Command::new("ldconfig").arg("-p").output();
    if listed.is_ok_and(|list| list.stdout.windows(10).any(|part| part == b"libcuda.so")) {
        return; // This machine has one.
    }
    let finished = cmt(["bench"]);
    let sentence = finished.refusal();
    assert!(sentence.contains("no libcuda was found"), "{sentence}");
}
