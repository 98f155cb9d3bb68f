//! Whether a thread's short copies in one direction follow one another so fast that staging them pays.
//!
//! Staging a short copy loses where helpers must be woken first while the caller has the bytes in its cache, above all bytes
//! of new memory (`docs/benchmarks.md`). Who begins a copy sooner than it could have come by new bytes since the last one has
//! none, and mostly finds helpers awake. The shortest copies to the host lose where they follow soon after one by stock.

#![expect(unsafe_code, reason = "asks libc for the time and for the thread")]

use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use crate::protocol::Line;

/// Longer copies need no pace: HtoD, DtoH.
const SHORT_BELOW_BYTES: [u64; 2] = [2 << 20, 128 << 10];
/// About as fast as one thread comes by new bytes. Where it has written them faster, in place, staged copies win all the same.
const WRITTEN_BYTES_A_NANOSECOND: u64 = 8;
/// A copy to the device that follows at once finds the link busy, which hides how long helpers take to wake.
const AT_ONCE_NS: u64 = 3_000;
/// Of others so many go to stock first: a few in a row are over before waking helpers for them has paid.
const FIRST: i32 = 4;
/// So many more where it was found that they cannot be staged, since that is not found for nothing.
const PAUSE: i32 = 16;
/// Threads that have a place of their own, if no two meet in one.
const PLACES: usize = 512;

/// By direction and thread. No thread-local variable: a library that was loaded late gets those from the program's `malloc`,
/// under the loader's lock.
static PACES: [[Line<Pace>; PLACES]; 2] = [const { [const { Line(Pace::new()) }; PLACES] }; 2];

struct Pace {
    /// Whose it is. Of two threads that meet here neither keeps its pace.
    thread: AtomicU64,
    /// When its last short copy returned, in nanoseconds of the monotonic clock.
    ended_ns: AtomicU64,
    /// Copies since one that came late, or less than none.
    in_a_row: AtomicI32,
}

impl Pace {
    const fn new() -> Self {
        Self {
            thread: AtomicU64::new(0),
            ended_ns: AtomicU64::new(0),
            in_a_row: AtomicI32::new(0),
        }
    }

    fn begins(&self, thread: u64, to_host: bool, bytes: u64, now_ns: u64) -> bool {
        let gap = now_ns.saturating_sub(self.ended_ns.load(Ordering::Relaxed));
        let is_own = self.thread.load(Ordering::Relaxed) == thread;
        // A clock that cannot be read says 0.
        let is_soon = is_own && now_ns > 0 && gap <= bytes / WRITTEN_BYTES_A_NANOSECOND;
        let before = self.in_a_row.load(Ordering::Relaxed);
        let in_a_row = match is_soon {
            true => before.saturating_add(1),
            false => before.min(0),
        };
        self.in_a_row.store(in_a_row, Ordering::Relaxed);
        let is_at_once = !to_host && gap <= AT_ONCE_NS;
        is_soon && (in_a_row >= FIRST || in_a_row > 0 && is_at_once)
    }

    fn ended(&self, thread: u64, now_ns: u64) {
        self.thread.store(thread, Ordering::Relaxed);
        self.ended_ns.store(now_ns, Ordering::Relaxed);
    }
}

/// Whether a guarded engine stages copies of this kind only where they come in a row.
pub fn is_paced(to_host: bool, bytes: u64) -> bool {
    bytes < SHORT_BELOW_BYTES[usize::from(to_host)]
}

/// This thread begins a short copy; whether it keeps pace with those before it.
pub(crate) fn begins(to_host: bool, bytes: u64) -> bool {
    let (thread, pace) = own(to_host);
    pace.begins(thread, to_host, bytes, now_ns())
}

/// It has returned, staged or not.
pub(crate) fn ended(to_host: bool) {
    let (thread, pace) = own(to_host);
    pace.ended(thread, now_ns());
}

/// It was none that could be staged: nobody asks about the next ones.
pub(crate) fn forget(to_host: bool) {
    own(to_host).1.in_a_row.store(-PAUSE, Ordering::Relaxed);
}

/// This thread's number, and its place for a direction.
fn own(to_host: bool) -> (u64, &'static Pace) {
    // SAFETY: takes nothing, and cannot fail.
    let thread = unsafe { libc::pthread_self() } as u64;
    (thread, &PACES[usize::from(to_host)][place(thread)].0)
}

/// Stacks lie at even distances, so all bits are mixed (MurmurHash3's finalizer).
fn place(thread: u64) -> usize {
    let mut mixed = thread;
    for factor in [0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53] {
        mixed = (mixed ^ mixed >> 33).wrapping_mul(factor);
    }
    (mixed ^ mixed >> 33) as usize % PLACES
}

fn now_ns() -> u64 {
    let mut now = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: writes the structure, or leaves it zero.
    let now = unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC, now.as_mut_ptr());
        now.assume_init()
    };
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_staged_while_they_come_sooner_than_they_could_be_written() {
        let pace = Pace::new();
        let mut now_ns = 1_000_000_000;
        let mut next = |thread, bytes: u64, gap_us: u64| {
            now_ns += 1000 * gap_us;
            let is_staged = pace.begins(thread, false, bytes, now_ns);
            now_ns += 60_000;
            pace.ended(thread, now_ns);
            is_staged
        };
        let (kib, mib) = (1 << 10, 1 << 20);
        let staged: Vec<bool> = (0..6).map(|_| next(1, mib, 20)).collect();
        assert_eq!(staged, [false, false, false, false, true, true]);
        assert!(next(1, mib, 131));
        assert!(next(1, 256 * kib, 32));
        assert!(!next(1, 256 * kib, 33), "time enough to write it");
        for _ in 0..3 {
            assert!(!next(1, mib, 131));
        }
        assert!(next(1, mib, 131));
        assert!(!next(1, mib, 132));
        assert!(next(1, mib, 3), "at once");
        assert!(!next(1, mib, 500) && !next(1, mib, 4));
        // Two threads in one place.
        for _ in 0..8 {
            assert!(!next(2, mib, 0));
            assert!(!next(1, mib, 0));
        }
    }

    #[test]
    fn to_the_host_nothing_is_gained_by_following_at_once() {
        let pace = Pace::new();
        let begins = |now_ns, to_host| {
            let is_staged = pace.begins(1, to_host, 64 << 10, now_ns);
            pace.ended(1, now_ns);
            is_staged
        };
        let staged: Vec<bool> = (1..=6).map(|now_us| begins(1000 * now_us, true)).collect();
        assert_eq!(staged, [false, false, false, false, true, true]);
        assert!(!begins(1_000_000, true) && !begins(1_001_000, true));
        assert!(begins(1_002_000, false));
    }

    #[test]
    fn what_cannot_be_staged_is_asked_about_seldom() {
        let (now_ns, mib) = (1000, 1 << 20);
        let (thread, pace) = own(false);
        pace.ended(thread, now_ns);
        let asked = (0..170).filter(|_| {
            let is_asked = pace.begins(thread, false, mib, now_ns);
            if is_asked {
                forget(false);
            }
            is_asked
        });
        assert_eq!(asked.count(), 10);
    }

    #[test]
    fn threads_with_stacks_side_by_side_have_places_of_their_own() {
        for distance in [0x80_1000, 0x81_0000, 0x100_0000, 0x1000, 0x2_1000] {
            for first in 0..32 {
                let top = 0x7f00_0000_0000 + (first << 25);
                let places: std::collections::BTreeSet<usize> = (0..16)
                    .map(|thread| place(top - thread * distance))
                    .collect();
                assert!(places.len() >= 13, "{distance:#x}: {}", places.len());
            }
        }
    }

    #[test]
    fn a_clock_that_goes_backwards_harms_nothing() {
        let pace = Pace::new();
        pace.ended(1, 1000);
        assert!(pace.begins(1, false, 1 << 20, 1));
        assert!(!pace.begins(1, false, 1 << 20, 0), "cannot be read");
        assert!(!pace.begins(1, false, 1 << 20, u64::MAX));
    }
}
