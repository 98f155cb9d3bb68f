//! Ranges longer than a test can wait: the samples of hours, a minute apart, put into the store at once.

use std::fmt::Write as _;

use cmt_tests::{Engine, cmt, require_packages, unix_time};

use crate::node::{Copy, State, text};
use crate::{Rung, check, made_up};

/// Length of the past.
const MINUTES: u64 = 420;

/// What a node says at a minute; nothing where it is not scraped.
pub type Told<'a> = Box<dyn Fn(u64) -> Option<State> + 'a>;

/// A round moment some hours ago.
pub fn beginning() -> u64 {
    (unix_time() as u64 / 3600 - 9) * 3600
}

/// The samples of nodes, with timestamps of which `per_second` are a second.
pub fn samples(start_s: u64, minutes: u64, nodes: &[(String, Told)], per_second: u64) -> String {
    let mut all = String::new();
    for minute in 0..minutes {
        let time = (start_s + minute * 60) * per_second;
        for (name, told) in nodes {
            let text = told(minute).map_or_else(String::new, |state| text(&state));
            for line in text.lines().filter(|line| !line.starts_with('#')) {
                let (metric, rest) = line.split_once('{').expect("labels");
                let comma = if rest.starts_with('}') { "" } else { "," };
                let target = format!("job=\"cmt\",instance=\"{name}\"");
                writeln!(all, "{metric}{{{target}{comma}{rest} {time}").expect("written");
            }
        }
    }
    all
}

/// One copy a minute, of few classes.
fn copies(seed: u64) -> Vec<Copy> {
    let mut copies = made_up(seed, MINUTES as usize);
    for copy in &mut copies {
        (copy.memory, copy.bytes) = ("pageable", 4096 + copy.bytes % 4096);
    }
    copies
}

pub fn hours(engine: Engine) {
    let copies: Vec<Vec<Copy>> = (0..7).map(copies).collect();
    // What a node says that counts since a minute.
    let since = |node: usize, first: u64, minute: u64| {
        Some(State {
            copies: copies[node][first as usize..=minute as usize].to_vec(),
            ..State::default()
        })
    };
    let start_s = beginning();
    let steady = |minute| since(0, 0, minute);
    let restarts = |minute| since(1, if minute < 200 { 0 } else { 200 }, minute);
    let goes = |minute| (minute < 250).then(|| since(2, 0, minute))?;
    let comes = |minute| {
        let mut state = (minute >= 150).then(|| since(3, 150, minute))??;
        state.start_time_s = (start_s + 149 * 60) as f64;
        Some(state)
    };
    let silent = |minute| (!(100..130).contains(&minute)).then(|| since(4, 0, minute))?;
    // At once it has counted more than before.
    let hastens = |minute| {
        let first = if minute < 200 { 0 } else { 200 };
        let mut state = since(5, first, minute)?;
        state.start_time_s = (start_s + first * 60) as f64 - 5.5;
        if first > 0 {
            state.copies.extend_from_slice(&copies[5][..200]);
        }
        Some(state)
    };
    let newborn = |minute| (minute >= 391).then(|| since(6, 391, minute))?;
    let all: [Told; 7] = [
        Box::new(steady),
        Box::new(restarts),
        Box::new(goes),
        Box::new(comes),
        Box::new(silent),
        Box::new(hastens),
        Box::new(newborn),
    ];
    let names = (0..7).map(|node| format!("node-{node}:9469"));
    let nodes: Vec<(String, Told)> = names.zip(all).collect();
    let store = engine.remembering(|per_second| samples(start_s, MINUTES, &nodes, per_second));
    // Some seconds after the scrapes of the minutes 30 and 390.
    let ask_at = |minute: u64, what: &[&str]| {
        let at = (start_s + minute * 60 + 5).to_string();
        let source = ["--prometheus", &store.url, "--at", &at, "--range", "6h"];
        cmt([&["fleet"], what, &source, &["--json"]].concat()).json()
    };
    let ask = |what: &[&str]| ask_at(390, what);
    let report = ask(&[]);
    assert_eq!(report["counts"], "exact");
    let found = &report["nodes"];
    assert_eq!(
        (&found["reporting"], &found["broken"]),
        (&6.into(), &4.into()),
        "{report:#}"
    );
    let ranges = [31..391, 31..391, 31..250, 150..391, 31..391, 31..391];
    let mut truth: Vec<Copy> = copies
        .iter()
        .zip(ranges)
        .flat_map(|(copies, range)| copies[range].to_vec())
        .collect();
    truth.extend_from_slice(&copies[5][..200]);
    check(&report, &truth, 4.0);
    let seconds: f64 = truth.iter().map(|copy| copy.latency_ns as f64 / 2e9).sum();
    let found = report["recoverable"]["seconds"].as_f64().expect("seconds");
    assert!((found - seconds).abs() < 1e-3, "{found}, truly {seconds}");
    // Younger than the last of the moments at which a long range is looked at, which are 90 s apart.
    let found = &ask_at(391, &[])["nodes"];
    assert_eq!(
        (&found["reporting"], &found["broken"]),
        (&7.into(), &5.into()),
        "{found:#}"
    );
    let savings = ask(&["savings"]);
    let found = savings["measured"]["saved_s"].as_f64().expect("seconds");
    assert!((found - seconds).abs() < 1e-3, "{found}, truly {seconds}");
}

#[test]
fn hours_are_counted_exactly() {
    let packages = [("prometheus", "prometheus"), ("promtool", "prometheus")];
    let Some(_turn) = require_packages(Rung::Fleet, &packages) else {
        return;
    };
    hours(Engine::Prometheus);
}
