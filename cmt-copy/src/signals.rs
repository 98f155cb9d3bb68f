//! Threads of ours in a process of somebody else's take none of its signals.
#![expect(unsafe_code, reason = "signal masks by libc")]

use core::mem::MaybeUninit;
use core::ptr::null_mut;

/// Signals that a thread raises itself: by a fault in the application's memory, or where a filter of system calls asks the
/// application. Blocked, they would kill the process past any handler that the application has for them.
const OWN: [libc::c_int; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGSYS,
    libc::SIGTRAP,
];

/// Does `work` with every signal blocked but those that a thread raises itself; threads that it starts keep that mask.
pub fn blocked<T>(work: impl FnOnce() -> T) -> T {
    let mut blocked = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: each set is initialised by the call that comes before its use.
    unsafe {
        libc::sigfillset(blocked.as_mut_ptr());
        for own in OWN {
            libc::sigdelset(blocked.as_mut_ptr(), own);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), before.as_mut_ptr());
    }
    let result = work();
    // SAFETY: the mask that was there.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
    result
}
