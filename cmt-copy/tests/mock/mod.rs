//! A CUDA driver without a GPU: streams are threads that run their work in order, with delays; device memory is host
//! memory that only they touch. It keeps the books that let a test see what the engine did, and fails on request.
#![allow(dead_code, reason = "each test binary uses its own part of the mock")]

mod entry;
mod stream;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use cmt_copy::{Driver, Engine, Outcome, Plan, Request};

#[allow(
    unused_imports,
    reason = "each test binary uses its own part of the mock"
)]
pub use entry::{per_thread_stream, table};
#[allow(
    unused_imports,
    reason = "each test binary uses its own part of the mock"
)]
pub use stream::{Stream, fault};

pub const NOT_READY: i32 = 600;
pub const NOT_SUPPORTED: i32 = 801;
pub const LAUNCH_FAILED: i32 = 719;

/// Positions in `COPY_FNS`.
pub const HTOD: usize = 0;
pub const HTOD_PTDS: usize = 1;
pub const DTOH: usize = 2;
pub const HTOD_ASYNC: usize = 4;
pub const HTOD_ASYNC_PTSZ: usize = 5;
pub const DTOH_ASYNC: usize = 6;
pub const DTOH_ASYNC_PTSZ: usize = 7;
pub const ANY: usize = 8;
pub const ANY_ASYNC: usize = 10;
pub const ROWS: usize = 12;
pub const ROWS_ASYNC: usize = 16;
pub const ROWS_ASYNC_PTSZ: usize = 17;

/// What kind of memory an address range is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Device,
    Managed,
    Pinned,
}

#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub bytes: usize,
    pub kind: Kind,
    pub context: usize,
}

/// What the driver knows, by address.
#[derive(Default)]
pub struct Books {
    pub ranges: BTreeMap<u64, Range>,
    pub contexts: BTreeMap<usize, Arc<Context>>,
    pub streams: BTreeMap<usize, Arc<Stream>>,
    pub events: BTreeMap<usize, Arc<AtomicBool>>,
    /// Starts of allocations with CU_POINTER_ATTRIBUTE_SYNC_MEMOPS.
    pub sync_memops: BTreeSet<u64>,
}

static BOOKS: LazyLock<Mutex<Books>> = LazyLock::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(0x1000);

pub fn books() -> MutexGuard<'static, Books> {
    BOOKS.lock().expect("the mock does not panic")
}

/// A number that was never given out before.
pub fn fresh() -> u64 {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

thread_local! {
    pub static CURRENT: Cell<usize> = const { Cell::new(0) };
    pub static CAPTURE_MODE: Cell<i32> = const { Cell::new(0) };
}

/// A context, its default stream, and the ways in which it is told to fail. A code of 0 means: work.
pub struct Context {
    pub handle: usize,
    pub id: u64,
    pub alive: AtomicBool,
    pub legacy: Arc<Stream>,
    /// DMA calls that succeed before one fails with `copy_code`.
    pub copies_left: AtomicI64,
    pub copy_code: AtomicI32,
    pub register_code: AtomicI32,
    /// Registrations of more bytes than this fail with 2 (out of memory).
    pub register_most: AtomicU64,
    pub write_value_code: AtomicI32,
    /// Writes of values that succeed before one fails with `write_value_code`.
    pub writes_left: AtomicI64,
    pub event_code: AtomicI32,
    pub record_code: AtomicI32,
    pub synchronize_code: AtomicI32,
    /// What `cuCtxGetId` returns while the context is alive.
    pub id_code: AtomicI32,
    /// `cuStreamIsCapturing` returns what broke the context, as most functions do.
    pub says_what_broke_it: AtomicBool,
    /// Pinned memory stays known to the driver when the context is destroyed.
    pub keeps_pins: AtomicBool,
    /// Writes of values succeed and never arrive.
    pub drop_writes: AtomicBool,
    pub host_page_tables: AtomicI32,
    /// What `cuCtxGetFlags` says.
    pub flags: AtomicU32,
    /// Some blocking stream captures: the legacy stream answers 906.
    pub legacy_captures: AtomicBool,
    pub dma_calls: AtomicU32,
    pub register_calls: AtomicU32,
    /// Calls that break a capture on another thread, made while this one was not in relaxed capture mode.
    pub unrelaxed: AtomicU32,
    /// Copies that reached the driver with a pageable side.
    pub stock_copies: AtomicU32,
    pub stock_bytes: AtomicU64,
}

impl Context {
    /// A new context, current on this thread.
    pub fn new() -> Arc<Self> {
        let handle = fresh() as usize;
        let zero = || AtomicI32::new(0);
        let context = Arc::new(Self {
            handle,
            id: fresh(),
            alive: AtomicBool::new(true),
            legacy: Stream::new(),
            copies_left: AtomicI64::new(i64::MAX),
            copy_code: zero(),
            register_code: zero(),
            register_most: AtomicU64::new(u64::MAX),
            write_value_code: zero(),
            writes_left: AtomicI64::new(0),
            event_code: zero(),
            record_code: zero(),
            synchronize_code: zero(),
            id_code: zero(),
            says_what_broke_it: AtomicBool::new(false),
            keeps_pins: AtomicBool::new(false),
            drop_writes: AtomicBool::new(false),
            host_page_tables: zero(),
            flags: AtomicU32::new(0),
            legacy_captures: AtomicBool::new(false),
            dma_calls: AtomicU32::new(0),
            register_calls: AtomicU32::new(0),
            unrelaxed: AtomicU32::new(0),
            stock_copies: AtomicU32::new(0),
            stock_bytes: AtomicU64::new(0),
        });
        books().contexts.insert(handle, Arc::clone(&context));
        context.make_current();
        context
    }

    pub fn make_current(&self) {
        CURRENT.set(self.handle);
    }

    /// Destroys it: its pinned memory is pinned no more, its streams are finished first.
    pub fn destroy(&self) {
        self.legacy.finish();
        self.alive.store(false, Ordering::SeqCst);
        if self.keeps_pins.load(Ordering::Relaxed) {
            return;
        }
        let mut books = books();
        books
            .ranges
            .retain(|_, range| range.context != self.handle || range.kind == Kind::Device);
    }

    /// Pinned bytes that this context has now.
    pub fn pinned_bytes(&self) -> usize {
        let books = books();
        let own = books
            .ranges
            .values()
            .filter(|range| range.kind == Kind::Pinned && range.context == self.handle);
        own.map(|range| range.bytes).sum()
    }

    pub fn stream(&self) -> Arc<Stream> {
        let stream = Stream::new();
        books().streams.insert(stream.handle, Arc::clone(&stream));
        stream
    }
}

/// A range of the driver's own that holds `[address, address + bytes)`.
pub fn range_of(address: u64, bytes: u64) -> Option<(u64, Range)> {
    let books = books();
    let (&start, &range) = books.ranges.range(..=address).next_back()?;
    (address + bytes <= start + range.bytes as u64).then_some((start, range))
}

/// Memory that the driver knows, with guard bytes that nobody may touch on both sides.
pub struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

const GUARD: usize = 256;
const GUARD_BYTE: u8 = 0xC3;

impl Memory {
    /// `len` bytes at an address that is `offset` behind a multiple of 64, filled with a pattern that depends on `seed`.
    pub fn host(len: usize, offset: usize, seed: u64) -> Self {
        let mut bytes = vec![GUARD_BYTE; len + 2 * GUARD + 128];
        let start = GUARD + bytes[GUARD..].as_ptr().align_offset(64) + offset;
        fill(&mut bytes[start..start + len], seed);
        Self { bytes, start, len }
    }

    /// The same, known to the driver as `kind`.
    pub fn known(context: &Context, kind: Kind, len: usize, offset: usize, seed: u64) -> Self {
        let mut memory = Self::host(len, offset, seed);
        let range = Range {
            bytes: len,
            kind,
            context: context.handle,
        };
        books().ranges.insert(memory.address(), range);
        memory
    }

    pub fn address(&mut self) -> u64 {
        self.bytes[self.start..].as_mut_ptr() as u64
    }

    pub fn data(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    /// The first byte that is not `seed`'s pattern or not a guard byte.
    pub fn wrong(&self, seed: u64) -> Option<String> {
        let mut want = vec![0; self.len];
        fill(&mut want, seed);
        let data = &self.bytes[self.start..self.start + self.len];
        if data != want {
            let wrong = (0..self.len).filter(|&at| data[at] != want[at]);
            let (count, first) = (wrong.clone().count(), wrong.clone().next());
            return Some(format!("byte {first:?} of {}, {count} in all", self.len));
        }
        let around = self.bytes[..self.start]
            .iter()
            .chain(&self.bytes[self.start + self.len..]);
        around
            .clone()
            .any(|&byte| byte != GUARD_BYTE)
            .then(|| "a guard byte".to_owned())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let address = self.address();
        if let Ok(mut books) = BOOKS.lock() {
            books.ranges.remove(&address);
        }
    }
}

/// Fills `data` with bytes that depend on `seed` and on where they stand.
pub fn fill(data: &mut [u8], seed: u64) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    // No two blocks are alike, so a block in the wrong place is noticed; few rounds, so that debug builds stay quick.
    for block in data.chunks_mut(4096) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        block.fill((state >> 32) as u8);
        for (piece, word) in block.chunks_mut(512).zip(1u64..) {
            let word = state.wrapping_mul(2 * word + 1).to_le_bytes();
            let len = piece.len().min(8);
            piece[..len].copy_from_slice(&word[..len]);
        }
    }
}

/// An engine on the mock.
pub fn engine(plan: Plan, threads: u32) -> Engine {
    let (originals, driver) = table();
    // SAFETY: the mock's functions have the signatures of `cuda.h` and live as long as the program.
    let driver = unsafe { Driver::new(&originals, &driver) }.expect("the mock has every function");
    Engine::new(driver, plan, threads)
}

/// The estimate for `cpus` CPUs, but with uploads from 64 KiB up staged as well.
pub fn plan(cpus: u32) -> Plan {
    let mut plan = cmt_copy::plan::estimate(cpus);
    plan.htod.rotate_right(1);
    plan.htod[0] = plan.htod[1];
    plan.htod[0].up_to_bytes = (64 << 10) - 1;
    plan.htod[1] = plan.htod[2];
    plan.htod[1].up_to_bytes = (1 << 20) - 1;
    plan.htod[1].ring_bytes = 4 << 20;
    plan
}

/// A plan with one row for everything.
pub fn one_row(slot: u64, slice: u64, ring: u64, threads: u32, store: u32) -> Plan {
    let mut plan = Plan::NONE;
    let row = cmt_copy::PlanRow {
        up_to_bytes: u64::MAX,
        slot_bytes: slot,
        slice_bytes: slice,
        ring_bytes: ring,
        threads,
        store,
    };
    plan.htod[0] = row;
    plan.dtoh[0] = row;
    plan
}

/// One call.
pub fn call(
    engine: &Engine,
    function: usize,
    dst: u64,
    src: u64,
    bytes: usize,
    stream: usize,
) -> Outcome {
    let request = Request {
        function,
        dst,
        src,
        bytes,
        stream,
    };
    // SAFETY: the tests pass memory of their own that outlives the call.
    unsafe { engine.copy(&request) }
}

/// Ends the test program if `what` has not come to an end after 30 s: something waits that must not.
pub fn within_30_s<T>(what: impl FnOnce() -> T) -> T {
    let (done, waits) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if waits
            .recv_timeout(std::time::Duration::from_secs(30))
            .is_err()
        {
            eprintln!("blocked for 30 s");
            std::process::abort();
        }
    });
    let result = what();
    done.send(()).expect("the watchdog waits");
    watchdog.join().expect("no panic inside");
    result
}
