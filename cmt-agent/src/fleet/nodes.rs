//! Which nodes report, and which of them counted through the whole range without a break.
//!
//! What a steady node counted is the difference of its counters at both ends. One that came, went or restarted in between is
//! looked at sample by sample (`samples`).

use super::prometheus::{Error, Labels, Prometheus};
use super::query::{Window, select};

/// A counter that every node has exactly once.
pub const PRESENCE: &str = "cmt_probe_calls_total";

/// The nodes of a range.
#[derive(Clone, Debug, Default)]
pub struct Nodes {
    /// How many were scraped at least once.
    pub reporting: u64,
    /// Those of which the range saw no beginning, no end, or a restart.
    pub broken: Vec<Broken>,
}

/// A node that did not count through the whole range.
#[derive(Clone, Debug)]
pub struct Broken {
    /// Its address, as Prometheus scrapes it.
    pub instance: String,
    /// Samples of each of its series, about.
    pub scrapes: f64,
}

impl Nodes {
    /// Asks which nodes there are.
    pub fn find(prometheus: &Prometheus, window: &Window, matchers: &str) -> Result<Self, Error> {
        let presence = select(PRESENCE, &[matchers]);
        let range = window.moments();
        let length = window.length();
        let all = prometheus.instant(
            &format!("count(count_over_time({presence}{range}))"),
            window.end_s,
        )?;
        let broken = prometheus.instant(
            &format!(
                "count_over_time({presence}{range}) unless ({presence} and {presence} offset {length} unless \
                 (resets({presence}{range}) > 0))"
            ),
            window.end_s,
        )?;
        let instance = |labels: &Labels| labels.get("instance").cloned().unwrap_or_default();
        Ok(Self {
            reporting: all.first().map_or(0, |sample| sample.value as u64),
            broken: broken
                .iter()
                .map(|sample| Broken {
                    instance: instance(&sample.labels),
                    scrapes: sample.value,
                })
                .collect(),
        })
    }
}
