//! Rows of a plan that are worth a try for copies of one size.

use std::collections::HashSet;

use cmt_common::control::{PlanRow, store};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Steps of each number, as the engine can use them.
const THREADS: [u32; 14] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32];
const SLICES: [u64; 7] = powers(16 * KIB);
const SLOTS: [u64; 8] = powers(64 * KIB);
const RINGS: [u64; 6] = powers(2 * MIB);
const STORES: [u32; 3] = [store::ORDINARY, store::NON_TEMPORAL, store::REP_MOVSB];
/// More slices in a slot only cost.
const SLICES_A_SLOT: u64 = 64;
/// More slots in a copy only cost, where they are small.
const SLOTS_A_COPY: u64 = 64;
const SLOT_LARGE: u64 = 2 * MIB;

/// A number and its next multiples by two.
const fn powers<const N: usize>(first: u64) -> [u64; N] {
    let mut powers = [first; N];
    let mut index = 1;
    while index < N {
        powers[index] = 2 * powers[index - 1];
        index += 1;
    }
    powers
}

/// What there is to choose from for copies of one size on so many threads.
pub struct Space {
    threads: Vec<u32>,
    slots: Vec<u64>,
    slices: Vec<u64>,
    rings: Vec<u64>,
}

impl Space {
    /// For copies of `bytes` bytes; `threads` counts the caller.
    pub fn new(bytes: u64, threads: u32) -> Self {
        let mut steps: Vec<u32> = THREADS.into_iter().filter(|&n| n <= threads).collect();
        // Between the steps there is room only for what is there at most.
        if steps.last() != Some(&threads) && threads < 64 {
            steps.push(threads);
        }
        let within = |steps: &[u64], least: u64, most: u64| -> Vec<u64> {
            let within = steps.iter().filter(|&&step| least <= step && step <= most);
            within.copied().collect()
        };
        Self {
            threads: steps,
            slots: within(
                &SLOTS,
                (bytes / SLOTS_A_COPY).min(SLOT_LARGE),
                bytes.max(SLOTS[0]),
            ),
            slices: within(&SLICES, 0, (bytes / 2).max(SLICES[0])),
            rings: within(&RINGS, 0, (8 * bytes).max(4 * MIB)),
        }
    }

    /// Up to `count` rows, the most promising first: `first`, those one step from it, and random ones.
    pub fn candidates(
        &self,
        first: &PlanRow,
        count: usize,
        dice: &mut fastrand::Rng,
    ) -> Vec<PlanRow> {
        let first = self.fitted(first);
        let mut found = vec![first];
        let mut neighbours = self.neighbours(&first);
        dice.shuffle(&mut neighbours);
        found.extend(neighbours);
        // A random row may be one that there is; a space may be smaller than `count`.
        found.extend((0..4 * count).filter_map(|_| self.random(dice)));
        let mut seen = HashSet::new();
        found.retain(|row| seen.insert(key(row)));
        found.truncate(count);
        found
    }

    /// `row` for these copies: no larger than they are, on threads that are there.
    fn fitted(&self, row: &PlanRow) -> PlanRow {
        let most = |steps: &[u64]| steps.last().copied().unwrap_or(u64::MAX);
        PlanRow {
            up_to_bytes: u64::MAX,
            slot_bytes: row.slot_bytes.min(most(&self.slots)),
            slice_bytes: row.slice_bytes.min(most(&self.slices)),
            ring_bytes: row.ring_bytes.min(most(&self.rings)),
            threads: row
                .threads
                .clamp(1, self.threads.last().copied().unwrap_or(1)),
            store: row.store,
        }
    }

    /// The rows one step from `row`.
    pub fn neighbours(&self, row: &PlanRow) -> Vec<PlanRow> {
        let mut found = Vec::new();
        for threads in beside(&self.threads, row.threads) {
            found.push(PlanRow { threads, ..*row });
        }
        for slot_bytes in beside(&self.slots, row.slot_bytes) {
            found.push(PlanRow { slot_bytes, ..*row });
        }
        for slice_bytes in beside(&self.slices, row.slice_bytes) {
            found.push(PlanRow {
                slice_bytes,
                ..*row
            });
        }
        for ring_bytes in beside(&self.rings, row.ring_bytes) {
            found.push(PlanRow { ring_bytes, ..*row });
        }
        for store in STORES.into_iter().filter(|&store| store != row.store) {
            found.push(PlanRow { store, ..*row });
        }
        found.retain(makes_sense);
        found
    }

    fn random(&self, dice: &mut fastrand::Rng) -> Option<PlanRow> {
        let row = PlanRow {
            up_to_bytes: u64::MAX,
            slot_bytes: *dice.choice(&self.slots)?,
            slice_bytes: *dice.choice(&self.slices)?,
            ring_bytes: *dice.choice(&self.rings)?,
            threads: *dice.choice(&self.threads)?,
            store: *dice.choice(&STORES)?,
        };
        makes_sense(&row).then_some(row)
    }
}

/// Whether the numbers fit together, as the engine would make them anyway.
fn makes_sense(row: &PlanRow) -> bool {
    row.slice_bytes <= row.slot_bytes
        && 2 * row.slot_bytes <= row.ring_bytes
        && row.slot_bytes / row.slice_bytes <= SLICES_A_SLOT
}

/// The steps just below and above a value.
fn beside<T: Copy + PartialOrd>(steps: &[T], value: T) -> impl Iterator<Item = T> {
    let below = steps.iter().rev().find(|&&step| step < value).copied();
    let above = steps.iter().find(|&&step| step > value).copied();
    below.into_iter().chain(above)
}

/// What tells rows apart.
fn key(row: &PlanRow) -> (u64, u64, u64, u32, u32) {
    (
        row.slot_bytes,
        row.slice_bytes,
        row.ring_bytes,
        row.threads,
        row.store,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: PlanRow = PlanRow {
        up_to_bytes: u64::MAX,
        slot_bytes: MIB,
        slice_bytes: 64 * KIB,
        ring_bytes: 16 * MIB,
        threads: 8,
        store: store::ORDINARY,
    };

    #[test]
    fn candidates_begin_with_the_given_row_and_are_all_different_and_the_same_by_the_same_seed() {
        let find = |seed| {
            let mut dice = fastrand::Rng::with_seed(seed);
            Space::new(4 * MIB, 16).candidates(&ROW, 40, &mut dice)
        };
        let found = find(7);
        assert_eq!((found.len(), found[0]), (40, ROW));
        let different: HashSet<_> = found.iter().map(key).collect();
        assert_eq!(different.len(), found.len());
        assert_eq!(find(7), found);
        assert_ne!(find(8), found);
    }

    #[test]
    fn no_candidate_has_more_threads_than_there_are() {
        for threads in [1, 2, 3, 7, 100] {
            for bytes in [64 * KIB, MIB, 256 * MIB] {
                let space = Space::new(bytes, threads);
                assert!(space.slots.iter().all(|&slot| slot <= bytes));
                let mut dice = fastrand::Rng::with_seed(1);
                let found = space.candidates(&ROW, 60, &mut dice);
                assert!(found.iter().all(|row| (1..=threads).contains(&row.threads)));
                assert!(found[1..].iter().all(makes_sense));
                assert!(found.len() > 10, "{threads} {bytes}");
            }
        }
    }
}
