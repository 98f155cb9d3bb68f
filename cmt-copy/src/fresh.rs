//! Destinations that nobody has touched yet, as PyTorch's `.cpu()` always gets: most of such a copy's time goes into page
//! faults, and huge pages make them a few hundred times rarer.
//!
//! Only where the kernel gives huge pages to those who ask (`transparent_hugepage/enabled` is `madvise`): with `always` the
//! memory has them, with `never` nobody gets any. There, memory that was not asked for and memory that was asked to be
//! without behave alike, so what is undone afterwards is undone to what the application had.
#![expect(
    unsafe_code,
    reason = "mincore and madvise on the application's memory"
)]

use std::sync::OnceLock;

use crate::protocol::{Task, Work, touch};

/// A huge page of x86-64 and of aarch64 with 4 KiB pages.
const HUGE_BYTES: u64 = 2 << 20;
const PAGE_BYTES: u64 = 4096;
/// Shorter copies do not earn the system calls back.
const WORTH_BYTES: u64 = 8 << 20;

/// A destination that gets huge pages until this is dropped.
#[derive(Debug)]
pub(crate) struct HugePages {
    start: u64,
    bytes: usize,
    /// Every page that holds a byte of the destination: first byte and length.
    pages: (u64, usize),
}

impl HugePages {
    /// Asks for huge pages for the `bytes` bytes at `host`, if they are fresh and get none anyway.
    ///
    /// # Safety
    /// The application must have given that range to be written to, and nobody else may write to it.
    pub(crate) unsafe fn for_destination(host: u64, bytes: u64) -> Option<Self> {
        if bytes < WORTH_BYTES || !are_given_on_request() {
            return None;
        }
        // SAFETY: the caller's promise.
        unsafe { Self::ask(host, bytes) }
    }

    /// # Safety
    /// As [`HugePages::for_destination`].
    unsafe fn ask(host: u64, bytes: u64) -> Option<Self> {
        let start = host.next_multiple_of(HUGE_BYTES);
        let end = (host + bytes) / HUGE_BYTES * HUGE_BYTES;
        let last = end.checked_sub(HUGE_BYTES).filter(|&last| last > start)?;
        let middle = start + (last - start) / 2 / PAGE_BYTES * PAGE_BYTES;
        if [start, middle, last]
            .iter()
            .any(|&page| resident(page, PAGE_BYTES) != Some(0))
        {
            return None;
        }
        // The last block tells whether a fault brings a huge page already.
        // SAFETY: within the destination (the caller's promise).
        unsafe { touch(last as *mut u8) };
        if resident(last, HUGE_BYTES) == Some(HUGE_BYTES / PAGE_BYTES) {
            return None;
        }
        let first_page = host / PAGE_BYTES * PAGE_BYTES;
        let pages_bytes = (host + bytes).next_multiple_of(PAGE_BYTES) - first_page;
        let asked = Self {
            start,
            bytes: (last - start) as usize,
            pages: (first_page, pages_bytes as usize),
        };
        advise(asked.start, asked.bytes, libc::MADV_HUGEPAGE).then_some(asked)
    }

    /// Brings them in, a slice each.
    pub(crate) fn task(&self) -> Task {
        Task {
            host: self.start as *mut u8,
            bytes: self.bytes,
            slice_bytes: HUGE_BYTES as usize,
            work: Work::Touch,
            ..Task::NONE
        }
    }
}

/// Advises the kernel on whole pages.
fn advise(start: u64, bytes: usize, advice: i32) -> bool {
    // SAFETY: the pages hold bytes of the application's destination; the advice changes none of them.
    unsafe { libc::madvise(start as *mut libc::c_void, bytes, advice) == 0 }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // All pages, not only those that were asked for: a setting splits a mapping, and pieces can neither be grown by
        // `mremap` nor counted against the kernel's limit as one. So a destination that fills its mapping leaves it whole,
        // and destinations side by side leave one piece.
        let (start, bytes) = self.pages;
        advise(start, bytes, libc::MADV_NOHUGEPAGE);
    }
}

/// Pages of the range that are in memory; `None` if it is not mapped.
fn resident(start: u64, bytes: u64) -> Option<u64> {
    let mut pages = [0u8; (HUGE_BYTES / PAGE_BYTES) as usize];
    debug_assert!(bytes <= HUGE_BYTES);
    // SAFETY: the vector has a byte for each page of the range, which is only looked at.
    let result = unsafe {
        libc::mincore(
            start as *mut libc::c_void,
            bytes as usize,
            pages.as_mut_ptr(),
        )
    };
    (result == 0).then(|| pages.iter().map(|page| u64::from(page & 1)).sum())
}

/// Whether huge pages go to those who ask for them, and to nobody else. Read once, when an engine is made: on a thread of the
/// application's a file is a cancellation point, and may be forbidden.
pub(crate) fn are_given_on_request() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
            .is_ok_and(|modes| modes.contains("[madvise]"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 32 << 20;

    fn fresh() -> *mut u8 {
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, prot, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        start.cast()
    }

    /// What `smaps` says of the mapping that holds `address`.
    fn smaps(address: u64, field: &str) -> String {
        let text = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let mut inside = false;
        for line in text.lines() {
            let range = line
                .split_once(' ')
                .and_then(|(range, _)| range.split_once('-'));
            if let Some((start, end)) = range
                && let (Ok(start), Ok(end)) =
                    (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
            {
                inside = (start..end).contains(&address);
            } else if inside && let Some(value) = line.strip_prefix(field) {
                return value.trim().to_owned();
            }
        }
        panic!("no {field} for {address:#x}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs the kernel")]
    fn a_fresh_destination_gets_huge_pages_for_the_copy_alone() {
        let memory = fresh();
        let middle = memory as u64 + BYTES as u64 / 2;
        // SAFETY: a fresh mapping of ours.
        let asked = unsafe { HugePages::ask(memory as u64, BYTES as u64) }.expect("fresh");
        assert!(smaps(middle, "VmFlags:").contains("hg"));
        drop(asked);
        let flags = smaps(middle, "VmFlags:");
        assert!(flags.contains("nh") && !flags.contains("hg"), "{flags}");
        // SAFETY: as above.
        unsafe { libc::munmap(memory.cast(), BYTES) };
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs the kernel")]
    fn a_destination_that_fills_its_mapping_leaves_it_whole() {
        let (memory, bytes) = (fresh(), BYTES as u64);
        // As malloc places it: behind a header, and not to the last byte. Two copies, neither of whole pages.
        let (first, border) = (memory as u64 + 64, memory as u64 + bytes / 2 + 100);
        let end = memory as u64 + bytes - 1000;
        // SAFETY: a fresh mapping of ours, that is moved and unmapped as a whole.
        unsafe {
            for (from, to) in [(first, border), (border, end)] {
                drop(HugePages::ask(from, to - from).expect("fresh"));
            }
            let grown = libc::mremap(memory.cast(), BYTES, 2 * BYTES, libc::MREMAP_MAYMOVE);
            assert_ne!(grown, libc::MAP_FAILED);
            libc::munmap(grown, 2 * BYTES);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs the kernel")]
    fn memory_in_use_and_memory_that_is_not_there_are_left_alone() {
        let memory = fresh();
        let address = memory as u64;
        // SAFETY: a fresh mapping of ours, written and unmapped within its bounds.
        unsafe {
            memory.add(BYTES / 2 - (2 << 20)).write_bytes(7, 4 << 20);
            assert!(
                HugePages::ask(address, BYTES as u64).is_none(),
                "its middle was touched"
            );
            let flags = smaps(address, "VmFlags:");
            assert!(!flags.contains("nh") && !flags.contains("hg"), "{flags}");
            assert!(HugePages::ask(address, 3 << 20).is_none(), "too short");
            libc::munmap(memory.cast(), BYTES);
            assert!(
                HugePages::ask(address, BYTES as u64).is_none(),
                "not mapped"
            );
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs the kernel")]
    fn memory_that_gets_huge_pages_anyway_keeps_its_setting() {
        let memory = fresh();
        // SAFETY: as above.
        unsafe {
            if libc::madvise(memory.cast(), BYTES, libc::MADV_HUGEPAGE) != 0 {
                return; // A kernel without them.
            }
            let asked = HugePages::ask(memory as u64, BYTES as u64);
            let huge = smaps(memory as u64, "AnonHugePages:") != "0 kB";
            assert_eq!(asked.is_none(), huge);
            if huge {
                assert!(smaps(memory as u64, "VmFlags:").contains("hg"));
            }
            libc::munmap(memory.cast(), BYTES);
        }
    }
}
