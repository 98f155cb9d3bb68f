//! How much counters grew within a range, over a whole fleet: exactly where the data allows it.
//!
//! `increase()` extrapolates, so it is not used unless there is no other way. Steady nodes' counters are summed by the server
//! at both ends and subtracted here; the others' samples are looked at one by one ([`samples`](super::samples)), as long as
//! they are not too many.

use std::collections::BTreeMap;
use std::thread;

use super::latencies::Latencies;
use super::nodes::{Broken, Nodes};
use super::prometheus::{Error, Labels, Prometheus, Sample};
use super::query::{Window, any_of, select, values};
use super::recorded::Recorded;
use super::samples::{Growth, NOT_FORMER};
use super::time;

/// Series of one node, roughly, to guess how many samples an answer would have.
const SERIES_OF_A_NODE: f64 = 250.0;
/// Samples that are fetched to be looked at, at most: some 50 MB.
const MOST_SAMPLES: f64 = 2e6;
/// Nodes that a matcher names, at most.
const MOST_NAMED: usize = 500;
/// From here on recorded series are used, if there are any.
const MANY_NODES: u64 = 1000;
/// Metrics of which every sample is looked at, and those that are left where the rest is recorded.
const ALL_NAMES: &str = "cmt_.+_(total|seconds|bucket|sum)|process_start_time_seconds";
const FEW_NAMES: &str =
    "cmt_(copy_recoverable_seconds|copy_seconds|lost|probe_calls)_total|process_start_time_seconds";

/// How the counts of nodes were found that came, went or restarted.
#[derive(Clone, Debug)]
enum Breaks {
    /// Sample by sample.
    Counted(Box<Growth>),
    /// By `increase()`, the others exactly.
    Extrapolated,
    /// By `increase()`, as all others.
    AllExtrapolated,
}

/// What Prometheus says of a metric.
#[derive(Debug, Default)]
struct Asked {
    /// Steady nodes' sums at the end.
    later: Vec<Sample>,
    /// And at the beginning.
    earlier: Vec<Sample>,
    /// What the others grew by, where that is extrapolated.
    broken: Vec<Sample>,
}

/// Sums of a group of series, by the values of some labels.
pub type Sums = BTreeMap<Vec<String>, f64>;
/// The same of histograms.
pub type Classes = BTreeMap<Vec<String>, Latencies>;

/// A range, and how its counts are found.
#[derive(Debug)]
pub struct Change<'a> {
    prometheus: &'a Prometheus,
    /// The range.
    pub window: Window,
    matchers: &'a str,
    /// Who reports.
    pub nodes: Nodes,
    breaks: Breaks,
    /// What rules recorded, where that is to be used.
    pub recorded: Option<Recorded<'a>>,
}

impl<'a> Change<'a> {
    /// Finds the nodes of the range, and how to count what they did: of many nodes by what rules recorded, unless all is to be
    /// `exact`.
    pub fn new(
        prometheus: &'a Prometheus,
        window: Window,
        matchers: &'a str,
        exact: bool,
    ) -> Result<Self, Error> {
        let nodes = Nodes::find(prometheus, &window, matchers)?;
        let recorded = Recorded {
            prometheus,
            window,
            matchers,
        };
        let is_large = nodes.reporting > MANY_NODES && !exact;
        let recorded = (is_large && recorded.exist()?).then_some(recorded);
        if is_large && recorded.is_none() {
            eprintln!(
                "cmt: warning: nothing is recorded from {} on, so the series of {} nodes are added up now; docs/fleet.md \
                 says which rules make that fast",
                time::shown(window.start_s),
                nodes.reporting
            );
        }
        let samples: f64 = nodes.broken.iter().map(|node| node.scrapes).sum();
        let breaks = if nodes.broken.is_empty() {
            Breaks::Counted(Box::default())
        } else if samples * SERIES_OF_A_NODE <= MOST_SAMPLES && nodes.broken.len() <= MOST_NAMED {
            let named = named("=~", &nodes.broken);
            let names = match recorded {
                Some(_) => FEW_NAMES,
                None => ALL_NAMES,
            };
            let every = select(names, &[matchers, &named]);
            // All samples, however long the range: the guess above says that they are few.
            let range = window.samples();
            let series = prometheus.samples(&format!("{every}{range}"), window.end_s)?;
            Breaks::Counted(Box::new(Growth::of(series, window.start_s)))
        } else if nodes.broken.len() <= MOST_NAMED {
            Breaks::Extrapolated
        } else {
            Breaks::AllExtrapolated
        };
        Ok(Self {
            prometheus,
            window,
            matchers,
            nodes,
            breaks,
            recorded,
        })
    }

    /// How far the counts are exact, in a word for JSON.
    pub fn exactness(&self) -> &'static str {
        match self.breaks {
            _ if self.recorded.is_some() => "recorded",
            Breaks::Counted(_) => "exact",
            Breaks::Extrapolated => "partly extrapolated",
            Breaks::AllExtrapolated => "extrapolated",
        }
    }

    /// What `cmt_copy_NAME_total` grew by, by direction and memory.
    pub fn copies(&self, name: &str) -> Result<Sums, Error> {
        let by = ["direction", "memory"];
        match &self.recorded {
            Some(recorded) => recorded.sums(name, &by),
            None => self.sums(&format!("cmt_copy_{name}_total"), &by),
        }
    }

    /// What counters grew by, as sums by labels.
    pub fn sums(&self, name: &str, by: &[&str]) -> Result<Sums, Error> {
        let mut sums = self.asked(name, by, "")?;
        for (labels, grown) in self.counted(|growth| &growth.counters) {
            if is_named(labels, name) {
                *sums.entry(values(labels, by)).or_default() += grown;
            }
        }
        sums.values_mut().for_each(|sum| *sum = sum.max(0.0));
        Ok(sums)
    }

    /// The same of native histograms; empty where none are stored.
    pub fn natives(&self, name: &str, by: &[&str]) -> Result<Classes, Error> {
        let asked = self.expressions(name, by, "")?;
        let mut classes = Classes::new();
        for sample in asked.later {
            if let Some(histogram) = sample.histogram {
                classes.insert(values(&sample.labels, by), histogram);
            }
        }
        for sample in asked.earlier {
            let class = classes.get_mut(&values(&sample.labels, by));
            if let Some((class, earlier)) = class.zip(sample.histogram) {
                *class = class.since(&earlier);
            }
        }
        for sample in asked.broken {
            if let Some(histogram) = sample.histogram {
                let class = classes.entry(values(&sample.labels, by)).or_default();
                class.add(&histogram, 1.0);
            }
        }
        for (labels, grown) in self.counted(|growth| &growth.histograms) {
            if is_named(labels, name) {
                let class = classes.entry(values(labels, by)).or_default();
                class.add(grown, 1.0);
            }
        }
        classes.retain(|_, class| class.count() > 0.0);
        Ok(classes)
    }

    /// The same of classic histograms, but of nodes that have no native ones.
    pub fn classics(&self, name: &str, by: &[&str], beside_native: bool) -> Result<Classes, Error> {
        let unless = match beside_native {
            true => format!(
                " unless on (job, instance) {} @ {:.3}",
                select(name, &[self.matchers]),
                self.window.end_s
            ),
            false => String::new(),
        };
        let mut with_le = by.to_vec();
        with_le.push("le");
        let native_nodes: Vec<_> = self
            .counted(|growth| &growth.histograms)
            .iter()
            .map(|(labels, _)| values(labels, &["job", "instance"]))
            .collect();
        let is_needed = !beside_native || self.has_only_classic(name, &unless)?;
        let mut found: [Sums; 2] = Default::default();
        for (sums, (suffix, by)) in found
            .iter_mut()
            .zip([("_bucket", with_le.as_slice()), ("_sum", by)])
        {
            let name = format!("{name}{suffix}");
            if is_needed {
                *sums = self.asked(&name, by, &unless)?;
            }
            for (labels, grown) in self.counted(|growth| &growth.counters) {
                let is_native = native_nodes.contains(&values(labels, &["job", "instance"]));
                if is_named(labels, &name) && !is_native {
                    *sums.entry(values(labels, by)).or_default() += grown;
                }
            }
        }
        let [buckets, seconds] = found;
        Ok(Latencies::by_class(&buckets, &seconds))
    }

    /// The `most` groups of labels of which a counter grew most.
    pub fn top(
        &self,
        name: &str,
        matcher: &str,
        by: &[&str],
        most: usize,
    ) -> Result<Vec<(Vec<String>, f64)>, Error> {
        let labels = by.join(", ");
        let length = self.window.length();
        let others = match self.breaks {
            Breaks::AllExtrapolated => String::new(),
            _ => named("!~", &self.nodes.broken),
        };
        let selected = select(name, &[self.matchers, matcher, &others]);
        let sum = format!("sum by ({labels}) ({selected})");
        let grown = match self.breaks {
            Breaks::AllExtrapolated => {
                let selected = select(name, &[self.matchers, matcher, NOT_FORMER]);
                format!("sum by ({labels}) (increase({selected}[{length}]))")
            }
            _ => format!("{sum} - (sum by ({labels}) ({selected} offset {length}) or 0 * {sum})"),
        };
        let mut found = Sums::new();
        for sample in self
            .prometheus
            .instant(&format!("topk({most}, {grown})"), self.window.end_s)?
        {
            found.insert(values(&sample.labels, by), sample.value);
        }
        if let Breaks::Extrapolated = self.breaks {
            let broken = select(
                name,
                &[
                    self.matchers,
                    matcher,
                    NOT_FORMER,
                    &named("=~", &self.nodes.broken),
                ],
            );
            let query = format!("topk({most}, sum by ({labels}) (increase({broken}[{length}])))");
            for sample in self.prometheus.instant(&query, self.window.end_s)? {
                *found.entry(values(&sample.labels, by)).or_default() += sample.value;
            }
        }
        for (labels, grown) in self.counted(|growth| &growth.counters) {
            if is_named(labels, name) && matches(labels, matcher) {
                *found.entry(values(labels, by)).or_default() += grown;
            }
        }
        let mut found: Vec<_> = found
            .into_iter()
            .filter(|(_, grown)| *grown > 0.0)
            .collect();
        found.sort_by(|one, other| other.1.total_cmp(&one.1));
        found.truncate(most);
        Ok(found)
    }

    fn counted<T>(&self, list: impl Fn(&Growth) -> &Vec<T>) -> &[T] {
        match &self.breaks {
            Breaks::Counted(growth) => list(growth),
            _ => &[],
        }
    }

    /// Whether a node that has a classic histogram has no native one.
    fn has_only_classic(&self, name: &str, unless: &str) -> Result<bool, Error> {
        let counts = select(&format!("{name}_count"), &[self.matchers]);
        let query = format!("count({counts}{unless})");
        let found = self.prometheus.instant(&query, self.window.end_s)?;
        Ok(!found.is_empty())
    }

    /// What Prometheus says of counters' growth.
    fn asked(&self, name: &str, by: &[&str], unless: &str) -> Result<Sums, Error> {
        let mut sums = Sums::new();
        let asked = self.expressions(name, by, unless)?;
        for (share, samples) in [
            (1.0, asked.later),
            (-1.0, asked.earlier),
            (1.0, asked.broken),
        ] {
            for sample in samples {
                *sums.entry(values(&sample.labels, by)).or_default() += share * sample.value;
            }
        }
        Ok(sums)
    }

    /// Asks for the sums of a metric.
    fn expressions(&self, name: &str, by: &[&str], unless: &str) -> Result<Asked, Error> {
        let labels = by.join(", ");
        let range = format!("[{}]", self.window.length());
        let increase = |matcher: &str| {
            let selected = select(name, &[self.matchers, matcher, NOT_FORMER]);
            let query = format!("sum by ({labels}) (increase({selected}{range}){unless})");
            self.prometheus.instant(&query, self.window.end_s)
        };
        if let Breaks::AllExtrapolated = self.breaks {
            return Ok(Asked {
                broken: increase("")?,
                ..Asked::default()
            });
        }
        let others = named("!~", &self.nodes.broken);
        let selected = select(name, &[self.matchers, &others]);
        let query = format!("sum by ({labels}) ({selected}{unless})");
        let at = |time_s: f64| self.prometheus.instant(&query, time_s);
        let (later, earlier) = thread::scope(|scope| {
            let later = scope.spawn(|| at(self.window.end_s));
            let earlier = at(self.window.start_s);
            (later.join(), earlier)
        });
        let later = later.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let broken = match self.breaks {
            Breaks::Extrapolated => increase(&named("=~", &self.nodes.broken))?,
            _ => Vec::new(),
        };
        Ok(Asked {
            later,
            earlier: earlier?,
            broken,
        })
    }
}

fn named(operator: &str, nodes: &[Broken]) -> String {
    let names = nodes.iter().map(|node| node.instance.as_str());
    any_of("instance", operator, names)
}

fn is_named(labels: &Labels, name: &str) -> bool {
    labels.get("__name__").is_some_and(|own| own == name)
}

/// Whether labels fit matchers of the forms `a="b"` and `a!="b"`.
fn matches(labels: &Labels, matchers: &str) -> bool {
    let of = |label: &str| labels.get(label).map_or("", String::as_str);
    matchers.split(',').all(|matcher| {
        let value = |rest: &str| rest.trim_end_matches('"').to_owned();
        match (matcher.split_once("!=\""), matcher.split_once("=\"")) {
            (Some((label, rest)), _) => of(label) != value(rest),
            (None, Some((label, rest))) => of(label) == value(rest),
            (None, None) => true,
        }
    })
}
