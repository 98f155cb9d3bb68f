//! Lanes: what one copy at a time uses. A lane is a pinned ring, its completion word and its board of slices.
//!
//! A lane belongs to one context. A copy takes it by compare-and-swap and gives it back when it returns; an asynchronous
//! HtoD returns while its last slots are in flight, so a lane that is free may still be *draining*. Such a lane is taken
//! again only by the same stream, which continues it in order, or once its completion word says that it is quiet. So a
//! lane whose stream died with slots in flight is used by nobody else any more.
#![expect(
    unsafe_code,
    reason = "the state of a lane belongs to whoever has taken it"
)]

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::driver::{Code, Context, Driver, Stream, StreamId, code};
use crate::patience::nap;
use crate::pinned::Pinned;
use crate::plan::SLICE_MAX_BYTES;
use crate::protocol::Board;

/// Announcements in flight in one lane; with events instead of a completion word, fewer.
const ANNOUNCEMENTS: usize = 1024;
const EVENTS: usize = 32;
/// Nobody waits for a lane whose copy has seen no progress for so long.
const STALLED_AFTER: Duration = Duration::from_micros(300);

/// One lane.
pub(crate) struct Lane {
    pub(crate) board: Board,
    taken: AtomicBool,
    /// Whoever has taken it waits for its stream, and has for a while.
    stalled: AtomicBool,
    /// Id of its context plus 1, 0 while it has none. A hint: the state says it for sure.
    pub(crate) context_hint: AtomicU64,
    state: UnsafeCell<Option<State>>,
}

// SAFETY: `state` is touched only by the one who has set `taken` (acquire) and not yet cleared it (release).
unsafe impl Sync for Lane {}

/// What the taker of a lane works with.
pub(crate) struct State {
    pub(crate) context: Context,
    pub(crate) pinned: Pinned,
    /// The stream whose slots are in flight, if its identity is known for sure.
    pub(crate) stream: Option<StreamId>,
    /// Ring position behind the last slot that was enqueued, behind the last one whose completion will be announced, and
    /// behind the last one that is complete.
    pub(crate) head: u64,
    announced: u64,
    pub(crate) arrived: u64,
    /// Announcements enqueued and seen, counted over the life of the lane (wrapping).
    submitted: u32,
    completed: u32,
    /// Ring position that announcement `n` stands for, at `n % ANNOUNCEMENTS`.
    ends: Box<[u64]>,
    /// [`EVENTS`] events by announcement where the driver cannot write a completion word, else none.
    events: Vec<usize>,
    /// A slot is in flight that nothing will ever announce.
    lost: bool,
    /// `completed` when a copy last gave up waiting for room.
    stalled_at: Option<u32>,
}

impl State {
    /// Nothing is in flight.
    pub(crate) fn is_quiet(&self) -> bool {
        self.submitted == self.completed && self.announced == self.head
    }

    /// Bytes in flight that no announcement stands for yet.
    pub(crate) fn unannounced(&self) -> u64 {
        self.head - self.announced
    }

    pub(crate) fn new(context: Context, pinned: Pinned) -> Self {
        Self {
            context,
            pinned,
            stream: None,
            head: 0,
            announced: 0,
            arrived: 0,
            submitted: 0,
            completed: 0,
            ends: vec![0; ANNOUNCEMENTS].into_boxed_slice(),
            events: Vec::new(),
            lost: false,
            stalled_at: None,
        }
    }

    /// Sees how far the stream has come.
    pub(crate) fn reap(&mut self, driver: &Driver) {
        if self.submitted == self.completed || self.lost {
            return;
        }
        let completed = if self.events.is_empty() {
            // Acquire: what the device wrote before the word is seen after it.
            self.pinned.word().load(Ordering::Acquire)
        } else {
            // The mode is taken once for all events that are asked.
            let completed = driver.relaxed(|| self.completed_by_events(driver));
            completed.unwrap_or(self.completed)
        };
        let (ahead, in_flight) = (
            completed.wrapping_sub(self.completed),
            self.submitted.wrapping_sub(self.completed),
        );
        if ahead != 0 && ahead <= in_flight {
            self.complete(completed);
        }
    }

    fn completed_by_events(&self, driver: &Driver) -> u32 {
        let mut completed = self.completed;
        while completed != self.submitted {
            let event = self.events.get(completed as usize % EVENTS).copied();
            // SAFETY: created for this lane, whose context is current (see `Lanes::take`), and not destroyed before it.
            let result = event.map(|event| unsafe { driver.query_event(event) });
            if result != Some(code::SUCCESS) {
                break;
            }
            completed = completed.wrapping_add(1);
        }
        completed
    }

    /// Notes that a slot's DMA was enqueued, and that it ends at ring position `end`.
    pub(crate) fn enqueued(&mut self, end: u64) {
        self.head = end;
    }

    /// Has the stream announce that everything enqueued so far is complete. Returns the announcement's number.
    ///
    /// Where the driver can neither write a word nor record an event, waits for the stream.
    pub(crate) fn announce(&mut self, driver: &Driver, stream: Stream<'_>) -> Result<u32, Code> {
        let number = self.submitted;
        let none_in_flight = number == self.completed;
        if let Some(cell) = self.ends.get_mut(number as usize % ANNOUNCEMENTS) {
            *cell = self.head;
        }
        self.announced = self.head;
        self.submitted = number.wrapping_add(1);
        if self.events.is_empty() {
            // SAFETY: the word is pinned and lives until nothing is in flight.
            let result = unsafe { stream.write_value(self.pinned.word_device(), self.submitted) };
            if result == Some(code::SUCCESS) {
                return Ok(number);
            }
            // Announcements by the word and by events are never in flight together.
            if none_in_flight {
                self.events = create_events(driver);
            }
        }
        let event = self.events.get(number as usize % EVENTS).copied();
        // SAFETY: an event of this lane; the announcement that used it before has been seen (`can_announce`).
        if event.and_then(|event| unsafe { stream.record(event) }) == Some(code::SUCCESS) {
            return Ok(number);
        }
        match stream.synchronize(driver) {
            code::SUCCESS => {
                self.complete_all();
                Ok(number)
            }
            error => {
                // The event says what it said of an earlier slot. Nobody may use this lane until the stream is idle.
                self.lost = true;
                self.stream = None;
                Err(error)
            }
        }
    }

    /// Whether announcement `number`, made by the copy that holds the lane, has been seen.
    pub(crate) fn has_seen(&self, number: u32) -> bool {
        let (unseen, since) = (
            self.submitted.wrapping_sub(self.completed),
            self.submitted.wrapping_sub(number),
        );
        unseen < since
    }

    /// Notes that all announcements before `completed` were seen.
    fn complete(&mut self, completed: u32) {
        self.completed = completed;
        let last = completed.wrapping_sub(1) as usize % ANNOUNCEMENTS;
        self.arrived = self.ends.get(last).copied().unwrap_or(self.arrived);
    }

    /// The stream is idle: everything is done, whatever the word says.
    pub(crate) fn complete_all(&mut self) {
        self.completed = self.submitted;
        self.announced = self.head;
        self.arrived = self.head;
        self.lost = false;
    }

    /// Waits until nothing is in flight; false if that takes longer than until `deadline`.
    pub(crate) fn becomes_quiet(&mut self, driver: &Driver, deadline: Instant) -> bool {
        loop {
            self.reap(driver);
            if self.is_quiet() || Instant::now() >= deadline {
                return self.is_quiet();
            }
            nap();
        }
    }

    /// Gives everything back. With `alive` the context is current; otherwise it is gone, and its events with it.
    pub(crate) fn free(self, driver: &Driver, alive: bool) {
        if alive {
            for event in self.events {
                // SAFETY: created for this lane, its context is alive, and nothing is in flight.
                unsafe { driver.destroy_event(event) };
            }
        }
        self.pinned.free(driver, alive);
    }

    /// Whether one more announcement may be made.
    pub(crate) fn can_announce(&self) -> bool {
        let most = if self.events.is_empty() {
            ANNOUNCEMENTS
        } else {
            EVENTS
        };
        (self.submitted.wrapping_sub(self.completed) as usize) < most
    }

    /// Remembers that waiting for room was in vain.
    pub(crate) fn note_stall(&mut self) {
        self.stalled_at = Some(self.completed);
    }

    /// Whether a copy of `bytes` bytes that must not wait for a stuck stream may continue this draining lane.
    pub(crate) fn can_continue(&self, bytes: u64) -> bool {
        let in_flight = self.head.saturating_sub(self.arrived);
        let free = (self.pinned.bytes() as u64).saturating_sub(in_flight);
        free >= bytes + SLICE_MAX_BYTES || self.stalled_at != Some(self.completed)
    }

    /// Ring position where a copy in slices of `slice` bytes starts.
    ///
    /// It goes on around the ring even where the lane is quiet: a DMA into memory that a CPU has just read or written is
    /// two to three times slower, until it has left that CPU's cache (H200 with Xeons of 2 MiB L2).
    pub(crate) fn start(&mut self, slice: u64) -> u64 {
        let start = self.head.next_multiple_of(slice);
        if self.is_quiet() {
            (self.head, self.announced, self.arrived) = (start, start, start);
        }
        start
    }
}

/// As many events as a lane needs, or none.
fn create_events(driver: &Driver) -> Vec<usize> {
    let mut events = Vec::with_capacity(EVENTS);
    events.extend((0..EVENTS).map_while(|_| driver.create_event()));
    if events.len() < EVENTS {
        for event in events.drain(..) {
            // SAFETY: just created and never used.
            unsafe { driver.destroy_event(event) };
        }
    }
    events
}

/// A lane that this copy has taken; given back when dropped.
pub(crate) struct Held<'a> {
    lane: &'a Lane,
    state: &'a mut State,
}

impl Deref for Held<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        self.state
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The copy is left midway: helpers must let go of the application's memory before the panic goes on. Nobody
            // can say what the lane's state is worth, so it stays taken.
            self.lane.board.withdraw();
        } else {
            self.lane.give_back();
        }
    }
}

impl<'a> Held<'a> {
    /// For the one who has taken `lane` and found `state` in it.
    pub(crate) fn new(lane: &'a Lane, state: &'a mut State) -> Self {
        Self { lane, state }
    }

    /// Notes how long this copy has waited for its stream without progress.
    pub(crate) fn note_wait(&self, waited: Duration) {
        let stalled = waited > STALLED_AFTER;
        if self.lane.stalled.load(Ordering::Relaxed) != stalled {
            self.lane.stalled.store(stalled, Ordering::Relaxed);
        }
    }

    /// The lane's slices.
    pub(crate) fn board(&self) -> &'a Board {
        &self.lane.board
    }
}

impl Lane {
    pub(crate) fn new() -> Self {
        Self {
            board: Board::new(),
            taken: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            context_hint: AtomicU64::new(0),
            state: UnsafeCell::new(None),
        }
    }

    /// The state, for as long as the caller keeps `taken` set; `None` if somebody else has it.
    #[expect(clippy::mut_from_ref, reason = "`taken` is the lock")]
    pub(crate) fn try_take(&self) -> Option<&mut Option<State>> {
        let free = self
            .taken
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        // SAFETY: this thread has just set `taken`, so nobody else touches the state until it is cleared.
        free.ok().map(|_| unsafe { &mut *self.state.get() })
    }

    /// Whether a copy has it that gets on at this moment.
    pub(crate) fn is_at_work(&self) -> bool {
        self.taken.load(Ordering::Relaxed) && !self.stalled.load(Ordering::Relaxed)
    }

    pub(crate) fn give_back(&self) {
        self.stalled.store(false, Ordering::Relaxed);
        self.taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Task;
    use crate::store::Store;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    #[cfg_attr(miri, ignore = "maps memory for a ring")]
    fn a_panic_takes_the_slices_back_and_keeps_the_lane() {
        let lane = Lane::new();
        let context = Context { handle: 1, id: 1 };
        let pinned = Pinned::map().expect("address space");
        let slot = lane.try_take().expect("free");
        let held = Held::new(&lane, slot.insert(State::new(context, pinned)));
        let mut host = vec![1u8; 40];
        let task = Task {
            host: host.as_mut_ptr(),
            bytes: 40,
            ring: held.pinned.ring(),
            ring_bytes: 64,
            ring_start: 0,
            slice_bytes: 4,
            rows: None,
            work: crate::protocol::Work::IntoRing,
            store: Store::Ordinary,
        };
        // SAFETY: the lane is held, and host and ring outlive every slice.
        unsafe { lane.board.open(task, 1) };
        lane.board.offer(10);
        assert!(lane.board.work());
        let panicked = catch_unwind(AssertUnwindSafe(move || {
            let _held = held;
            std::panic::resume_unwind(Box::new(()));
        }));
        assert!(panicked.is_err());
        assert!(!lane.board.is_ready() && !lane.board.work());
        assert!(lane.try_take().is_none());
    }
}
