//! What attaching costs copies that stay the driver's: attached and detached in turns, each attached round between two of
//! stock, so that the machine's drift falls out.

use std::collections::BTreeMap;

use anyhow::{Context as _, bail};
use cmt_common::control::Plan;
use serde::{Deserialize, Serialize};

use super::report::{Quantiles, deciles};
use super::wire::{self, Batch, Direction, Memory, Reply, Request};
use super::{Key, Run, SMALLEST_BYTES};
use crate::keeper;
use crate::target::Target;

/// Attached rounds, and with fewer samples.
const ROUNDS: usize = 64;
const ROUNDS_QUICK: usize = 4;
/// Smaller than any copy of the three passes.
const TINY_BYTES: [u64; 3] = [1, 64, 1 << 10];
/// Longer ones last so long that what attaching adds cannot be seen.
const PINNED_MOST_BYTES: u64 = 1 << 20;
/// Copies of one kind in a round: that are not counted, that are counted at least and at most, and the time within.
const BEFORE: usize = 3;
const SAMPLES: (usize, usize, u64) = (5, 40, 20);
/// Pinned copies that nobody counts come before each round for so long: device and processor were idle while `cmt` attached or
/// detached, and not equally long.
const WARM_UP_MS: u64 = 50;

/// One kind of copy that the payload looks at and leaves to the driver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// HtoD or DtoH.
    pub direction: Direction,
    /// Reused, fresh or pinned.
    pub memory: Memory,
    /// Length of each copy.
    pub bytes: u64,
    /// Attached rounds.
    pub rounds: usize,
    /// Until the call returned.
    pub call: Added,
    /// Until the device was idle.
    pub idle: Added,
}

/// Attached times beside those of stock.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Added {
    /// Median of the rounds' medians, detached, in nanoseconds.
    pub stock_ns: u64,
    /// An attached round's median less the mean of those before and after it, in nanoseconds: of all rounds the 10th
    /// percentile, the median and the 90th.
    pub added_ns: [i64; 3],
}

/// Medians until the call returned and until the device was idle, in nanoseconds.
type Medians = [u64; 2];

/// Measures them. Whole rounds only, and none when interrupted before the first has ended.
///
/// # Errors
/// When attaching or detaching fails, or a byte was wrong.
pub fn measure(
    run: &mut Run,
    target: &Target,
    (plan, threads): (&Plan, u32),
    staged: &BTreeMap<Key, u64>,
) -> anyhow::Result<Vec<Turn>> {
    let keys = keys(staged);
    let rounds = match run.settings.quick {
        true => ROUNDS_QUICK,
        false => ROUNDS,
    };
    run.bar
        .inc_length(((keys.len() + 2) * (2 * rounds + 1)) as u64);
    let (mut stock, mut attached) = (Vec::new(), Vec::new());
    stock.extend(round(run, &keys)?);
    while attached.len() < rounds && !run.session.is_interrupted() {
        keeper::attach(target, plan, threads)?;
        let now = round(run, &keys)?;
        if run.session.is_interrupted() {
            break; // Detached with the rest of the session.
        }
        keeper::detach(target)?;
        let (Some(now), Some(after)) = (now, round(run, &keys)?) else {
            break;
        };
        attached.push(now);
        stock.push(after);
    }
    Ok(turns(&keys, &stock, &attached))
}

/// What the payload staged nothing of, as far as it is short, and what no plan stages.
fn keys(staged: &BTreeMap<Key, u64>) -> Vec<Key> {
    let is_short = |memory, bytes| memory != Memory::Pinned || bytes <= PINNED_MOST_BYTES;
    let left = staged
        .iter()
        .filter(|&(&(_, memory, bytes), &calls)| calls == 0 && is_short(memory, bytes))
        .map(|(&key, _)| key);
    let is_left = |direction| staged.get(&(direction, Memory::Reused, SMALLEST_BYTES)) == Some(&0);
    let tiny = [Direction::HtoD, Direction::DtoH]
        .into_iter()
        .filter(|&direction| is_left(direction))
        .flat_map(|direction| TINY_BYTES.map(|bytes| (direction, Memory::Reused, bytes)));
    let mut keys: Vec<Key> = left.chain(tiny).collect();
    keys.sort();
    keys
}

/// All of them once; none when interrupted.
fn round(run: &mut Run, keys: &[Key]) -> anyhow::Result<Option<Vec<Medians>>> {
    for direction in [Direction::HtoD, Direction::DtoH] {
        let key = (direction, Memory::Pinned, SMALLEST_BYTES);
        time(run, key, (1, usize::MAX, WARM_UP_MS))?;
    }
    let mut medians = Vec::new();
    for &key in keys {
        let Some(batch) = time(run, key, SAMPLES)? else {
            return Ok(None);
        };
        let both = medians_of(&batch);
        medians.push(both.context("the process to measure answered without a sample")?);
    }
    run.bar.inc(1);
    Ok(Some(medians))
}

/// The bytes of such copies were checked in the three passes.
fn time(
    run: &mut Run,
    (direction, memory, bytes): Key,
    (least, most, budget_ms): (usize, usize, u64),
) -> anyhow::Result<Option<Batch>> {
    let cell = wire::Cell {
        least,
        most,
        budget_ms,
        ..run.settings.cell(direction, memory, bytes)
    };
    match run.session.ask(&Request::Time(cell, BEFORE))? {
        Some(Reply::Timed(batch)) => Ok(Some(batch)),
        Some(_) => bail!("the process to measure answered something else"),
        None => Ok(None),
    }
}

fn medians_of(batch: &Batch) -> Option<Medians> {
    let median = |times: &[u64]| Some(Quantiles::of(times.iter().copied())?.p50);
    Some([median(&batch.call_ns)?, median(&batch.idle_ns)?])
}

/// `stock` has one round more than `attached`.
fn turns(keys: &[Key], stock: &[Vec<Medians>], attached: &[Vec<Medians>]) -> Vec<Turn> {
    let added = |key: usize, part: usize| {
        let detached: Vec<u64> = stock.iter().map(|round| round[key][part]).collect();
        let added = attached
            .iter()
            .zip(detached.windows(2))
            .map(|(round, around)| {
                round[key][part].cast_signed() - around.iter().sum::<u64>().cast_signed() / 2
            });
        let added_ns = deciles(added)?;
        Some(Added {
            stock_ns: Quantiles::of(detached)?.p50,
            added_ns,
        })
    };
    let turn = |(index, &(direction, memory, bytes))| {
        Some(Turn {
            direction,
            memory,
            bytes,
            rounds: attached.len(),
            call: added(index, 0)?,
            idle: added(index, 1)?,
        })
    };
    keys.iter().enumerate().filter_map(turn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_drifts_adds_nothing() {
        let keys = [(Direction::HtoD, Memory::Reused, 4096)];
        // Each round a tenth of a microsecond slower; attached ones 50 and 70 ns besides.
        let stock = [1000, 1200, 1400].map(|ns| vec![[ns, 2 * ns]]);
        let attached = [[1150, 2250], [1370, 2670]].map(|both| vec![both]);
        let [turn] = &turns(&keys, &stock, &attached)[..] else {
            panic!("one kind");
        };
        assert_eq!(turn.rounds, 2);
        assert_eq!(turn.call.stock_ns, 1200);
        assert_eq!(turn.call.added_ns, [50, 50, 70]);
        assert_eq!(turn.idle.added_ns, [50, 50, 70]);
        assert_eq!(turns(&keys, &stock[..1], &[]), []);
    }

    #[test]
    fn what_is_staged_and_long_pinned_copies_are_left_out() {
        let staged = BTreeMap::from([
            ((Direction::HtoD, Memory::Reused, 4096), 0),
            ((Direction::HtoD, Memory::Reused, 1 << 20), 101),
            ((Direction::HtoD, Memory::Pinned, 1 << 20), 0),
            ((Direction::HtoD, Memory::Pinned, 2 << 20), 0),
            ((Direction::DtoH, Memory::Reused, 4096), 101),
        ]);
        let bytes = keys(&staged).into_iter().map(|(direction, memory, bytes)| {
            assert_eq!(direction, Direction::HtoD);
            (memory, bytes)
        });
        let reused = [1, 64, 1024, 4096].map(|bytes| (Memory::Reused, bytes));
        let pinned = [(Memory::Pinned, 1 << 20)];
        assert!(bytes.eq(reused.into_iter().chain(pinned)));
    }
}
