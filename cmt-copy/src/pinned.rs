//! The pinned memory of one lane: a ring of slots and the completion word before it.
//!
//! The memory is a mapping of the engine's own that the driver registers, so a context that the application destroys can
//! only unpin it: helpers never touch memory that the driver has unmapped. Where registering is not supported, the
//! driver allocates it instead; such a ring is touched only while its context is known to be alive.
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
    origin: Origin,
}

/// Whose memory it is.
enum Origin {
    /// Mapped here, registered with the driver.
    Mapped { start: *mut u8, bytes: usize },
    /// From `cuMemHostAlloc`; starts with the word's page.
    Driver,
}

// SAFETY: the pointers lead to memory that this value owns; no part of it belongs to one thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// A ring of `ring_bytes` bytes (a power of two between 1 MiB and [`RING_MAX_BYTES`]), or a smaller one where that
    /// cannot be had; `None` if there is no pinned memory at all. The context it is for must be current.
    pub(crate) fn new(driver: &Driver, ring_bytes: usize) -> Option<Self> {
        Self::map()
            .and_then(|mapped| mapped.register_most_of(driver, ring_bytes))
            .or_else(|| Self::allocate(driver, ring_bytes))
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
    fn map() -> Option<Self> {
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
                origin: Origin::Mapped { start, bytes },
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
        match driver.relaxed(|| unsafe { driver.register(start, bytes) }) {
            Some(code::SUCCESS) => {
                *slot = to;
                Ok(())
            }
            Some(error) => Err(error),
            None => Err(code::INVALID_VALUE),
        }
    }

    /// Memory from the driver, for where registering does not work.
    fn allocate(driver: &Driver, ring_bytes: usize) -> Option<Self> {
        let start = driver.relaxed(|| driver.allocate_host(ring_bytes + WORD_PAGE))?;
        if start.is_null() {
            return None;
        }
        let mut ends = [0; PIECES];
        ends[0] = ring_bytes;
        let mut pinned = Self {
            ring: start.wrapping_add(WORD_PAGE),
            ends,
            word_device: 0,
            origin: Origin::Driver,
        };
        match driver.device_pointer(start) {
            Some(device) => pinned.word_device = device,
            None => {
                pinned.free(driver, true);
                return None;
            }
        }
        // SAFETY: the first word of the new allocation.
        unsafe { start.cast::<u32>().write(0) };
        Some(pinned)
    }

    /// Makes the ring `ring_bytes` long if that can be had. Nothing may be in flight.
    pub(crate) fn grow(&mut self, driver: &Driver, ring_bytes: usize) -> bool {
        let now = self.bytes();
        let possible = matches!(self.origin, Origin::Mapped { .. })
            && ring_bytes <= RING_MAX_BYTES as usize
            && ring_bytes > now;
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

    /// Gives the memory back. With `alive` its context exists and is current; otherwise the driver has already unpinned
    /// it. Nothing may be in flight and no helper at work in it. If the driver will not unpin it, it is leaked.
    pub(crate) fn free(self, driver: &Driver, alive: bool) {
        match self.origin {
            Origin::Mapped { start, bytes } => {
                let mut unpinned = true;
                let mut from = 0;
                for end in self.ends.into_iter().filter(|&end| end > 0) {
                    let piece = if from == 0 {
                        self.word_address()
                    } else {
                        self.ring.wrapping_add(from)
                    };
                    if alive {
                        // SAFETY: registered at this address, and nothing uses it (this function's contract).
                        let result = driver.relaxed(|| unsafe { driver.unregister(piece) });
                        unpinned &= result == Some(code::SUCCESS);
                    }
                    from = end;
                }
                if unpinned {
                    // SAFETY: the mapping of `map`; the driver no longer knows it.
                    unsafe { libc::munmap(start.cast(), bytes) };
                }
            }
            Origin::Driver if alive => {
                let start = self.word_address();
                // SAFETY: from `allocate_host`, and nothing uses it.
                driver.relaxed(|| unsafe { driver.free_host(start) });
            }
            // The driver freed it with its context.
            Origin::Driver => {}
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
