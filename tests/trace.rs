//! `cmt trace` counts what a program counts itself: every call once, under the function that the program called.

use std::fs;
use std::process::Command;

use cmt_tests::{Rung, Trace, Victim, built, cmt, cmt_command, require};
use serde_json::Value;

/// Starts a victim that waits for [`Victim::signal`] with SIGUSR1 before it allocates and copies.
#[track_caller]
fn held(name: &str, args: &[&str]) -> Victim {
    Victim::start(name, args.iter().chain(&["--hold"]))
}

/// Traces a victim from its first to its last call; returns the report and the victim's own account.
#[track_caller]
fn traced(name: &str, args: &[&str]) -> (Value, Value, u32) {
    traced_as(&[], held(name, args))
}

#[track_caller]
fn traced_as(env: &[(&str, &str)], victim: Victim) -> (Value, Value, u32) {
    let pid = victim.pid;
    let trace = Trace::start_as(env, [pid.to_string()]);
    victim.signal(libc::SIGUSR1);
    let account = victim.finish();
    (trace.finish().0, account, pid)
}

/// The copies of a process in a report.
#[track_caller]
fn copies(report: &Value, pid: u32) -> &Vec<Value> {
    let processes = report["processes"].as_array().expect("processes");
    let process = processes
        .iter()
        .find(|process| process["pid"] == pid)
        .unwrap_or_else(|| panic!("process {pid} is missing: {report}"));
    process["copies"].as_array().expect("copies")
}

fn sum(copies: &[&Value], field: &str) -> u64 {
    copies
        .iter()
        .map(|copy| copy[field].as_u64().expect("a number"))
        .sum()
}

/// Checks that a report holds exactly what the victim counted, by function, and nothing was lost.
#[track_caller]
fn assert_counts(report: &Value, account: &Value, pid: u32) {
    assert_eq!(report["schema"], "cmt/trace/1");
    assert_eq!(report["lost"], 0, "{report}");
    let all = copies(report, pid);
    let own = account["functions"].as_object().expect("functions");
    assert!(!own.is_empty(), "the victim copied nothing");
    for copy in all {
        let function = copy["function"].as_str().expect("a name");
        assert!(
            own.contains_key(function),
            "{function} was not called by the program itself"
        );
        assert_histogram(copy);
    }
    for (function, counts) in own {
        let rows: Vec<&Value> = all
            .iter()
            .filter(|copy| copy["function"] == **function)
            .collect();
        for field in ["calls", "errors", "bytes"] {
            assert_eq!(sum(&rows, field), counts[field], "{field} of {function}");
        }
    }
}

/// A histogram holds the successful calls, and its quantiles are in order.
#[track_caller]
fn assert_histogram(copy: &Value) {
    let buckets = copy["histogram"].as_array().expect("a histogram");
    let counted: u64 = buckets
        .iter()
        .map(|bucket| bucket[2].as_u64().expect("a count"))
        .sum();
    let succeeded =
        copy["calls"].as_u64().expect("calls") - copy["errors"].as_u64().expect("errors");
    assert_eq!(counted, succeeded, "{copy}");
    let latency = &copy["latency_ns"];
    if succeeded == 0 {
        assert!(
            latency.is_null() && copy["bytes"] == 0 && copy["total_ns"] == 0,
            "{copy}"
        );
        return;
    }
    let quantiles: Vec<u64> = ["p50", "p90", "p99", "max"]
        .iter()
        .map(|name| latency[name].as_u64().expect("a latency"))
        .collect();
    assert!(quantiles.is_sorted() && quantiles[0] > 0, "{copy}");
    let last = buckets.last().expect("a bucket");
    let (lo, hi) = (last[0].as_u64(), last[1].as_u64());
    assert!(
        lo <= Some(quantiles[3]) && Some(quantiles[3]) < hi,
        "the maximum is in the last bucket: {copy}"
    );
}

/// Checks that all copies of a process show this direction's and memory's names, each direction seen.
#[track_caller]
fn assert_classes(report: &Value, pid: u32, memory: &str) {
    let all = copies(report, pid);
    for direction in ["HtoD", "DtoH"] {
        assert!(
            all.iter().any(|copy| copy["direction"] == direction),
            "no {direction}: {report}"
        );
    }
    for copy in all {
        assert!(
            copy["direction"] == "HtoD" || copy["direction"] == "DtoH",
            "{copy}"
        );
        assert_eq!(copy["memory"], memory, "{copy}");
    }
}

#[test]
fn counts_of_a_named_process_are_its_own() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for (name, args) in [
        (
            "victim-rt",
            &["--threads", "4", "--bytes", "4K,64", "--calls", "5000"][..],
        ),
        (
            "victim-rt",
            &[
                "--threads",
                "3",
                "--bytes",
                "4K,1M",
                "--calls",
                "200",
                "--async",
            ],
        ),
        (
            "victim-rt",
            &[
                "--bytes",
                "16K",
                "--calls",
                "200",
                "--async",
                "--per-thread",
            ],
        ),
        (
            "victim-drv",
            &["--threads", "4", "--bytes", "4K", "--calls", "5000"],
        ),
        (
            "victim-drv",
            &["--bytes", "16K", "--calls", "200", "--per-thread"],
        ),
        (
            "victim-static-rt",
            &["--bytes", "16K", "--calls", "200", "--async"],
        ),
    ] {
        let (report, account, pid) = traced(name, args);
        assert_counts(&report, &account, pid);
        assert_classes(&report, pid, "pageable");
        assert!(report["overhead"]["calls"].as_u64() > Some(0));
        assert!(report["overhead"]["pair_ns"].as_u64() > Some(0), "{report}");
    }
}

#[test]
fn counts_of_all_processes_are_their_own() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // It makes both libraries known before the others start: those then are traced from their first call on.
    let idle = held("victim-rt", &[]);
    let trace = Trace::start(["--all"]);
    let mut ended = Vec::new();
    for (name, args) in [
        (
            "victim-rt",
            &["--threads", "2", "--bytes", "4K", "--calls", "2000"][..],
        ),
        (
            "victim-drv",
            &[
                "--threads",
                "2",
                "--bytes",
                "4K",
                "--calls",
                "2000",
                "--async",
            ],
        ),
        ("victim-rt", &["--bytes", "4K", "--calls", "20"]),
    ] {
        let victim = Victim::start(name, args);
        let pid = victim.pid;
        ended.push((pid, victim.finish()));
    }
    let report = trace.interrupt();
    for (pid, account) in &ended {
        assert_counts(&report, account, *pid);
    }
    let processes = report["processes"].as_array().expect("processes");
    assert!(
        processes.iter().all(|process| process["pid"] != idle.pid),
        "it copied nothing"
    );
    let names: Vec<&str> = processes
        .iter()
        .filter_map(|process| process["comm"].as_str())
        .collect();
    assert!(names.contains(&"victim-drv"), "{names:?}");
}

#[test]
fn failed_calls_are_errors_and_no_latencies() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for name in ["victim-rt", "victim-drv"] {
        let args = [
            "--bytes",
            "16K",
            "--calls",
            "100",
            "--fail-every",
            "5",
            "--exact",
        ];
        let (report, account, pid) = traced(name, &args);
        assert_counts(&report, &account, pid);
        let errors: Vec<&Value> = copies(&report, pid)
            .iter()
            .filter(|copy| copy["errors"] != 0)
            .collect();
        assert_eq!(sum(&errors, "errors"), 10);
    }
}

#[test]
fn two_dimensional_copies_count_width_times_height() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // With libcudart, the kind is an argument on the stack.
    for (name, args) in [
        ("victim-rt", &["--two-d"][..]),
        ("victim-rt", &["--two-d", "--async"]),
        ("victim-drv", &["--two-d"]),
        ("victim-drv", &["--two-d", "--async"]),
    ] {
        let args: Vec<&str> = args
            .iter()
            .chain(&["--bytes", "64K", "--calls", "40"])
            .copied()
            .collect();
        let (report, account, pid) = traced(name, &args);
        assert_counts(&report, &account, pid);
        assert_classes(&report, pid, "pageable");
    }
}

#[test]
fn addresses_decide_where_the_call_does_not() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for name in ["victim-rt", "victim-drv"] {
        let args = ["--default-kind", "--bytes", "64K", "--calls", "40"];
        let (report, account, pid) = traced(name, &args);
        assert_counts(&report, &account, pid);
        assert_classes(&report, pid, "pageable");
    }
}

#[test]
fn memory_pinned_during_the_trace_shows_as_pinned() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for kind in [&["--default-kind"][..], &[]] {
        let args: Vec<&str> = kind
            .iter()
            .chain(&["--pinned", "--bytes", "64K", "--calls", "40"])
            .copied()
            .collect();
        let (report, account, pid) = traced("victim-rt", &args);
        assert_counts(&report, &account, pid);
        assert_classes(&report, pid, "pinned");
    }
}

#[test]
fn functions_that_start_with_endbr64_count_like_the_rest() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut command = Victim::command("victim-drv");
    let folder = &built().folder;
    command.env(
        "LD_LIBRARY_PATH",
        format!("{}:{}", folder.join("endbr").display(), folder.display()),
    );
    command.args([
        "--threads",
        "2",
        "--bytes",
        "4K",
        "--calls",
        "2000",
        "--hold",
    ]);
    let (report, account, pid) = traced_as(&[], Victim::spawn(command));
    assert_counts(&report, &account, pid);
}

#[test]
fn older_kernels_links_count_the_same() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    // A second process on the same library must not be counted with the first.
    let other = Victim::start("victim-drv", ["--bytes", "4K", "--pause-ms", "1"]);
    for kernel in ["filter", "single"] {
        let victim = held(
            "victim-drv",
            &["--threads", "2", "--bytes", "4K", "--calls", "500"],
        );
        let (report, account, pid) = traced_as(&[("CMT_PRETEND_KERNEL", kernel)], victim);
        assert_counts(&report, &account, pid);
        assert_eq!(
            report["processes"].as_array().map(Vec::len),
            Some(1),
            "{kernel}"
        );
    }
    other.stop();
}

#[test]
fn a_library_that_is_loaded_later_is_found() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let args = [
        "--load-after",
        "1",
        "--bytes",
        "4K",
        "--pause-ms",
        "2",
        "--calls",
        "1000",
    ];
    let victim = Victim::start("victim-static-rt", args);
    let pid = victim.pid;
    let trace = Trace::start([pid.to_string()]);
    let account = victim.finish();
    let report = trace.finish().0;
    let seen: Vec<&Value> = copies(&report, pid).iter().collect();
    let calls = sum(&seen, "calls");
    assert!(calls > 0, "{report}");
    // What came before the next look at its maps is missing.
    let own: u64 = account["functions"]
        .as_object()
        .expect("functions")
        .values()
        .filter_map(|counts| counts["calls"].as_u64())
        .sum();
    assert!(calls <= own, "{calls} of {own}");
}

#[test]
fn a_library_deleted_after_its_start_is_probed_and_not_the_one_in_its_place() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let library = folder.path().join("libcuda.so.1");
    fs::copy(built().folder.join("libcuda.so.1"), &library).expect("copy the library");
    let mut command = Victim::command("victim-drv");
    command.env("LD_LIBRARY_PATH", folder.path());
    command.args(["--bytes", "4K", "--calls", "200", "--hold"]);
    let victim = Victim::spawn(command);
    fs::remove_file(&library).expect("delete it");
    fs::write(&library, "another file").expect("replace it");
    let (report, account, pid) = traced_as(&[], victim);
    assert_counts(&report, &account, pid);
}

#[test]
fn a_library_of_another_mount_namespace_is_probed() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let hidden = folder.path().join("hidden");
    fs::create_dir(&hidden).expect("a folder");
    // Outside, the path is there too and names another library.
    fs::copy(
        built().folder.join("endbr/libcuda.so.1"),
        hidden.join("libcuda.so.1"),
    )
    .expect("copy it");
    let script = format!(
        "mount -t tmpfs none {hidden} && cp {library} {hidden}/ && LD_LIBRARY_PATH={hidden} exec {victim} \
         --bytes 4K --calls 200 --hold",
        hidden = hidden.display(),
        library = built().folder.join("libcuda.so.1").display(),
        victim = built().victim("victim-drv").display(),
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
    let (report, account, pid) = traced_as(&[], Victim::spawn(command));
    assert_counts(&report, &account, pid);
}

#[test]
fn a_forked_childs_copies_are_not_its_parents() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let args = [
        "--bytes",
        "4K",
        "--seconds",
        "1",
        "--fork-at",
        "0.3",
        "--pause-ms",
        "1",
    ];
    let (report, account, pid) = traced("victim-rt", &args);
    assert_eq!(account["child_signal"], 0);
    assert_counts(&report, &account, pid);
    assert_eq!(report["processes"].as_array().map(Vec::len), Some(1));
}

#[test]
fn a_trace_that_saw_nothing_says_why() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut sleeper = Command::new("sleep")
        .arg("60")
        .spawn()
        .expect("start sleep");
    let pid = sleeper.id().to_string();
    let none = cmt(["trace", &pid, "--for", "100ms"]);
    let said = format!("pid {pid} (sleep) maps no CUDA library: nothing could be probed; ");
    assert!(none.refusal().starts_with(&said), "{none:?}");
    let none = cmt(["trace", &pid, "--for", "100ms", "--json"]);
    assert_eq!(none.code, Some(1));
    assert_eq!(none.parse()["processes"][0]["pid"], sleeper.id());

    let victim = held("victim-rt", &[]);
    let idle = cmt(["trace", &victim.pid.to_string(), "--for", "100ms"]);
    assert_eq!(idle.code, Some(0));
    let said = "no copy function was called; probes were on libcuda.so.1,\n  libcudart.so.13\n";
    assert!(idle.stdout.contains(said), "{idle:?}");
    // One that has probes is enough.
    let both = cmt(["trace", &pid, &victim.pid.to_string(), "--for", "100ms"]);
    assert_eq!(both.code, Some(0));
    let said = format!("sleep (pid {pid}): maps no CUDA library, so there was nothing to probe.");
    assert!(both.stdout.contains(&said), "{both:?}");
    sleeper.kill().expect("end it");
    sleeper.wait().expect("wait for it");
}

#[test]
fn the_table_fits_80_columns() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start(
        "victim-rt",
        [
            "--threads",
            "4",
            "--bytes",
            "64,1M",
            "--fail-every",
            "7",
            "--allow-errors",
        ],
    );
    let text = cmt(["trace", &victim.pid.to_string(), "--for", "1s"]);
    assert_eq!(text.code, Some(0));
    for word in [
        "cudaMemcpy",
        "HtoD",
        "pageable",
        "1MiB",
        "p99",
        "tracing itself",
    ] {
        assert!(text.stdout.contains(word), "no {word}: {}", text.stdout);
    }
    for line in text.stdout.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    victim.stop();
}

#[test]
fn what_cannot_be_traced_is_refused() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let mut ended = Command::new("true").spawn().expect("start true");
    let pid = ended.id().to_string();
    ended.wait().expect("wait for it");
    assert_eq!(
        cmt(["trace", &pid, "--for", "1s"]).refusal(),
        format!("no process has the id {pid}; nothing was traced")
    );
    // kthreadd.
    if fs::read_to_string("/proc/2/comm").is_ok_and(|comm| comm.trim() == "kthreadd") {
        let refused = cmt(["trace", "2", "--for", "1s"]);
        assert!(refused.refusal().contains("kernel thread"), "{refused:?}");
    }
    let victim = held("victim-rt", &[]);
    for (dropped, named) in [
        ("-bpf,-sys_admin", "CAP_BPF"),
        ("-perfmon,-sys_admin", "CAP_PERFMON"),
    ] {
        let trace = cmt_command(["trace", &victim.pid.to_string(), "--for", "1s"]);
        let output = Command::new("setpriv")
            .args(["--bounding-set", dropped, "--inh-caps", dropped])
            .arg(trace.get_program())
            .args(trace.get_args())
            .output()
            .expect("run setpriv");
        let finished = cmt_tests::Finished::from(output);
        let refusal = finished.refusal();
        assert!(
            refusal.contains(named) && refusal.contains("run it as root"),
            "{refusal}"
        );
    }
}

#[test]
fn every_copy_is_counted_or_lost_where_some_are_left_by_a_jump() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let (report, account, pid) = traced_as(&[], Victim::start("victim-jumper", [""; 0]));
    let counted: Vec<&Value> = copies(&report, pid).iter().collect();
    let returned = account["functions"]["cuMemcpyHtoD_v2"]["calls"].as_u64();
    let (returned, jumped) = (
        returned.expect("calls"),
        account["jumped"].as_u64().expect("calls"),
    );
    let (counted, lost) = (
        sum(&counted, "calls"),
        report["lost"].as_u64().expect("a number"),
    );
    // A frame that was left and not overwritten looks as if the next, deeper ones were within it.
    assert!(lost >= jumped && counted >= returned / 2, "{report}");
    assert_eq!(counted + lost, returned + jumped, "{report}");
}
