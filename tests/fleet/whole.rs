//! From a program's copy to the fleet's figures: victims, `cmt serve`, a Prometheus with and without native histograms or a
//! VictoriaMetrics, and `cmt fleet`.

use std::thread;
use std::time::{Duration, Instant};

use cmt_tests::{CLASSIC, Engine, Rung, Serve, Victim, require, require_packages};
use serde_json::Value;

use super::Range;

/// Victims have ended, a serve has counted them, and Prometheus has asked it, within this time.
const PATIENCE: Duration = Duration::from_secs(60);

fn sum(rows: &Value, field: &str) -> u64 {
    let rows = rows.as_array().into_iter().flatten();
    rows.filter_map(|row| row[field].as_u64()).sum()
}

#[test]
fn what_victims_copy_is_what_the_fleet_says() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let engines = [Engine::Prometheus, Engine::VictoriaMetrics];
    let Some(_packages) = require_packages(Rung::Fleet, &engines.map(Engine::package)) else {
        return;
    };
    for (engine, arguments, histograms) in [
        (Engine::Prometheus, &[CLASSIC][..], "classic"),
        (Engine::Prometheus, &[], "native"),
        (Engine::VictoriaMetrics, &[], "classic"),
    ] {
        let serve = Serve::start(&[], &[]);
        let prometheus = engine.start(std::slice::from_ref(&serve.address), arguments);
        // A node that Prometheus comes to know within the range counts from its first sample only.
        let started = Instant::now();
        let before = Range::begin();
        while before.ask(&prometheus, &["--json"]).code != Some(0) {
            assert!(started.elapsed() < PATIENCE, "it is not scraped");
            thread::sleep(Duration::from_millis(200));
        }
        let range = Range::begin();
        let victims: Vec<Victim> = [
            ("victim-rt", &["--threads", "2", "--bytes", "4K,1M"][..]),
            ("victim-drv", &["--async", "--bytes", "64K"]),
            ("victim-static-rt", &["--bytes", "256K"]),
            ("victim-rt", &["--pinned", "--bytes", "128K"]),
        ]
        .into_iter()
        .map(|(name, args)| Victim::start(name, args.iter().chain(&["--calls", "200", "--hold"])))
        .collect();
        // Each maps its libraries; the probes are on them within a second.
        thread::sleep(Duration::from_secs(2));
        for victim in &victims {
            victim.signal(libc::SIGUSR1);
        }
        let accounts: Vec<Value> = victims.into_iter().map(Victim::finish).collect();
        let own = |field: &str| -> u64 {
            let functions = accounts
                .iter()
                .filter_map(|account| account["functions"].as_object());
            functions
                .flat_map(|functions| functions.values())
                .filter_map(|counts| counts[field].as_u64())
                .sum()
        };
        let started = Instant::now();
        let report = loop {
            let report = range.ask(&prometheus, &["--json"]);
            if report.code == Some(0) {
                let report = report.json();
                if sum(&report["copies"], "calls") >= own("calls") {
                    break report;
                }
            }
            assert!(started.elapsed() < PATIENCE, "{report:#?}");
            thread::sleep(Duration::from_millis(500));
        };
        assert_eq!(report["histograms"], histograms, "{report:#}");
        for field in ["calls", "bytes"] {
            assert_eq!(sum(&report["copies"], field), own(field), "{report:#}");
        }
        assert_eq!(sum(&report["classes"], "calls"), own("calls"), "{report:#}");
        let pinned: Vec<&Value> = report["copies"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|row| row["memory"] == "pinned")
            .collect();
        assert_eq!(
            pinned
                .iter()
                .filter_map(|row| row["calls"].as_u64())
                .sum::<u64>(),
            200
        );
    }
}
