//! Latencies as HdrHistogram writes percentile distributions (`.hgrm`), which its plotter and others read.
//!
//! Values are microseconds. A latency is known within its bucket, and stands as the bucket's end.

use std::fmt::Write as _;

use hdrhistogram::Histogram;

use crate::histogram::Stat;

/// Lines for each halving of what remains up to 100 %, as HdrHistogram's own tools write them.
const TICKS_PER_HALF: u32 = 5;
/// Decimal digits that are kept: more than a bucket of 12.5 % needs.
const DIGITS: u8 = 3;

/// The distribution of a class of copies; `None` where none succeeded.
pub fn text(stat: &Stat) -> Option<String> {
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
