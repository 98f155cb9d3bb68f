//! The payload's allocator: libc's, with a reserve for when that has nothing left.
//!
//! Rust ends the process when an allocation fails, and this is somebody else's process. The payload allocates little:
//! code to relocate, texts, thread names. What comes from the reserve is not given back.
#![expect(unsafe_code, reason = "an allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

const RESERVE_BYTES: usize = 512 << 10;

#[global_allocator]
static ALLOCATOR: Reserve = Reserve {
    memory: UnsafeCell::new([0; RESERVE_BYTES]),
    used: AtomicUsize::new(0),
};

/// libc's allocator, and memory that is there from the start.
#[repr(C, align(64))]
struct Reserve {
    memory: UnsafeCell<[u8; RESERVE_BYTES]>,
    used: AtomicUsize,
}

// SAFETY: `used` gives each byte of the memory to one caller only.
unsafe impl Sync for Reserve {}

impl Reserve {
    fn take(&self, layout: Layout) -> *mut u8 {
        let start = self.memory.get().cast::<u8>();
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let padding = (start.addr() + used).wrapping_neg() & (layout.align() - 1);
            let from = used + padding;
            let Some(end) = from
                .checked_add(layout.size())
                .filter(|&end| end <= RESERVE_BYTES)
            else {
                return std::ptr::null_mut();
            };
            match self
                .used
                .compare_exchange_weak(used, end, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return start.wrapping_add(from),
                Err(now) => used = now,
            }
        }
    }

    fn owns(&self, block: *mut u8) -> bool {
        let start = self.memory.get().addr();
        (start..start + RESERVE_BYTES).contains(&block.addr())
    }
}

// SAFETY: blocks come from `System` or, each byte once, from the reserve; only those of `System` go back to it.
unsafe impl GlobalAlloc for Reserve {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those that `System` asks for.
        let block = unsafe { System.alloc(layout) };
        if block.is_null() {
            self.take(layout)
        } else {
            block
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if !self.owns(block) {
            // SAFETY: not from the reserve, so `System` made it with this layout.
            unsafe { System.dealloc(block, layout) }
        }
    }
}
