//! The pinned memory of one lane: a ring of slots and the completion word before it.
//!
//! The memory is a mapping of the engine's own that the driver registers, so a context that the application destroys can
//! only unpin it: nobody ever touches memory that the driver has unmapped. Where registering does not work, there is no
//! pinned memory.
#![expect(unsafe_code, reason = "maps, registers and frees memory")]

use core::ptr::null_mut;
use std::sync::atomic::AtomicU32;

use crate::driver::{Driver, code};
use crate::plan::{RING_MAX_BYTES, SLICE_MAX_BYTES};

/// The ring starts at a multiple of this, so that huge pages fit.
const ALIGNMENT: usize = 2 << 20;
/// The page of the completion word lies right before the ring.
const WORD_PAGE: usize = 4096;
/// Pieces of a ring that were registered one by one: a ring only doubles, from 1 MiB up to the largest.
const PIECES: usize = (RING_MAX_BYTES / SLICE_MAX_BYTES).ilog2() as usize + 1;

/// A ring and its completion word.
pub(crate) struct Pinned {
    ring: *mut u8,
    /// Ends of the registered pieces as distances from the ring's start; 0 where there is none. A DMA must not cross one.
    ends: [usize; PIECES],
    word_device: u64,
    /// The mapping that holds both.
    mapping: (*mut u8, usize),
}

// SAFETY: the pointers lead to memory that this value owns; no part of it belongs to one thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// A ring of `ring_bytes` bytes (a power of two between 1 MiB and [`RING_MAX_BYTES`]), or a smaller one where that
    /// cannot be had; `None` if there is no pinned memory at all. The context it is for must be current.
    pub(crate) fn new(driver: &Driver, ring_bytes: usize) -> Option<Self> {
        Self::map()?.register_most_of(driver, ring_bytes)
    }

    /// Registers `ring_bytes` bytes of a new mapping, or less where the driver has too little memory.
    fn register_most_of(mut self, driver: &Driver, ring_bytes: usize) -> Option<Self> {
        let mut bytes = ring_bytes;
        while bytes >= SLICE_MAX_BYTES as usize {
            match self.register(driver, 0, bytes) {
                Err(code::OUT_OF_MEMORY) => bytes /= 4,
                Err(_) => break,
                Ok(()) => match driver.device_pointer(self.word_address()) {
                    None => break,
                    Some(device) => {
                        self.word_device = device;
                        return Some(self);
                    }
                },
            }
        }
        self.free(driver, true);
        None
    }

    /// Address space for the largest ring; nothing of it is touched yet.
    pub(crate) fn map() -> Option<Self> {
        let bytes = RING_MAX_BYTES as usize + ALIGNMENT + WORD_PAGE;
        // SAFETY: a new private mapping; ring and word lie within it. A forked child does not get it: the parent's pages
        // must never become copy-on-write, since the device would go on using the old ones.
        unsafe {
            let start = libc::mmap(
                null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            );
            if start == libc::MAP_FAILED {
                return None;
            }
            if libc::madvise(start, bytes, libc::MADV_DONTFORK) != 0 {
                libc::munmap(start, bytes);
                return None;
            }
            libc::madvise(start, bytes, libc::MADV_HUGEPAGE);
            let start = start.cast::<u8>();
            let first = start.add(WORD_PAGE);
            Some(Self {
                ring: first.add(first.align_offset(ALIGNMENT)),
                ends: [0; PIECES],
                word_device: 0,
                mapping: (start, bytes),
            })
        }
    }

    /// Registers the ring from `from` to `to`, and the word's page with its start.
    fn register(&mut self, driver: &Driver, from: usize, to: usize) -> Result<(), i32> {
        let piece = self.ends.iter().position(|&end| end == 0);
        let Some(slot) = piece.and_then(|piece| self.ends.get_mut(piece)) else {
            return Err(code::INVALID_VALUE);
        };
        let (start, bytes) = if from == 0 {
            (self.ring.wrapping_sub(WORD_PAGE), to + WORD_PAGE)
        } else {
            (self.ring.wrapping_add(from), to - from)
        };
        // SAFETY: the range lies within the mapping, which outlives the registration (see `free`).
        match unsafe { driver.register(start, bytes) } {
            code::SUCCESS => {
                *slot = to;
                Ok(())
            }
            error => Err(error),
        }
    }

    /// Makes the ring `ring_bytes` long if that can be had. Nothing may be in flight.
    pub(crate) fn grow(&mut self, driver: &Driver, ring_bytes: usize) -> bool {
        let now = self.bytes();
        let possible = ring_bytes <= RING_MAX_BYTES as usize && ring_bytes > now;
        possible && self.register(driver, now, ring_bytes).is_ok()
    }

    /// Length of the ring.
    pub(crate) fn bytes(&self) -> usize {
        self.ends.iter().copied().max().unwrap_or(0)
    }

    /// First byte of the ring.
    pub(crate) fn ring(&self) -> *mut u8 {
        self.ring
    }

    /// How far a DMA that starts at `place` may reach: to the end of the registration that holds it.
    pub(crate) fn end_of_piece(&self, place: usize) -> usize {
        let ends = self.ends.iter().copied().filter(|&end| end > place);
        ends.min().unwrap_or(place)
    }

    fn word_address(&self) -> *mut u8 {
        self.ring.wrapping_sub(WORD_PAGE)
    }

    /// The completion word, which the device writes and the CPU reads.
    pub(crate) fn word(&self) -> &AtomicU32 {
        // SAFETY: aligned memory that lives as long as `self`; every access by the CPU is atomic, and the device writes 32
        // bits at once.
        unsafe { AtomicU32::from_ptr(self.word_address().cast()) }
    }

    /// The device's address of the completion word.
    pub(crate) fn word_device(&self) -> u64 {
        self.word_device
    }

    /// Gives the memory back. With `alive` its context exists and is current; otherwise the driver should have unpinned
    /// it by itself. Nothing may be in flight and no helper at work in it. It is leaked unless the driver is done with it.
    pub(crate) fn free(self, driver: &Driver, alive: bool) {
        let mut unpinned = true;
        let mut piece = self.word_address();
        for end in self.ends.into_iter().filter(|&end| end > 0) {
            unpinned &= if alive {
                // SAFETY: registered at this address, and nothing uses it (this function's contract).
                unsafe { driver.unregister(piece) == code::SUCCESS }
            } else {
                driver.memory_type(piece as u64) == Ok(0)
            };
            piece = self.ring.wrapping_add(end);
        }
        if unpinned {
            let (start, bytes) = self.mapping;
            // SAFETY: the mapping of `map`; the driver no longer knows it.
            unsafe { libc::munmap(start.cast(), bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_can_double_from_the_smallest_to_the_largest() {
        assert_eq!(SLICE_MAX_BYTES << (PIECES - 1), RING_MAX_BYTES);
    }
}
