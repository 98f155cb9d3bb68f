//! The guard: now and then a copy of a size class goes to stock and is timed, as are some of the staged ones. A class that
//! loses goes to stock for a while, then is tried again.
//!
//! Only calls that come back when their bytes are where they belong are timed: synchronous ones and DtoH, on idle streams.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Powers of two of bytes.
const CLASSES: usize = 48;
/// Every so manyth copy of a class is timed.
const TIMED_EVERY: u32 = 32;
/// Every so manyth copy of a class goes to stock, until there are enough of them, and later.
const STOCK_EVERY: u32 = 256;
const STOCK_LATER_EVERY: u32 = 2048;
/// The last so many times of a class are compared, by their medians.
const SAMPLES: usize = 8;
/// A class is judged by so many of stock's times.
const ENOUGH: u32 = 4;
/// Slower by no more than this is noise.
const NOISE: f64 = 1.05;
/// How long a class that lost goes to stock.
const OFF_FOR: Duration = Duration::from_secs(60);

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
    classes: [[Class; CLASSES]; 2],
}

#[derive(Default)]
struct Class {
    copies: AtomicU32,
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

impl Guard {
    pub(crate) fn new() -> Self {
        Self {
            started: Instant::now(),
            classes: core::array::from_fn(|_| core::array::from_fn(|_| Class::default())),
        }
    }

    fn class(&self, to_host: bool, bytes: u64) -> &Class {
        let class = bytes.max(1).ilog2() as usize;
        &self.classes[usize::from(to_host)][class.min(CLASSES - 1)]
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
        let number = class.copies.fetch_add(1, Ordering::Relaxed) + 1;
        let every = match class.stock.count() < ENOUGH {
            true => STOCK_EVERY,
            false => STOCK_LATER_EVERY,
        };
        let turn = if number.is_multiple_of(every) {
            Turn::Sample
        } else if number % TIMED_EVERY == TIMED_EVERY / 2 {
            Turn::StageTimed
        } else {
            return Turn::Stage;
        };
        if may_be_timed() { turn } else { Turn::Stage }
    }

    /// A copy took so long, staged or by stock.
    pub(crate) fn note(&self, staged: bool, to_host: bool, bytes: u64, took: Duration) {
        let class = self.class(to_host, bytes);
        let for_a_mib = u64::try_from((took.as_nanos() << 20) / u128::from(bytes.max(1)));
        let times = if staged { &class.staged } else { &class.stock };
        times.note(for_a_mib.unwrap_or(u64::MAX));
        let enough = class.stock.count() >= ENOUGH && class.staged.count() >= SAMPLES as u32;
        if enough && class.staged.median() as f64 > NOISE * class.stock.median() as f64 {
            let until = self.now_ms() + OFF_FOR.as_millis() as u64;
            class.off_until_ms.store(until, Ordering::Relaxed);
        }
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
        assert_eq!(run(&guard, 1024, 30, 90), 4);
        assert_eq!(run(&guard, 4096, 30, 90), 2);
        assert!(run(&guard, 1024, 31, 30) <= 1, "noise");
    }

    #[test]
    fn a_class_that_loses_goes_to_stock_and_no_other_does() {
        let guard = Guard::new();
        run(&guard, 1024, 90, 30);
        assert_eq!(guard.turn(false, MIB, || true), Turn::Lost);
        assert_eq!(run(&guard, 100, 90, 30), 100);
        assert_ne!(guard.turn(false, 2 * MIB, || true), Turn::Lost);
        assert_ne!(guard.turn(true, MIB, || true), Turn::Lost);
    }

    #[test]
    fn a_class_that_lost_is_tried_again_and_judged_anew() {
        let mut guard = Guard::new();
        run(&guard, 1024, 90, 30);
        assert_eq!(guard.turn(false, MIB, || true), Turn::Lost);
        guard.started = Instant::now().checked_sub(2 * OFF_FOR).expect("later");
        assert!(run(&guard, 2048, 30, 90) <= 8);
        assert_ne!(guard.turn(false, MIB, || true), Turn::Lost);
    }

    #[test]
    fn what_cannot_be_timed_is_staged() {
        let guard = Guard::new();
        for _ in 0..3000 {
            assert_eq!(guard.turn(true, MIB, || false), Turn::Stage);
        }
    }
}
