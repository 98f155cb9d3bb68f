//! How a thread waits for the stream or for a helper: it spins, then lets others run, then sleeps in short naps.
//!
//! Stock waits by spinning too, but only where the context was not made for blocking; nobody should lose a CPU to us for
//! as long as a kernel runs.
#![expect(unsafe_code, reason = "sleeps by a raw system call")]

use std::time::{Duration, Instant};

/// After so long without progress the waiting thread lets other threads run.
const YIELD_AFTER: Duration = Duration::from_micros(100);
/// After so long it naps between two looks. Slots of a copy that runs follow each other much faster.
const NAP_AFTER: Duration = Duration::from_millis(2);
const NAP: Duration = Duration::from_micros(30);
/// The stream is asked for an error when there has been no progress for so long.
const ASK_EVERY: Duration = Duration::from_millis(10);

/// One wait, from the last progress on.
#[derive(Default)]
pub(crate) struct Patience {
    polls: u32,
    since: Option<Instant>,
    asked: Duration,
    napping: bool,
}

impl Patience {
    /// Something happened: the next wait starts anew.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }

    /// One short pause. Returns how long there has been no progress, zero at first.
    pub(crate) fn pause(&mut self) -> Duration {
        core::hint::spin_loop();
        self.polls = self.polls.wrapping_add(1);
        if self.napping {
            nap();
        } else if !self.polls.is_multiple_of(16) {
            return Duration::ZERO;
        }
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        self.napping = waited > NAP_AFTER;
        if !self.napping && waited > YIELD_AFTER {
            std::thread::yield_now();
        }
        waited
    }

    /// Whether it is time to ask the stream how it is, after a wait of `waited`.
    pub(crate) fn is_time_to_ask(&mut self, waited: Duration) -> bool {
        let due = waited >= self.asked + ASK_EVERY;
        if due {
            self.asked = waited;
        }
        due
    }
}

/// Sleeps for a moment. Not by libc's function, which is a cancellation point: the thread may be the application's.
pub(crate) fn nap() {
    let time = libc::timespec {
        tv_sec: 0,
        tv_nsec: NAP.subsec_nanos().into(),
    };
    // SAFETY: reads a local; a signal ends it early, which does no harm.
    unsafe {
        libc::syscall(
            libc::SYS_nanosleep,
            &raw const time,
            core::ptr::null_mut::<libc::timespec>(),
        )
    };
}
