//! What the bench found, as `cmt/bench/1` prints it. Table and page are made from it.

use std::path::Path;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use super::cpu::CpuCopies;
use super::machine::Machine;
use super::turns::Turn;
use super::wire::{Batch, Direction, Memory};
use crate::origin::Origin;
use crate::profile;

/// The name and version of the format.
pub const SCHEMA: &str = "cmt/bench/1";

/// The whole object.
#[derive(Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// True on the project's own libcuda: real bytes, modelled time. Such figures say nothing of a GPU.
    pub stand_in: bool,
    /// Fewer samples and sizes.
    pub quick: bool,
    /// Ctrl-C ended it early; what is there was measured in full.
    pub interrupted: bool,
    /// The largest copy.
    pub largest_bytes: u64,
    /// Why it is smaller than what was asked for; none if it is not.
    pub limited_by: Option<String>,
    /// Median of `cuCtxSynchronize` with nothing to wait for: part of each time until the device is idle.
    pub idle_synchronize_ns: u64,
    /// Who measured, where and when; none in reports of versions that did not say.
    #[serde(default)]
    pub origin: Option<Origin>,
    /// Where it ran.
    pub machine: Machine,
    /// How the process was attached to; none if interrupted before.
    pub attach: Option<Attach>,
    /// One for each direction, kind of host memory and size.
    pub cells: Vec<Cell>,
    /// Copies that the payload leaves to the driver, attached and detached in turns; none in reports of versions that did not do so.
    #[serde(default)]
    pub turns: Vec<Turn>,
    /// Ways for a CPU to move bytes, without a GPU.
    pub cpu_copies: CpuCopies,
}

impl Report {
    /// The report that `--json` once wrote to a file.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("{} cannot be read", path.display()))?;
        let report: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} is no {SCHEMA} object", path.display()))?;
        ensure!(
            report.schema == SCHEMA,
            "{} is a {:?} object, not {SCHEMA:?}",
            path.display(),
            report.schema
        );
        Ok(report)
    }
}

/// The attach between the two stock passes.
#[derive(Serialize, Deserialize)]
pub struct Attach {
    /// Threads that may move bytes.
    pub threads: u32,
    /// Functions patched.
    pub patched: usize,
    /// The whole attach, in milliseconds.
    pub attach_ms: f64,
    /// How long all threads were stopped.
    pub commit_pause_us: u64,
    /// The plan that tuned copies followed.
    pub plan: profile::File,
}

/// Copies of one kind by the three copiers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// HtoD or DtoH.
    pub direction: Direction,
    /// Reused or fresh.
    pub memory: Memory,
    /// Length of each copy.
    pub bytes: u64,
    /// The driver's own pageable copy, before attaching and after detaching.
    pub stock: Option<Stat>,
    /// The same call while attached.
    pub tuned: Option<Stat>,
    /// The same call with pinned memory (always reused), before attaching and after detaching: what the link gives.
    pub pinned: Option<Stat>,
    /// Pinned copies while attached: the payload looks at them and leaves them to the driver.
    pub pinned_attached: Option<Stat>,
    /// Part of the tuned copies that the payload made itself; the others it left to the driver.
    pub staged: Option<f64>,
    /// Pinned median over tuned median, both until the device is idle.
    pub share_of_pinned: Option<f64>,
    /// Stock median over tuned median, both until the device is idle.
    pub speedup: Option<f64>,
    /// Stock's median after detaching over the one before attaching: how much the machine drifted.
    pub drift: Option<f64>,
}

/// Times of one copier.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stat {
    /// Copies timed.
    pub samples: usize,
    /// Until the call returned.
    pub call_ns: Quantiles,
    /// Until the device was idle.
    pub idle_ns: Quantiles,
    /// Bytes by the median until the device is idle, in 1e9 bytes a second.
    pub gbps: f64,
    /// Processor seconds of the whole process for 1 GiB.
    pub cpu_s_per_gib: f64,
}

/// Quantiles by the nearest rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantiles {
    /// 10th percentile.
    pub p10: u64,
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
}

impl Quantiles {
    /// Those of `values`; none of an empty list.
    pub fn of(values: impl IntoIterator<Item = u64>) -> Option<Self> {
        let [p10, p50, p90] = deciles(values)?;
        Some(Self { p10, p50, p90 })
    }
}

/// The 10th percentile, the median and the 90th, by the nearest rank; none of an empty list.
pub fn deciles<T: Copy + Ord>(values: impl IntoIterator<Item = T>) -> Option<[T; 3]> {
    let mut sorted: Vec<T> = values.into_iter().collect();
    sorted.sort_unstable();
    let rank = |percent: usize| {
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).copied()
    };
    Some([rank(10)?, rank(50)?, rank(90)?])
}

impl Stat {
    /// Of all copies in `batches`, each of `bytes` bytes; none without any.
    pub fn of(batches: &[&Batch], bytes: u64) -> Option<Self> {
        let samples = batches.iter().map(|batch| batch.idle_ns.len()).sum();
        let idle_ns = Quantiles::of(batches.iter().flat_map(|batch| batch.idle_ns.clone()))?;
        let cpu_ns: u64 = batches.iter().map(|batch| batch.cpu_ns).sum();
        let gib = (bytes * samples as u64) as f64 / (1u64 << 30) as f64;
        Some(Self {
            samples,
            call_ns: Quantiles::of(batches.iter().flat_map(|batch| batch.call_ns.clone()))?,
            idle_ns,
            gbps: bytes as f64 / idle_ns.p50.max(1) as f64,
            cpu_s_per_gib: cpu_ns as f64 / 1e9 / gib,
        })
    }
}

/// The batches of one cell, in the order in which they were measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Batches<'a> {
    /// Before attaching.
    pub stock: Option<&'a Batch>,
    /// While attached, and the part of it that was staged.
    pub tuned: Option<(&'a Batch, f64)>,
    /// After detaching.
    pub again: Option<&'a Batch>,
    /// With pinned memory, in each of the three passes.
    pub pinned: [Option<&'a Batch>; 3],
}

impl Cell {
    /// Puts the batches of one cell together.
    pub fn of(direction: Direction, memory: Memory, bytes: u64, batches: &Batches) -> Self {
        let all = |batches: &[Option<&Batch>]| {
            let there: Vec<&Batch> = batches.iter().flatten().copied().collect();
            Stat::of(&there, bytes)
        };
        let stock = all(&[batches.stock, batches.again]);
        let tuned = all(&[batches.tuned.map(|(batch, _)| batch)]);
        let pinned = all(&[batches.pinned[0], batches.pinned[2]]);
        let median = |stat: &Option<Stat>| stat.as_ref().map(|stat| stat.idle_ns.p50 as f64);
        let over = |one: Option<f64>, other: Option<f64>| Some(one? / other?);
        let alone = |batch: Option<&Batch>| median(&all(&[batch]));
        Self {
            direction,
            memory,
            bytes,
            staged: batches.tuned.map(|(_, staged)| staged),
            share_of_pinned: over(median(&pinned), median(&tuned)),
            speedup: over(median(&stock), median(&tuned)),
            drift: over(alone(batches.again), alone(batches.stock)),
            stock,
            tuned,
            pinned,
            pinned_attached: all(&[batches.pinned[1]]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(idle_ns: &[u64]) -> Batch {
        Batch {
            call_ns: idle_ns.iter().map(|ns| ns / 2).collect(),
            idle_ns: idle_ns.to_vec(),
            cpu_ns: 1_000_000_000,
            wrong_at: None,
        }
    }

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let values = Quantiles::of((1..=10).rev()).expect("ten");
        assert_eq!((values.p10, values.p50, values.p90), (1, 5, 9));
        let one = Quantiles::of([7]).expect("one");
        assert_eq!((one.p10, one.p50, one.p90), (7, 7, 7));
        assert_eq!(Quantiles::of([]), None);
    }

    #[test]
    fn ratios_come_from_the_time_until_idle_of_all_samples() {
        let (stock, again) = (batch(&[400, 400, 400]), batch(&[800]));
        let (tuned, pinned) = (batch(&[200]), batch(&[100]));
        let cell = Cell::of(
            Direction::HtoD,
            Memory::Reused,
            1 << 30,
            &Batches {
                stock: Some(&stock),
                tuned: Some((&tuned, 1.0)),
                again: Some(&again),
                pinned: [Some(&pinned), Some(&stock), None],
            },
        );
        assert_eq!(cell.share_of_pinned, Some(0.5));
        assert_eq!(cell.speedup, Some(2.0));
        assert_eq!(cell.drift, Some(2.0));
        let stock = cell.stock.expect("measured");
        assert_eq!((stock.samples, stock.call_ns.p50), (4, 200));
        // Two seconds for four copies of 1 GiB.
        assert!((stock.cpu_s_per_gib - 0.5).abs() < 1e-12);
    }
}
