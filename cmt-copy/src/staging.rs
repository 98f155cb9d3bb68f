//! The two staged copies: HtoD fills slots and sends them, DtoH has slots filled and copies them out.
//!
//! The calling thread makes every CUDA call here. Between calls it moves slices like a helper, and where there is
//! nothing to move it polls the completion word without entering the driver.
#![expect(
    unsafe_code,
    reason = "hands the application's addresses to helpers and to the driver"
)]

use std::time::{Duration, Instant};

use cmt_common::control::PassReason;

use crate::Outcome;
use crate::driver::{Code, Driver, Stream, code};
use crate::fresh::HugePages;
use crate::lane::Held;
use crate::layout::{Sending, Slots};
use crate::patience::Patience;
use crate::plan::Row;
use crate::pool::Lanes;
use crate::protocol::{Board, MARKS, Task, Work};
use crate::rows::Rows;
use crate::workers::CopyRuns;

/// An asynchronous HtoD that finds no room in the ring and sees no progress for so long, and for as long as stock itself
/// would take to stage it at 16 bytes a nanosecond, hands the rest to stock.
const STALLED_AFTER: Duration = Duration::from_micros(100);
const STOCK_BYTES_A_NANOSECOND: u64 = 16;
/// Stock waits for a busy stream when an asynchronous HtoD from pageable memory is this long (driver 580).
pub(crate) const STOCK_WAITS_FROM_BYTES: u64 = 64 << 20;
/// What may still be on its way when a synchronous HtoD returns. Stock returns as soon as the last piece is staged, with
/// the stream still busy and its last bytes not yet to be seen from other streams, at every size (driver 580; CUDA's
/// "API synchronization behavior" says so too). What the stream was given before the copy is always done by then.
pub(crate) const TAIL_BYTES: u64 = 1 << 20;
/// The link is taken to be this fast (PCIe 5 x16); where it is slower, slots are a little shorter than they could be.
const LINK_BYTES_A_NANOSECOND: u64 = 50;
/// A DMA is enqueued so long before the link is thought to run dry.
const LINK_LEAD: Duration = Duration::from_micros(4);
/// How often the stream is asked whether it is done with what came before the copy.
const ASK_WHAT_CAME_BEFORE_EVERY: Duration = Duration::from_micros(10);
/// What one of several copies has in flight at most, whatever its plan says: the link serves what it was given in turn, so who had
/// more in flight would get more of it.
const SHARED_WINDOW_BYTES: u64 = 16 << 20;
/// Shorter copies are made by the caller alone: they are over before a sleeping helper is awake, and what another CPU has written
/// costs the caller more than its help saves.
pub(crate) const HELPED_FROM_BYTES: u64 = 128 << 10;
/// So many helpers are woken for a shorter copy than those below while its first bytes are on their way to the host, when the caller
/// would only wait.
const WAKE_EARLY: u32 = 4;
/// Longer ones wake all helpers at once.
const WAKE_ALL_FROM_BYTES: u64 = 2 << 20;

/// One copy, ready to be staged.
pub(crate) struct Copy<'a> {
    pub driver: &'a Driver,
    pub lanes: &'a Lanes,
    pub _running: CopyRuns<'a>,
    pub held: Held<'a>,
    pub stream: Stream<'a>,
    pub host: u64,
    pub device: u64,
    /// Of a rectangle: bytes of its padded rows.
    pub bytes: u64,
    /// Of a rectangle: how its rows lie.
    pub rows: Option<Rows>,
    /// Fits into the ring of `held`.
    pub row: Row,
    /// Whether it may wait for a busy stream.
    pub may_wait: bool,
    pub is_async: bool,
    /// Bytes that may still be on their way when a synchronous HtoD returns.
    pub tail: u64,
}

/// How a staged HtoD left its loop.
enum Sent {
    /// Every slot is on its way.
    All,
    /// The stream is stuck; so many bytes are on their way.
    Stalled(u64),
}

impl Copy<'_> {
    /// Host to device.
    ///
    /// # Safety
    /// The application's contract with CUDA: `host` is readable for `bytes` bytes until this returns, `device` is a range
    /// that it may write on this stream.
    pub(crate) unsafe fn htod(mut self) -> Outcome {
        let board = self.held.board();
        let before = match self.announce_what_came_before() {
            Ok(before) => before,
            Err(error) => return Outcome::Staged(error),
        };
        // SAFETY: the caller's promise; `open` gets the lane that this copy holds.
        let result = unsafe { self.send(board, self.is_async || before.is_some()) };
        match result {
            Ok(Sent::All) if self.is_async => Outcome::Staged(code::SUCCESS),
            Ok(Sent::All) => match self.wait_for_all_but(self.tail, before) {
                Ok(()) => Outcome::Staged(code::SUCCESS),
                Err(error) => Outcome::Staged(error),
            },
            Ok(Sent::Stalled(sent)) => {
                board.withdraw();
                self.held.note_stall();
                if sent == 0 {
                    return Outcome::Pass(PassReason::Busy);
                }
                // SAFETY: the rest of the caller's ranges; the driver stages pageable memory itself.
                Outcome::Staged(unsafe { self.hand_over(sent) })
            }
            Err(error) => self.fail(error),
        }
    }

    /// Has stock copy all but the first `sent` bytes to the device.
    ///
    /// # Safety
    /// As [`Copy::htod`].
    unsafe fn hand_over(&self, sent: u64) -> Code {
        let left = self.bytes - sent;
        let Some(rows) = &self.rows else {
            let (host, device) = (self.host + sent, self.device + sent);
            // SAFETY: the caller's promise.
            return unsafe {
                self.stream
                    .copy_to_device(device, host as *const u8, left as usize)
            };
        };
        // Slices hold whole rows.
        let (first, height) = (sent / rows.ring_pitch, left / rows.ring_pitch);
        let host = self.host + first * rows.host_pitch;
        let device = self.device + first * rows.device_pitch;
        let copy = rows.copy(host, rows.host_pitch, device, height, true);
        // SAFETY: the caller's promise.
        unsafe { self.stream.copy_rows(&copy) }
    }

    /// Fills slots and sends them until all are on their way. `is_behind`: the stream may have work from before, behind which
    /// nothing is gained by sending what has come in so far, and every DMA more is paid for.
    ///
    /// # Safety
    /// As [`Copy::htod`].
    unsafe fn send(&mut self, board: &Board, mut is_behind: bool) -> Result<Sent, Code> {
        let slice = self.row.slice;
        let total = self.bytes.div_ceil(slice);
        let capacity = self.held.pinned.bytes() as u64;
        let start = self.held.start(slice);
        // SAFETY: this copy holds the lane; every slice on offer lies in a part of the ring that nothing in flight uses.
        unsafe { self.open(board, start, true) };
        let stalled_after =
            STALLED_AFTER + Duration::from_nanos(self.bytes / STOCK_BYTES_A_NANOSECOND);
        let mut stalled = false;
        let tail = self.tail;
        let sending = Sending::new(self.bytes, slice, self.row.slot, tail);
        let mut link_busy_until = None;
        let mut asked_at = None;
        let (mut offered, mut done, mut sent) = (0, 0, 0);
        let mut patience = Patience::default();
        let mut arrived_before = self.held.arrived;
        while sent < total {
            self.held.reap(self.driver);
            let arrived = self.held.arrived;
            let window = if stalled { capacity } else { self.window() };
            if arrived != arrived_before {
                arrived_before = arrived;
                patience.reset();
            }
            // Room in the ring comes back in quarters, also where the window has become smaller since something was sent. Each
            // announcement takes the GPU as long as 100 KB.
            let is_due = self.held.unannounced() >= window.min(capacity) / 4;
            if is_due && self.held.can_announce() {
                self.held.announce(self.driver, self.stream)?;
            }
            let free_to = (arrived.max(start) + window).min(arrived + capacity);
            let fits = total.min(free_to.saturating_sub(start) / slice);
            if fits > offered {
                offered = fits;
                self.offer(board, offered);
            }
            while done < offered && board.is_done(done) {
                done += 1;
            }
            let link_is_idle = || {
                let now = Instant::now();
                if link_busy_until.is_some_and(|until| now + LINK_LEAD < until) {
                    return false;
                }
                // Later the stream is busy with this copy, too, and nobody can tell.
                let ask_again = |at| now - at > ASK_WHAT_CAME_BEFORE_EVERY;
                if is_behind && sent == 0 && asked_at.is_none_or(ask_again) {
                    asked_at = Some(now);
                    is_behind = self.stream.query(self.driver) == code::NOT_READY;
                }
                !is_behind
            };
            let room = self.room(start + sent * slice);
            if let Some(end) = sending.end_of_slot(sent, done, room, link_is_idle)
                && self.held.can_announce()
            {
                // SAFETY: the slices of this slot are in the ring and stay until the slot has arrived.
                unsafe { self.enqueue(start, sent, end, true)? };
                let (left_before, left) = ((total - sent) * slice, (total - end) * slice);
                // The tail is let go of with what came before it announced.
                let tail_begins = left_before > tail && left <= tail;
                if tail_begins || left == 0 {
                    self.held.announce(self.driver, self.stream)?;
                }
                if left > 0 {
                    let took = Duration::from_nanos((end - sent) * slice / LINK_BYTES_A_NANOSECOND);
                    let now = Instant::now();
                    link_busy_until =
                        Some(link_busy_until.map_or(now, |until: Instant| until.max(now)) + took);
                }
                sent = end;
                patience.reset();
                continue;
            }
            if board.work() {
                patience.reset();
                continue;
            }
            let waited = patience.pause();
            let waits_for_stream = done == offered;
            if waits_for_stream && !self.may_wait && waited > stalled_after {
                if self.held.unannounced() > 0 {
                    self.held.announce(self.driver, self.stream)?;
                    patience.reset();
                    continue;
                }
                if window >= capacity {
                    return Ok(Sent::Stalled(sent * slice));
                }
                stalled = true;
                patience.reset();
                continue;
            }
            self.ask(&mut patience, waited)?;
        }
        Ok(Sent::All)
    }

    /// Device to host.
    ///
    /// # Safety
    /// The application's contract with CUDA: `host` is writable for `bytes` bytes until this returns, `device` is a range
    /// that it may read on this stream.
    pub(crate) unsafe fn dtoh(mut self) -> Outcome {
        let board = self.held.board();
        let huge_pages = match self.rows {
            // SAFETY: the caller's promise.
            None => unsafe { HugePages::for_destination(self.host, self.bytes) },
            Some(_) => None,
        };
        if let Some(pages) = &huge_pages {
            // SAFETY: they are part of the destination.
            unsafe { self.touch(board, pages) };
        }
        // SAFETY: the caller's promise; `open` gets the lane that this copy holds.
        match unsafe { self.receive(board) } {
            Ok(()) => Outcome::Staged(code::SUCCESS),
            Err(error) => self.fail(error),
        }
    }

    /// Has slots filled and copies them out until the last byte is there.
    ///
    /// # Safety
    /// As [`Copy::dtoh`].
    unsafe fn receive(&mut self, board: &Board) -> Result<(), Code> {
        let slice = self.row.slice;
        let total = self.bytes.div_ceil(slice);
        let capacity = self.held.pinned.bytes() as u64;
        let start = self.held.start(slice);
        // SAFETY: this copy holds the lane; slices are offered only when the DMA that fills them is complete.
        unsafe { self.open(board, start, false) };
        let mut slots = Slots::new(self.bytes, slice, self.row.slot);
        let mut slot_end = slots.end_of_slot_at(0, self.room(start));
        let (mut offered, mut done, mut asked) = (0, 0, 0);
        let mut patience = Patience::default();
        let mut may_wake_early = self.may_wake_early();
        while done < total {
            self.held.reap(self.driver);
            let arrived = self.held.arrived;
            let ready = total.min(arrived.saturating_sub(start) / slice);
            if ready > offered {
                offered = ready;
                self.offer(board, offered);
                patience.reset();
            }
            while done < offered && board.is_done(done) {
                done += 1;
            }
            let copied_out = start + done * slice;
            let free_to = (copied_out + self.window()).min(arrived.min(copied_out) + capacity);
            if asked < total && start + slot_end * slice <= free_to && self.held.can_announce() {
                // SAFETY: nothing in flight and no slice that is still to be copied out lies in this part of the ring.
                unsafe { self.enqueue(start, asked, slot_end, false)? };
                self.held.announce(self.driver, self.stream)?;
                asked = slot_end;
                slot_end = slots.end_of_slot_at(asked, self.room(start + asked * slice));
                patience.reset();
                continue;
            }
            if core::mem::take(&mut may_wake_early) && offered == 0 {
                self.wake(WAKE_EARLY);
            }
            if board.work() {
                patience.reset();
                continue;
            }
            let waited = patience.pause();
            self.ask(&mut patience, waited)?;
        }
        Ok(())
    }

    /// Whether helpers sleep, and nothing on the stream would keep those waiting that are woken now.
    fn may_wake_early(&self) -> bool {
        self.row.threads > 1
            && self.lanes.crew.has_sleepers()
            && self.stream.query(self.driver) == code::SUCCESS
    }

    /// Has every huge page of the destination brought in by one thread each: helpers that met in one page while they copy
    /// would each clear one, and throw it away.
    ///
    /// # Safety
    /// As [`Copy::dtoh`]; `pages` is part of the destination.
    unsafe fn touch(&self, board: &Board, pages: &HugePages) {
        let task = pages.task();
        let total = (task.bytes / task.slice_bytes) as u64;
        // SAFETY: this copy holds the lane, and every copy before it left the board with all tickets done or withdrawn.
        unsafe { board.open(task, self.row.threads - 1) };
        let mut patience = Patience::default();
        let (mut offered, mut done) = (0, 0);
        while done < total {
            if offered < total.min(done + MARKS as u64) {
                offered = total.min(done + MARKS as u64);
                self.offer(board, offered);
            }
            while done < offered && board.is_done(done) {
                done += 1;
                patience.reset();
            }
            if !board.work() {
                patience.pause();
            }
        }
    }

    /// Puts the task on the board; nothing is on offer yet.
    ///
    /// # Safety
    /// See [`Board::open`]: the application's range must stay valid until every ticket is done or withdrawn.
    unsafe fn open(&self, board: &Board, start: u64, into_ring: bool) {
        let pinned = &self.held.pinned;
        let task = Task {
            host: self.host as *mut u8,
            bytes: self.bytes as usize,
            ring: pinned.ring(),
            ring_bytes: pinned.bytes(),
            ring_start: (start % pinned.bytes() as u64) as usize,
            slice_bytes: self.row.slice as usize,
            rows: self.rows.filter(|rows| !rows.is_linear_on_host()),
            work: if into_ring {
                Work::IntoRing
            } else {
                Work::OutOfRing
            },
            store: self.row.store,
        };
        // SAFETY: this copy holds the lane, and every copy before it left the board with all tickets done or withdrawn.
        unsafe { board.open(task, self.row.threads - 1) };
    }

    /// Slices below `slices` may be moved.
    fn offer(&self, board: &Board, slices: u64) {
        board.offer(slices);
        self.wake(1);
    }

    /// Wakes helpers that sleep, for a short copy `most` of them.
    fn wake(&self, most: u32) {
        if self.row.threads > 1 {
            let most = match self.bytes < WAKE_ALL_FROM_BYTES {
                true => most,
                false => u32::MAX,
            };
            self.lanes.crew.wake_for(self.row.threads - 1, most);
        }
    }

    /// Bytes that may be in flight. What must not wait has all of its ring.
    fn window(&self) -> u64 {
        match self.may_wait && self.lanes.crew.copies() > 1 {
            true => self.row.ring.min(SHARED_WINDOW_BYTES),
            false => self.row.ring,
        }
    }

    /// Slices that lie in the ring without a gap from `position` on.
    fn room(&self, position: u64) -> u64 {
        let pinned = &self.held.pinned;
        let place = (position % pinned.bytes() as u64) as usize;
        (pinned.end_of_piece(place) - place) as u64 / self.row.slice
    }

    /// Enqueues the DMA of slices `from..to`.
    ///
    /// # Safety
    /// That part of the ring must be free for this DMA until it is complete.
    unsafe fn enqueue(
        &mut self,
        start: u64,
        from: u64,
        to: u64,
        to_device: bool,
    ) -> Result<(), Code> {
        let slice = self.row.slice;
        let (offset, end) = (from * slice, (to * slice).min(self.bytes));
        let capacity = self.held.pinned.bytes() as u64;
        let place = ((start + offset) % capacity) as usize;
        let bytes = end - offset;
        let rows = self.rows.filter(|rows| !rows.is_linear_to_device());
        // SAFETY: `room` kept the slot within one registered piece of the ring; the device range is part of the caller's.
        let result = unsafe {
            let ring = self.held.pinned.ring().add(place);
            match (rows, to_device) {
                (Some(rows), _) => {
                    let (first, height) = (offset / rows.ring_pitch, bytes / rows.ring_pitch);
                    let device = self.device + first * rows.device_pitch;
                    let copy = rows.copy(ring as u64, rows.ring_pitch, device, height, to_device);
                    self.stream.copy_rows(&copy)
                }
                (None, true) => {
                    self.stream
                        .copy_to_device(self.device + offset, ring, bytes as usize)
                }
                (None, false) => {
                    self.stream
                        .copy_to_host(ring, self.device + offset, bytes as usize)
                }
            }
        };
        if result != code::SUCCESS {
            return Err(result);
        }
        self.held.enqueued(start + to * slice);
        Ok(())
    }

    /// A synchronous HtoD that fits into its tail would return with the work before it still to be done, which stock waits
    /// for: has the stream announce that work, unless it is idle. Returns the announcement's number.
    fn announce_what_came_before(&mut self) -> Result<Option<u32>, Code> {
        if self.bytes > self.tail {
            return Ok(None);
        }
        match self.stream.query(self.driver) {
            code::SUCCESS => return Ok(None),
            code::NOT_READY => {}
            error => return Err(error),
        }
        let mut patience = Patience::default();
        while !self.held.can_announce() {
            self.held.reap(self.driver);
            let waited = patience.pause();
            self.ask(&mut patience, waited)?;
        }
        self.held.announce(self.driver, self.stream).map(Some)
    }

    /// Waits until at most `tail` bytes are in flight and announcement `before` has been seen.
    fn wait_for_all_but(&mut self, tail: u64, before: Option<u32>) -> Result<(), Code> {
        let mut patience = Patience::default();
        loop {
            self.held.reap(self.driver);
            let seen = before.is_none_or(|number| self.held.has_seen(number));
            if seen && self.held.head - self.held.arrived <= tail {
                return Ok(());
            }
            let waited = patience.pause();
            self.ask(&mut patience, waited)?;
        }
    }

    /// From time to time during a wait: learns of an error, or that the stream is idle whatever the completion word says.
    fn ask(&mut self, patience: &mut Patience, waited: Duration) -> Result<(), Code> {
        self.held.note_wait(waited);
        if !patience.is_time_to_ask(waited) {
            return Ok(());
        }
        match self.stream.query(self.driver) {
            code::NOT_READY => Ok(()),
            code::SUCCESS => {
                self.held.complete_all();
                Ok(())
            }
            error => Err(error),
        }
    }

    /// Leaves a copy that the driver has refused midway, with nobody at work in the application's memory. What is in flight
    /// touches only the ring, and keeps the lane; stock does not wait for the stream either before it returns an error.
    fn fail(mut self, error: Code) -> Outcome {
        self.held.board().withdraw();
        if self.held.unannounced() > 0 {
            // Where that fails too, the lane stays taken by the stream.
            let _ = self.held.announce(self.driver, self.stream);
        }
        Outcome::Staged(error)
    }
}
