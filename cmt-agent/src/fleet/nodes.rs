//! Which nodes report, and which of them counted through the whole range without a break.
//!
//! What a steady node counted is the difference of its counters at both ends. One that came, went or restarted in between is
//! looked at sample by sample (`samples`).

use super::prometheus::{Error, Labels, Prometheus};
use super::query::{Window, any_of, select};

/// A counter that every node has exactly once.
pub const PRESENCE: &str = "cmt_probe_calls_total";
/// A gauge that changes when it restarts; other targets have it too.
pub const START_TIME: &str = "process_start_time_seconds";

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
        // The second half: what has come since the last of the moments that are looked at.
        let seen = format!("(count_over_time({presence}{range}) or 0 * {presence} + 1)");
        let by_job = prometheus.instant(&format!("count by (job) {seen}"), window.end_s)?;
        let jobs = by_job.iter().filter_map(|sample| sample.labels.get("job"));
        let jobs = any_of("job", "=~", jobs.map(String::as_str));
        let started = select(START_TIME, &[matchers, &jobs]);
        // Thanos never sees a reset (its issue 3644).
        let restarted = format!(
            "resets({presence}{range}) > 0 or max_over_time({started}{range}) > min_over_time({started}{range})"
        );
        let broken = prometheus.instant(
            &format!(
                "{seen} unless ({presence} and {presence} offset {length} unless ({restarted}))"
            ),
            window.end_s,
        )?;
        let instance = |labels: &Labels| labels.get("instance").cloned().unwrap_or_default();
        Ok(Self {
            reporting: by_job.iter().map(|sample| sample.value as u64).sum(),
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
