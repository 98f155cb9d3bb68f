//! `cmt fleet` against a real Prometheus, which scrapes nodes of known truth.

mod node;
mod protobuf;

use std::collections::BTreeMap;

use cmt_tests::{Finished, Prometheus, Rung, Turn, cmt, require_packages, unix_time};
use node::{Copy, Form, Node, State, bounds_ns};
use serde_json::Value;

fn turn() -> Option<Turn> {
    require_packages(Rung::Fleet, &[("prometheus", "prometheus")])
}

/// A range that begins now and ends when it is asked about.
struct Range {
    start_s: f64,
}

impl Range {
    fn begin() -> Self {
        let start_s = unix_time();
        Self { start_s }
    }

    /// `cmt fleet` about the time since then, which ends at a whole number of seconds.
    fn ask(&self, prometheus: &Prometheus, more: &[&str]) -> Finished {
        let seconds = (unix_time() - self.start_s).ceil();
        let at = format!("{:.3}", self.start_s + seconds);
        let range = format!("{seconds}s");
        let mut args = vec!["fleet", "--prometheus", &prometheus.url, "--at", &at];
        args.extend(["--range", &range]);
        args.extend(more);
        cmt(args)
    }
}

/// Copies of all kinds, with latencies over seven orders of magnitude.
fn made_up(seed: u64, count: usize) -> Vec<Copy> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count)
        .map(|_| Copy {
            direction: ["HtoD", "DtoH"][random.usize(..2)],
            memory: ["pageable", "pinned"][random.usize(..2)],
            workload: ["pod/a", "unit/b", "other"][random.usize(..3)],
            bytes: 1 << random.u64(8..34) | random.u64(..256),
            latency_ns: 100 << random.u64(..28) | random.u64(..64),
        })
        .collect()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Compares every count with the truth.
#[track_caller]
fn check(report: &Value, truth: &[Copy], bucket: f64) {
    let mut copies: BTreeMap<(&str, &str), (u64, u64, f64)> = BTreeMap::new();
    let mut classes: BTreeMap<(&str, &str, u64), Vec<u64>> = BTreeMap::new();
    for copy in truth {
        let (direction, memory) = (copy.direction, copy.memory);
        let sum = copies.entry((direction, memory)).or_default();
        *sum = (
            sum.0 + 1,
            sum.1 + copy.bytes,
            sum.2 + copy.latency_ns as f64 / 1e9,
        );
        let class = (direction, memory, copy.size_class());
        classes.entry(class).or_default().push(copy.latency_ns);
    }
    let rows = report["copies"].as_array().expect("copies");
    assert_eq!(rows.len(), copies.len(), "{report:#}");
    for (row, ((direction, memory), (calls, bytes, seconds))) in
        rows.iter().rev().zip(copies.iter().rev())
    {
        assert_eq!(
            (&row["direction"], &row["memory"]),
            (&Value::from(*direction), &Value::from(*memory))
        );
        assert_eq!(
            (&row["calls"], &row["bytes"]),
            (&Value::from(*calls), &Value::from(*bytes))
        );
        assert!((row["seconds"].as_f64().expect("seconds") - seconds).abs() < 1e-3);
    }
    let rows = report["classes"].as_array().expect("classes");
    assert_eq!(rows.len(), classes.len(), "{report:#}");
    for row in rows {
        let text = |name: &str| row[name].as_str().expect("a text");
        let size = row["size_class_bytes"].as_u64().expect("a size");
        let latencies = classes
            .get_mut(&(text("direction"), text("memory"), size))
            .unwrap_or_else(|| panic!("no such copies: {row}"));
        latencies.sort_unstable();
        assert_eq!(row["calls"], latencies.len(), "{row}");
        for (name, q) in [("p50_ns", 0.5), ("p99_ns", 0.99)] {
            let rank = (q * latencies.len() as f64).ceil() as usize;
            let truth = latencies[rank.max(1) - 1] as f64;
            let found = row[name].as_f64().expect("a latency");
            let near =
                (truth / bucket..=truth * bucket).contains(&found) || truth.max(found) <= 1000.0;
            assert!(near, "{name}: {found}, truly {truth}: {row}");
        }
    }
}

#[test]
fn counts_are_exact_and_quantiles_within_their_bucket() {
    let Some(_turn) = turn() else { return };
    let nodes = [Form::Classic, Form::Classic].map(Node::start);
    let addresses = nodes.each_ref().map(|node| node.address.clone());
    let prometheus = Prometheus::start(folder(), &addresses);
    nodes[0].count(&made_up(1, 500));
    nodes[1].count(&made_up(2, 300));
    let range = Range::begin();
    let truth = [made_up(3, 700), made_up(4, 900)];
    nodes[0].count(&truth[0]);
    nodes[1].count(&truth[1]);
    let report = range.ask(&prometheus, &["--json"]).json();
    assert_eq!(report["schema"], "cmt/fleet/1");
    assert_eq!(
        (&report["counts"], &report["histograms"]),
        (&"exact".into(), &"classic".into())
    );
    assert_eq!(
        (&report["nodes"]["reporting"], &report["nodes"]["broken"]),
        (&2.into(), &0.into())
    );
    check(&report, &truth.concat(), 4.0);
    let _ = (State::default(), bounds_ns());
}
