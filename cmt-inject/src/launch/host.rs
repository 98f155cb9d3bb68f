//! The way to `cmt tune`: a socket that the environment names. A process hands its control block over and gets the plan in it.
#![expect(unsafe_code, reason = "a file in memory, mapped and sent")]

use std::ffi::{CStr, OsString};
use std::io::{Error, Read as _, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cmt_common::control::{CONTROL_BYTES, CONTROL_NAME, Control};
use cmt_common::launch::{GO, PAYLOAD_VARIABLE, SOCKET_VARIABLE};

/// No copy waits longer for an answer.
const PATIENCE: Duration = Duration::from_secs(2);

fn socket() -> Option<OsString> {
    std::env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty())
}

/// Whether this library is here for `cmt tune`, at the start of a program. It is not where `cmt attach` has brought it into a
/// process that was started so: then threads may be anywhere.
pub fn is_wanted() -> bool {
    let wanted = std::env::var_os(PAYLOAD_VARIABLE);
    socket().is_some()
        && own_path().is_some_and(|own| wanted.is_some_and(|it| it.as_bytes() == own.to_bytes()))
}

/// The name under which the loader has loaded this library.
fn own_path() -> Option<&'static CStr> {
    // SAFETY: plain numbers and pointers, for which zeros are valid.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here = is_wanted as *const () as *const libc::c_void;
    // SAFETY: fills the structure in; the name is the loader's, and lives as long as this library.
    unsafe {
        let found = libc::dladdr(here, &raw mut info) != 0 && !info.dli_fname.is_null();
        found.then(|| CStr::from_ptr(info.dli_fname))
    }
}

/// Makes this process's control block, a copy of `template`, and hands it to `cmt tune`, which has put the plan into it when
/// this returns; `None` if nobody has.
pub fn introduce(template: &Control) -> Option<&'static Control> {
    let stream = UnixStream::connect(socket()?).ok()?;
    let (block, file) = block(template).ok()?;
    send(&stream, &file).ok()?;
    (answer(stream).ok()? == GO).then_some(block)
}

fn block(template: &Control) -> Result<(&'static Control, OwnedFd)> {
    let name = std::ffi::CString::new(CONTROL_NAME)?;
    // SAFETY: the name is NUL-terminated, and the call touches no other memory.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sets the length of our own file, then maps all of it at an address of the kernel's choice; the template is a
    // block, which is shorter, and nobody knows the mapping yet.
    unsafe {
        if libc::ftruncate(fd, CONTROL_BYTES as libc::off_t) != 0 {
            return Err(Error::last_os_error());
        }
        let at = libc::mmap(
            std::ptr::null_mut(),
            CONTROL_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd,
            0,
        );
        if at == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        let block = at.cast::<Control>();
        block.copy_from_nonoverlapping(&raw const *template, 1);
        Ok((&*block, file))
    }
}

/// One byte and the descriptor.
fn send(stream: &UnixStream, file: &OwnedFd) -> Result<()> {
    #[repr(C, align(8))]
    struct Rights {
        header: libc::cmsghdr,
        fd: libc::c_int,
    }
    let fd_bytes = size_of::<libc::c_int>() as u32;
    let mut byte = [0u8];
    let mut part = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    // SAFETY: CMSG_LEN only computes; the message points to locals that outlive the call, with their lengths.
    let sent = unsafe {
        let mut rights = Rights {
            header: libc::cmsghdr {
                cmsg_len: libc::CMSG_LEN(fd_bytes) as usize,
                cmsg_level: libc::SOL_SOCKET,
                cmsg_type: libc::SCM_RIGHTS,
            },
            fd: file.as_raw_fd(),
        };
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut rights).cast();
        message.msg_controllen = libc::CMSG_LEN(fd_bytes) as usize;
        libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    match sent {
        1 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

fn answer(mut stream: UnixStream) -> Result<u8> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    Ok(answer[0])
}
