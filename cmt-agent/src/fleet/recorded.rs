//! The series that recording rules keep of a large fleet (`examples/prometheus/rules.yml`): sums without single nodes, so that a
//! question takes the same time however many nodes there are. They are rates, so what comes from them is not exact.

use super::change::{Classes, Sums};
use super::latencies::Latencies;
use super::prometheus::{Error, Prometheus};
use super::query::{Window, select, values};

/// The rules' interval.
const INTERVAL_S: f64 = 60.0;
/// Longer ranges are read at this many moments.
const MOMENTS: f64 = 240.0;

/// The recorded series of a range.
#[derive(Clone, Copy, Debug)]
pub struct Recorded<'a> {
    /// Where to ask.
    pub prometheus: &'a Prometheus,
    /// About what time.
    pub window: Window,
    /// Only series with these labels; those of single nodes they do not have.
    pub matchers: &'a str,
}

impl Recorded<'_> {
    /// Whether they are there from the beginning of the range to its end.
    pub fn exist(&self) -> Result<bool, Error> {
        let all = select(
            "cmt:copy_duration_seconds(_bucket)?:rate5m",
            &[self.matchers],
        );
        let query = format!("count({all})");
        let at = |time_s: f64| self.prometheus.instant(&query, time_s);
        // Rules begin with the data: the first rate takes two scrapes, and some.
        let early_s = self.window.start_s + 2.0 * INTERVAL_S;
        Ok(!at(self.window.end_s)?.is_empty() && !at(early_s)?.is_empty())
    }

    /// The growth of `cmt_copy_NAME_total`.
    pub fn sums(&self, name: &str, by: &[&str]) -> Result<Sums, Error> {
        self.grown(&format!("cmt:copy_{name}:rate5m"), by)
    }

    /// The growth of the histograms; native ones, and classic ones of the nodes that have no others.
    pub fn latencies(&self, by: &[&str]) -> Result<[Classes; 2], Error> {
        let (range, _) = self.range();
        let query = select("cmt:copy_duration_seconds:rate5m", &[self.matchers]);
        let native = self
            .prometheus
            .samples(&format!("{query}{range}"), self.window.end_s)?;
        let moments = native.iter().map(|series| series.histograms.len()).max();
        let share = self.window.seconds() / moments.unwrap_or(1).max(1) as f64;
        let mut natives = Classes::new();
        for series in &native {
            let class = natives.entry(values(&series.labels, by)).or_default();
            for (_, rate) in &series.histograms {
                class.add(rate, share);
            }
        }
        let mut with_le = by.to_vec();
        with_le.push("le");
        let buckets = self.grown("cmt:copy_duration_seconds_bucket:rate5m", &with_le)?;
        let seconds = self.grown("cmt:copy_duration_seconds_sum:rate5m", by)?;
        Ok([natives, Latencies::by_class(&buckets, &seconds)])
    }

    fn grown(&self, name: &str, by: &[&str]) -> Result<Sums, Error> {
        let (range, seconds) = self.range();
        let series = select(name, &[self.matchers]);
        let query = format!(
            "sum by ({}) (sum_over_time({series}{range})) * {seconds} / scalar(count_over_time(vector(1){range}))",
            by.join(", ")
        );
        let samples = self.prometheus.instant(&query, self.window.end_s)?;
        Ok(samples
            .into_iter()
            .map(|sample| (values(&sample.labels, by), sample.value))
            .collect())
    }

    /// A subquery's range, and its length in seconds.
    fn range(&self) -> (String, f64) {
        let seconds = self.window.seconds();
        let step = (seconds / MOMENTS).round().max(INTERVAL_S);
        (format!("[{}:{step}s]", self.window.length()), seconds)
    }
}
