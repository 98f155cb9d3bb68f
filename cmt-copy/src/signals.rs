//! Threads of ours in a process of somebody else's take none of its signals.
#![expect(unsafe_code, reason = "signal masks by libc")]

use core::mem::MaybeUninit;
use core::ptr::{null, null_mut};

/// Signals that a thread raises itself by a fault in the application's memory. Blocked, they would kill the process past any
/// handler that the application has for them, or comes to have.
const FAULTS: [libc::c_int; 4] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE];
/// Signals by which a filter of system calls asks the application, or a debugger's library. Without a handler the process may take
/// them in some other way (`signalfd`).
const QUESTIONS: [libc::c_int; 2] = [libc::SIGSYS, libc::SIGTRAP];

/// Whether the application has a handler for a signal.
fn has_handler(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: only asks; the structure is filled where the call succeeds.
    unsafe {
        libc::sigaction(signal, null(), action.as_mut_ptr()) == 0
            && ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.assume_init().sa_sigaction)
    }
}

/// Does `work` with every signal blocked but those that a thread raises itself; threads that it starts keep that mask.
pub fn blocked<T>(work: impl FnOnce() -> T) -> T {
    let mut blocked = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: each set is initialised by the call that comes before its use.
    unsafe {
        libc::sigfillset(blocked.as_mut_ptr());
        let questions = QUESTIONS.into_iter().filter(|&signal| has_handler(signal));
        for own in FAULTS.into_iter().chain(questions) {
            libc::sigdelset(blocked.as_mut_ptr(), own);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), before.as_mut_ptr());
    }
    let result = work();
    // SAFETY: the mask that was there.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
    result
}
