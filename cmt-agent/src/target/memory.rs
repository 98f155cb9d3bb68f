//! A target's memory, read and written through `/proc/PID/mem`.
//!
//! Writes go past page protection (the kernel's `FOLL_FORCE`), so code pages stay r-x throughout: a private mapping gets
//! its own copy of the page, the file is never touched.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

use super::file::Access;

/// `/proc/PID/mem`, open for reading and writing.
#[derive(Debug)]
pub struct Memory {
    file: File,
}

impl Memory {
    /// Opens the memory of `pid`; needs the rights of a ptrace attach.
    pub fn open(pid: u32, access: Access) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(access == Access::ReadWrite)
            .open(format!("/proc/{pid}/mem"))?;
        Ok(Self { file })
    }

    /// The contents of `file` as if they stood in memory from address 0 on.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn of_file(file: File) -> Self {
        Self { file }
    }

    /// Fills `buffer` from `address` on.
    pub fn read(&self, address: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, address)
    }

    /// Reads as many bytes as are mapped from `address` on, `most` at most.
    pub fn read_up_to(&self, address: u64, most: usize) -> Vec<u8> {
        let mut buffer = vec![0; most];
        let mut filled = 0;
        while filled < most {
            match self
                .file
                .read_at(&mut buffer[filled..], address.wrapping_add(filled as u64))
            {
                Ok(0) | Err(_) => break,
                Ok(count) => filled += count,
            }
        }
        buffer.truncate(filled);
        buffer
    }

    /// Writes all of `bytes` at `address`.
    pub fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, address)
    }

    /// Reads `N` bytes at `address`.
    pub fn array<const N: usize>(&self, address: u64) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read(address, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a little-endian word at `address`.
    pub fn word(&self, address: u64) -> io::Result<u64> {
        Ok(u64::from_le_bytes(self.array(address)?))
    }
}
