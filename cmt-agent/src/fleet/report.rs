//! What a fleet did in a range: the figures behind the text, the page and `cmt/fleet/1`.

use std::collections::BTreeMap;
use std::thread;
use std::time::Instant;

use anyhow::bail;
use serde::Serialize;

use super::change::{Change, Classes, Sums};
use super::latencies::Latencies;
use super::prometheus::{Error, Prometheus};
use super::query::Window;
use super::time::{self, DAY_S};

/// The histogram of all copies.
const LATENCY: &str = "cmt_copy_duration_seconds";
/// What attach would have given back.
pub(super) const RECOVERABLE: &str = "cmt_copy_recoverable_seconds_total";

/// The report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `cmt/fleet/1`.
    pub schema: &'static str,
    /// Beginning of the range.
    pub start: String,
    /// Its end.
    pub end: String,
    /// Its length.
    pub range_s: f64,
    /// `exact`, `partly extrapolated` (nodes that came, went or restarted), `extrapolated`, or `recorded` by rules as rates.
    pub counts: &'static str,
    /// `native`, `classic` or `both`: where the latencies come from.
    pub histograms: &'static str,
    /// Who reported.
    pub nodes: Nodes,
    /// By direction and memory.
    pub copies: Vec<Copies>,
    /// By direction, memory and size.
    pub classes: Vec<Class>,
    /// By direction and size, all memory together, to draw.
    pub latencies: Vec<Drawn>,
    /// Time inside pageable copies.
    pub pageable: Time,
    /// Of that, what attach would have given back; null where no node estimates it.
    pub recoverable: Option<Time>,
    /// What the lists of the worst are ordered by: `recoverable` or `pageable` seconds.
    pub worst_by: &'static str,
    /// Most first.
    pub worst_workloads: Vec<Worst>,
    /// Most first.
    pub worst_nodes: Vec<Worst>,
    /// Copies that could not be counted.
    pub lost: Vec<Lost>,
    /// Questions that Prometheus was asked.
    pub queries: u32,
    /// How long all answers took.
    pub took_s: f64,
}

/// Who reported.
#[derive(Clone, Debug, Serialize)]
pub struct Nodes {
    /// Scraped at least once.
    pub reporting: u64,
    /// Of those: came, went or restarted within the range.
    pub broken: u64,
    /// Of those: could not count something; the worst `--top` of them at most.
    pub lost: Vec<Worst>,
}

/// Copies of one direction and kind of memory.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Copies {
    /// HtoD, DtoH …
    pub direction: String,
    /// pageable, pinned …
    pub memory: String,
    /// All calls.
    pub calls: u64,
    /// Those that returned an error.
    pub errors: u64,
    /// Bytes copied.
    pub bytes: u64,
    /// The same as 1e9 bytes a day, at the range's pace.
    pub gb_per_day: f64,
    /// Time inside the calls.
    pub seconds: f64,
    /// Time in waits for them.
    pub wait_seconds: f64,
}

/// Successful copies of one class.
#[derive(Clone, Debug, Serialize)]
pub struct Class {
    /// HtoD, DtoH …
    pub direction: String,
    /// pageable, pinned …
    pub memory: String,
    /// From that size up to four times as much; null for the classes that a node had no room to tell apart.
    pub size_class_bytes: Option<u64>,
    /// Calls.
    pub calls: u64,
    /// Time inside the calls.
    pub seconds: f64,
    /// Median latency, within its bucket.
    pub p50_ns: u64,
    /// 90 % stay below.
    pub p90_ns: u64,
    /// 99 % stay below.
    pub p99_ns: u64,
}

/// A histogram to draw.
#[derive(Clone, Debug, Serialize)]
pub struct Drawn {
    /// HtoD, DtoH …
    pub direction: String,
    /// From that size up to four times as much; null for all sizes.
    pub size_class_bytes: Option<u64>,
    /// Lower bound and upper bound in nanoseconds, and calls.
    pub histogram: Vec<(u64, u64, u64)>,
}

/// Time by which copies held their callers up.
#[derive(Clone, Debug, Serialize)]
pub struct Time {
    /// In the range.
    pub seconds: f64,
    /// In an hour of it.
    pub seconds_per_hour: f64,
    /// As many GPUs stood still all the time, if one does while a thread of its process copies.
    pub gpus: f64,
}

/// One of the worst.
#[derive(Clone, Debug, Serialize)]
pub struct Worst {
    /// A workload or a node.
    pub name: String,
    /// How much of it.
    pub value: f64,
}

/// Copies that could not be counted, by cause.
#[derive(Clone, Debug, Serialize)]
pub struct Lost {
    /// Why.
    pub reason: String,
    /// How many.
    pub count: u64,
}

/// Latencies by class, and where they come from.
pub(super) struct Asked {
    pub(super) classes: Classes,
    pub(super) kind: &'static str,
}

/// Asks for the latencies: native ones first, classic ones of the nodes that have none.
pub(super) fn latencies(change: &Change<'_>, by: &[&str]) -> Result<Asked, Error> {
    let [mut classes, classic] = match &change.recorded {
        Some(recorded) => recorded.latencies(by)?,
        None => {
            let native = change.natives(LATENCY, by)?;
            let classic = change.classics(LATENCY, by, !native.is_empty())?;
            [native, classic]
        }
    };
    let kind = match (!classes.is_empty(), classic.is_empty()) {
        (true, true) => "native",
        (true, false) => "both",
        (false, _) => "classic",
    };
    for (key, latencies) in classic {
        classes.entry(key).or_default().add(&latencies, 1.0);
    }
    Ok(Asked { classes, kind })
}

/// The change of one range.
///
/// # Errors
/// When Prometheus does not answer, or knows no node there.
pub(super) fn change<'a>(
    prometheus: &'a Prometheus,
    window: Window,
    matchers: &'a str,
    exact: bool,
) -> anyhow::Result<Change<'a>> {
    let change = Change::new(prometheus, window, matchers, exact)?;
    if change.nodes.reporting == 0 {
        let matching = match matchers {
            "" => String::new(),
            _ => format!(" and matches {matchers}"),
        };
        bail!(
            "no node reports cmt_… from {} to {}{matching}; is cmt serve scraped? See docs/fleet.md",
            time::shown(window.start_s),
            time::shown(window.end_s)
        );
    }
    Ok(change)
}

impl Report {
    /// Asks for everything, several questions at a time.
    ///
    /// # Errors
    /// When Prometheus does not answer, or knows no node there.
    pub fn ask(
        prometheus: &Prometheus,
        window: Window,
        matchers: &str,
        top: usize,
        exact: bool,
    ) -> anyhow::Result<Self> {
        let started = Instant::now();
        let change = change(prometheus, window, matchers, exact)?;
        let asked = thread::scope(|scope| -> Result<_, Error> {
            let copies = scope.spawn(|| copies(&change));
            let worst = scope.spawn(|| worst(&change, top));
            let lost = scope.spawn(|| lost(&change, top));
            let latencies = latencies(&change, &["direction", "memory", "size_class"]);
            Ok((latencies?, joined(copies)?, joined(worst)?, joined(lost)?))
        });
        let (asked, copies, worst, (lost, nodes_lost)) = asked?;
        let per_hour = |seconds: f64| Time {
            seconds,
            seconds_per_hour: seconds / window.seconds() * 3600.0,
            gpus: seconds / window.seconds(),
        };
        let pageable = copies.iter().filter(|copies| copies.memory == "pageable");
        Ok(Self {
            schema: "cmt/fleet/1",
            start: time::shown(window.start_s),
            end: time::shown(window.end_s),
            range_s: window.seconds(),
            counts: change.exactness(),
            histograms: asked.kind,
            nodes: Nodes {
                reporting: change.nodes.reporting,
                broken: change.nodes.broken.len() as u64,
                lost: nodes_lost,
            },
            pageable: per_hour(pageable.map(|copies| copies.seconds).sum()),
            copies,
            classes: asked.classes.iter().filter_map(class).collect(),
            latencies: drawn(&asked.classes),
            recoverable: worst.recoverable.map(per_hour),
            worst_by: worst.by,
            worst_workloads: worst.workloads,
            worst_nodes: worst.nodes,
            lost,
            queries: prometheus.asked(),
            took_s: started.elapsed().as_secs_f64(),
        })
    }
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn copies(change: &Change<'_>) -> Result<Vec<Copies>, Error> {
    let mut all: BTreeMap<Vec<String>, Copies> = BTreeMap::new();
    type Set = fn(&mut Copies, f64);
    let counters: [(&str, Set); 5] = [
        ("calls", |copies, value| copies.calls = value.round() as u64),
        ("errors", |copies, value| {
            copies.errors = value.round() as u64
        }),
        ("bytes", |copies, value| copies.bytes = value.round() as u64),
        ("seconds", |copies, value| copies.seconds = value),
        ("wait_seconds", |copies, value| copies.wait_seconds = value),
    ];
    for (name, set) in counters {
        for (key, value) in change.copies(name)? {
            set(all.entry(key).or_default(), value);
        }
    }
    Ok(all
        .into_iter()
        .filter(|(_, copies)| copies.calls > 0)
        .map(|(key, copies)| Copies {
            direction: key[0].clone(),
            memory: key[1].clone(),
            gb_per_day: copies.bytes as f64 / 1e9 / change.window.seconds() * DAY_S,
            ..copies
        })
        .collect())
}

struct Ranking {
    recoverable: Option<f64>,
    by: &'static str,
    workloads: Vec<Worst>,
    nodes: Vec<Worst>,
}

fn worst(change: &Change<'_>, top: usize) -> Result<Ranking, Error> {
    let recoverable = change.sums(RECOVERABLE, &[])?.values().next().copied();
    let (by, name, matcher) = match recoverable {
        Some(seconds) if seconds > 0.0 => ("recoverable", RECOVERABLE, ""),
        _ => ("pageable", "cmt_copy_seconds_total", "memory=\"pageable\""),
    };
    // `other` is what a node had no room to tell apart, `former` what went by names that it gave up: no workload that one could
    // attach to.
    let some = match matcher {
        "" => "workload!=\"other\",workload!=\"former\"".to_owned(),
        _ => format!("{matcher},workload!=\"other\",workload!=\"former\""),
    };
    Ok(Ranking {
        recoverable,
        by,
        workloads: ranked(change.top(name, &some, &["workload"], top)?),
        nodes: ranked(change.top(name, matcher, &["instance"], top)?),
    })
}

fn ranked(found: Vec<(Vec<String>, f64)>) -> Vec<Worst> {
    found
        .into_iter()
        .map(|(name, value)| Worst {
            name: name.join(" "),
            value,
        })
        .collect()
}

fn lost(change: &Change<'_>, top: usize) -> Result<(Vec<Lost>, Vec<Worst>), Error> {
    let reasons: Sums = change.sums("cmt_lost_total", &["reason"])?;
    let lost: Vec<Lost> = reasons
        .into_iter()
        .map(|(reason, count)| Lost {
            reason: reason.join(""),
            count: count.round() as u64,
        })
        .filter(|lost| lost.count > 0)
        .collect();
    if lost.is_empty() {
        return Ok((lost, Vec::new()));
    }
    let nodes = ranked(change.top("cmt_lost_total", "", &["instance"], top)?);
    Ok((lost, nodes))
}

/// A class of the report; none without calls.
fn class((key, latencies): (&Vec<String>, &Latencies)) -> Option<Class> {
    Some(Class {
        direction: key[0].clone(),
        memory: key[1].clone(),
        size_class_bytes: key[2].parse().ok(),
        calls: latencies.count().round() as u64,
        seconds: latencies.sum_s,
        p50_ns: latencies.quantile(0.5)?,
        p90_ns: latencies.quantile(0.9)?,
        p99_ns: latencies.quantile(0.99)?,
    })
}

/// Histograms of each direction, and of each of its sizes.
fn drawn(classes: &Classes) -> Vec<Drawn> {
    let mut sums: BTreeMap<(&str, Option<u64>), Latencies> = BTreeMap::new();
    for (key, latencies) in classes {
        let mut add = |size| sums.entry((&key[0], size)).or_default().add(latencies, 1.0);
        add(None);
        if let Ok(size) = key[2].parse() {
            add(Some(size));
        }
    }
    sums.into_iter()
        .map(|((direction, size_class_bytes), latencies)| Drawn {
            direction: direction.to_owned(),
            size_class_bytes,
            histogram: latencies.bars(),
        })
        .collect()
}
