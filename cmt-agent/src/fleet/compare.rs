//! Two ranges, or two groups of nodes, side by side: what a rollout brought, by direction and size class.
//!
//! Compared are copies of pageable and of unknown memory, as after `cmt attach`: all others go to the driver's copier on both
//! sides. Classes hold sizes up to four times their lower bound, so where the mix of sizes changed, so did the means.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde::Serialize;

use super::latencies::Latencies;
use super::prometheus::Prometheus;
use super::query::Window;
use super::report::{Drawn, change, latencies};
use super::table::{histogram, nodes};
use super::time;
use crate::trace::table::time as short_time;
use crate::trace::table::{grouped, size};

/// Histograms that the text shows: of those classes in which most time was spent.
const DRAWN: usize = 2;

/// One side.
#[derive(Clone, Debug)]
pub struct Side {
    /// As the text calls it.
    pub name: &'static str,
    /// When.
    pub window: Window,
    /// Which nodes.
    pub matchers: String,
    /// Not by what rules recorded.
    pub exact: bool,
}

/// The comparison, `cmt/fleet-compare/1`.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// `cmt/fleet-compare/1`.
    pub schema: &'static str,
    /// What is compared with what.
    pub sides: [Described; 2],
    /// By direction and size.
    pub classes: Vec<Row>,
}

/// One side, as asked for and found.
#[derive(Clone, Debug, Serialize)]
pub struct Described {
    /// `before`, `after`, `unpatched`, `patched`.
    pub name: &'static str,
    /// Beginning of its range.
    pub start: String,
    /// End of its range.
    pub end: String,
    /// Labels of its nodes.
    #[serde(rename = "match")]
    pub matchers: String,
    /// Nodes that reported.
    pub nodes: u64,
    /// How far its counts are exact.
    pub counts: &'static str,
}

/// A class on both sides.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// HtoD, DtoH …
    pub direction: String,
    /// From that size up to four times as much.
    pub size_class_bytes: u64,
    /// On each side; null where it saw none.
    pub sides: [Option<Figures>; 2],
    /// Mean of the first by mean of the second.
    pub speedup: Option<f64>,
    /// Drawn in the text.
    #[serde(skip)]
    histograms: [Vec<(u64, u64, u64)>; 2],
}

/// A class on one side.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Calls.
    pub calls: u64,
    /// Time inside them.
    pub seconds: f64,
    /// Their mean.
    pub mean_ns: u64,
    /// Median, within its bucket.
    pub p50_ns: u64,
    /// 99 % stay below.
    pub p99_ns: u64,
}

type Classes = BTreeMap<(String, u64), Latencies>;

impl Comparison {
    /// Asks for both sides.
    ///
    /// # Errors
    /// When Prometheus does not answer, or knows no node on one side.
    pub fn ask(prometheus: &Prometheus, sides: &[Side; 2]) -> anyhow::Result<Self> {
        let [first, second] = sides;
        let (first, before) = ask(prometheus, first)?;
        let (second, after) = ask(prometheus, second)?;
        let keys: BTreeSet<_> = before.keys().chain(after.keys()).cloned().collect();
        let classes = keys
            .into_iter()
            .map(|key| row(key.clone(), [before.get(&key), after.get(&key)]))
            .collect();
        Ok(Self {
            schema: "cmt/fleet-compare/1",
            sides: [first, second],
            classes,
        })
    }

    /// The comparison as text of at most 80 columns.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for side in &self.sides {
            // Writing to a String cannot fail, here and below.
            let _ = writeln!(
                text,
                "{:<9} {}, {} to {}{}{}",
                side.name,
                nodes(side.nodes),
                side.start,
                side.end,
                if side.counts == "exact" { "" } else { ", " },
                side.counts.trim_start_matches("exact"),
            );
        }
        if self.classes.is_empty() {
            return text + "No copies of pageable memory on either side.\n";
        }
        let _ = writeln!(
            text,
            "\n  {:<13} {:<9} {:>13} {:>7} {:>7} {:>7} {:>9}",
            "copies", "", "calls", "p50", "p99", "mean", "speed-up"
        );
        for row in &self.classes {
            let class = format!("{} {}", row.direction, size(row.size_class_bytes as f64));
            for (at, side) in row.sides.iter().enumerate() {
                let name = self.sides[at].name;
                let first = if at == 0 { class.as_str() } else { "" };
                let speedup = match (at, row.speedup) {
                    (1, Some(speedup)) => format!("{speedup:.2}x"),
                    _ => String::new(),
                };
                let line = match side {
                    Some(side) => format!(
                        "  {first:<13} {name:<9} {:>13} {:>7} {:>7} {:>7} {speedup:>9}",
                        grouped(side.calls),
                        short_time(side.p50_ns),
                        short_time(side.p99_ns),
                        short_time(side.mean_ns),
                    ),
                    None => format!("  {first:<13} {name:<9} {:>13}", "none"),
                };
                text = text + line.trim_end() + "\n";
            }
        }
        text + &self.histograms()
    }

    fn histograms(&self) -> String {
        let seconds = |row: &Row| -> f64 {
            let sides = row.sides.iter().flatten();
            sides.map(|side| side.seconds).fold(0.0, f64::max)
        };
        let mut rows: Vec<&Row> = self.classes.iter().collect();
        rows.sort_by(|one, other| seconds(other).total_cmp(&seconds(one)));
        let mut text = String::new();
        for row in rows.into_iter().take(DRAWN) {
            for (side, bars) in self.sides.iter().zip(&row.histograms) {
                text += &histogram(&Drawn {
                    direction: format!("{}: {}", side.name, row.direction),
                    size_class_bytes: Some(row.size_class_bytes),
                    histogram: bars.clone(),
                });
            }
        }
        text
    }
}

fn ask(prometheus: &Prometheus, side: &Side) -> anyhow::Result<(Described, Classes)> {
    let change = change(prometheus, side.window, &side.matchers, side.exact)?;
    let asked = latencies(&change, &["direction", "memory", "size_class"])?;
    let mut classes = Classes::new();
    for (key, latencies) in asked.classes {
        let is_compared = key[1] == "pageable" || key[1] == "unknown";
        if let (true, Ok(size)) = (is_compared, key[2].parse()) {
            let class = classes.entry((key[0].clone(), size)).or_default();
            class.add(&latencies, 1.0);
        }
    }
    let described = Described {
        name: side.name,
        start: time::shown(side.window.start_s),
        end: time::shown(side.window.end_s),
        matchers: side.matchers.clone(),
        nodes: change.nodes.reporting,
        counts: change.exactness(),
    };
    Ok((described, classes))
}

fn row((direction, size_class_bytes): (String, u64), sides: [Option<&Latencies>; 2]) -> Row {
    let figures = sides.map(|side| side.and_then(figures));
    let mean = |at: usize| figures[at].as_ref().map(|side| side.mean_ns as f64);
    Row {
        direction,
        size_class_bytes,
        speedup: mean(0)
            .zip(mean(1))
            .filter(|(_, after)| *after > 0.0)
            .map(|(before, after)| before / after),
        histograms: sides.map(|side| side.map_or_else(Vec::new, Latencies::bars)),
        sides: figures,
    }
}

fn figures(latencies: &Latencies) -> Option<Figures> {
    let calls = latencies.count();
    Some(Figures {
        calls: calls.round() as u64,
        seconds: latencies.sum_s,
        mean_ns: (latencies.sum_s / calls * 1e9).round() as u64,
        p50_ns: latencies.quantile(0.5)?,
        p99_ns: latencies.quantile(0.99)?,
    })
}
