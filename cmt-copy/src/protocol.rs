//! How one caller and any number of helpers share the slices of a copy. Knows nothing of CUDA.
//!
//! Each lane has a [`Board`]. Slices carry *tickets*, numbers that only grow over the life of the board, so a stale
//! number never fits a later copy:
//!
//! - the owner of the lane writes the task while no ticket is on offer, then raises `limit`: slices below it are ready;
//! - anyone takes the ticket `next` by compare-and-swap while it is below `limit`, and only then reads the task. The
//!   task stays as it is until every ticket taken has been marked done;
//! - whoever took a ticket moves the slice and marks it; the owner sees the marks and sends or reuses what they cover.
//!
//! `limit` is stored with release after the data of its slices are in place (for DtoH: after the DMA that brought them
//! was seen to be complete), and loaded with acquire by those who take tickets. Marks are stored with release after the
//! bytes are moved and loaded with acquire by the owner. Nobody waits while holding a ticket.
#![expect(
    unsafe_code,
    reason = "the task is shared without a lock and names raw memory"
)]

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::patience::Patience;
use crate::plan::{RING_MAX_BYTES, SLICE_MIN_BYTES};
use crate::rows::Rows;
use crate::store::Store;

/// Most slices of one copy that can be on offer and not yet seen to be done: those that fit in the largest ring.
pub(crate) const MARKS: usize = (RING_MAX_BYTES / SLICE_MIN_BYTES) as usize;

/// Keeps what different threads write on different cache lines (two, since they are fetched in pairs).
#[repr(align(128))]
pub(crate) struct Line<T>(pub T);

/// What is to be done with a slice.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// HtoD: its bytes go from the application into the ring.
    IntoRing,
    /// DtoH: the other way.
    OutOfRing,
    /// Its first page is brought in; no byte changes.
    Touch,
}

/// What the slices of a copy are.
#[derive(Clone, Copy)]
pub(crate) struct Task {
    /// First byte of the application's memory.
    pub host: *mut u8,
    pub bytes: usize,
    /// First byte of the ring.
    pub ring: *mut u8,
    pub ring_bytes: usize,
    /// Where slice 0 lies in the ring; a multiple of `slice_bytes`, which divides `ring_bytes`.
    pub ring_start: usize,
    pub slice_bytes: usize,
    /// Where the bytes do not lie in one piece on the host: how they do. Then `bytes` and slices count padded rows.
    pub rows: Option<Rows>,
    pub work: Work,
    pub store: Store,
}

impl Task {
    /// A task without bytes.
    pub(crate) const NONE: Self = Self {
        host: core::ptr::null_mut(),
        bytes: 0,
        ring: core::ptr::null_mut(),
        ring_bytes: 1,
        ring_start: 0,
        slice_bytes: 1,
        rows: None,
        work: Work::Touch,
        store: Store::Ordinary,
    };

    /// Moves one slice.
    ///
    /// # Safety
    /// Application memory and ring must be valid for what the task says, and no other thread may touch the slice.
    unsafe fn move_slice(&self, index: usize) {
        let offset = index * self.slice_bytes;
        let bytes = self.slice_bytes.min(self.bytes.saturating_sub(offset));
        let place = (self.ring_start + offset) % self.ring_bytes;
        let Some(rows) = &self.rows else {
            // SAFETY: `offset + bytes` stays within the copy; the ring is a whole number of slices, so the place has room
            // for one.
            unsafe { self.move_piece(offset, place, bytes) };
            self.store.fence();
            return;
        };
        let ring_pitch = rows.ring_pitch as usize;
        for at in (0..bytes).step_by(ring_pitch) {
            let row = (offset + at) / ring_pitch;
            let on_host = row * rows.host_pitch as usize;
            // SAFETY: slices hold whole rows, each of which has room in the ring; the host has as many as the task says.
            unsafe { self.move_piece(on_host, place + at, rows.width as usize) };
        }
        self.store.fence();
    }

    /// Moves `bytes` bytes that lie in one piece on the host, from `offset` on, and in the ring, at `place`; they are still to
    /// be fenced.
    ///
    /// # Safety
    /// As [`Task::move_slice`]. Application memory and pinned ring are different mappings.
    unsafe fn move_piece(&self, offset: usize, place: usize, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let (host, ring) = (self.host.add(offset), self.ring.wrapping_add(place));
            match self.work {
                Work::IntoRing => self.store.put(ring, host, bytes),
                Work::OutOfRing => self.store.put(host, ring, bytes),
                Work::Touch => touch(host),
            }
        }
    }
}

/// Brings the page at `byte` in, ready to be written, and leaves what it holds. The first access is a write: a read could
/// bring the kernel's page of zeros, and cost a second fault.
///
/// # Safety
/// The byte must be writable, and be written by no one else but atomically.
pub(crate) unsafe fn touch(byte: *mut u8) {
    // SAFETY: the caller's promise.
    let byte = unsafe { AtomicU8::from_ptr(byte) };
    let _ = byte.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
}

/// The slices of one lane.
pub(crate) struct Board {
    /// The next ticket to be taken.
    next: Line<AtomicU64>,
    /// The helpers that are at work here.
    helping: Line<AtomicU32>,
    /// The first ticket that is not ready; the task's first ticket; the helpers that it wants.
    limit: Line<(AtomicU64, AtomicU64, AtomicU32)>,
    task: UnsafeCell<Task>,
    /// Ticket `t` has been done when mark `t % MARKS` holds `t + 1`.
    marks: Box<[AtomicU64]>,
}

// SAFETY: the task is written only by the lane's owner while no ticket is on offer, and read only by holders of tickets
// (see the module's documentation); the raw pointers in it are valid in every thread by the contract of `open`.
unsafe impl Sync for Board {}
// SAFETY: as above; nothing belongs to the thread that made the board.
unsafe impl Send for Board {}

impl Board {
    pub(crate) fn new() -> Self {
        Self {
            next: Line(AtomicU64::new(0)),
            helping: Line(AtomicU32::new(0)),
            limit: Line((AtomicU64::new(0), AtomicU64::new(0), AtomicU32::new(0))),
            task: UnsafeCell::new(Task::NONE),
            marks: (0..MARKS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Owner: starts a copy, with nothing on offer yet, for at most `helpers` helpers at a time.
    ///
    /// # Safety
    /// Only the lane's owner may call it, when every ticket of the last copy has been done or withdrawn. The task's
    /// memory must stay valid until the same holds for this copy, and slices on offer must not be touched otherwise.
    pub(crate) unsafe fn open(&self, task: Task, helpers: u32) {
        let (limit, base, wanted) = &self.limit.0;
        base.store(limit.load(Ordering::Relaxed), Ordering::Relaxed);
        wanted.store(helpers, Ordering::Relaxed);
        // SAFETY: nobody holds a ticket and none is on offer (the caller's promise), so nobody reads the task.
        unsafe { *self.task.get() = task };
    }

    fn base(&self) -> u64 {
        self.limit.0.1.load(Ordering::Relaxed)
    }

    /// Owner: slices below `slices` are ready now. Never goes back within a copy.
    pub(crate) fn offer(&self, slices: u64) {
        self.limit
            .0
            .0
            .store(self.base() + slices, Ordering::Release);
    }

    /// Anyone: whether a slice could be taken.
    pub(crate) fn is_ready(&self) -> bool {
        self.next.0.load(Ordering::Relaxed) < self.limit.0.0.load(Ordering::Relaxed)
    }

    /// Anyone: whether a slice could be taken and the copy has fewer helpers than it wants. Writes nothing, so helpers that
    /// are not wanted cost those at work little.
    pub(crate) fn wants_helper(&self) -> bool {
        self.is_ready() && self.helping.0.load(Ordering::Relaxed) < self.wanted()
    }

    /// Anyone: how many helpers this copy wants.
    pub(crate) fn wanted(&self) -> u32 {
        self.limit.0.2.load(Ordering::Relaxed)
    }

    /// Helper: whether this copy wants one more helper; if so, [`Board::leave`] must follow.
    pub(crate) fn join(&self) -> bool {
        if self.helping.0.fetch_add(1, Ordering::Relaxed) < self.wanted() {
            return true;
        }
        self.leave();
        false
    }

    /// Helper: is no longer at work here.
    pub(crate) fn leave(&self) {
        self.helping.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// Anyone: takes a slice that is ready and moves it; false if there is none.
    pub(crate) fn work(&self) -> bool {
        let next = &self.next.0;
        let mut ticket = next.load(Ordering::Relaxed);
        loop {
            // Acquire: the task, and for DtoH the slice's bytes, were in place before the limit passed this ticket.
            if ticket >= self.limit.0.0.load(Ordering::Acquire) {
                return false;
            }
            match next.compare_exchange_weak(
                ticket,
                ticket + 1,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => break,
                Err(current) => ticket = current,
            }
        }
        // SAFETY: this thread holds a ticket, so the owner keeps the task and its memory as they are, and no other thread
        // has the same slice.
        unsafe {
            let task = *self.task.get();
            task.move_slice((ticket - self.base()) as usize);
        }
        if let Some(mark) = self.mark(ticket) {
            let before = mark.swap(ticket + 1, Ordering::Release);
            debug_assert_ne!(before, ticket + 1, "a slice was moved twice");
        }
        true
    }

    fn mark(&self, ticket: u64) -> Option<&AtomicU64> {
        self.marks.get(ticket as usize % MARKS)
    }

    /// Owner: whether slice `index` has been moved.
    pub(crate) fn is_done(&self, index: u64) -> bool {
        let ticket = self.base() + index;
        self.mark(ticket)
            .is_some_and(|mark| mark.load(Ordering::Acquire) == ticket + 1)
    }

    /// Owner: takes back what is on offer and not taken, and waits for what is taken. The copy can then be left as it
    /// stands: nobody touches its memory any more.
    pub(crate) fn withdraw(&self) {
        let next = &self.next.0;
        let limit = self.limit.0.0.load(Ordering::Relaxed);
        let taken = loop {
            let ticket = next.load(Ordering::Relaxed);
            if next
                .compare_exchange(ticket, limit, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
            {
                break ticket - self.base();
            }
        };
        // Those before the last `MARKS` were seen done, else these would not have been on offer.
        let mut patience = Patience::default();
        for index in taken.saturating_sub(MARKS as u64)..taken {
            while !self.is_done(index) {
                patience.pause();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Helpers on one board, and an owner who runs copies on it.
    fn with_helpers(count: usize, owner: impl FnOnce(&Board)) {
        let (board, stop) = (Board::new(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..count {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        if board.is_ready() && board.join() {
                            while board.work() {}
                            board.leave();
                        }
                        std::thread::yield_now();
                    }
                });
            }
            owner(&board);
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(board.helping.0.load(Ordering::Relaxed), 0, "everybody left");
    }

    fn task(host: &mut [u8], ring: &mut [u8], slice_bytes: usize, into_ring: bool) -> Task {
        Task {
            host: host.as_mut_ptr(),
            bytes: host.len(),
            ring: ring.as_mut_ptr(),
            ring_bytes: ring.len(),
            ring_start: slice_bytes,
            slice_bytes,
            rows: None,
            work: if into_ring {
                Work::IntoRing
            } else {
                Work::OutOfRing
            },
            store: Store::Ordinary,
        }
    }

    #[test]
    fn every_slice_of_every_copy_is_moved_once_and_seen() {
        let rounds = if cfg!(miri) { 6 } else { 3000 };
        with_helpers(3, |board| {
            for round in 0..rounds {
                let (slice, slices) = (4 + round % 5, 1 + round % 7);
                let mut host: Vec<u8> = (0..slice * slices - round % 3)
                    .map(|at| (at * 7 + round) as u8)
                    .collect();
                let want = host.clone();
                let mut ring = vec![0; slice * 8];
                let task = task(&mut host, &mut ring, slice, true);
                // SAFETY: both buffers outlive the copy, whose slices are all done below.
                unsafe { board.open(task, (round % 3) as u32) };
                for index in 0..slices as u64 {
                    board.offer(index + 1);
                    board.work();
                }
                for index in 0..slices as u64 {
                    while !board.is_done(index) {
                        std::thread::yield_now();
                    }
                }
                assert_eq!(ring[slice..][..want.len().min(slice * 7)], want);
                assert!(!board.is_ready() && !board.work());
            }
        });
    }

    #[test]
    fn after_a_withdrawal_nobody_touches_the_memory_and_the_next_copy_is_whole() {
        let rounds = if cfg!(miri) { 6 } else { 3000 };
        with_helpers(3, |board| {
            for round in 0..rounds {
                let mut host = vec![0; 40];
                let mut ring: Vec<u8> = (0..48).collect();
                let first = task(&mut host, &mut ring, 4, false);
                // SAFETY: both buffers are there until the withdrawal below.
                unsafe { board.open(first, 3) };
                board.offer(1 + round % 10);
                board.withdraw();
                assert!(!board.is_ready());
                host.fill(0xEE);
                assert!(host.iter().all(|&byte| byte == 0xEE));
                let second = task(&mut host, &mut ring, 4, false);
                // SAFETY: both buffers are there until every slice is done below.
                unsafe { board.open(second, 3) };
                board.offer(10);
                while board.work() {}
                while !(0..10).all(|index| board.is_done(index)) {
                    std::thread::yield_now();
                }
                assert!(host.iter().zip(4u8..).all(|(&byte, want)| byte == want));
            }
        });
    }

    #[test]
    fn a_helper_beyond_those_wanted_is_not_asked_for() {
        let board = Board::new();
        let (mut host, mut ring) = (vec![1; 8], vec![0; 16]);
        // SAFETY: both buffers outlive the slices, which are withdrawn below.
        unsafe { board.open(task(&mut host, &mut ring, 4, true), 1) };
        assert!(!board.wants_helper(), "nothing is on offer");
        board.offer(2);
        assert!(board.wants_helper() && board.join());
        assert!(board.is_ready() && !board.wants_helper() && !board.join());
        board.leave();
        assert!(board.wants_helper());
        board.withdraw();
        assert!(!board.wants_helper());
    }

    #[test]
    #[cfg_attr(miri, ignore = "counts context switches")]
    fn a_long_withdrawal_sleeps() {
        let board = Board::new();
        let (mut host, mut ring) = (vec![1; 8], vec![0; 16]);
        // SAFETY: both buffers outlive the slices, which are done or withdrawn below.
        unsafe { board.open(task(&mut host, &mut ring, 4, true), 1) };
        board.offer(2);
        let ticket = board.next.0.fetch_add(1, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(100));
                board.marks[ticket as usize].store(ticket + 1, Ordering::Release);
            });
            let before = voluntary_switches();
            board.withdraw();
            assert!(voluntary_switches() - before > 20);
        });
    }

    /// How often the calling thread has slept.
    fn voluntary_switches() -> i64 {
        // SAFETY: fills a local of the right type.
        unsafe {
            let mut usage = std::mem::zeroed::<libc::rusage>();
            libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
            usage.ru_nvcsw
        }
    }
}
