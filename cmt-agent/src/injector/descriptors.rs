//! A target's open files, with the access that the target has to them, and files that it is given.
#![expect(
    unsafe_code,
    reason = "pidfd_open, pidfd_getfd and open_tree, which nix does not wrap"
)]

use std::ffi::CString;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{ControlMessage, MsgFlags, getsockopt, sendmsg};

/// A duplicate of descriptor `fd` of process `pid` (Linux 5.6). Opening `/proc/PID/fd/N` would use our rights instead.
pub fn take(pid: u32, fd: u32) -> io::Result<File> {
    // SAFETY: takes numbers only, returns a new descriptor or -1.
    let process = own(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: as above.
    let file = own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) })?;
    Ok(File::from(file))
}

/// The folder of a process's own descriptors as a root of its own: nothing else can be reached from it, not by `..` either
/// (`open_tree(2)`, Linux 5.2; takes CAP_SYS_ADMIN).
pub fn own_folder(pid: u32) -> io::Result<OwnedFd> {
    let path = CString::new(format!("/proc/{pid}/fd"))?;
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    // SAFETY: `path` is NUL-terminated and outlives the call, which returns a new descriptor or -1.
    own(unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) })
}

/// Sends descriptors into socket `fd` of process `pid`, which must be one of a pair that it has made itself: whoever else is
/// at the other end would take us for the sender. Does not wait.
pub fn send(pid: u32, fd: u32, files: [RawFd; 2]) -> io::Result<()> {
    let socket = take(pid, fd)?;
    let peer = getsockopt(&socket, PeerCredentials)?;
    if u32::try_from(peer.pid()) != Ok(pid) {
        return Err(io::Error::other("its socket is not its own"));
    }
    let rights = [ControlMessage::ScmRights(&files)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(&[0])],
        &rights,
        flags,
        None,
    )?;
    Ok(())
}

fn own(result: libc::c_long) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(Errno::result(result)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us; nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use nix::fcntl::{AtFlags, OFlag, openat};
    use nix::sys::stat::{Mode, fstatat};

    use super::*;

    #[test]
    fn from_a_folder_of_descriptors_nothing_else_can_be_reached() {
        let kept = tempfile::tempfile().expect("a file");
        let Ok(folder) = own_folder(std::process::id()) else {
            return; // Not root.
        };
        let inode = |path: &str| fstatat(&folder, path, AtFlags::empty()).map(|found| found.st_ino);
        assert_eq!(inode(".."), inode("."));
        assert_eq!(inode("../../status"), Err(Errno::ENOENT));
        let name = kept.as_raw_fd().to_string();
        let again = openat(&folder, name.as_str(), OFlag::O_RDONLY, Mode::empty()).expect("open");
        let (again, kept) = (File::from(again), kept);
        assert_eq!(
            again.metadata().expect("again").ino(),
            kept.metadata().expect("kept").ino()
        );
    }
}
