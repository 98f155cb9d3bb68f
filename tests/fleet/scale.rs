//! Ten thousand nodes: how long each question takes. Asked for by name: it takes minutes, 15 GB of disk and 10 GB of memory.
//!
//! `cargo test --release -p cmt-tests --test fleet -- --ignored --nocapture ten_thousand`

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use cmt_tests::{Prometheus, Rung, cmt, require_packages};
use serde_json::Value;

const NODES: u64 = 10_000;
/// Begins a block of Prometheus's, which is two hours long: 2026-11-30T10:00:00Z.
const START_S: u64 = 1_796_032_800;
const LENGTH_S: u64 = 4000;
/// Every node is scraped every 15 s. To keep the text small, only the counter that says so has all samples.
const SCRAPE_S: u64 = 15;
const COARSE_S: u64 = 240;
const COUNTERS: [&str; 5] = ["calls", "bytes", "errors", "seconds", "wait_seconds"];
const WORKLOADS: u64 = 3;
const CLASSES: [(&str, &str, u64); 12] = [
    ("HtoD", "pageable", 65_536),
    ("HtoD", "pageable", 1_048_576),
    ("HtoD", "pageable", 16_777_216),
    ("HtoD", "pageable", 67_108_864),
    ("HtoD", "pinned", 65_536),
    ("HtoD", "pinned", 16_777_216),
    ("DtoH", "pageable", 0),
    ("DtoH", "pageable", 4096),
    ("DtoH", "pageable", 1_048_576),
    ("DtoH", "pageable", 16_777_216),
    ("DtoH", "pinned", 4096),
    ("DtoH", "pinned", 16_777_216),
];

/// Calls of each class in each coarse step.
fn pace(node: u64, class: usize) -> u64 {
    1 + (node * 7 + class as u64 * 13) % 50
}

/// A third of the calls each in three buckets, which lie higher for larger sizes.
fn thirds(size: u64, bucket: u32) -> u64 {
    u64::from(bucket.saturating_sub(size.max(1).ilog2() / 4)).min(3)
}

fn le(bucket: u32) -> String {
    match bucket {
        13 => "+Inf".to_owned(),
        _ => format!("{:e}", (1000u64 << (2 * bucket)) as f64 / 1e9),
    }
}

struct Text {
    out: BufWriter<File>,
    samples: u64,
}

impl Text {
    fn series(
        &mut self,
        name: &str,
        node: u64,
        labels: &str,
        step_s: u64,
        value: impl Fn(u64) -> u64,
    ) {
        for at in 0..=LENGTH_S / step_s {
            let (time, value) = (START_S + at * step_s, value(at));
            let instance = format!("10.{}.{}.{}:9469", node >> 16, node >> 8 & 255, node & 255);
            writeln!(
                self.out,
                "{name}{{job=\"cmt\",instance=\"{instance}\"{labels}}} {value} {time}"
            )
            .expect("written");
            self.samples += 1;
        }
    }

    /// What the rules record of them all.
    fn recorded(&mut self) {
        let fleet = |class| -> u64 { (0..NODES).map(|node| pace(node, class)).sum() };
        for (class, (direction, memory, size)) in CLASSES.into_iter().enumerate() {
            let labels =
                format!("direction=\"{direction}\",memory=\"{memory}\",size_class=\"{size}\"");
            for bucket in 0..14 {
                let labels = format!("{labels},le=\"{}\"", le(bucket));
                let grown = fleet(class) * thirds(size, bucket);
                self.rate("duration_seconds_bucket", &labels, grown);
            }
            self.rate("duration_seconds_sum", &labels, fleet(class));
        }
        for name in COUNTERS {
            for (index, direction) in ["HtoD", "DtoH"].into_iter().enumerate() {
                for memory in ["pageable", "pinned"] {
                    let labels = format!("direction=\"{direction}\",memory=\"{memory}\"");
                    self.rate(name, &labels, WORKLOADS * fleet(index));
                }
            }
        }
    }

    fn rate(&mut self, name: &str, labels: &str, grown: u64) {
        let rate = grown as f64 / COARSE_S as f64;
        for time in (START_S..=START_S + LENGTH_S).step_by(60) {
            writeln!(self.out, "cmt:copy_{name}:rate5m{{{labels}}} {rate} {time}")
                .expect("written");
        }
    }
}

/// The made-up fleet as OpenMetrics.
fn write(path: &Path) -> u64 {
    let mut text = Text {
        out: BufWriter::with_capacity(1 << 20, File::create(path).expect("a file")),
        samples: 0,
    };
    writeln!(text.out, "# TYPE cmt_probe_calls counter").expect("written");
    for node in 0..NODES {
        text.series("cmt_probe_calls_total", node, "", SCRAPE_S, |at| at * 10);
    }
    writeln!(text.out, "# TYPE cmt_copy_duration_seconds histogram").expect("written");
    for node in 0..NODES {
        for (class, (direction, memory, size)) in CLASSES.into_iter().enumerate() {
            let pace = pace(node, class);
            let labels =
                format!(",direction=\"{direction}\",memory=\"{memory}\",size_class=\"{size}\"");
            for bucket in 0..14 {
                let thirds = thirds(size, bucket);
                let le = le(bucket);
                let labels = format!("{labels},le=\"{le}\"");
                text.series(
                    "cmt_copy_duration_seconds_bucket",
                    node,
                    &labels,
                    COARSE_S,
                    |at| at * pace * thirds,
                );
            }
            text.series(
                "cmt_copy_duration_seconds_sum",
                node,
                &labels,
                COARSE_S,
                |at| at * pace,
            );
            text.series(
                "cmt_copy_duration_seconds_count",
                node,
                &labels,
                COARSE_S,
                |at| at * pace * 3,
            );
        }
    }
    for name in COUNTERS {
        writeln!(text.out, "# TYPE cmt_copy_{name} counter").expect("written");
        for node in 0..NODES {
            for (index, direction) in ["HtoD", "DtoH"].into_iter().enumerate() {
                for memory in ["pageable", "pinned"] {
                    for workload in 0..WORKLOADS {
                        let labels = format!(
                            ",direction=\"{direction}\",memory=\"{memory}\",workload=\"pod/{node}-{workload}\""
                        );
                        let pace = pace(node, index);
                        text.series(
                            &format!("cmt_copy_{name}_total"),
                            node,
                            &labels,
                            COARSE_S,
                            |at| at * pace,
                        );
                    }
                }
            }
        }
    }
    writeln!(text.out, "# TYPE cmt_copy_recoverable_seconds counter").expect("written");
    for node in 0..NODES {
        for workload in 0..WORKLOADS {
            let labels = format!(",workload=\"pod/{node}-{workload}\"");
            text.series(
                "cmt_copy_recoverable_seconds_total",
                node,
                &labels,
                COARSE_S,
                |at| at * pace(node, 0),
            );
        }
    }
    writeln!(text.out, "# TYPE cmt_lost counter").expect("written");
    for node in 0..NODES {
        let lost = u64::from(node % 1000 == 0);
        text.series(
            "cmt_lost_total",
            node,
            ",reason=\"no room\"",
            COARSE_S,
            |at| at * lost,
        );
    }
    text.recorded();
    writeln!(text.out, "# EOF").expect("written");
    text.out.flush().expect("written");
    text.samples
}

#[test]
#[ignore = "takes minutes, 15 GB of disk and 10 GB of memory"]
fn ten_thousand_nodes_are_asked_in_five_seconds() {
    let packages = [("prometheus", "prometheus"), ("promtool", "prometheus")];
    let Some(_turn) = require_packages(Rung::Fleet, &packages) else {
        return;
    };
    // Kept from run to run where a folder is named.
    let kept = std::env::var_os("CMT_FLEET_SCALE").map(PathBuf::from);
    let own = tempfile::tempdir().expect("a folder");
    let folder = kept.as_deref().unwrap_or(own.path());
    if !folder.join("made").exists() {
        make(folder);
    }
    let prometheus = Prometheus::start_in(folder, &[], &[]);
    let at = (START_S + 3900).to_string();
    let ask = |more: &[&str]| {
        let mut args = vec![
            "fleet",
            "--prometheus",
            &prometheus.url,
            "--at",
            &at,
            "--json",
        ];
        args.extend(more);
        let report = cmt(args).json();
        println!(
            "{more:?}: {} questions, {:.1} s; Prometheus {} MiB",
            report["queries"],
            report["took_s"].as_f64().expect("seconds"),
            prometheus.memory() >> 20
        );
        assert_eq!(report["nodes"]["reporting"], NODES);
        report
    };
    let exact = ask(&["--exact"]);
    let recorded = ask(&[]);
    assert_eq!(
        (&exact["counts"], &recorded["counts"]),
        (&"exact".into(), &"recorded".into())
    );
    for rows in ["copies", "classes"] {
        let calls = |report: &Value| -> Vec<f64> {
            let rows = report[rows].as_array().expect("rows").iter();
            rows.map(|row| row["calls"].as_f64().expect("calls"))
                .collect()
        };
        for (exact, recorded) in calls(&exact).into_iter().zip(calls(&recorded)) {
            assert!(
                (recorded / exact - 1.0).abs() < 0.05,
                "{recorded} for {exact}"
            );
        }
    }
    assert!(
        recorded["took_s"]
            .as_f64()
            .is_some_and(|took_s| took_s < 5.0),
        "{recorded:#}"
    );
}

/// Makes the data: the nodes' series, then what the rules record of them.
fn make(folder: &Path) {
    let text = folder.join("fleet.om");
    let started = Instant::now();
    let samples = write(&text);
    println!("{samples} samples written in {:.0?}", started.elapsed());
    let started = Instant::now();
    promtool(
        &["tsdb", "create-blocks-from", "openmetrics"],
        &[&text, folder],
    );
    std::fs::remove_file(&text).expect("removed");
    println!("block made in {:.0?}", started.elapsed());
    std::fs::write(folder.join("made"), "").expect("written");
}

fn promtool(arguments: &[&str], paths: &[&Path]) {
    let made = Command::new("promtool")
        .args(arguments)
        .args(paths)
        .output();
    let made = made.expect("promtool");
    assert!(made.status.success(), "{made:?}");
}
