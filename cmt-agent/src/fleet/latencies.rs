//! Latencies of a fleet: Prometheus's histograms, classic and native, added, subtracted, drawn and asked for quantiles.
//!
//! Native buckets lie between powers of two of a second or finer, classic ones between the bounds that the nodes expose. Both
//! are kept as they came, so that subtracting an older state from a newer one is exact.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::prometheus::number;

/// What a bucket without an upper bound ends with.
const ENDLESS: u64 = u64::MAX;
/// Bounds are native when they are this near to a power.
const NEAR: f64 = 1e-6;

/// Counts by latency. Fractions of calls occur where Prometheus extrapolated.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(try_from = "Wire")]
pub struct Latencies {
    /// Sum of the latencies.
    pub sum_s: f64,
    /// Native: calls that took no time.
    zero: f64,
    /// Native: bucket `i` ends at 2^(i / 2^schema) seconds and begins where the one before ends.
    schema: i32,
    powers: BTreeMap<i32, f64>,
    /// Classic: calls by upper and lower bound, in nanoseconds.
    bounds: BTreeMap<(u64, u64), f64>,
}

/// A native histogram as the query API has it.
#[derive(Deserialize)]
struct Wire {
    sum: String,
    /// Which ends belong to it, lower bound, upper bound, calls.
    #[serde(default)]
    buckets: Vec<(u8, String, String, String)>,
}

impl TryFrom<Wire> for Latencies {
    type Error = String;

    fn try_from(wire: Wire) -> Result<Self, String> {
        let mut all = Self {
            sum_s: number(&wire.sum),
            ..Self::default()
        };
        for (_, lower, upper, calls) in &wire.buckets {
            let (lower, upper, calls) = (number(lower), number(upper), number(calls));
            if calls.is_nan() || upper.is_nan() {
                return Err("a bucket of the histogram is no number".into());
            }
            match power(lower, upper) {
                _ if lower <= 0.0 && upper < 1e-9 => all.zero += calls,
                Some((schema, index)) => {
                    // The schema of a histogram is one and the same.
                    all.schema = schema;
                    *all.powers.entry(index).or_default() += calls;
                }
                None => *all.bounds.entry((ns(upper), ns(lower))).or_default() += calls,
            }
        }
        Ok(all)
    }
}

/// Schema and index of a native bucket; none where its bounds are no powers, as those of buckets with bounds of one's own.
fn power(lower: f64, upper: f64) -> Option<(i32, i32)> {
    if lower <= 0.0 || !upper.is_finite() {
        return None;
    }
    let schema = -(upper / lower).log2().log2();
    let index = upper.log2() * schema.round().exp2();
    let is_near = |value: f64| (value - value.round()).abs() < NEAR * value.abs().max(1.0);
    ((-4.5..8.5).contains(&schema) && (schema - schema.round()).abs() < 1e-3 && is_near(index))
        .then(|| (schema.round() as i32, index.round() as i32))
}

fn ns(seconds: f64) -> u64 {
    match seconds.is_finite() {
        true => (seconds.max(0.0) * 1e9).round() as u64,
        false => ENDLESS,
    }
}

impl Latencies {
    /// A classic histogram: calls by `le`, each with those of all lower bounds.
    pub fn classic<'a>(buckets: impl IntoIterator<Item = (&'a str, f64)>) -> Self {
        let by_bound: BTreeMap<u64, f64> = buckets
            .into_iter()
            .map(|(le, calls)| (ns(number(le)), calls))
            .collect();
        let (mut lower, mut below) = (0, 0.0);
        let mut all = Self::default();
        for (upper, calls) in by_bound {
            all.bounds
                .insert((upper, lower), f64::max(calls - below, 0.0));
            (lower, below) = (upper, f64::max(calls, below));
        }
        all
    }

    /// Classic histograms by class, from sums of buckets whose last label is `le`, and of seconds. Only those with calls.
    pub fn by_class(
        buckets: &BTreeMap<Vec<String>, f64>,
        seconds: &BTreeMap<Vec<String>, f64>,
    ) -> BTreeMap<Vec<String>, Self> {
        let mut by_class: BTreeMap<&[String], Vec<(&str, f64)>> = BTreeMap::new();
        for (key, calls) in buckets {
            if let Some((le, class)) = key.split_last() {
                by_class.entry(class).or_default().push((le, *calls));
            }
        }
        by_class
            .into_iter()
            .map(|(class, buckets)| {
                let mut latencies = Self::classic(buckets);
                latencies.sum_s = seconds.get(class).copied().unwrap_or(0.0).max(0.0);
                (class.to_vec(), latencies)
            })
            .filter(|(_, latencies)| latencies.count() > 0.0)
            .collect()
    }

    /// Number of calls.
    pub fn count(&self) -> f64 {
        self.zero + self.powers.values().sum::<f64>() + self.bounds.values().sum::<f64>()
    }

    /// Adds `share` times what `other` counted; -1 takes it away.
    pub fn add(&mut self, other: &Self, share: f64) {
        let mut other = other.clone();
        if self.powers.is_empty() {
            self.schema = other.schema;
        } else if !other.powers.is_empty() {
            let schema = self.schema.min(other.schema);
            self.coarsen(schema);
            other.coarsen(schema);
        }
        self.sum_s += share * other.sum_s;
        self.zero += share * other.zero;
        for (index, calls) in other.powers {
            *self.powers.entry(index).or_default() += share * calls;
        }
        for (bounds, calls) in other.bounds {
            *self.bounds.entry(bounds).or_default() += share * calls;
        }
    }

    /// What was counted since `earlier`, an older state of the same counters.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut grown = self.clone();
        grown.add(earlier, -1.0);
        grown.sum_s = grown.sum_s.max(0.0);
        grown.zero = grown.zero.max(0.0);
        for calls in grown.powers.values_mut().chain(grown.bounds.values_mut()) {
            *calls = calls.max(0.0);
        }
        grown
    }

    fn coarsen(&mut self, schema: i32) {
        let steps = self.schema - schema;
        if steps <= 0 {
            return;
        }
        let mut powers = BTreeMap::new();
        for (index, calls) in &self.powers {
            let wider = (index + (1 << steps) - 1) >> steps;
            *powers.entry(wider).or_default() += calls;
        }
        (self.schema, self.powers) = (schema, powers);
    }

    /// Lower bound and upper bound in nanoseconds, and calls, in no order.
    fn cells(&self) -> impl Iterator<Item = (f64, f64, f64)> {
        let width = f64::from(-self.schema).exp2();
        let end = move |index: i32| 1e9 * (f64::from(index) * width).exp2();
        let powers = self
            .powers
            .iter()
            .map(move |(index, calls)| (end(index - 1), end(*index), *calls));
        let bounds = self.bounds.iter().map(|(&(upper, lower), calls)| {
            let upper = match upper {
                ENDLESS => f64::INFINITY,
                upper => upper as f64,
            };
            (lower as f64, upper, *calls)
        });
        powers
            .chain(bounds)
            .chain([(0.0, 1.0, self.zero)])
            .filter(|(_, _, calls)| *calls > 0.0)
    }

    /// The latency in nanoseconds that a share of `q` (0 to 1) of the calls does not exceed, interpolated within its bucket.
    /// Where that has no upper bound, its lower one. `None` without calls.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let rank = q * self.count();
        let lowest = self.cells().map(|cell| cell.0).reduce(f64::min)?;
        let highest = self
            .cells()
            .map(|(lower, upper, _)| if upper.is_finite() { upper } else { lower })
            .reduce(f64::max)?;
        let (mut lower, mut upper) = (lowest, highest);
        for _ in 0..100 {
            let middle = match lower > 0.0 {
                true => (lower * upper).sqrt(),
                false => (lower + upper) / 2.0,
            };
            let below: f64 = self
                .cells()
                .map(|cell| cell.2 * share(cell, cell.0, middle))
                .sum();
            if below < rank {
                lower = middle;
            } else {
                upper = middle;
            }
        }
        Some(upper.round() as u64)
    }

    /// Rows to draw: lower and upper bound in nanoseconds, and calls. Classic buckets as they are; native ones by octave, or
    /// where nodes of both kinds report, divided among the classic ones.
    pub fn bars(&self) -> Vec<(u64, u64, u64)> {
        let mut rows: BTreeMap<(u64, u64), f64> = BTreeMap::new();
        if self.bounds.is_empty() {
            let mut octaves = self.clone();
            octaves.coarsen(0);
            for (lower, upper, calls) in octaves.cells() {
                *rows
                    .entry((lower.round() as u64, upper.round() as u64))
                    .or_default() += calls;
            }
        } else {
            let grid: Vec<(u64, u64)> = self.bounds.keys().map(|&(hi, lo)| (lo, hi)).collect();
            for cell in self.cells() {
                for &(lower, upper) in &grid {
                    let part = share(cell, lower as f64, upper as f64);
                    *rows.entry((lower, upper)).or_default() += cell.2 * part;
                }
            }
        }
        rows.into_iter()
            .map(|((lower, upper), calls)| (lower, upper, calls.round() as u64))
            .skip_while(|row| row.2 == 0)
            .collect()
    }
}

/// The share of a bucket that lies from `from` to `to`, evenly on a scale of powers where it does not begin at zero.
fn share((lower, upper, _): (f64, f64, f64), from: f64, to: f64) -> f64 {
    let (from, to) = (from.max(lower), to.min(upper));
    if to <= from {
        return 0.0;
    }
    if upper.is_infinite() {
        return 1.0;
    }
    match lower > 0.0 {
        true => (to / from).ln() / (upper / lower).ln(),
        false => (to - from) / (upper - lower),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Prometheus prints it: the bounds of schema 2 near 1 ms, and one call of no time.
    fn native(calls: [u32; 3]) -> Latencies {
        let end = |index: i32| (f64::from(index) / 4.0).exp2();
        let bucket = |at: usize| {
            let index = at as i32 - 40;
            let (lower, upper) = (end(index - 1), end(index));
            format!("[0,\"{lower}\",\"{upper}\",\"{}\"]", calls[at])
        };
        let json = format!(
            r#"{{"count":"7","sum":"0.5","buckets":[[3,"-1e-128","1e-128","1"],{},{},{}]}}"#,
            bucket(0),
            bucket(1),
            bucket(2)
        );
        serde_json::from_str(&json).expect("a histogram")
    }

    #[test]
    fn native_histograms_are_read_and_subtracted() {
        let (earlier, later) = (native([1, 2, 0]), native([3, 2, 5]));
        assert_eq!((later.schema, later.count()), (2, 11.0));
        let grown = later.since(&earlier);
        assert_eq!(grown.count(), 7.0);
        let median = grown.quantile(0.5).expect("calls") as f64;
        let bounds = [-39.0f64 / 4.0, -38.0 / 4.0].map(|power| 1e9 * power.exp2());
        assert!((bounds[0]..=bounds[1]).contains(&median), "{median}");
    }

    #[test]
    fn a_coarser_state_is_subtracted_too() {
        let mut coarse = native([3, 2, 5]);
        coarse.coarsen(0);
        assert_eq!((coarse.schema, coarse.count()), (0, 11.0));
        // A bucket belongs to the octave that its upper end lies in.
        let octaves: Vec<(i32, f64)> = coarse.powers.clone().into_iter().collect();
        assert_eq!(octaves, [(-10, 3.0), (-9, 7.0)]);
        assert_eq!(coarse.since(&native([1, 2, 0])).count(), 7.0);
    }

    #[test]
    fn merged_parts_are_the_whole() {
        let mut all = native([1, 2, 3]);
        all.add(&native([2, 0, 2]), 1.0);
        assert_eq!(all.powers, native([3, 2, 5]).powers);
    }

    #[test]
    fn classic_quantiles_lie_in_their_bucket_and_100_ns_beside_100_s() {
        let all = Latencies::classic([
            ("+Inf", 100.0),
            ("1e-06", 10.0),
            ("4e-06", 10.0),
            ("0.001", 99.0),
        ]);
        assert_eq!(all.count(), 100.0);
        for (q, from, to) in [
            (0.05, 1, 1000),
            (0.5, 4000, 1_000_000),
            (0.985, 900_000, 1_000_000),
        ] {
            let found = all.quantile(q).expect("calls");
            assert!((from..=to).contains(&found), "{q}: {found}");
        }
        // Beyond the last bound nothing is known.
        assert_eq!(all.quantile(0.999), Some(1_000_000));
        assert_eq!(Latencies::default().quantile(0.5), None);
    }

    #[test]
    fn bounds_of_ones_own_stay_as_they_are() {
        let json =
            r#"{"count":"3","sum":"1","buckets":[[0,"1e-06","4e-06","1"],[0,"4e-06","+Inf","2"]]}"#;
        let all: Latencies = serde_json::from_str(json).expect("a histogram");
        assert_eq!(
            all.bars(),
            [(1000, 4000, 1), (4000, u64::MAX, 2)],
            "{all:?}"
        );
    }

    #[test]
    fn both_kinds_together_keep_every_call() {
        let mut all = Latencies::classic([("1e-06", 1.0), ("0.004", 2.0), ("+Inf", 2.0)]);
        all.add(&native([1, 2, 3]), 1.0);
        let drawn: u64 = all.bars().iter().map(|row| row.2).sum();
        assert_eq!((drawn, all.count()), (9, 9.0));
    }
}
