//! Which series `cmt serve` has: names of workloads that make room for others, and processes where they are asked for.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use cmt_tests::{Named, Rung, Samples, Serve, account_of, require, until};

use crate::{alone, idle, shared};

#[test]
fn workloads_that_are_gone_make_room_and_nothing_is_lost() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // Others would take the names.
    let _alone = alone();
    let _idle = idle();
    const NAMES: usize = 6;
    let args = [
        "--max-workloads",
        &NAMES.to_string(),
        "--keep-workloads",
        "2s",
    ];
    let serve = Serve::start(&[], &args);
    const COUNTED: [&str; 3] = ["calls", "errors", "bytes"];
    let sums = |samples: &Samples, label: &str| {
        COUNTED.map(|what| samples.sum(&format!("cmt_copy_{what}_total"), &[label]) as u64)
    };
    let mut least = [0; 3];
    let mut scrape = || {
        let samples = serve.scrape();
        let all = sums(&samples, "");
        assert!(
            all.iter().zip(least).all(|(now, before)| *now >= before),
            "{least:?}, then {all:?}"
        );
        least = all;
        assert!(workloads(&samples).len() <= NAMES + 2);
        samples
    };
    let mut own = Vec::new();
    for index in 0..2 * NAMES {
        let named = Named::new(&format!("sv-{index}"), "victim-drv");
        let victim = named.start(&["--bytes", "4K", "--calls", "40"]);
        let account = account_of(&victim.finish());
        until("it has a name of its own", || {
            scrape().of_workload(&named.workload()) == account
        });
        own.push((named.workload(), account));
        thread::sleep(Duration::from_millis(700));
    }
    let samples = scrape();
    let left = workloads(&samples);
    let mut folded = [0; 3];
    for (workload, account) in &own {
        match left.contains(workload) {
            true => assert_eq!(samples.of_workload(workload), *account),
            false => (0..3).for_each(|index| folded[index] += account[index]),
        }
    }
    let former = sums(&samples, "workload=\"former\"");
    assert!(folded[0] > 0);
    // Victims of other test processes on this machine may have gone the same way.
    let is_ours = |name: &String| own.iter().any(|(own, _)| own == name) || name == "former";
    match left.iter().all(is_ours) {
        true => assert_eq!(former, folded),
        false => assert!(former.iter().zip(folded).all(|(all, own)| *all >= own)),
    }
}

fn workloads(samples: &Samples) -> BTreeSet<String> {
    let series = samples.0.keys();
    let names = series.filter_map(|series| series.split("workload=\"").nth(1)?.split('"').next());
    names.map(str::to_owned).collect()
}

#[test]
fn processes_are_told_apart_where_that_is_asked_for() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let _idle = idle();
    let serve = Serve::start(&[], &["--by-pid"]);
    let without = Serve::start(&[], &[]);
    let named = Named::new("sv-pid", "victim-rt");
    let victims = [30, 70].map(|calls: u32| {
        named.start(&[
            "--bytes",
            "4K",
            "--calls",
            &calls.to_string(),
            "--fail-every",
            "7",
        ])
    });
    let workload = format!("workload=\"{}\"", named.workload());
    for victim in victims {
        let pid = format!("pid=\"{}\"", victim.pid);
        let own = account_of(&victim.finish());
        // Its end does not take it away.
        until("its calls are counted", || {
            let samples = serve.scrape();
            let counted = ["calls", "errors", "bytes"].map(|what| {
                let name = format!("cmt_process_copy_{what}_total");
                samples.sum(&name, &[&pid, &workload]) as u64
            });
            counted == own
        });
        assert!(
            serve
                .scrape()
                .sum("cmt_process_copy_seconds_total", &[&pid])
                > 0.0
        );
    }
    let page = String::from_utf8(without.get("/metrics", "").2).expect("text");
    assert!(
        !page.contains("pid=") && !page.contains("cmt_process"),
        "{page}"
    );
}
