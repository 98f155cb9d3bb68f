//! The plan: how a copy of some size and direction is cut and by how many threads it is moved.
//!
//! [`estimate`] is the plan that needs no measurement. [`PlanCell`] holds the plan in force; it may be replaced while
//! copies run, and each copy reads one consistent row.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use cmt_common::control::{PLAN_ROWS, Plan, PlanRow, store};

use crate::store::Store;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Copies to the device below this go to the original function: 128 KiB gains only where the next follows at once, and lost a
/// tenth where the caller had written it (H200 with 16 CPUs, driver 580).
pub const LEAST_TO_DEVICE_BYTES: u64 = 256 * KIB;
/// And copies to the host below this: 32 KiB lost a tenth into fresh memory there.
const LEAST_TO_HOST_BYTES: u64 = 64 * KIB;
/// Bounds of the unit of CPU work. The lower one bounds the completion marks of a lane, the upper one divides every
/// amount of pinned memory that a lane can have.
pub(crate) const SLICE_MIN_BYTES: u64 = 16 * KIB;
pub(crate) const SLICE_MAX_BYTES: u64 = MIB;
/// Largest unit of DMA.
const SLOT_MAX_BYTES: u64 = 8 * MIB;
/// Most pinned bytes that one copy has in flight.
pub(crate) const RING_MAX_BYTES: u64 = 64 * MIB;
/// More threads than this have only ever made copies slower.
pub(crate) const THREADS_MAX: u32 = 64;

/// The default plan for a machine with `cpus` CPUs to use.
///
/// The rows are near the best of a search on one H200 with 16 CPUs (`docs/benchmarks.md`), with threads cut down to what is
/// there. One CPU stages nothing: there is nobody to share the work with. HtoD stores past the caches, and rings are larger
/// than caches, since a DMA on what lies in a CPU's cache is slow.
pub fn estimate(cpus: u32) -> Plan {
    if cpus < 2 {
        return Plan::NONE;
    }
    let row = |up_to_bytes, threads: u32, slot_bytes, slice_bytes, ring_bytes, store| PlanRow {
        up_to_bytes,
        slot_bytes,
        slice_bytes,
        ring_bytes,
        threads: threads.min(cpus),
        store,
    };
    let stock = |cut_over_bytes: u64| PlanRow {
        up_to_bytes: cut_over_bytes - 1,
        ..PlanRow::default()
    };
    let (plain, streaming) = (store::ORDINARY, store::NON_TEMPORAL);
    let htod = [
        stock(LEAST_TO_DEVICE_BYTES),
        row(MIB - 1, 4, MIB, 32 * KIB, 16 * MIB, streaming),
        row(2 * MIB, 6, MIB, 32 * KIB, 16 * MIB, streaming),
        row(8 * MIB, 6, MIB, 32 * KIB, 32 * MIB, streaming),
        row(32 * MIB, 6, 2 * MIB, 128 * KIB, RING_MAX_BYTES, streaming),
        row(128 * MIB, 6, 4 * MIB, 128 * KIB, RING_MAX_BYTES, streaming),
        row(u64::MAX, 8, 4 * MIB, 256 * KIB, RING_MAX_BYTES, plain),
    ];
    let dtoh = [
        stock(LEAST_TO_HOST_BYTES),
        row(128 * KIB, 4, 256 * KIB, 32 * KIB, 4 * MIB, plain),
        row(512 * KIB, 10, 256 * KIB, 32 * KIB, 16 * MIB, streaming),
        row(2 * MIB, 10, 512 * KIB, 16 * KIB, 16 * MIB, plain),
        row(8 * MIB, 10, MIB, 32 * KIB, 32 * MIB, plain),
        row(32 * MIB, 12, 2 * MIB, 64 * KIB, RING_MAX_BYTES, plain),
        row(u64::MAX, 8, 4 * MIB, 256 * KIB, RING_MAX_BYTES, streaming),
    ];
    let mut plan = Plan::NONE;
    plan.htod[..htod.len()].copy_from_slice(&htod);
    plan.dtoh[..dtoh.len()].copy_from_slice(&dtoh);
    plan
}

/// A row made safe to work with: whatever a profile or a host says, these numbers fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// Unit of DMA, a multiple of `slice`, at most half of `ring`.
    pub slot: u64,
    /// Unit of CPU work, a power of two.
    pub slice: u64,
    /// Bytes in flight, a power of two.
    pub ring: u64,
    /// The caller included; at least 1.
    pub threads: u32,
    pub store: Store,
}

impl Row {
    /// `None` if the row hands its copies to the original function.
    fn new(row: &PlanRow, threads_max: u32) -> Option<Self> {
        let power_of_two = |bytes: u64| 1u64 << bytes.max(1).ilog2();
        let threads = row.threads.min(threads_max).min(THREADS_MAX);
        (threads > 0).then(|| {
            Self {
                slot: row.slot_bytes.min(SLOT_MAX_BYTES),
                slice: power_of_two(row.slice_bytes.clamp(SLICE_MIN_BYTES, SLICE_MAX_BYTES)),
                ring: power_of_two(row.ring_bytes.clamp(MIB, RING_MAX_BYTES)),
                threads,
                store: Store::from_plan(row.store),
            }
            .within(RING_MAX_BYTES)
        })
    }

    /// The same row in slices of whole rows of a rectangle that lie `pitch` bytes apart (a power of two up to
    /// [`SLICE_MAX_BYTES`]).
    pub(crate) fn in_whole_rows(self, pitch: u64) -> Self {
        Self {
            slice: self.slice.max(pitch),
            ring: self.ring.max(2 * pitch),
            ..self
        }
        .within(RING_MAX_BYTES)
    }

    /// The same row in a ring of at most `ring_bytes` bytes (a multiple of 64 KiB).
    pub(crate) fn within(self, ring_bytes: u64) -> Self {
        let ring = self.ring.min(ring_bytes);
        let half = 1 << (ring / 2).max(1).ilog2();
        let slice = self.slice.min(half);
        let slot = self.slot.clamp(slice, half) / slice * slice;
        Self {
            slot,
            slice,
            ring,
            ..self
        }
    }
}

/// Words of one row in a [`PlanCell`].
const ROW_WORDS: usize = 5;
const PLAN_WORDS: usize = 2 * PLAN_ROWS * ROW_WORDS;

/// The plan in force: two copies of it and a number that says which one counts.
pub(crate) struct PlanCell {
    /// Counts plans; its lowest bit names the copy that is in force.
    version: AtomicU64,
    copies: [[AtomicU64; PLAN_WORDS]; 2],
    /// Smallest copy that is staged, by direction (HtoD, DtoH).
    cut_over: [AtomicU64; 2],
    threads_max: u32,
    /// Only for those who replace the plan.
    replacing: Mutex<()>,
}

impl PlanCell {
    pub(crate) fn new(plan: &Plan, threads_max: u32) -> Self {
        let cell = Self {
            version: AtomicU64::new(0),
            copies: core::array::from_fn(|_| core::array::from_fn(|_| AtomicU64::new(0))),
            cut_over: [AtomicU64::new(u64::MAX), AtomicU64::new(u64::MAX)],
            threads_max,
            replacing: Mutex::new(()),
        };
        cell.replace(plan);
        cell
    }

    /// Puts `plan` in force for every copy that starts from now on.
    pub(crate) fn replace(&self, plan: &Plan) {
        let _one_at_a_time = self.replacing.lock();
        let version = self.version.load(Ordering::Relaxed) + 1;
        let rows = plan.htod.iter().chain(&plan.dtoh);
        let words = rows.flat_map(|row| {
            let numbers = u64::from(row.threads) << 32 | u64::from(row.store);
            [
                row.up_to_bytes,
                row.slot_bytes,
                row.slice_bytes,
                row.ring_bytes,
                numbers,
            ]
        });
        for (cell, word) in self.copies[version as usize % 2].iter().zip(words) {
            cell.store(word, Ordering::Release);
        }
        self.version.store(version, Ordering::Release);
        for (cut_over, rows) in self.cut_over.iter().zip([&plan.htod, &plan.dtoh]) {
            cut_over.store(smallest_staged(rows), Ordering::Relaxed);
        }
    }

    /// The smallest copy that could be staged in one direction (0 HtoD, 1 DtoH).
    pub(crate) fn cut_over(&self, to_host: bool) -> u64 {
        self.cut_over[usize::from(to_host)].load(Ordering::Relaxed)
    }

    /// The row for a copy; `None` hands it to the original function.
    pub(crate) fn row(&self, to_host: bool, bytes: u64) -> Option<Row> {
        loop {
            let version = self.version.load(Ordering::Acquire);
            let words = &self.copies[version as usize % 2];
            let rows = words
                .chunks_exact(ROW_WORDS)
                .skip(if to_host { PLAN_ROWS } else { 0 })
                .take(PLAN_ROWS);
            let mut found = PlanRow::default();
            for row in rows {
                let word = |index: usize| row.get(index).map_or(0, |w| w.load(Ordering::Acquire));
                let up_to_bytes = word(0);
                if up_to_bytes != 0 && bytes <= up_to_bytes {
                    let numbers = word(4);
                    found = PlanRow {
                        up_to_bytes,
                        slot_bytes: word(1),
                        slice_bytes: word(2),
                        ring_bytes: word(3),
                        threads: (numbers >> 32) as u32,
                        store: numbers as u32,
                    };
                    break;
                }
            }
            // A word of a later plan is stored (release) after the version that ended this one, so having loaded
            // such a word (acquire) would show here.
            if self.version.load(Ordering::Relaxed) == version {
                return Row::new(&found, self.threads_max);
            }
        }
    }
}

/// The smallest copy that any row stages, `u64::MAX` if none does.
fn smallest_staged(rows: &[PlanRow]) -> u64 {
    let mut above = 0;
    for row in rows.iter().filter(|row| row.up_to_bytes > 0) {
        if row.threads > 0 && row.up_to_bytes > above {
            return above + 1;
        }
        above = above.max(row.up_to_bytes);
    }
    u64::MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::thread::available_parallelism;

    #[test]
    fn the_estimate_stages_from_its_cut_over_and_never_asks_for_more_threads_than_cpus() {
        for cpus in [2, 3, 8, 16, 256] {
            let plan = estimate(cpus);
            let cell = PlanCell::new(&plan, cpus);
            for to_host in [false, true] {
                let cut_over = [LEAST_TO_DEVICE_BYTES, LEAST_TO_HOST_BYTES][usize::from(to_host)];
                assert_eq!(cell.cut_over(to_host), cut_over);
                assert_eq!(cell.row(to_host, cut_over - 1), None);
                for bytes in [cut_over, MIB, 100 * MIB, 1 << 40] {
                    let row = cell.row(to_host, bytes).expect("staged");
                    assert!(row.threads >= 2 && row.threads <= cpus);
                }
            }
        }
        assert_eq!(estimate(1), Plan::NONE);
        assert_eq!(estimate(0), Plan::NONE);
    }

    #[test]
    fn the_first_row_that_fits_counts_and_none_stages_nothing() {
        let mut plan = Plan::NONE;
        let cell = PlanCell::new(&plan, 4);
        assert_eq!(
            (cell.cut_over(false), cell.row(false, 1 << 30)),
            (u64::MAX, None)
        );
        plan.dtoh[0] = PlanRow {
            up_to_bytes: 1000,
            threads: 0,
            ..PlanRow::default()
        };
        plan.dtoh[1] = PlanRow {
            up_to_bytes: 2000,
            threads: 9,
            ..PlanRow::default()
        };
        cell.replace(&plan);
        assert_eq!(cell.cut_over(true), 1001);
        assert_eq!(cell.row(true, 1000), None);
        assert_eq!(cell.row(true, 1001).map(|row| row.threads), Some(4));
        assert_eq!(cell.row(true, 2001), None);
        assert_eq!(cell.row(false, 1500), None);
    }

    #[test]
    fn a_row_is_never_read_half_from_one_plan_and_half_from_another() {
        let plan = |n: u64| {
            let mut plan = Plan::NONE;
            plan.htod[PLAN_ROWS - 1] = PlanRow {
                up_to_bytes: u64::MAX,
                slot_bytes: (64 * KIB) << n,
                slice_bytes: (16 * KIB) << n,
                ring_bytes: MIB << n,
                threads: n as u32 + 1,
                store: 0,
            };
            plan
        };
        let cell = PlanCell::new(&plan(0), 64);
        let stop = std::sync::atomic::AtomicBool::new(false);
        let rounds = if cfg!(miri) { 30 } else { 60_000 };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..rounds {
                    cell.replace(&plan(round % 5));
                }
                stop.store(true, Ordering::Relaxed);
            });
            // More readers than CPUs, so that some are interrupted while they read.
            for _ in 0..2 * available_parallelism().map_or(2, |n| n.get()) {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let row = cell.row(false, MIB).expect("staged");
                        let n = u64::from(row.threads) - 1;
                        assert_eq!(
                            (row.slot, row.slice, row.ring),
                            ((64 * KIB) << n, (16 * KIB) << n, MIB << n)
                        );
                    }
                });
            }
        });
    }

    proptest! {
        #[test]
        fn any_row_becomes_one_that_fits_together(
            slot_bytes: u64, slice_bytes: u64, ring_bytes: u64, threads: u32, store: u32, chunks in 1u64..=1024,
        ) {
            let raw = PlanRow { up_to_bytes: 1, slot_bytes, slice_bytes, ring_bytes, threads, store };
            if let Some(row) = Row::new(&raw, 16) {
                for row in [row, row.within(chunks * 64 * KIB)] {
                    prop_assert!(row.slice.is_power_of_two() && row.slice >= SLICE_MIN_BYTES);
                    prop_assert!(row.slice <= SLICE_MAX_BYTES && row.slot <= SLOT_MAX_BYTES);
                    prop_assert!(row.slot >= row.slice && row.slot % row.slice == 0);
                    prop_assert!(2 * row.slot <= row.ring && row.ring <= RING_MAX_BYTES);
                    prop_assert!((1..=16).contains(&row.threads));
                }
                prop_assert!(row.within(chunks * 64 * KIB).ring <= chunks * 64 * KIB);
            } else {
                prop_assert_eq!(threads, 0);
            }
        }
    }
}
