//! Whether a thread's short copies to the device follow one another so fast that staging them pays.
//!
//! Staging a short copy loses where helpers must be woken first while the caller has the bytes in its cache, above all bytes
//! of new memory (`docs/benchmarks.md`). Who begins a copy sooner than it could have come by new bytes since the last one has
//! none, and mostly finds helpers awake.

use core::cell::Cell;
use core::time::Duration;
use std::time::Instant;

/// Longer copies need no pace.
const SHORT_BELOW_BYTES: u64 = 2 << 20;
/// About as fast as one thread writes new bytes; staged copies of bytes that were written faster, in place, win all the same.
const WRITTEN_BYTES_A_NANOSECOND: u64 = 8;
/// So many go to stock first: a few in a row are over before waking helpers for them has paid.
const FIRST: u32 = 4;

thread_local!(static PACE: Cell<Pace> = const { Cell::new(Pace { ended: None, in_a_row: 0 }) });

#[derive(Clone, Copy)]
struct Pace {
    /// When this thread's last short copy to the device returned.
    ended: Option<Instant>,
    /// Copies since one that came late.
    in_a_row: u32,
}

impl Pace {
    fn begins(&mut self, bytes: u64, now: Instant) -> bool {
        let gap = Duration::from_nanos(bytes / WRITTEN_BYTES_A_NANOSECOND);
        let is_soon = self.ended.is_some_and(|ended| now - ended <= gap);
        self.in_a_row = if is_soon {
            self.in_a_row.saturating_add(1)
        } else {
            0
        };
        self.in_a_row >= FIRST
    }
}

pub(crate) fn is_short(bytes: u64) -> bool {
    bytes < SHORT_BELOW_BYTES
}

/// This thread begins a short copy to the device; whether it keeps pace with those before it.
pub(crate) fn begins(bytes: u64) -> bool {
    let mut pace = PACE.get();
    let keeps = pace.begins(bytes, Instant::now());
    PACE.set(pace);
    keeps
}

/// It has returned, staged or not.
pub(crate) fn ended() {
    let mut pace = PACE.get();
    pace.ended = Some(Instant::now());
    PACE.set(pace);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_staged_while_they_come_sooner_than_they_could_be_written() {
        let mut pace = Pace {
            ended: None,
            in_a_row: 0,
        };
        let mut now = Instant::now();
        let mut next = |bytes: u64, gap_us| {
            now += Duration::from_micros(gap_us);
            let is_staged = pace.begins(bytes, now);
            now += Duration::from_micros(60);
            pace.ended = Some(now);
            is_staged
        };
        let (kib, mib) = (1 << 10, 1 << 20);
        let staged: Vec<bool> = (0..6).map(|_| next(mib, 20)).collect();
        assert_eq!(staged, [false, false, false, false, true, true]);
        assert!(next(mib, 131));
        assert!(next(256 * kib, 32));
        assert!(!next(256 * kib, 33), "time enough to write it");
        for _ in 0..3 {
            assert!(!next(mib, 131));
        }
        assert!(next(mib, 131));
        assert!(!next(mib, 132));
    }
}
