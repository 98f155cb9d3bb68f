//! `cmt fleet compare`, `savings` and the page.

use std::fs;

use cmt_tests::{Engine, Prometheus, cmt, unix_time};
use serde_json::Value;

use crate::node::{Copy, Form, Node};
use crate::{Range, made_up, turn};

fn copies(memory: &'static str, latency_ns: u64, count: usize) -> Vec<Copy> {
    let copy = Copy {
        direction: "DtoH",
        memory,
        workload: "pod/a",
        bytes: 64 << 20,
        latency_ns,
    };
    vec![copy; count]
}

fn figures(class: &Value, side: usize) -> (u64, f64) {
    let side = &class["sides"][side];
    let mean = side["mean_ns"].as_f64().expect("a mean");
    (side["calls"].as_u64().expect("calls"), mean)
}

#[test]
fn a_rollout_is_compared_before_and_after() {
    let Some(_turn) = turn() else { return };
    rollout(Engine::Prometheus, Form::Native);
}

pub fn rollout(engine: Engine, form: Form) {
    let node = Node::start(form);
    let prometheus = engine.start(std::slice::from_ref(&node.address), &[]);
    node.count(&copies("pageable", 1, 7));
    let first = unix_time();
    node.count(&copies("pageable", 40_000_000, 100));
    let second = unix_time();
    node.count(&copies("pageable", 4_000_000, 300));
    node.count(&copies("pinned", 4_000_000, 500));
    let third = unix_time();
    prometheus.settle();
    let (before, after) = (
        format!("{first:.3}/{second:.3}"),
        format!("{second:.3}/{third:.3}"),
    );
    let ask = |more: &[&str]| {
        let mut args = vec!["fleet", "compare", "--prometheus", &prometheus.url];
        args.extend(["--before", &before, "--after", &after]);
        args.extend(more);
        cmt(args)
    };
    let report = ask(&["--json"]).json();
    assert_eq!(report["schema"], "cmt/fleet-compare/1");
    let classes = report["classes"].as_array().expect("classes");
    assert_eq!(
        classes.len(),
        1,
        "pinned copies are not compared: {report:#}"
    );
    assert_eq!(classes[0]["size_class_bytes"], 64 << 20);
    assert_eq!(figures(&classes[0], 0), (100, 40e6));
    assert_eq!(figures(&classes[0], 1), (300, 4e6));
    let speedup = classes[0]["speedup"].as_f64().expect("a speed-up");
    assert!((speedup - 10.0).abs() < 1e-6, "{speedup}");
    let text = ask(&[]).stdout;
    assert!(
        text.lines().all(|line| line.chars().count() <= 80),
        "{text}"
    );
    for part in [
        "DtoH 64MiB    before",
        "10.00x",
        "before: DtoH 64MiB latency",
        "after: DtoH",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn two_groups_of_nodes_are_compared() {
    let Some(_turn) = turn() else { return };
    groups(Engine::Prometheus);
}

pub fn groups(engine: Engine) {
    let nodes = [Form::Classic, Form::Classic].map(Node::start);
    let addresses = nodes.each_ref().map(|node| node.address.clone());
    let prometheus = engine.start(&addresses, &[]);
    nodes.iter().for_each(Node::wait);
    let range = Range::begin();
    nodes[0].count(&copies("pageable", 40_000_000, 30));
    nodes[1].count(&copies("pageable", 8_000_000, 50));
    let labels = addresses.map(|address| format!("instance=\"{address}\""));
    let question = [
        "compare",
        "--unpatched",
        &labels[0],
        "--patched",
        &labels[1],
        "--json",
    ];
    let report = range.ask(&prometheus, &question).json();
    let classes = report["classes"].as_array().expect("classes");
    assert_eq!(figures(&classes[0], 0), (30, 40e6));
    assert_eq!(figures(&classes[0], 1), (50, 8e6));
    let half = cmt([
        "fleet",
        "compare",
        "--prometheus",
        &prometheus.url,
        "--patched",
        "a=\"b\"",
    ]);
    assert_eq!(half.code, Some(2), "{half:?}");
}

#[test]
fn the_page_needs_no_network() {
    let Some(_turn) = turn() else { return };
    let node = Node::start(Form::Classic);
    let prometheus = Prometheus::start(std::slice::from_ref(&node.address));
    node.wait();
    let range = Range::begin();
    let mut all = made_up(1, 50);
    all[0].workload = "comm/<b>&";
    all[0].memory = "pageable";
    node.count(&all);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("fleet.html");
    let path = path.to_str().expect("a path");
    assert_eq!(range.ask(&prometheus, &["--html", path]).code, Some(0));
    let page = fs::read_to_string(path).expect("the page");
    assert!(page.contains("comm/&lt;b&gt;&amp;"), "{page}");
    assert!(
        !page.contains("http") && !page.contains("<script"),
        "{page}"
    );
    let nowhere = range.ask(&prometheus, &["--html", "/nowhere/fleet.html"]);
    assert!(
        nowhere
            .refusal()
            .contains("/nowhere/fleet.html cannot be written")
    );
}

/// The public worked example: 32,768 GPUs interrupted every 1.4 to 1.6 hours, and a million.
#[test]
fn savings_are_those_of_the_worked_example() {
    let ask = |gpus: &str| {
        let args = [
            "fleet",
            "savings",
            "--event",
            "resume",
            "--seconds",
            "1",
            "--gpus",
            gpus,
            "--json",
        ];
        let report = cmt(args).json();
        assert_eq!(
            (&report["schema"], &report["price"]),
            (&"cmt/fleet-savings/1".into(), &9.0.into())
        );
        let pair = |name: &str| {
            let values = &report["events"][0][name];
            [0, 1].map(|at| values[at].as_f64().expect("a number"))
        };
        (pair("every_s"), pair("share"), pair("dollars"))
    };
    let near = |found: [f64; 2], said: [f64; 2], within: f64| {
        for (found, said) in found.into_iter().zip(said) {
            assert!((found - said).abs() <= within, "{found} for {said}");
        }
    };
    let (every_s, share, dollars) = ask("32768");
    near(every_s.map(|every_s| every_s / 3600.0), [1.6, 1.4], 0.05);
    near(share.map(|share| share * 100.0), [0.017, 0.019], 0.0005);
    near(dollars, [435_000.0, 500_000.0], 500.0);
    let (_, _, dollars) = ask("1000000");
    near(dollars, [13e6, 15e6], 0.5e6);
}

#[test]
fn every_assumption_can_be_changed() {
    let args = [
        "--event",
        "wake",
        "--every",
        "2h",
        "--seconds",
        "3.6",
        "--gpus",
        "1000",
        "--price",
        "2",
    ];
    let report = cmt(["fleet", "savings", "--json"].iter().chain(&args)).json();
    let event = &report["events"][0];
    assert_eq!(
        event["gpu_hours"][0].as_f64(),
        Some(1000.0 * 8760.0 * 0.0005)
    );
    assert_eq!(
        event["dollars"][1].as_f64(),
        Some(2.0 * 1000.0 * 8760.0 * 0.0005)
    );
    let text = cmt(["fleet", "savings"]).stdout;
    for part in [
        "32,768 GPUs (--gpus)",
        "$9.00 a GPU-hour (--price)",
        "resume",
        "checkpoint",
        "assumed:",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let unknown = cmt(["fleet", "savings", "--event", "lunch"]);
    assert_eq!(unknown.code, Some(2), "{unknown:?}");
}
