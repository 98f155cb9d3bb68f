//! What `cmt trace` sees: every copy function, the kind and the make of host memory, and what a caller waits for.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use cmt_tests::{Rung, Trace, Victim, built, cmt, cmt_command, require};
use serde_json::Value;

/// Traces a victim that is ready before its first copy; returns the report and the victim's own account.
#[track_caller]
fn traced(env: &[(&str, &str)], victim: Victim) -> (Value, Value) {
    let trace = Trace::start_as(env, [victim.pid.to_string()]);
    victim.signal(libc::SIGUSR1);
    let account = victim.finish();
    (trace.finish().0, account)
}

#[track_caller]
fn copies(report: &Value) -> &Vec<Value> {
    report["processes"][0]["copies"].as_array().expect("copies")
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

#[test]
fn every_copy_function_counts_under_its_name_with_its_bytes() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut command = Victim::command("victim-every");
    command.env("LD_LIBRARY_PATH", &built().folder);
    let (report, account) = traced(&[], Victim::spawn(command));
    assert_eq!(report["lost"], 0, "{report}");
    let mut seen: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for copy in copies(&report) {
        let name = copy["function"].as_str().expect("a name");
        let sums = seen.entry(name).or_default();
        sums.0 += number(&copy["calls"]);
        sums.1 += number(&copy["bytes"]);
        let wanted = expected_direction(name);
        assert!(
            wanted.contains(&copy["direction"].as_str().expect("a direction")),
            "{copy}"
        );
    }
    let own: BTreeMap<&str, (u64, u64)> = account["functions"]
        .as_object()
        .expect("functions")
        .iter()
        .map(|(name, counts)| {
            (
                name.as_str(),
                (number(&counts["calls"]), number(&counts["bytes"])),
            )
        })
        .collect();
    assert_eq!(seen, own);
    assert!(own.len() > 110, "{} functions", own.len());
}

/// By the words of a function's name, where it says the direction.
fn expected_direction(name: &str) -> &'static [&'static str] {
    let says = |word: &str| name.contains(word);
    if says("HtoD")
        || says("HtoA")
        || says("ToSymbol")
        || says("MemcpyToArray")
        || says("2DToArray")
    {
        &["HtoD"]
    } else if says("DtoH") || says("AtoH") || says("FromSymbol") || says("FromArray") {
        &["DtoH"]
    } else if says("DtoD")
        || says("AtoA")
        || says("AtoD")
        || says("DtoA")
        || (says("Peer") && !says("cuMemcpy3D"))
        || says("ArrayToArray")
    {
        &["DtoD"]
    } else {
        &["HtoD", "DtoH"]
    }
}

/// Memory kind and backing by size class, of the copies in one direction.
fn kinds<'a>(report: &'a Value, direction: &str) -> BTreeMap<u64, Vec<(&'a str, &'a str, u64)>> {
    let mut kinds: BTreeMap<u64, Vec<_>> = BTreeMap::new();
    for copy in copies(report)
        .iter()
        .filter(|copy| copy["direction"] == direction)
    {
        kinds
            .entry(number(&copy["size_class_bytes"]))
            .or_default()
            .push((
                copy["memory"].as_str().expect("a kind"),
                copy["backing"].as_str().expect("a backing"),
                number(&copy["calls"]),
            ));
    }
    kinds
}

#[test]
fn memory_made_before_the_trace_is_told_apart() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let (report, account) = traced(&[], Victim::start("victim-kinds", ["--pin"]));
    let rounds = number(&account["rounds"]);
    let (htod, dtoh) = (kinds(&report, "HtoD"), kinds(&report, "DtoH"));
    const KIB: u64 = 1 << 10;
    for found in [&htod, &dtoh] {
        for (size, memory, backing) in [
            (64 * KIB, "pageable", "anonymous"),
            // Registered, and pinned in the kernel.
            (128 * KIB, "pinned", "unknown"),
            (256 * KIB, "pageable", "file"),
            (512 * KIB, "pageable", "shared"),
            (1024 * KIB, "pinned", "unknown"),
        ] {
            assert_eq!(found[&size], [(memory, backing, rounds)], "{size} {report}");
        }
        // Where the machine had no huge page left, it is small ones.
        assert!(
            matches!(
                found[&(4096 * KIB)][..],
                [("pageable", "huge" | "anonymous", _)]
            ),
            "{report}"
        );
    }
    // The first copy of a round only reads what nobody has touched; the second writes it.
    assert_eq!(
        htod[&(8192 * KIB)],
        [("pageable", "untouched", rounds)],
        "{report}"
    );
    assert_eq!(
        dtoh[&(8192 * KIB)],
        [("pageable", "untouched", rounds)],
        "{report}"
    );
    assert_eq!(
        dtoh[&(16384 * KIB)],
        [("pageable", "untouched", rounds)],
        "{report}"
    );
}

#[test]
fn where_page_tables_cannot_be_read_nothing_is_guessed() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let blind = [("CMT_PRETEND_KERNEL", "blind")];
    let victim = Victim::start("victim-kinds", ["--pin"]);
    let trace = Trace::start_as(&blind, [victim.pid.to_string()]);
    victim.signal(libc::SIGUSR1);
    victim.finish();
    let (report, said) = trace.finish();
    assert!(
        said.contains("cannot be told from pageable memory"),
        "{said}"
    );
    for found in [kinds(&report, "HtoD"), kinds(&report, "DtoH")] {
        for (size, kinds) in found {
            let memory = if size == 1 << 20 { "pinned" } else { "unknown" };
            assert!(
                kinds
                    .iter()
                    .all(|kind| (kind.0, kind.1) == (memory, "unknown")),
                "{size} {report}"
            );
        }
    }
}

#[test]
fn waits_behind_asynchronous_copies_count_with_them() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for victim in ["victim-rt", "victim-drv", "victim-static-rt"] {
        for more in [&[][..], &["--per-thread"]] {
            // 20 rounds: HtoD, a wait in every other one, DtoH, a wait.
            let args = [
                "--async", "--exact", "--bytes", "64K", "--calls", "40", "--hold",
            ];
            let (report, _) = traced(&[], Victim::start(victim, args.iter().chain(more)));
            for (direction, waits) in [("HtoD", 10), ("DtoH", 20)] {
                let of: Vec<&Value> = copies(&report)
                    .iter()
                    .filter(|copy| copy["direction"] == direction)
                    .collect();
                let sum = |field: &str| of.iter().map(|copy| number(&copy[field])).sum::<u64>();
                assert_eq!(sum("waited"), waits, "{victim} {direction} {report}");
                assert!(
                    sum("wait_ns") > 0 && sum("until_ns") > sum("wait_ns"),
                    "{report}"
                );
            }
        }
    }
    // A synchronous copy leaves nothing to wait for.
    let (report, _) = traced(
        &[],
        Victim::start(
            "victim-rt",
            ["--exact", "--bytes", "64K", "--calls", "40", "--hold"],
        ),
    );
    assert!(
        copies(&report).iter().all(|copy| copy["waited"] == 0),
        "{report}"
    );
}

#[test]
fn a_report_says_what_attach_would_give_back() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let link = [("CMT_PRETEND_LINK", "32.0 GT/s PCIe x16")];
    for (args, env, word, sure) in [
        (
            &["--bytes", "4M", "--calls", "60"][..],
            &link[..],
            "of its threads' time",
            true,
        ),
        (
            &["--bytes", "4M", "--calls", "60"],
            &[],
            "no GPU's link is known",
            false,
        ),
        (
            &["--bytes", "4M", "--calls", "60", "--pinned"],
            &link,
            "no copies of pageable memory",
            true,
        ),
        (&["--bytes", "4K", "--calls", "60"], &link, "small", true),
    ] {
        let (report, _) = traced(
            env,
            Victim::start("victim-drv", args.iter().chain(&["--exact", "--hold"])),
        );
        let gain = &report["processes"][0]["gain"];
        assert!(
            gain["advice"]
                .as_str()
                .is_some_and(|advice| advice.contains(word)),
            "{gain}"
        );
        assert_eq!(gain["saved_s_per_minute"].is_number(), sure, "{gain}");
    }
}

#[test]
fn single_copies_are_the_same_that_are_counted() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let (perfetto, hgrm) = (
        folder.path().join("copies.json"),
        folder.path().join("copies.hgrm"),
    );
    let victim = Victim::start(
        "victim-rt",
        [
            "--threads",
            "4",
            "--bytes",
            "4K,64K",
            "--calls",
            "400",
            "--hold",
        ],
    );
    let pid = victim.pid;
    let mut command = cmt_command(["trace", "--events", "--perfetto"]);
    command
        .arg(&perfetto)
        .arg("--hgrm")
        .arg(&hgrm)
        .arg(pid.to_string());
    let trace = Trace::spawn(command);
    victim.signal(libc::SIGUSR1);
    let account = victim.finish();
    let (lines, said) = trace.finish_as_text();
    assert!(said.contains("1600 copies written\n"), "{said}");

    let counts = &account["functions"]["cudaMemcpy"];
    let events: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let own = number(&counts["calls"]);
    assert_eq!(events.len() as u64, own);
    let bytes: u64 = events.iter().map(|event| number(&event["bytes"])).sum();
    assert_eq!(bytes, number(&counts["bytes"]));
    let threads: BTreeSet<u64> = events.iter().map(|event| number(&event["tid"])).collect();
    assert_eq!(threads.len(), 4);
    for event in &events {
        assert_eq!(
            (&event["pid"], &event["function"]),
            (&pid.into(), &"cudaMemcpy".into()),
            "{event}"
        );
        assert_eq!(
            (&event["memory"], &event["result"]),
            (&"pageable".into(), &0.into()),
            "{event}"
        );
        assert!(
            number(&event["latency_ns"]) > 0 && number(&event["host"]) > 0,
            "{event}"
        );
    }

    let slices: Vec<Value> =
        serde_json::from_str(&fs::read_to_string(&perfetto).expect("the file")).expect("JSON");
    assert_eq!(
        slices.iter().filter(|slice| slice["ph"] == "X").count() as u64,
        own
    );
    for file in [
        "copies.hgrm",
        "copies.HtoD-pageable.hgrm",
        "copies.DtoH-pageable.hgrm",
    ] {
        let text = fs::read_to_string(folder.path().join(file)).expect("the file");
        let total = if file == "copies.hgrm" { own } else { own / 2 };
        assert!(
            text.contains(&format!("Total count    = {total:>12}")),
            "{text}"
        );
    }
}

#[test]
fn what_cannot_be_written_is_refused_before_anything_is_traced() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-rt", ["--hold"]);
    let pid = victim.pid.to_string();
    for option in ["--perfetto", "--hgrm"] {
        let finished = cmt(["trace", &pid, "--for", "30s", option, "/nonexistent/file"]);
        let refused = finished.refusal();
        assert!(
            refused.contains("/nonexistent/file cannot be written; nothing was traced"),
            "{refused}"
        );
    }
}

#[test]
fn sixty_four_threads_count_like_one() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for threads in ["1", "64"] {
        let args = [
            "--threads",
            threads,
            "--bytes",
            "4K,64",
            "--calls",
            "500",
            "--async",
            "--hold",
        ];
        let (report, account) = traced(&[], Victim::start("victim-rt", args));
        assert_sums(&report, &account);
    }
}

/// Checks calls and bytes of all functions together.
#[track_caller]
fn assert_sums(report: &Value, account: &Value) {
    assert_eq!(report["lost"], 0, "{report}");
    for field in ["calls", "errors", "bytes"] {
        let seen: u64 = copies(report).iter().map(|copy| number(&copy[field])).sum();
        let functions = account["functions"].as_object().expect("functions");
        let own: u64 = functions
            .values()
            .map(|counts| number(&counts[field]))
            .sum();
        assert_eq!(seen, own, "{field}: {report}");
    }
}

#[test]
fn a_process_that_becomes_another_program_is_traced_on() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    const PROGRAM: &str = r#"
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
print("ready", os.getpid(), flush=True)
signal.sigwait([signal.SIGUSR2])
os.execv(sys.argv[1], ["victim-drv", "--bytes", "4K", "--calls", "300", "--hold"])
"#;
    let mut command = std::process::Command::new("python3");
    command.env("LD_LIBRARY_PATH", &built().folder);
    command
        .args(["-c", PROGRAM])
        .arg(built().victim("victim-drv"));
    let victim = Victim::spawn(command);
    let trace = Trace::start([victim.pid.to_string()]);
    victim.signal(libc::SIGUSR2);
    let ready = victim.next_line().expect("it says that it is ready");
    assert!(ready.starts_with("ready "), "{ready}");
    // One look at its maps is due every 250 ms.
    std::thread::sleep(std::time::Duration::from_secs(1));
    victim.signal(libc::SIGUSR1);
    let account = victim.finish();
    assert_sums(&trace.finish().0, &account);
}

#[test]
fn several_copies_of_a_runtime_in_one_process_count_together() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    const PROGRAM: &str = r#"
import ctypes, json, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
runtimes = [ctypes.CDLL(path) for path in sys.argv[1:]]
host = ctypes.create_string_buffer(1 << 16)
device = ctypes.c_void_p()
assert runtimes[0].cudaMalloc(ctypes.byref(device), len(host)) == 0
print("ready", os.getpid(), flush=True)
signal.sigwait([signal.SIGUSR1])
calls = 0
for turn in range(200):
    for runtime in runtimes:
        assert runtime.cudaMemcpy(device, host, ctypes.c_size_t(5000), 1) == 0
        calls += 1
print(json.dumps({"functions": {"cudaMemcpy": {"calls": calls, "errors": 0, "bytes": calls * 5000}}}))
"#;
    let folder = tempfile::tempdir().expect("a folder");
    let library = built().folder.join("libcudart.so.13");
    let other = folder.path().join("libcudart-of-a-wheel.so.13");
    fs::copy(&library, &other).expect("copy the library");
    let mut command = std::process::Command::new("python3");
    command.env("LD_LIBRARY_PATH", &built().folder);
    command.args(["-c", PROGRAM]).args([&library, &other]);
    let (report, account) = traced(&[], Victim::spawn(command));
    assert_sums(&report, &account);
    assert_eq!(copies(&report).len(), 1, "{report}");
}

#[test]
fn ctrl_c_leaves_no_probe_behind() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-rt", ["--bytes", "4K", "--pause-ms", "1"]);
    let code = || (victim.code("libcuda.so.1"), victim.code("libcudart.so.13"));
    let before = code();
    let trace = Trace::start(["--all"]);
    let probed = code();
    // Not compared by a macro that prints them.
    assert!(before.0 != probed.0, "no probe in libcuda");
    assert!(before.1 != probed.1, "no probe in libcudart");
    trace.interrupt();
    assert!(code() == before, "a probe is left");
    victim.stop();
}

/// Checks that a report holds so many calls of each of several victims, and that nothing was lost.
#[track_caller]
fn assert_each_made(report: &Value, accounts: &[Value], calls: u64) {
    assert_eq!(report["lost"], 0, "{report}");
    let processes = report["processes"].as_array().expect("processes");
    for account in accounts {
        let process = processes
            .iter()
            .find(|process| process["pid"] == account["pid"])
            .expect("the process");
        let copies = process["copies"].as_array().expect("copies");
        let made: u64 = copies.iter().map(|copy| number(&copy["calls"])).sum();
        assert_eq!(made, calls, "{report}");
    }
}

#[test]
fn two_processes_of_an_older_kernel_count_once_each() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let args = [
        "--threads",
        "2",
        "--bytes",
        "4K",
        "--calls",
        "1000",
        "--hold",
    ];
    let victims = [0, 1].map(|_| Victim::start("victim-drv", args));
    let pids = victims.each_ref().map(|victim| victim.pid.to_string());
    let trace = Trace::start_as(&[("CMT_PRETEND_KERNEL", "filter")], pids);
    for victim in &victims {
        victim.signal(libc::SIGUSR1);
    }
    let accounts = victims.map(Victim::finish);
    let report = trace.finish().0;
    assert_each_made(&report, &accounts, 2000);
}

/// Containers of one image have a mount each, and the kernel shows its files under other numbers in each.
#[test]
fn two_mounts_of_one_library_count_each_call_once() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let lower = folder.path().join("lower");
    fs::create_dir(&lower).expect("a folder");
    fs::copy(
        built().folder.join("libcuda.so.1"),
        lower.join("libcuda.so.1"),
    )
    .expect("copy the library");
    let script = r#"
mount -t tmpfs none "$1/scratch" && mkdir "$1/scratch/up" "$1/scratch/work" "$1/scratch/merged" &&
mount -t overlay -o "lowerdir=$1/lower,upperdir=$1/scratch/up,workdir=$1/scratch/work" none "$1/scratch/merged" &&
LD_LIBRARY_PATH="$1/scratch/merged" exec "$2" --bytes 4K --calls 1000 --hold
"#;
    fs::create_dir(folder.path().join("scratch")).expect("a folder");
    let victims = [0, 1].map(|_| {
        let mut command = std::process::Command::new("unshare");
        command.args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            script,
            "sh",
        ]);
        command.arg(folder.path()).arg(built().victim("victim-drv"));
        Victim::spawn(command)
    });
    let trace = Trace::start(["--all"]);
    for victim in &victims {
        victim.signal(libc::SIGUSR1);
    }
    let accounts = victims.map(Victim::finish);
    let report = trace.interrupt();
    assert_each_made(&report, &accounts, 1000);
}

#[test]
fn a_process_whose_first_thread_has_ended_is_traced() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    const PROGRAM: &str = r#"
import ctypes, json, os, signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
cuda = ctypes.CDLL("libcuda.so.1")
host = ctypes.create_string_buffer(1 << 16)
def work():
    device, context = ctypes.c_uint64(), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(device), ctypes.c_size_t(1 << 16)) == 0
    while open("/proc/self/stat").read().rsplit(")", 1)[1].split()[0] != "Z":
        pass
    print("ready", os.getpid(), flush=True)
    signal.sigwait([signal.SIGUSR1])
    for turn in range(300):
        assert cuda.cuMemcpyHtoD_v2(device, host, ctypes.c_size_t(5000)) == 0
    print(json.dumps({"functions": {"cuMemcpyHtoD_v2": {"calls": 300, "errors": 0, "bytes": 1500000}}}), flush=True)
    os._exit(0)
threading.Thread(target=work).start()
# Lets go of the interpreter before it ends this thread.
ctypes.CDLL(None).pthread_exit(None)
"#;
    for all in [false, true] {
        let mut command = std::process::Command::new("python3");
        command.env("LD_LIBRARY_PATH", &built().folder);
        command.args(["-c", PROGRAM]);
        let victim = Victim::spawn(command);
        let pid = victim.pid.to_string();
        let trace = Trace::start([if all { "--all" } else { &pid }]);
        victim.signal(libc::SIGUSR1);
        let account = victim.finish();
        let report = match all {
            true => trace.interrupt(),
            false => trace.finish().0,
        };
        assert_sums(&report, &account);
    }
}
