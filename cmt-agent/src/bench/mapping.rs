//! Pageable host memory straight from the kernel, so that it is known whether it was touched.
#![expect(unsafe_code, reason = "maps and unmaps memory")]

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// A private anonymous mapping, as malloc makes one for a big block. No page of it exists before it is touched.
pub struct Mapping {
    address: NonNull<c_void>,
    bytes: usize,
}

impl Mapping {
    /// Maps.
    pub fn new(bytes: usize) -> nix::Result<Self> {
        let length = NonZeroUsize::new(bytes).ok_or(nix::Error::EINVAL)?;
        // SAFETY: the kernel picks an address at which nothing is.
        let address = unsafe {
            mmap_anonymous(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_PRIVATE,
            )
        }?;
        Ok(Self { address, bytes })
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped readable for so long, zeroes where nothing was written, unmapped only by `drop`.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr().cast(), self.bytes) }
    }
}

impl DerefMut for Mapping {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, writable, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr().cast(), self.bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our mapping; the borrows of it have ended.
        let _ = unsafe { munmap(self.address, self.bytes) };
    }
}
