//! Doing something on a thread of the program's that the program does not notice.
#![expect(unsafe_code, reason = "errno, cancellation, limits and descriptors")]

use core::ffi::c_int;
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsRawFd as _, IntoRawFd as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// `PTHREAD_CANCEL_DISABLE` of glibc's pthread.h.
const CANCEL_DISABLE: c_int = 1;
/// The largest file in memory that is made.
const MOST_FILE_BYTES: u64 = 64 << 10;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Seccomp filters of this process when libcuda was patched.
static FILTERS: AtomicU64 = AtomicU64::new(0);
/// And how it was confined: not at all, or by filters.
static MODE: AtomicI32 = AtomicI32::new(0);

/// Runs `work`; `None` if it panics. The thread's `errno` stays, and it is not cancelled meanwhile.
pub fn within<T>(work: impl FnOnce() -> T) -> Option<T> {
    let mut state = 0;
    // SAFETY: this thread's own; a cancellation that comes meanwhile takes place at the next point for it, as it would have.
    let errno = unsafe {
        pthread_setcancelstate(CANCEL_DISABLE, &raw mut state);
        *libc::__errno_location()
    };
    let result = catch_unwind(AssertUnwindSafe(work)).ok();
    // SAFETY: as above.
    unsafe {
        *libc::__errno_location() = errno;
        pthread_setcancelstate(state, std::ptr::null_mut());
    }
    result
}

/// Files in the place of standard descriptors that are closed, so that none that is opened meanwhile becomes one of those. They
/// can no more be read or written than those can, and none that a program has there is alike.
pub struct StandardDescriptors(Vec<(File, u64)>);

impl StandardDescriptors {
    /// Keeps them for as long as the result lives.
    pub fn keep() -> Self {
        let mut kept = Vec::new();
        // SAFETY: asks for flags of a descriptor, which may be none.
        while (0..=2).any(|fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0) {
            let file = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_PATH)
                .open("/");
            match file {
                Ok(file) if file.as_raw_fd() <= 2 => {
                    let inode = inode(&file);
                    kept.push((file, inode));
                }
                _ => break,
            }
        }
        Self(kept)
    }
}

impl Drop for StandardDescriptors {
    fn drop(&mut self) {
        for (file, opened) in self.0.drain(..) {
            // The program may have put a file of its own there meanwhile.
            if inode(&file) != opened {
                let _ = file.into_raw_fd();
            }
        }
    }
}

fn inode(file: &File) -> u64 {
    file.metadata().map_or(0, |file| file.ino() ^ file.rdev())
}

/// Whether this process may write files as large as we need: one byte more, and it would be killed (SIGXFSZ).
pub fn may_write_files() -> bool {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the call writes to nothing but `limit`.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0;
    known && limit.rlim_cur >= MOST_FILE_BYTES
}

/// Remembers by how many seccomp filters this process is confined.
pub fn note_filters() {
    MODE.store(mode(), Ordering::Relaxed);
    FILTERS.store(filters(), Ordering::Relaxed);
}

/// Whether it was confined then as now, by one system call that filters forbid least; [`has_the_same_filters`] looks closer.
pub fn has_the_same_mode() -> bool {
    MODE.load(Ordering::Relaxed) == mode()
}

fn mode() -> i32 {
    // SAFETY: only asks.
    unsafe { libc::prctl(libc::PR_GET_SECCOMP) }
}

/// Whether these are as many as then.
pub fn has_the_same_filters() -> bool {
    FILTERS.load(Ordering::Relaxed) == filters()
}

/// `Seccomp_filters` of `/proc/PID/status` (Linux 5.9); the mode before.
fn filters() -> u64 {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let field = |name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse().ok()
    };
    field("Seccomp_filters:")
        .or_else(|| field("Seccomp:"))
        .unwrap_or(0)
}
