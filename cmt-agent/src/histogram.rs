//! Latency histograms on the host side: merging, differences, quantiles.
//!
//! The buckets are those of `cmt_common::histogram`, so what the kernel counted is kept as it is.

use cmt_common::event::CopyStat;
use cmt_common::histogram::{BUCKETS, bucket_bounds};

/// Calls, bytes and latencies of one class of copies. Latencies and bytes are those of successful calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// All calls, failed ones included.
    pub calls: u64,
    /// Calls that returned an error.
    pub errors: u64,
    /// Bytes copied.
    pub bytes: u64,
    /// Sum of the latencies.
    pub total_ns: u64,
    /// The longest latency.
    pub max_ns: u64,
    /// Calls behind which the thread waited for the stream, with no other copy in between.
    pub waited: u64,
    /// Time in those waits.
    pub wait_ns: u64,
    /// From the beginning of those calls to the end of their waits.
    pub until_ns: u64,
    /// What the last failed call returned; 0 while none has failed.
    pub last_error: u64,
    buckets: Box<[u64; BUCKETS]>,
}

impl Default for Stat {
    fn default() -> Self {
        Self {
            calls: 0,
            errors: 0,
            bytes: 0,
            total_ns: 0,
            max_ns: 0,
            waited: 0,
            wait_ns: 0,
            until_ns: 0,
            last_error: 0,
            buckets: Box::new([0; BUCKETS]),
        }
    }
}

impl From<&CopyStat> for Stat {
    fn from(stat: &CopyStat) -> Self {
        Self {
            calls: stat.calls,
            errors: stat.errors,
            bytes: stat.bytes,
            total_ns: stat.total_ns,
            max_ns: stat.max_ns,
            waited: stat.waited,
            wait_ns: stat.wait_ns,
            until_ns: stat.until_ns,
            last_error: stat.last_error,
            buckets: Box::new(stat.buckets),
        }
    }
}

impl Stat {
    /// Adds what `other` counted.
    pub fn merge(&mut self, other: &Self) {
        self.calls += other.calls;
        self.errors += other.errors;
        // A program may say that it copies any number.
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.total_ns += other.total_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
        self.waited += other.waited;
        self.wait_ns += other.wait_ns;
        self.until_ns += other.until_ns;
        if other.last_error != 0 {
            self.last_error = other.last_error;
        }
        for (own, other) in self.buckets.iter_mut().zip(other.buckets.iter()) {
            *own += other;
        }
    }

    /// What was counted after `earlier`, an older state of the same counters.
    ///
    /// The longest latency of the difference is exact if it was the longest of all; else it is the end of the highest
    /// bucket that grew.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut buckets = self.buckets.clone();
        for (own, earlier) in buckets.iter_mut().zip(earlier.buckets.iter()) {
            *own = own.saturating_sub(*earlier);
        }
        let max_ns = if self.max_ns > earlier.max_ns {
            self.max_ns
        } else {
            let highest = buckets.iter().rposition(|count| *count > 0);
            highest.map_or(0, |index| self.max_ns.min(bucket_bounds(index).1 - 1))
        };
        Self {
            calls: self.calls.saturating_sub(earlier.calls),
            errors: self.errors.saturating_sub(earlier.errors),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            total_ns: self.total_ns.saturating_sub(earlier.total_ns),
            max_ns,
            waited: self.waited.saturating_sub(earlier.waited),
            wait_ns: self.wait_ns.saturating_sub(earlier.wait_ns),
            until_ns: self.until_ns.saturating_sub(earlier.until_ns),
            last_error: if self.errors > earlier.errors {
                self.last_error
            } else {
                0
            },
            buckets,
        }
    }

    /// Counts one successful call.
    pub fn record(&mut self, bytes: u64, latency_ns: u64) {
        self.calls += 1;
        self.bytes += bytes;
        self.total_ns += latency_ns;
        self.max_ns = self.max_ns.max(latency_ns);
        self.buckets[cmt_common::histogram::bucket_of(latency_ns)] += 1;
    }

    /// Number of latencies.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The latency in nanoseconds that a share of `q` (0 to 1) of the calls does not exceed: interpolated within its bucket,
    /// so within 12.5 %. `None` if nothing succeeded.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let rank = ((q * count as f64).ceil() as u64).clamp(1, count);
        let mut below = 0;
        for (index, in_bucket) in self.buckets.iter().enumerate() {
            if below + in_bucket >= rank {
                let (lo, hi) = bucket_bounds(index);
                let hi = hi.min(self.max_ns.max(lo) + 1);
                let share = ((rank - below) as f64 - 0.5) / *in_bucket as f64;
                return Some(lo + ((hi - lo) as f64 * share) as u64);
            }
            below += in_bucket;
        }
        None
    }

    /// Bytes per second spent in these calls, in GB/s (1e9). `None` if nothing succeeded.
    pub fn gb_per_s(&self) -> Option<f64> {
        (self.total_ns > 0).then(|| self.bytes as f64 / self.total_ns as f64)
    }

    /// The buckets that are not empty: lower bound, upper bound (exclusive), count.
    pub fn histogram(&self) -> Vec<(u64, u64, u64)> {
        self.buckets
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(index, count)| {
                let (lo, hi) = bucket_bounds(index);
                (lo, hi, *count)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Latencies that span nine orders of magnitude, from a fixed generator.
    fn latencies(count: usize, mut seed: u64) -> Vec<u64> {
        (0..count)
            .map(|_| {
                seed = seed
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                100u64 << (seed >> 59) | seed >> 56
            })
            .collect()
    }

    fn stat(latencies: &[u64]) -> Stat {
        let mut stat = Stat::default();
        for latency in latencies {
            stat.record(4096, *latency);
        }
        stat
    }

    #[test]
    fn merged_parts_are_the_whole() {
        let all = latencies(1000, 1);
        let mut merged = Stat::default();
        for part in all.chunks(77) {
            merged.merge(&stat(part));
        }
        assert_eq!(merged, stat(&all));
        assert_eq!(merged.count(), merged.calls);
    }

    #[test]
    fn later_minus_earlier_is_what_came_between() {
        let all = latencies(1000, 2);
        let (earlier, between) = all.split_at(400);
        let difference = stat(&all).since(&stat(earlier));
        let between = stat(between);
        assert_eq!(difference.buckets, between.buckets);
        assert_eq!(
            (difference.calls, difference.bytes),
            (between.calls, between.bytes)
        );
        assert_eq!(difference.total_ns, between.total_ns);
        assert!(difference.max_ns >= between.max_ns);
        assert!(difference.max_ns <= between.max_ns + between.max_ns / 8 + 1);
    }

    #[test]
    fn quantiles_are_within_a_bucket_of_the_true_ones() {
        let mut all = latencies(5000, 3);
        let stat = stat(&all);
        all.sort_unstable();
        for q in [0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0] {
            let rank = ((q * all.len() as f64).ceil() as usize).clamp(1, all.len());
            let exact = all[rank - 1] as f64;
            let found = stat.quantile(q).unwrap() as f64;
            assert!(
                (found - exact).abs() <= exact / 8.0 + 1.0,
                "{q}: {found} for {exact}"
            );
        }
        assert_eq!(Stat::default().quantile(0.5), None);
    }

    #[test]
    fn failed_calls_have_no_latency() {
        let failed = Stat {
            calls: 5,
            errors: 5,
            ..Stat::default()
        };
        assert_eq!((failed.quantile(0.5), failed.gb_per_s()), (None, None));
        assert!(failed.histogram().is_empty());
    }
}
