//! `cmt fleet` against a real Prometheus, which scrapes nodes of known truth.

mod access;
mod node;
mod past;
mod protobuf;
mod scale;
mod sides;
mod victoria;
mod whole;

use std::collections::BTreeMap;

use cmt_tests::{
    Engine, Finished, Prometheus, Rung, Turn, cmt, free_port, require_packages, unix_time,
};
use node::{Copy, Form, Node, State};
use serde_json::Value;

fn turn() -> Option<Turn> {
    turn_of(Engine::Prometheus)
}

fn turn_of(engine: Engine) -> Option<Turn> {
    require_packages(Rung::Fleet, &[engine.package()])
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
        prometheus.settle();
        let seconds = (unix_time() - self.start_s).ceil();
        let at = format!("{:.3}", self.start_s + seconds);
        let range = format!("{seconds}s");
        let mut args = vec!["fleet"];
        args.extend(more);
        args.extend([
            "--prometheus",
            &prometheus.url,
            "--at",
            &at,
            "--range",
            &range,
        ]);
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

/// Two nodes of these forms; of what they report only the second half lies in the range.
fn two_nodes(engine: Engine, forms: [Form; 2]) -> (Value, Vec<Copy>) {
    let nodes = forms.map(Node::start);
    let addresses = nodes.each_ref().map(|node| node.address.clone());
    let prometheus = engine.start(&addresses, &[]);
    nodes[0].count(&made_up(1, 500));
    nodes[1].count(&made_up(2, 300));
    let range = Range::begin();
    let truth = [made_up(3, 700), made_up(4, 900)];
    nodes[0].count(&truth[0]);
    nodes[1].count(&truth[1]);
    let report = range.ask(&prometheus, &["--json"]).json();
    assert_eq!(report["schema"], "cmt/fleet/1");
    assert_eq!(report["counts"], "exact");
    let found = &report["nodes"];
    assert_eq!(
        (&found["reporting"], &found["broken"]),
        (&2.into(), &0.into())
    );
    (report, truth.concat())
}

#[test]
fn counts_are_exact_and_quantiles_within_their_bucket() {
    let Some(_turn) = turn() else { return };
    let (report, truth) = two_nodes(Engine::Prometheus, [Form::Classic, Form::Classic]);
    assert_eq!(report["histograms"], "classic");
    check(&report, &truth, 4.0);
}

#[test]
fn native_histograms_are_read() {
    let Some(_turn) = turn() else { return };
    let (report, truth) = two_nodes(Engine::Prometheus, [Form::Native, Form::Native]);
    assert_eq!(report["histograms"], "native");
    check(
        &report,
        &truth,
        f64::from(1 << protobuf::SCHEMA).recip().exp2(),
    );
}

#[test]
fn nodes_of_both_kinds_count_once() {
    let Some(_turn) = turn() else { return };
    let (report, truth) = two_nodes(Engine::Prometheus, [Form::Classic, Form::Native]);
    assert_eq!(report["histograms"], "both");
    check(&report, &truth, 4.0);
}

/// What no `increase()` tells: a node restarts, one goes, one comes, and one comes back from where it could not be reached.
fn breaks(engine: Engine, form: Form) {
    let steady = Node::start(form);
    let restarts = Node::start(form);
    let goes = Node::start(form);
    let absent = || format!("127.0.0.1:{}", free_port());
    let (comes, unknown) = (absent(), absent());
    let addresses = [
        steady.address.clone(),
        restarts.address.clone(),
        goes.address.clone(),
        comes.clone(),
        unknown.clone(),
    ];
    let prometheus = engine.start(&addresses, &[]);
    for (seed, node) in [&steady, &restarts, &goes].into_iter().enumerate() {
        node.change(|state| state.copies = made_up(seed as u64, 400));
    }
    let range = Range::begin();
    let truth: Vec<Vec<Copy>> = (10..19).map(|seed| made_up(seed, 300)).collect();
    steady.count(&truth[0]);
    restarts.count(&truth[1]);
    // Fewer than before, then more.
    restarts.change(|state| state.copies.clone_from(&truth[2]));
    restarts.count(&truth[3]);
    // A name is given up, and taken again.
    for (node, more) in [(&steady, &truth[7]), (&restarts, &truth[8])] {
        node.change(give_up_a_name);
        node.count(more);
    }
    goes.count(&truth[4]);
    drop(goes);
    let start_time_s = unix_time();
    let copies = truth[5].clone();
    let comes = Node::start_at(
        &comes,
        form,
        State {
            copies,
            start_time_s,
            ..State::default()
        },
    );
    let copies = made_up(99, 5000);
    let unknown = Node::start_at(
        &unknown,
        form,
        State {
            copies,
            ..State::default()
        },
    );
    comes.wait();
    unknown.count(&truth[6]);
    let report = range.ask(&prometheus, &["--json"]).json();
    assert_eq!(report["counts"], "exact");
    let found = &report["nodes"];
    assert_eq!(
        (&found["reporting"], &found["broken"]),
        (&5.into(), &4.into())
    );
    check(&report, &truth.concat(), 4.0);
    let worst = report["worst_workloads"].as_array().expect("workloads");
    let names = worst
        .iter()
        .map(|one| one["name"].as_str().expect("a name"));
    let names: Vec<&str> = names.collect();
    assert!(!names.is_empty() && !names.contains(&"former"), "{names:?}");
}

/// What a workload counted goes by another name from then on.
fn give_up_a_name(state: &mut State) {
    let of_name = state
        .copies
        .iter_mut()
        .filter(|copy| copy.workload == "pod/a");
    of_name.for_each(|copy| copy.workload = "former");
}

#[test]
fn restarts_and_comings_and_goings_stay_exact() {
    let Some(_turn) = turn() else { return };
    breaks(Engine::Prometheus, Form::Classic);
}

#[test]
fn native_histograms_too() {
    let Some(_turn) = turn() else { return };
    breaks(Engine::Prometheus, Form::Native);
}

#[test]
fn the_worst_come_first_and_losses_are_told() {
    let Some(_turn) = turn() else { return };
    worst_and_losses(Engine::Prometheus);
}

fn worst_and_losses(engine: Engine) {
    let nodes = [Form::Classic; 3].map(Node::start);
    let addresses = nodes.each_ref().map(|node| node.address.clone());
    let prometheus = engine.start(&addresses, &[]);
    let copy = |workload, seconds: u64| Copy {
        direction: "HtoD",
        memory: "pageable",
        workload,
        bytes: 1 << 20,
        latency_ns: seconds * 1_000_000_000,
    };
    nodes[0].count(&[copy("pod/old", 9000)]);
    let range = Range::begin();
    nodes[0].count(&[copy("pod/old", 10), copy("pod/a", 40), copy("other", 900)]);
    nodes[1].count(&[copy("pod/a", 100), copy("unit/b", 60)]);
    nodes[2].change(|state| state.lost = 7);
    let report = range.ask(&prometheus, &["--json", "--top", "2"]).json();
    let worst = |list: &str| -> Vec<(String, f64)> {
        let list = report[list].as_array().expect("a list");
        let name = |one: &Value| one["name"].as_str().expect("a name").to_owned();
        list.iter()
            .map(|one| (name(one), one["value"].as_f64().expect("seconds")))
            .collect()
    };
    assert_eq!(report["worst_by"], "recoverable");
    assert_eq!(
        worst("worst_workloads"),
        [("pod/a".into(), 70.0), ("unit/b".into(), 30.0)]
    );
    let (first, second) = (addresses[0].clone(), addresses[1].clone());
    assert_eq!(worst("worst_nodes"), [(first, 475.0), (second, 80.0)]);
    assert_eq!(report["recoverable"]["seconds"], 555.0);
    assert_eq!(report["pageable"]["seconds"], 1110.0);
    assert_eq!(
        report["lost"],
        serde_json::json!([{"reason": "no_room", "count": 7}])
    );
    assert_eq!(
        report["nodes"]["lost"],
        serde_json::json!([{"name": addresses[2], "value": 7.0}])
    );
    let text = range.ask(&prometheus, &[]).stdout;
    assert!(
        text.lines().all(|line| line.chars().count() <= 80),
        "{text}"
    );
    for part in [
        "3 nodes",
        "HtoD latency",
        "1MiB",
        "pod/a",
        "lost 7: no room",
        "counts are exact",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn what_cannot_be_answered_is_said_with_its_remedy() {
    let Some(_turn) = turn() else { return };
    let ask = |url: &str, more: &[&str]| {
        let mut args = vec!["fleet", "--prometheus", url];
        args.extend(more);
        cmt(args).refusal().to_owned()
    };
    let nobody = format!("http://me:secret@127.0.0.1:{}", free_port());
    let sentence = ask(&nobody, &[]);
    assert!(
        sentence.contains("no answer from http://127.0.0.1"),
        "{sentence}"
    );
    assert!(!sentence.contains("secret"), "{sentence}");
    let prometheus = Prometheus::start(&[]);
    let sentence = ask(&prometheus.url, &[]);
    assert!(
        sentence.contains("is cmt serve scraped? See docs/fleet.md"),
        "{sentence}"
    );
    let sentence = ask(&prometheus.url, &["--match", "job=~\"(\""]);
    assert!(sentence.contains("missing closing )"), "{sentence}");
    let sentence = ask(&format!("{}/elsewhere", prometheus.url), &[]);
    assert!(
        sentence.contains("is no Prometheus query API (HTTP 404"),
        "{sentence}"
    );
    let limited = Prometheus::start_with(&[], &["--query.max-samples=1"]);
    let sentence = ask(&limited.url, &[]);
    for part in [
        "HTTP 422",
        "too many samples into memory",
        "a shorter --range",
    ] {
        assert!(sentence.contains(part), "{part}: {sentence}");
    }
    let nothing = cmt(["fleet"]);
    assert_eq!(nothing.code, Some(2), "{nothing:?}");
}
