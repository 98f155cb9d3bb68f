//! The pool of lanes: which copy gets which lane, and how much memory all of them may pin.
//!
//! A stream that is busy keeps to one draining lane and holds up nobody else; a copy that gets no lane passes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cmt_common::control::PassReason;

use crate::driver::{Context, Driver, StreamId};
use crate::lane::{Held, Lane, State};
use crate::patience::nap;
use crate::pinned::Pinned;
use crate::plan::SLICE_MAX_BYTES;
use crate::workers::Crew;

/// Copies that can be staged at the same time.
const LANES: usize = 8;
/// Pinned bytes of all lanes together.
const PINNED_MAX_BYTES: u64 = 256 << 20;
/// Smallest ring that is asked for.
const RING_FIRST_BYTES: u64 = 4 << 20;
/// After pinned memory was refused, nobody asks for it for so long.
const RETRY_AFTER: Duration = Duration::from_secs(10);
/// Contexts that take turns must not spend their time on pinning: no more than one lane changes hands in so long.
const EVICT_EVERY: Duration = Duration::from_millis(100);
/// CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: the device reads pageable memory itself.
const USES_HOST_PAGE_TABLES: i32 = 100;

/// All lanes, and the helpers that serve them.
pub(crate) struct Lanes {
    pub(crate) crew: Crew,
    lanes: [Lane; LANES],
    /// Copies that may be at work at once before others that can wait do.
    most_at_work: usize,
    pinned_bytes: AtomicU64,
    started: Instant,
    /// Milliseconds after `started` before which no pinned memory is asked for.
    no_pinning_before_ms: AtomicU64,
    /// Milliseconds after `started` before which no lane is taken from a living context.
    no_eviction_before_ms: AtomicU64,
    /// Id of a context whose device does not want staging, plus 1.
    unsupported: AtomicU64,
}

/// What a copy wants of a lane.
pub(crate) struct Wanted {
    pub context: Context,
    pub stream_id: Option<StreamId>,
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
            most_at_work: ((helpers as usize + 1) / 4).clamp(2, LANES),
            pinned_bytes: AtomicU64::new(0),
            started: Instant::now(),
            no_pinning_before_ms: AtomicU64::new(0),
            no_eviction_before_ms: AtomicU64::new(0),
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
            let mut held = Held::new(lane, state);
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

    /// The same, but while enough other copies are at work, or all lanes are taken by such, waits up to `limit`: more copies at
    /// once than there are CPUs for would only hold each other up.
    pub(crate) fn take_within(
        &self,
        driver: &Driver,
        wanted: &Wanted,
        limit: Duration,
    ) -> Result<Held<'_>, PassReason> {
        let mut since = None;
        let mut may_wait = || since.get_or_insert_with(Instant::now).elapsed() < limit;
        loop {
            let at_work = self.lanes.iter().filter(|lane| lane.is_at_work()).count();
            if at_work < self.most_at_work || !may_wait() {
                match self.take(driver, wanted) {
                    Err(PassReason::Busy) if at_work > 0 && may_wait() => {}
                    result => return result,
                }
            }
            nap();
        }
    }

    /// Whether a copy gets on at this moment.
    pub(crate) fn are_at_work(&self) -> bool {
        self.lanes.iter().any(Lane::is_at_work)
    }

    /// A lane that has no memory yet, or that another context can do without.
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
        if !self.lanes.iter().any(|lane| empty(&lane)) || self.affordable(0, 0) == 0 {
            self.make_room(driver, hint);
        }
        for lane in self.lanes.iter().filter(empty) {
            let Some(slot) = lane.try_take() else {
                continue;
            };
            if slot.is_some() {
                lane.give_back(); // Somebody else was faster, and is done already.
                continue;
            }
            return match self.pin(driver, wanted.ring_bytes) {
                Ok(pinned) => {
                    let state = slot.insert(State::new(wanted.context, pinned));
                    state.stream = wanted.stream_id;
                    lane.context_hint.store(hint, Ordering::Relaxed);
                    Ok(Held::new(lane, state))
                }
                Err(reason) => {
                    lane.give_back();
                    Err(reason)
                }
            };
        }
        Err(PassReason::Busy)
    }

    /// Empties a lane whose context is gone, or a quiet one of a living context if the one with this hint has none at all.
    fn make_room(&self, driver: &Driver, hint: u64) {
        let hint_of = |lane: &Lane| lane.context_hint.load(Ordering::Relaxed);
        let may_evict = !self.lanes.iter().any(|lane| hint_of(lane) == hint)
            && self.now_ms() >= self.no_eviction_before_ms.load(Ordering::Relaxed);
        for lane in &self.lanes {
            if [0, hint].contains(&hint_of(lane)) {
                continue;
            }
            let Some(slot) = lane.try_take() else {
                continue;
            };
            let spare = match slot.as_mut() {
                None => false,
                Some(state) if !driver.is_alive(state.context) => true,
                Some(state) => {
                    let context = state.context;
                    let quiet = || {
                        state.reap(driver);
                        state.is_quiet()
                    };
                    may_evict && driver.within(context, quiet) == Some(true)
                }
            };
            if spare && let Some(state) = slot.take() {
                lane.context_hint.store(0, Ordering::Relaxed);
                self.free_in_its_context(driver, state);
            }
            lane.give_back();
            if spare {
                let later = self.now_ms() + EVICT_EVERY.as_millis() as u64;
                self.no_eviction_before_ms.store(later, Ordering::Relaxed);
                return;
            }
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// The ring that is asked for: a power of two, within what all lanes may have.
    fn affordable(&self, ring_bytes: u64, held: u64) -> u64 {
        let others = self.pinned_bytes().saturating_sub(held);
        // Half of what is left at most: lanes that come later must find some.
        let left = PINNED_MAX_BYTES.saturating_sub(others) / 2;
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

    /// Frees what a quiet lane had.
    fn free_in_its_context(&self, driver: &Driver, state: State) {
        self.pinned_bytes
            .fetch_sub(state.pinned.bytes() as u64, Ordering::Relaxed);
        let context = state.context;
        if driver.is_alive(context) {
            // Where the context cannot be made current, the memory is leaked.
            driver.within(context, || state.free(driver, true));
        } else {
            state.free(driver, false);
        }
    }

    /// Frees every lane that becomes quiet within `patience`; leaks the others. No copy may run or start.
    pub(crate) fn free_all(&self, driver: &Driver, patience: Duration) {
        let deadline = Instant::now() + patience;
        for lane in &self.lanes {
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
            self.free_in_its_context(driver, state);
            lane.context_hint.store(0, Ordering::Relaxed);
            lane.give_back();
        }
    }
}
