//! Latencies as Prometheus has them: classic buckets, and native ones of schema 3.
//!
//! Classic bounds are powers of four, so they are edges of the kernel's buckets too, and what stands below them is exact.
//! Native buckets are 8 to the octave like the kernel's, but even in the logarithm: each of the kernel's goes as a whole to
//! the native one that holds its middle, so a quantile is right within one bucket.

use std::collections::BTreeMap;

use crate::histogram::Stat;

/// Upper bounds of the classic buckets: 4^5 ns (1.024 µs) to 4^17 ns (17.2 s).
const POWERS_OF_FOUR: std::ops::RangeInclusive<u32> = 5..=17;
/// Series of one classic histogram: its buckets, the infinite one, sum and count.
pub const CLASSIC_SERIES: usize = (*POWERS_OF_FOUR.end() - *POWERS_OF_FOUR.start()) as usize + 4;
/// The native schema: 2^3 buckets to the octave.
pub const SCHEMA: i32 = 3;
const PER_OCTAVE: f64 = 8.0;
/// Prometheus's default; no latency is so short. It also marks a histogram without any latency as a native one.
pub const ZERO_THRESHOLD: f64 = 2.938_735_877_055_719e-39; // 2^-128

/// Upper bound in seconds and latencies of each classic bucket, those of lower ones not included.
pub fn classic(stat: &Stat) -> Vec<(f64, u64)> {
    let bounds = POWERS_OF_FOUR.map(|power| 1u64 << (2 * power));
    let mut buckets: Vec<(f64, u64)> = bounds
        .clone()
        .map(|ns| (seconds(ns), 0))
        .chain([(f64::INFINITY, 0)])
        .collect();
    for (_, end_ns, count) in stat.histogram() {
        let index = bounds.clone().take_while(|bound| end_ns > *bound).count();
        buckets[index].1 += count;
    }
    buckets
}

/// Sparse native buckets as the exposition formats write them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Native {
    /// Gap to the bucket before, and how many follow each other. The first gap counts from bucket 0.
    pub spans: Vec<(i32, u32)>,
    /// Count of each bucket, less that of the one before.
    pub deltas: Vec<i64>,
}

/// The native buckets of what `stat` counted.
pub fn native(stat: &Stat) -> Native {
    let mut counts: BTreeMap<i32, u64> = BTreeMap::new();
    for (start_ns, end_ns, count) in stat.histogram() {
        // The last one has no end.
        let width = if end_ns == u64::MAX {
            0
        } else {
            end_ns - start_ns
        };
        *counts
            .entry(native_index((start_ns as f64 + width as f64 / 2.0) / 1e9))
            .or_default() += count;
    }
    let mut native = Native::default();
    let (mut next, mut before) = (0, 0);
    for (index, count) in counts {
        match native.spans.last_mut() {
            Some((_, length)) if index == next => *length += 1,
            _ => native.spans.push((index - next, 1)),
        }
        native.deltas.push(count as i64 - before);
        (next, before) = (index + 1, count as i64);
    }
    native
}

/// The bucket of a value: number `i` holds what is above 2^((i - 1) / 8) and at most 2^(i / 8).
fn native_index(value: f64) -> i32 {
    (value.log2() * PER_OCTAVE).ceil() as i32
}

/// A time in Prometheus's unit.
pub fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Latencies from 8 ns to 18 minutes, from a fixed generator.
    fn latencies(count: usize, mut seed: u64) -> Vec<u64> {
        (0..count)
            .map(|_| {
                seed = seed
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                let bits = 3 + (seed >> 32) % 37;
                (1 << bits) | ((seed >> 20) % (1 << bits))
            })
            .collect()
    }

    fn stat(latencies: &[u64]) -> Stat {
        let mut stat = Stat::default();
        for latency in latencies {
            stat.record(1, *latency);
        }
        stat
    }

    /// Index and count of every bucket.
    fn unpacked(native: &Native) -> Vec<(i32, u64)> {
        let (mut index, mut count) = (0, 0);
        let mut deltas = native.deltas.iter();
        let mut buckets = Vec::new();
        for (gap, length) in &native.spans {
            index += gap;
            for _ in 0..*length {
                count += deltas.next().expect("a delta for each bucket");
                buckets.push((index, count as u64));
                index += 1;
            }
        }
        assert_eq!(deltas.next(), None);
        buckets
    }

    #[test]
    fn native_buckets_hold_every_latency_once() {
        for seed in 0..50 {
            let stat = stat(&latencies(500, seed));
            let buckets = unpacked(&native(&stat));
            let sum: u64 = buckets.iter().map(|(_, count)| count).sum();
            assert_eq!(sum, stat.count());
            assert!(buckets.iter().all(|(_, count)| *count > 0));
            assert!(buckets.is_sorted_by(|one, next| one.0 < next.0));
        }
        assert_eq!(native(&Stat::default()), Native::default());
    }

    #[test]
    fn a_native_quantile_is_right_within_a_bucket() {
        for seed in 0..50 {
            let mut all = latencies(500, seed);
            let buckets = unpacked(&native(&stat(&all)));
            all.sort_unstable();
            for q in [0.01, 0.25, 0.5, 0.9, 0.99, 1.0] {
                let rank = ((q * all.len() as f64).ceil() as u64).max(1);
                let exact = native_index(all[rank as usize - 1] as f64 / 1e9);
                let mut below = 0;
                let found = buckets.iter().find(|(_, count)| {
                    below += count;
                    below >= rank
                });
                let found = found.expect("the rank is within the count").0;
                assert!((found - exact).abs() <= 1, "{q}: {found} for {exact}");
            }
        }
    }

    #[test]
    fn classic_buckets_are_exact() {
        let all = latencies(5000, 7);
        let buckets = classic(&stat(&all));
        assert_eq!(buckets.len() + 2, CLASSIC_SERIES);
        assert_eq!(buckets[0].0, 1.024e-6);
        let mut below = 0;
        for (bound, count) in buckets {
            below += count;
            let exact = all.iter().filter(|ns| (**ns as f64 / 1e9) < bound).count();
            assert_eq!(below, exact as u64, "{bound}");
        }
    }
}
