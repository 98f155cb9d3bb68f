//! What nodes counted that came, went or restarted within the range: from every sample of theirs.
//!
//! A counter that restarted begins at zero. A node of which nothing was known when the range began counts from its first
//! sample, unless it says (`process_start_time_seconds`) that it started within the range: then from zero.

use std::collections::BTreeMap;

use super::latencies::Latencies;
use super::nodes::{PRESENCE, START_TIME};
use super::prometheus::{Labels, Series};

const NAME: &str = "__name__";
const WORKLOAD: &str = "workload";
/// What went by names that a node gave up counts under this one.
const FORMER: &str = "former";
/// Leaves that out.
pub const NOT_FORMER: &str = "workload!=\"former\"";

/// What all those nodes' series grew by.
#[derive(Clone, Debug, Default)]
pub struct Growth {
    /// Counters, by all their labels.
    pub counters: Vec<(Labels, f64)>,
    /// Native histograms.
    pub histograms: Vec<(Labels, Latencies)>,
}

/// What is known of one node.
#[derive(Debug, Default)]
struct Node {
    /// When it was scraped first.
    first_s: f64,
    /// After which the counters had begun anew.
    restarts_s: Vec<f64>,
    /// Whether its counters were zero, or known, when the range began.
    known: bool,
    /// When it was scraped.
    scraped_s: Vec<f64>,
}

impl Node {
    /// Then a series without a sample was away, and counts from zero since: the name of a workload that was given up and taken
    /// again.
    fn was_scraped_between(&self, earlier_s: f64, later_s: f64) -> bool {
        let next = self.scraped_s.partition_point(|at| *at <= earlier_s);
        self.scraped_s.get(next).is_some_and(|at| *at < later_s)
    }
}

impl Growth {
    /// The growth of all series after `start_s`; samples until then say what they began with.
    pub fn of(all: Vec<Series>, start_s: f64) -> Self {
        let nodes = nodes(&all, start_s);
        let unknown = Node::default();
        let mut growth = Self::default();
        for series in all {
            let node = nodes.get(&key(&series.labels)).unwrap_or(&unknown);
            if series
                .labels
                .get(NAME)
                .is_some_and(|name| name == START_TIME)
            {
                continue;
            }
            // That grew by whole counters, whose growth is known from their own samples.
            if series.labels.get(WORKLOAD).is_some_and(|of| of == FORMER) {
                continue;
            }
            if !series.values.is_empty() {
                let grown = grown(&series.values, node, start_s);
                growth.counters.push((series.labels.clone(), grown));
            }
            if !series.histograms.is_empty() {
                let mut grown = Latencies::default();
                for (from, to) in spans(&series.histograms, node, start_s) {
                    let later = &series.histograms[to].1;
                    match from {
                        Some(at) => grown.add(&later.since(&series.histograms[at].1), 1.0),
                        None => grown.add(later, 1.0),
                    }
                }
                growth.histograms.push((series.labels, grown));
            }
        }
        growth
    }
}

/// The labels of the target itself. Two targets of one address and different jobs are two nodes.
fn key(labels: &Labels) -> (String, String) {
    let label = |name: &str| labels.get(name).cloned().unwrap_or_default();
    (label("job"), label("instance"))
}

fn nodes(all: &[Series], start_s: f64) -> BTreeMap<(String, String), Node> {
    let mut nodes: BTreeMap<_, Node> = BTreeMap::new();
    for series in all {
        let Some(&(first_s, first)) = series.values.first() else {
            continue;
        };
        let node = nodes.entry(key(&series.labels)).or_default();
        match series.labels.get(NAME).map(String::as_str) {
            Some(PRESENCE) => {
                node.first_s = first_s;
                node.scraped_s = series.values.iter().map(|(at, _)| *at).collect();
                node.known |= first_s <= start_s;
                let falls = series.values.windows(2).filter(|two| two[1].1 < two[0].1);
                node.restarts_s.extend(falls.map(|two| two[1].0));
            }
            Some(START_TIME) => {
                node.known |= first >= start_s;
                let changes = series.values.windows(2).filter(|two| two[1].1 != two[0].1);
                node.restarts_s.extend(changes.map(|two| two[1].0));
            }
            _ => {}
        }
    }
    nodes
}

fn grown(samples: &[(f64, f64)], node: &Node, start_s: f64) -> f64 {
    let sum: f64 = spans(samples, node, start_s)
        .map(|(from, to)| samples[to].1 - from.map_or(0.0, |at| samples[at].1))
        .sum();
    sum.max(0.0)
}

/// Pairs of samples whose differences make up the growth; without the first, the growth is from zero.
fn spans<'a, T>(
    samples: &'a [(f64, T)],
    node: &'a Node,
    start_s: f64,
) -> impl Iterator<Item = (Option<usize>, usize)> + 'a {
    let before = samples.iter().rposition(|(at, _)| *at <= start_s);
    let from_zero = node.known || samples[0].0 > node.first_s;
    let mut from = match before {
        None if from_zero => None,
        None => Some(0),
        known => known,
    };
    let first = before.unwrap_or(0);
    let mut spans = Vec::new();
    for at in first + 1..samples.len() {
        let restarted = node
            .restarts_s
            .iter()
            .any(|restart| samples[at - 1].0 < *restart && *restart <= samples[at].0);
        if restarted || node.was_scraped_between(samples[at - 1].0, samples[at].0) {
            spans.push((from, at - 1));
            from = None;
        }
    }
    spans.push((from, samples.len() - 1));
    spans.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, values: &[(f64, f64)]) -> Series {
        let labels = [(NAME, name), ("job", "cmt"), ("instance", "a")];
        Series {
            labels: labels.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            values: values.to_vec(),
            histograms: Vec::new(),
        }
    }

    fn grown(all: Vec<Series>) -> f64 {
        let growth = Growth::of(all, 100.0);
        let copies = |labels: &Labels| labels[NAME] == "copies";
        let found = growth.counters.iter().find(|(labels, _)| copies(labels));
        found.expect("the counter").1
    }

    #[test]
    fn a_restart_begins_at_zero() {
        let presence = [(95.0, 50.0), (110.0, 60.0), (125.0, 5.0), (140.0, 9.0)];
        let copies = [(95.0, 10.0), (110.0, 13.0), (125.0, 20.0), (140.0, 22.0)];
        let all = vec![series(PRESENCE, &presence), series("copies", &copies)];
        assert_eq!(grown(all), 3.0 + 22.0);
    }

    #[test]
    fn a_name_that_was_given_up_and_taken_again_begins_at_zero() {
        let presence = [(95.0, 50.0), (110.0, 60.0), (125.0, 65.0), (140.0, 70.0)];
        let copies = [(95.0, 10.0), (110.0, 13.0), (140.0, 15.0)];
        let mut former = series("copies", &[(95.0, 7.0), (125.0, 20.0)]);
        former.labels.insert(WORKLOAD.into(), FORMER.into());
        let all = vec![
            series(PRESENCE, &presence),
            series("copies", &copies),
            former,
        ];
        assert_eq!(Growth::of(all.clone(), 100.0).counters.len(), 2);
        assert_eq!(grown(all), 3.0 + 15.0);
    }

    #[test]
    fn a_node_that_was_unknown_counts_from_its_first_sample_or_its_start() {
        let presence = series(PRESENCE, &[(110.0, 60.0), (125.0, 65.0)]);
        let copies = series("copies", &[(110.0, 1000.0), (125.0, 1007.0)]);
        assert_eq!(grown(vec![presence.clone(), copies.clone()]), 7.0);
        let started = series(START_TIME, &[(110.0, 105.0), (125.0, 105.0)]);
        assert_eq!(grown(vec![presence.clone(), copies, started]), 1007.0);
        // A series that appears later than its node is new.
        let late = series("copies", &[(125.0, 4.0)]);
        assert_eq!(grown(vec![presence, late]), 4.0);
    }
}
