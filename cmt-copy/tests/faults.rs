//! Application memory that faults: a handler of the application's resolves the fault slowly, on whichever thread moves
//! the slice. So a slice can be held for as long as a test wants, by a helper, while everybody else goes on.
#![expect(unsafe_code, reason = "handles faults in memory of its own")]

mod mock;

use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

use cmt_copy::Outcome;
use mock::{Context, Kind, Memory};

const PAGE: usize = 4096;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Threads that resolve a fault now, and faults of threads that have no name of the engine's.
static RESOLVING: AtomicUsize = AtomicUsize::new(0);
static FAULTS_OF_HELPERS: AtomicUsize = AtomicUsize::new(0);
/// Thread that calls `copy`.
static CALLER: AtomicI32 = AtomicI32::new(0);

extern "C" fn resolve(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    RESOLVING.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the kernel passes the faulting address; every inaccessible page of this program may be opened.
    unsafe {
        if libc::gettid() != CALLER.load(Ordering::Relaxed) {
            FAULTS_OF_HELPERS.fetch_add(1, Ordering::Relaxed);
        }
        std::thread::sleep(Duration::from_millis(30));
        let page = (*info).si_addr() as usize / PAGE * PAGE;
        libc::mprotect(page as *mut _, PAGE, libc::PROT_READ | libc::PROT_WRITE);
    }
    RESOLVING.fetch_sub(1, Ordering::SeqCst);
}

/// Pages of the test's own, of which one every `every` bytes faults.
struct Faulting {
    start: *mut u8,
    bytes: usize,
}

impl Faulting {
    fn new(bytes: usize, seed: u64) -> Self {
        // SAFETY: a new mapping.
        let start = unsafe {
            let start = libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(start, libc::MAP_FAILED);
            start.cast::<u8>()
        };
        let mut own = Self { start, bytes };
        mock::fill(own.data(), seed);
        own
    }

    fn data(&mut self) -> &mut [u8] {
        // SAFETY: the mapping.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// Makes one page in every `every` bytes fault, the first of them after `from` bytes.
    fn close(&self, from: usize, every: usize) {
        for at in (from..self.bytes).step_by(every) {
            // SAFETY: a page of the mapping.
            let result =
                unsafe { libc::mprotect(self.start.add(at).cast(), PAGE, libc::PROT_NONE) };
            assert_eq!(result, 0);
        }
    }
}

impl Drop for Faulting {
    fn drop(&mut self) {
        // SAFETY: the mapping, which nobody uses any more.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// One test, since the handler and its counters belong to the whole program.
#[test]
fn a_slice_that_is_held_up_is_neither_overwritten_nor_left_behind() {
    // SAFETY: a handler with the signature that SA_SIGINFO asks for.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = resolve as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        assert_eq!(
            libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut()),
            0
        );
        CALLER.store(libc::gettid(), Ordering::Relaxed);
    }
    let context = Context::new();
    context.legacy.dawdle_us.store(0, Ordering::Relaxed);
    let engine = mock::engine(mock::one_row(128 * KIB, 32 * KIB, MIB, 4, 0), 4);
    let bytes = 6 << 20;

    let mut source = Memory::known(&context, Kind::Device, bytes, 0, 1);
    for round in 0..3 {
        let mut target = Faulting::new(bytes, 99);
        target.close(round * 3 * PAGE, 700 * 1024 / PAGE * PAGE);
        let (to, from) = (target.start as u64, source.address());
        let outcome = mock::call(&engine, mock::DTOH, to, from, bytes, 0);
        assert_eq!(outcome, Outcome::Staged(0));
        assert_eq!(RESOLVING.load(Ordering::SeqCst), 0);
        assert!(target.data() == source.data(), "DtoH, round {round}");
    }

    let mut target = Memory::known(&context, Kind::Device, bytes, 0, 1);
    for seed in 0..3 {
        let source = Faulting::new(bytes, seed);
        source.close(seed as usize * 5 * PAGE, 700 * 1024 / PAGE * PAGE);
        let (to, from) = (target.address(), source.start as u64);
        let outcome = mock::call(&engine, mock::HTOD, to, from, bytes, 0);
        assert_eq!(outcome, Outcome::Staged(0));
        context.legacy.finish();
        assert_eq!(target.wrong(seed), None);
    }

    // The driver refuses a slot while later slices are still being moved.
    context.copy_code.store(7, Ordering::Relaxed);
    for round in 0..6 {
        let source = Faulting::new(bytes, 1);
        source.close(256 * 1024, 64 * 1024);
        context.copies_left.store(round % 2, Ordering::Relaxed);
        let (to, from) = (target.address(), source.start as u64);
        let outcome = mock::call(&engine, mock::HTOD, to, from, bytes, 0);
        assert_eq!(outcome, Outcome::Staged(7));
        assert_eq!(
            RESOLVING.load(Ordering::SeqCst),
            0,
            "somebody still reads the source"
        );
    }
    assert!(FAULTS_OF_HELPERS.load(Ordering::Relaxed) > 0);
    engine.shutdown();
}
