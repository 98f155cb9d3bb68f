//! Lanes: what one copy at a time uses. A lane is a pinned ring, its completion word and its board of slices.
//!
//! A lane belongs to one context. A copy takes it by compare-and-swap and gives it back when it returns; an asynchronous
//! HtoD returns while its last slots are in flight, so a lane that is free may still be *draining*. Such a lane is taken
//! again only by the same stream, which continues it in order, or once its completion word says that it is quiet: so a
//! busy stream holds up nobody else.
#![expect(
    unsafe_code,
    reason = "the state of a lane belongs to whoever has taken it"
)]

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cmt_common::control::PassReason;

use crate::driver::{Code, Context, Driver, Stream, code};
use crate::pinned::Pinned;
use crate::plan::SLICE_MAX_BYTES;
use crate::protocol::Board;
use crate::workers::Crew;

/// Copies that can be staged at the same time.
const LANES: usize = 8;
/// Pinned bytes of all lanes together.
const PINNED_MAX_BYTES: u64 = 256 << 20;
/// Smallest ring that is asked for.
const RING_FIRST_BYTES: u64 = 4 << 20;
/// Slots in flight in one lane; with events instead of a completion word, fewer.
const SLOTS: usize = 1024;
const EVENTS: usize = 32;
/// After pinned memory was refused, nobody asks for it for so long.
const RETRY_AFTER: Duration = Duration::from_secs(10);
/// CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: the device reads pageable memory itself.
const USES_HOST_PAGE_TABLES: i32 = 100;

/// All lanes, and the helpers that serve them.
pub(crate) struct Lanes {
    pub(crate) crew: Crew,
    lanes: [Lane; LANES],
    pinned_bytes: AtomicU64,
    started: Instant,
    /// Milliseconds after `started` before which no pinned memory is asked for.
    no_pinning_before_ms: AtomicU64,
    /// Id of a context whose device does not want staging, plus 1.
    unsupported: AtomicU64,
}

/// One lane.
pub(crate) struct Lane {
    pub(crate) board: Board,
    taken: AtomicBool,
    /// Id of its context plus 1, 0 while it has none. A hint: the state says it for sure.
    context_hint: AtomicU64,
    state: UnsafeCell<Option<State>>,
}

// SAFETY: `state` is touched only by the one who has set `taken` (acquire) and not yet cleared it (release).
unsafe impl Sync for Lane {}

/// What the taker of a lane works with.
pub(crate) struct State {
    context: Context,
    pub(crate) pinned: Pinned,
    /// The stream whose slots are in flight, if its identity is known for sure.
    stream: Option<u64>,
    /// Ring position behind the last slot that was submitted, and behind the last one that is complete.
    pub(crate) head: u64,
    pub(crate) arrived: u64,
    /// Slots submitted and complete, counted over the life of the lane (wrapping).
    submitted: u32,
    completed: u32,
    /// Ring position behind slot `n`, at `n % SLOTS`.
    ends: Box<[u64]>,
    /// [`EVENTS`] events by slot where the driver cannot write a completion word, else none.
    events: Vec<usize>,
    /// `completed` when a copy last gave up waiting for room.
    stalled_at: Option<u32>,
}

impl State {
    /// Nothing is in flight.
    pub(crate) fn is_quiet(&self) -> bool {
        self.submitted == self.completed
    }

    fn new(context: Context, pinned: Pinned) -> Self {
        Self {
            context,
            pinned,
            stream: None,
            head: 0,
            arrived: 0,
            submitted: 0,
            completed: 0,
            ends: vec![0; SLOTS].into_boxed_slice(),
            events: Vec::new(),
            stalled_at: None,
        }
    }

    /// Sees how far the stream has come.
    pub(crate) fn reap(&mut self, driver: &Driver) {
        let completed = if self.events.is_empty() {
            // Acquire: what the device wrote before the word is seen after it.
            self.pinned.word().load(Ordering::Acquire)
        } else {
            self.completed_by_events(driver)
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

    /// Has the stream announce the slot whose DMA was just enqueued, and that ends at ring position `end`.
    ///
    /// Where the driver can neither write a word nor record an event, waits for the stream.
    pub(crate) fn submitted_slot(
        &mut self,
        driver: &Driver,
        stream: Stream<'_>,
        end: u64,
    ) -> Result<(), Code> {
        let number = self.submitted;
        let was_quiet = self.is_quiet();
        if let Some(cell) = self.ends.get_mut(number as usize % SLOTS) {
            *cell = end;
        }
        self.head = end;
        self.submitted = number.wrapping_add(1);
        if self.events.is_empty() {
            // SAFETY: the word is pinned and lives until nothing is in flight.
            let result = unsafe { stream.write_value(self.pinned.word_device(), self.submitted) };
            if result == Some(code::SUCCESS) {
                return Ok(());
            }
            // Slots that the word announces and slots that events announce are never in flight together.
            if was_quiet {
                self.events = create_events(driver);
            }
        }
        let event = self.events.get(number as usize % EVENTS).copied();
        // SAFETY: an event of this lane; the slot that used it before is complete (`has_room_for_slot`).
        if event.and_then(|event| unsafe { stream.record(event) }) == Some(code::SUCCESS) {
            return Ok(());
        }
        match stream.synchronize() {
            code::SUCCESS => {
                self.complete_all();
                Ok(())
            }
            error => Err(error),
        }
    }

    /// Notes that all slots before `completed` are done.
    fn complete(&mut self, completed: u32) {
        self.completed = completed;
        let last = completed.wrapping_sub(1) as usize % SLOTS;
        self.arrived = self.ends.get(last).copied().unwrap_or(self.arrived);
    }

    /// The stream is idle: everything is done, whatever the word says.
    pub(crate) fn complete_all(&mut self) {
        if !self.is_quiet() {
            self.complete(self.submitted);
        }
    }

    /// Waits until nothing is in flight; false if that takes longer than until `deadline`.
    fn becomes_quiet(&mut self, driver: &Driver, deadline: Instant) -> bool {
        loop {
            self.reap(driver);
            if self.is_quiet() || Instant::now() >= deadline {
                return self.is_quiet();
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Whether one more slot may be submitted.
    pub(crate) fn has_room_for_slot(&self) -> bool {
        let most = if self.events.is_empty() {
            SLOTS
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
    fn can_continue(&self, bytes: u64) -> bool {
        let in_flight = self.head.saturating_sub(self.arrived);
        let free = (self.pinned.bytes() as u64).saturating_sub(in_flight);
        free >= bytes + SLICE_MAX_BYTES || self.stalled_at != Some(self.completed)
    }

    /// Ring position where a copy in slices of `slice` bytes starts.
    pub(crate) fn start(&mut self, slice: u64) -> u64 {
        if self.is_quiet() {
            // The start of the ring is the part that is most likely in a cache.
            (self.head, self.arrived) = (0, 0);
        }
        self.head.next_multiple_of(slice)
    }
}

/// As many events as a lane needs, or none.
fn create_events(driver: &Driver) -> Vec<usize> {
    let mut events = Vec::with_capacity(EVENTS);
    let created = driver.relaxed(|| {
        for _ in 0..EVENTS {
            match driver.create_event() {
                Some(event) => events.push(event),
                None => return false,
            }
        }
        true
    });
    if created != Some(true) {
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
        self.lane.taken.store(false, Ordering::Release);
    }
}

impl<'a> Held<'a> {
    /// The lane's slices.
    pub(crate) fn board(&self) -> &'a Board {
        &self.lane.board
    }

    /// Keeps the lane from everybody for ever: nobody knows what the device still does with it.
    pub(crate) fn abandon(self) {
        core::mem::forget(self);
    }
}

impl Lane {
    fn new() -> Self {
        Self {
            board: Board::new(),
            taken: AtomicBool::new(false),
            context_hint: AtomicU64::new(0),
            state: UnsafeCell::new(None),
        }
    }

    /// The state, for as long as the caller keeps `taken` set; `None` if somebody else has it.
    #[expect(clippy::mut_from_ref, reason = "`taken` is the lock")]
    fn try_take(&self) -> Option<&mut Option<State>> {
        let free = self
            .taken
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        // SAFETY: this thread has just set `taken`, so nobody else touches the state until it is cleared.
        free.ok().map(|_| unsafe { &mut *self.state.get() })
    }

    fn give_back(&self) {
        self.taken.store(false, Ordering::Release);
    }
}

/// What a copy wants of a lane.
pub(crate) struct Wanted {
    pub context: Context,
    pub stream_id: Option<u64>,
    /// Ring that the plan asks for.
    pub ring_bytes: u64,
    /// Bytes of a copy that must not wait for a stuck stream.
    pub without_waiting: Option<u64>,
}

impl Lanes {
    pub(crate) fn new(helpers: u32) -> Self {
        Self {
            crew: Crew::new(helpers),
            lanes: core::array::from_fn(|_| Lane::new()),
            pinned_bytes: AtomicU64::new(0),
            started: Instant::now(),
            no_pinning_before_ms: AtomicU64::new(0),
            unsupported: AtomicU64::new(0),
        }
    }

    /// Every lane, in the order in which they are taken.
    pub(crate) fn all(&self) -> &[Lane] {
        &self.lanes
    }

    /// Pinned bytes of all lanes.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes.load(Ordering::Relaxed)
    }

    /// A lane for one copy.
    pub(crate) fn take(&self, driver: &Driver, wanted: &Wanted) -> Result<Held<'_>, PassReason> {
        let hint = wanted.context.id.wrapping_add(1);
        for lane in &self.lanes {
            if lane.context_hint.load(Ordering::Relaxed) != hint {
                continue;
            }
            let Some(Some(state)) = lane.try_take() else {
                continue;
            };
            let mut held = Held { lane, state };
            if held.context != wanted.context {
                continue;
            }
            held.reap(driver);
            if held.is_quiet() {
                self.grow(driver, &mut held, wanted.ring_bytes);
                held.stream = wanted.stream_id;
                return Ok(held);
            }
            if held.stream.is_some() && held.stream == wanted.stream_id {
                // The stream keeps to this lane: it must not fill them all.
                return match wanted.without_waiting {
                    Some(bytes) if !held.can_continue(bytes) => Err(PassReason::Busy),
                    _ => Ok(held),
                };
            }
        }
        self.take_new(driver, wanted)
    }

    /// A lane that has no memory yet, or whose context is gone.
    fn take_new(&self, driver: &Driver, wanted: &Wanted) -> Result<Held<'_>, PassReason> {
        let hint = wanted.context.id.wrapping_add(1);
        if self.unsupported.load(Ordering::Relaxed) == hint {
            return Err(PassReason::Unsupported);
        }
        if self.now_ms() < self.no_pinning_before_ms.load(Ordering::Relaxed) {
            return Err(PassReason::NoPinnedMemory);
        }
        let host_page_tables = driver
            .current_device()
            .and_then(|device| driver.device_attribute(USES_HOST_PAGE_TABLES, device));
        if host_page_tables.unwrap_or(0) != 0 {
            self.unsupported.store(hint, Ordering::Relaxed);
            return Err(PassReason::Unsupported);
        }
        let empty = |lane: &&Lane| lane.context_hint.load(Ordering::Relaxed) == 0;
        let of_others =
            |lane: &&Lane| ![0, hint].contains(&lane.context_hint.load(Ordering::Relaxed));
        let lanes = self.lanes.iter();
        for lane in lanes.clone().filter(empty).chain(lanes.filter(of_others)) {
            let Some(slot) = lane.try_take() else {
                continue;
            };
            match slot.take() {
                Some(other) if driver.is_alive(other.context) => {
                    *slot = Some(other);
                    lane.give_back();
                    continue;
                }
                Some(dead) => {
                    lane.context_hint.store(0, Ordering::Relaxed);
                    self.free(driver, dead, false);
                }
                None => {}
            }
            return match self.pin(driver, wanted.ring_bytes) {
                Ok(pinned) => {
                    let state = slot.insert(State::new(wanted.context, pinned));
                    state.stream = wanted.stream_id;
                    lane.context_hint.store(hint, Ordering::Relaxed);
                    Ok(Held { lane, state })
                }
                Err(reason) => {
                    lane.give_back();
                    Err(reason)
                }
            };
        }
        Err(PassReason::Busy)
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// The ring that is asked for: a power of two, within what all lanes may have.
    fn affordable(&self, ring_bytes: u64, held: u64) -> u64 {
        let others = self.pinned_bytes().saturating_sub(held);
        let left = PINNED_MAX_BYTES.saturating_sub(others);
        let bytes = ring_bytes.max(RING_FIRST_BYTES).min(left);
        if bytes < SLICE_MAX_BYTES {
            0
        } else {
            1 << bytes.ilog2()
        }
    }

    fn pin(&self, driver: &Driver, ring_bytes: u64) -> Result<Pinned, PassReason> {
        let bytes = self.affordable(ring_bytes, 0);
        if bytes == 0 {
            return Err(PassReason::Busy);
        }
        match Pinned::new(driver, bytes as usize) {
            Some(pinned) => {
                self.pinned_bytes
                    .fetch_add(pinned.bytes() as u64, Ordering::Relaxed);
                Ok(pinned)
            }
            None => {
                self.pinning_failed();
                Err(PassReason::NoPinnedMemory)
            }
        }
    }

    fn pinning_failed(&self) {
        let later = self.now_ms() + RETRY_AFTER.as_millis() as u64;
        self.no_pinning_before_ms.store(later, Ordering::Relaxed);
    }

    /// Makes a quiet lane's ring as large as the plan asks for, if it can be had.
    fn grow(&self, driver: &Driver, state: &mut State, ring_bytes: u64) {
        let before = state.pinned.bytes() as u64;
        if before >= ring_bytes || self.now_ms() < self.no_pinning_before_ms.load(Ordering::Relaxed)
        {
            return;
        }
        let bytes = self.affordable(ring_bytes, before);
        if bytes > before {
            if state.pinned.grow(driver, bytes as usize) {
                self.pinned_bytes
                    .fetch_add(bytes - before, Ordering::Relaxed);
            } else {
                self.pinning_failed();
            }
        }
    }

    /// Frees what a lane had. With `alive` its context is current.
    fn free(&self, driver: &Driver, state: State, alive: bool) {
        self.pinned_bytes
            .fetch_sub(state.pinned.bytes() as u64, Ordering::Relaxed);
        if alive {
            for event in state.events {
                // SAFETY: created with the lane, its context is alive, and nothing is in flight.
                unsafe { driver.destroy_event(event) };
            }
        }
        state.pinned.free(driver, alive);
    }

    /// Frees every lane that becomes quiet within `patience`; leaks the others. No copy may run or start.
    pub(crate) fn free_all(&self, driver: &Driver, patience: Duration) {
        let deadline = Instant::now() + patience;
        for lane in &self.lanes {
            // A lane that is still taken was abandoned.
            let Some(slot) = lane.try_take() else {
                continue;
            };
            let Some(mut state) = slot.take() else {
                lane.give_back();
                continue;
            };
            let alive = driver.is_alive(state.context);
            let quiet = !alive
                || driver.within(state.context, || state.becomes_quiet(driver, deadline))
                    == Some(true);
            if !quiet {
                continue; // Leaked, and kept from everybody.
            }
            let context = state.context;
            let free = || self.free(driver, state, alive);
            if alive {
                driver.within(context, free);
            } else {
                free();
            }
            lane.context_hint.store(0, Ordering::Relaxed);
            lane.give_back();
        }
    }
}
