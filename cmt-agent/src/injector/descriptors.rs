//! A target's open files, with the access that the target has to them.
#![expect(
    unsafe_code,
    reason = "pidfd_open and pidfd_getfd, which nix does not wrap"
)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

/// A duplicate of descriptor `fd` of process `pid` (Linux 5.6). Opening `/proc/PID/fd/N` would use our rights instead.
pub fn take(pid: u32, fd: u32) -> io::Result<File> {
    // SAFETY: takes numbers only, returns a new descriptor or -1.
    let process = own(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: as above.
    let file = own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) })?;
    Ok(File::from(file))
}

fn own(result: libc::c_long) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(Errno::result(result)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us; nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
