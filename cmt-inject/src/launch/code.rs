//! Writing to code that no thread is in.
#![expect(unsafe_code, reason = "writes to code")]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;

/// Overwrites code. No thread may be in these bytes. False, and nothing changed, if that is not possible here.
pub fn write(address: u64, bytes: &[u8]) -> bool {
    // The kernel's own way to write to memory that is not writable: no page ever is writable and executable, and page
    // protection stays as it is. A hardened kernel has it forbidden (`proc_mem.force_override`, Linux 6.12).
    let written = OpenOptions::new()
        .write(true)
        .open("/proc/self/mem")
        .and_then(|memory| memory.write_all_at(bytes, address));
    written.is_ok() || write_in_place(address, bytes)
}

fn write_in_place(address: u64, bytes: &[u8]) -> bool {
    let start = address / PAGE * PAGE;
    let len = (address + bytes.len() as u64).next_multiple_of(PAGE) - start;
    let protect = |rights| {
        // SAFETY: whole pages of code that is mapped readable and executable, before and after.
        unsafe { libc::mprotect(start as *mut libc::c_void, len as usize, rights) == 0 }
    };
    // Other threads may be in the functions beside: the pages stay executable.
    if !protect(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) {
        return false;
    }
    // SAFETY: writable now, and by the caller's promise nobody executes these bytes.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
    protect(libc::PROT_READ | libc::PROT_EXEC)
}
