//! The guard: now and then a copy of a size class goes to stock and is timed, as is a staged one. A class that loses goes to
//! stock for a while, then is tried again.
//!
//! Only linear copies on idle streams, with no other at work beside them, are judged, by what the caller feels: how long the
//! call takes. Behind other work an asynchronous HtoD comes back at once or when the stream is done, and both say nothing of
//! the copier. So neither a loop whose synchronous copies follow at once, each behind the last one's tail, nor a crowd whose
//! copies overlap all the time is judged often.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cmt_common::control::{SIZE_CLASSES, size_class};

/// One of so many copies of a class goes to stock, and one is timed, until there are enough of them, and later. Both at the
/// same rate, so that both sides' times are of the same while. Short copies, which stock may win, are judged sooner; a long one that
/// goes to stock costs much.
const SHORT_EVERY: u32 = 32;
const EVERY: u32 = 256;
const LATER_EVERY: u32 = 2048;
const SHORT_BELOW_BYTES: u64 = 4 << 20;
/// The last so many times of a class are compared, by their medians.
const SAMPLES: usize = 8;
/// A class is judged by so many of either side's times; short copies are many, and their times differ more.
const ENOUGH: u32 = 4;
const ENOUGH_SHORT: u32 = 8;
/// Where a stream is not idle when a copy is to be timed, so many copies after it are tried.
const TRIES: u32 = 8;
/// Slower by no more than this is noise.
const NOISE: f64 = 1.05;
/// How long a class that lost goes to stock.
const OFF_FOR: Duration = Duration::from_secs(60);

fn enough(bytes: u64) -> u32 {
    match bytes < SHORT_BELOW_BYTES {
        true => ENOUGH_SHORT,
        false => ENOUGH,
    }
}

/// What is to be done with a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    Stage,
    StageTimed,
    /// To stock, which is timed.
    Sample,
    /// To stock: its class has lost.
    Lost,
}

/// What is known of all classes, by direction (HtoD, DtoH).
pub(crate) struct Guard {
    started: Instant,
    classes: [[Class; SIZE_CLASSES]; 2],
}

#[derive(Default)]
struct Class {
    copies: AtomicU32,
    /// Tries left of a turn that could not be taken, and which turn that is (see [`Class::owe`]).
    owed: AtomicU32,
    stock: Times,
    staged: Times,
    /// Milliseconds after the guard's start until which the class goes to stock; 0 while it is staged.
    off_until_ms: AtomicU64,
}

/// The last times of one side, in nanoseconds for a MiB.
#[derive(Default)]
struct Times {
    count: AtomicU32,
    last: [AtomicU64; SAMPLES],
}

impl Times {
    fn note(&self, time: u64) {
        let place = self.count.fetch_add(1, Ordering::Relaxed) as usize % SAMPLES;
        self.last[place].store(time, Ordering::Relaxed);
    }

    fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    fn median(&self) -> u64 {
        let known = (self.count() as usize).min(SAMPLES);
        let mut times = [0; SAMPLES];
        for (time, last) in times.iter_mut().zip(&self.last) {
            *time = last.load(Ordering::Relaxed);
        }
        let times = &mut times[..known];
        times.sort_unstable();
        times.get(known / 2).copied().unwrap_or(0)
    }
}

impl Class {
    /// The turn of the next copy. Which copies are chosen has no pattern that a program's own could meet.
    fn next(&self, bytes: u64) -> (Turn, u32) {
        let owed = self.owed.load(Ordering::Relaxed);
        if owed > 0 {
            let turn = match owed.is_multiple_of(2) {
                true => Turn::Sample,
                false => Turn::StageTimed,
            };
            return (turn, owed / 2 - 1);
        }
        let number = self.copies.fetch_add(1, Ordering::Relaxed);
        let dice = number.wrapping_mul(0x9E37_79B1) >> 16;
        let every = match self.stock.count().min(self.staged.count()) < enough(bytes) {
            true if bytes < SHORT_BELOW_BYTES => SHORT_EVERY,
            true => EVERY,
            false => LATER_EVERY,
        };
        match dice % every {
            0 => (Turn::Sample, TRIES),
            1 => (Turn::StageTimed, TRIES),
            _ => (Turn::Stage, 0),
        }
    }

    /// Remembers a turn that could not be taken.
    fn owe(&self, turn: Turn, tries: u32) {
        let owed = match tries {
            0 => 0,
            tries => 2 * tries + u32::from(turn == Turn::StageTimed),
        };
        self.owed.store(owed, Ordering::Relaxed);
    }
}

impl Guard {
    pub(crate) fn new() -> Self {
        Self {
            started: Instant::now(),
            classes: core::array::from_fn(|_| core::array::from_fn(|_| Class::default())),
        }
    }

    fn class(&self, to_host: bool, bytes: u64) -> &Class {
        &self.classes[usize::from(to_host)][size_class(bytes)]
    }

    /// Counts a copy and says what is to be done with it. `may_be_timed` is asked only where it matters.
    pub(crate) fn turn(
        &self,
        to_host: bool,
        bytes: u64,
        may_be_timed: impl FnOnce() -> bool,
    ) -> Turn {
        let class = self.class(to_host, bytes);
        let off_until = class.off_until_ms.load(Ordering::Relaxed);
        if off_until > 0 {
            if self.now_ms() < off_until {
                return Turn::Lost;
            }
            // Judged anew, by times of now.
            class.stock.count.store(0, Ordering::Relaxed);
            class.staged.count.store(0, Ordering::Relaxed);
            class.off_until_ms.store(0, Ordering::Relaxed);
        }
        let (turn, tries) = class.next(bytes);
        if turn == Turn::Stage {
            return turn;
        }
        let is_taken = may_be_timed();
        class.owe(turn, if is_taken { 0 } else { tries });
        if is_taken { turn } else { Turn::Stage }
    }

    /// A copy took so long, staged or by stock.
    pub(crate) fn note(&self, staged: bool, to_host: bool, bytes: u64, took: Duration) {
        let class = self.class(to_host, bytes);
        let for_a_mib = u64::try_from((took.as_nanos() << 20) / u128::from(bytes.max(1)));
        let times = if staged { &class.staged } else { &class.stock };
        times.note(for_a_mib.unwrap_or(u64::MAX));
        let has_enough = class.stock.count().min(class.staged.count()) >= enough(bytes);
        if has_enough && class.staged.median() as f64 > NOISE * class.stock.median() as f64 {
            let until = self.now_ms() + OFF_FOR.as_millis() as u64;
            class.off_until_ms.store(until, Ordering::Relaxed);
        }
    }

    /// Median times of a copy's class for a MiB, in nanoseconds: stock's and staged ones. `None` before there are enough.
    pub(crate) fn compared(&self, to_host: bool, bytes: u64) -> Option<[u64; 2]> {
        let class = self.class(to_host, bytes);
        let sides = [&class.stock, &class.staged];
        sides
            .iter()
            .all(|side| side.count() >= enough(bytes))
            .then(|| sides.map(Times::median))
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// So many copies of 1 MiB that take so many microseconds; how many of them went to stock.
    fn run(guard: &Guard, copies: u32, staged_us: u64, stock_us: u64) -> u32 {
        let mut stock = 0;
        for _ in 0..copies {
            match guard.turn(false, MIB, || true) {
                Turn::Stage => {}
                Turn::StageTimed => {
                    guard.note(true, false, MIB, Duration::from_micros(staged_us));
                }
                Turn::Sample => {
                    stock += 1;
                    guard.note(false, false, MIB, Duration::from_micros(stock_us));
                }
                Turn::Lost => stock += 1,
            }
        }
        stock
    }

    #[test]
    fn a_class_that_wins_is_hardly_disturbed() {
        let guard = Guard::new();
        assert!((2..=8).contains(&run(&guard, 256, 30, 90)));
        let later = run(&guard, 64 * 1024, 30, 90);
        assert!((16..=64).contains(&later), "{later}");
        assert!(run(&guard, 64 * 1024, 31, 30) <= 64, "noise");
        assert_ne!(guard.turn(false, MIB, || true), Turn::Lost);
        assert_eq!(guard.compared(false, MIB), Some([30_000, 31_000]));
        assert_eq!(guard.compared(true, MIB), None);
    }

    #[test]
    fn a_class_that_loses_goes_to_stock_and_no_other_does() {
        let guard = Guard::new();
        run(&guard, 512, 90, 30);
        assert_eq!(guard.turn(false, MIB, || true), Turn::Lost);
        assert_eq!(run(&guard, 100, 90, 30), 100);
        assert_ne!(guard.turn(false, 2 * MIB, || true), Turn::Lost);
        assert_ne!(guard.turn(true, MIB, || true), Turn::Lost);
    }

    #[test]
    fn a_class_that_lost_is_tried_again_and_judged_anew() {
        let mut guard = Guard::new();
        run(&guard, 4096, 90, 30);
        assert_eq!(guard.turn(false, MIB, || true), Turn::Lost);
        guard.started = Instant::now().checked_sub(2 * OFF_FOR).expect("later");
        assert!(run(&guard, 2048, 30, 90) <= 16);
        assert_ne!(guard.turn(false, MIB, || true), Turn::Lost);
    }

    #[test]
    fn what_cannot_be_timed_is_staged_and_the_next_that_can_has_its_turn() {
        let guard = Guard::new();
        let mut asked = 0;
        for _ in 0..4096 {
            let busy = || {
                asked += 1;
                false
            };
            assert_eq!(guard.turn(true, MIB, busy), Turn::Stage);
        }
        assert!((1000..=2000).contains(&asked), "{asked}");
        // Every second one, as where each download follows an upload that is still on its way.
        let mut taken = 0;
        for number in 0..4096 {
            taken += u32::from(guard.turn(true, 2 * MIB, || number % 2 == 0) != Turn::Stage);
        }
        assert!(taken >= 8, "{taken}");
    }

    /// As many copies of one class in each round of a program's loop as the guard counts to.
    #[test]
    fn a_programs_rhythm_does_not_decide_which_copies_are_compared() {
        let guard = Guard::new();
        let mut places = [
            std::collections::BTreeSet::new(),
            std::collections::BTreeSet::new(),
        ];
        for number in 0..64 * 256u32 {
            match guard.turn(false, MIB, || true) {
                Turn::Sample => places[0].insert(number % 256),
                Turn::StageTimed => places[1].insert(number % 256),
                _ => false,
            };
        }
        assert!(places.iter().all(|places| places.len() > 16), "{places:?}");
    }
}
