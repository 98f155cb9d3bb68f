//! Latencies as HdrHistogram writes percentile distributions (`.hgrm`), which its plotter and others read.
//!
//! Values are microseconds. A latency is known within its bucket, and stands as the bucket's end.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use cmt_common::api::{Direction, MemoryKind};
use hdrhistogram::Histogram;

use super::Snapshot;
use crate::histogram::Stat;

/// Lines for each halving of what remains up to 100 %, as HdrHistogram's own tools write them.
const TICKS_PER_HALF: u32 = 5;
/// Decimal digits that are kept: more than a bucket of 12.5 % needs.
const DIGITS: u8 = 3;

/// The files of a trace: `path` with all copies between host and device, and beside it one for each direction and kind of
/// memory that was seen, as in `copies.HtoD-pageable.hgrm`.
pub fn files(path: &Path, snapshot: &Snapshot) -> Vec<(PathBuf, String)> {
    let mut all = Stat::default();
    let mut parts: BTreeMap<(u8, u8), Stat> = BTreeMap::new();
    for (key, stat) in &snapshot.rows {
        if matches!(
            Direction::from_raw(key.direction),
            Direction::HtoD | Direction::DtoH
        ) {
            all.merge(stat);
            parts
                .entry((key.direction, key.memory))
                .or_default()
                .merge(stat);
        }
    }
    let beside = |(direction, memory): (u8, u8)| {
        let part = format!(
            "{}-{}.hgrm",
            Direction::from_raw(direction).name(),
            MemoryKind::from_raw(memory).name()
        );
        path.with_extension(part)
    };
    std::iter::once((path.to_owned(), all))
        .chain(parts.into_iter().map(|(key, stat)| (beside(key), stat)))
        .filter_map(|(path, stat)| Some((path, text(&stat)?)))
        .collect()
}

/// The distribution of a class of copies; `None` where none succeeded.
fn text(stat: &Stat) -> Option<String> {
    let mut histogram: Histogram<u64> = Histogram::new(DIGITS).ok()?;
    for (_, end, count) in stat.histogram() {
        histogram
            .record_n((end - 1).clamp(1, stat.max_ns.max(1)), count)
            .ok()?;
    }
    if histogram.is_empty() {
        return None;
    }
    let us = |ns: f64| ns / 1e3;
    let mut text = String::new();
    // Writing to a String cannot fail, here and below.
    let _ = writeln!(
        text,
        "{:>12} {:>14} {:>10} {:>14}\n",
        "Value", "Percentile", "TotalCount", "1/(1-Percentile)"
    );
    let mut total = 0;
    for value in histogram.iter_quantiles(TICKS_PER_HALF) {
        total += value.count_since_last_iteration();
        let quantile = value.quantile_iterated_to();
        let _ = write!(
            text,
            "{:>12.3} {quantile:>14.12} {total:>10}",
            us(value.value_iterated_to() as f64)
        );
        let _ = match quantile < 1.0 {
            true => writeln!(text, " {:>14.2}", 1.0 / (1.0 - quantile)),
            false => writeln!(text),
        };
    }
    let _ = writeln!(
        text,
        "#[Mean    = {:>12.3}, StdDeviation   = {:>12.3}]",
        us(stat.total_ns as f64 / stat.count().max(1) as f64),
        us(histogram.stdev())
    );
    let _ = writeln!(
        text,
        "#[Max     = {:>12.3}, Total count    = {:>12}]",
        us(stat.max_ns as f64),
        histogram.len()
    );
    let _ = writeln!(
        text,
        "#[Buckets = {:>12}, SubBuckets     = {:>12}]",
        histogram.buckets(),
        1 << 11
    );
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_rise_to_all_calls_and_the_longest() {
        let mut stat = Stat::default();
        for latency in 1..=1000u64 {
            stat.record(4096, latency * 1000);
        }
        let text = text(&stat).expect("a distribution");
        let rows: Vec<Vec<f64>> = text
            .lines()
            .skip(2)
            .filter(|line| !line.starts_with('#'))
            .map(|line| {
                line.split_whitespace()
                    .map(|word| word.parse().expect("a number"))
                    .collect()
            })
            .collect();
        assert!(
            rows.is_sorted_by(|one, next| one[0] <= next[0]
                && one[1] <= next[1]
                && one[2] <= next[2])
        );
        let last = rows.last().expect("a row");
        assert!((last[0] - 1000.0).abs() < 1.0, "{last:?}");
        assert_eq!(&last[1..], [1.0, 1000.0]);
        let median = rows.iter().find(|row| row[1] >= 0.5).expect("a median");
        assert!((440.0..570.0).contains(&median[0]), "{median:?}");
        assert!(
            text.contains("#[Max     =     1000.000, Total count    =         1000]"),
            "{text}"
        );
    }

    #[test]
    fn failed_copies_have_no_distribution() {
        let mut failed = Stat::default();
        failed.calls = 3;
        failed.errors = 3;
        assert_eq!(text(&failed), None);
    }
}
