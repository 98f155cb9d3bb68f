//! What `cmt trace` sees: every copy function, the kind and the make of host memory, and what a caller waits for.

use std::collections::BTreeMap;

use cmt_tests::{Rung, Trace, Victim, built, require};
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
            "s of every minute",
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
