//! One traced thread: running ([`Seized`]) or stopped ([`Stopped`]), with its registers, its signals and the system call
//! that the stop interrupted.
#![expect(unsafe_code, reason = "ptrace requests that nix does not wrap")]

use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::ptrace;
use nix::unistd::Pid;

use super::{Pace, ThreadError, remember, tracer_of};
use crate::target::text;

/// A thread that we hold stopped.
#[derive(Debug)]
pub struct Stopped {
    /// Thread id.
    pub tid: i32,
    /// Its general registers.
    pub regs: libc::user_regs_struct,
    /// The signal that it was about to receive; it gets it when it is resumed.
    signal: Option<i32>,
    detached: bool,
}

/// A thread that we trace and that still runs.
#[derive(Debug)]
pub struct Seized {
    pub(super) tid: i32,
    detached: bool,
}

impl Seized {
    /// Starts tracing a thread without stopping it.
    pub fn seize(tid: i32) -> Result<Self, ThreadError> {
        match ptrace::seize(Pid::from_raw(tid), ptrace::Options::empty()) {
            Ok(()) => {
                remember(tid);
                Ok(Self {
                    tid,
                    detached: false,
                })
            }
            Err(Errno::ESRCH) => Err(ThreadError::Gone { tid }),
            // One that did not stop the last time is still ours.
            Err(Errno::EPERM) if tracer_of(tid) == Some(nix::unistd::gettid().as_raw()) => {
                Ok(Self {
                    tid,
                    detached: false,
                })
            }
            Err(errno) => Err(ThreadError::Refused { tid, errno }),
        }
    }

    /// Asks it to stop, without waiting.
    pub fn interrupt(&self) -> Result<(), ThreadError> {
        let tid = self.tid;
        ptrace::interrupt(Pid::from_raw(tid)).map_err(|errno| match errno {
            Errno::ESRCH => ThreadError::Gone { tid },
            errno => ThreadError::Ptrace {
                tid,
                request: "INTERRUPT",
                errno,
            },
        })
    }

    /// Waits until it has stopped, `deadline` at the longest.
    pub fn wait(&mut self, deadline: Instant) -> Result<Stopped, ThreadError> {
        let mut pace = Pace::new(deadline);
        loop {
            if let Some(stopped) = self.look()? {
                return Ok(stopped);
            }
            pace.pause(self.tid)?;
        }
    }

    /// Looks whether it has stopped.
    pub(super) fn look(&mut self) -> Result<Option<Stopped>, ThreadError> {
        let tid = self.tid;
        let signal = match poll_stop(tid) {
            Ok(Some(Event::Stopped { signal })) => signal,
            Ok(Some(Event::Ended)) | Err(Errno::ECHILD) => {
                self.detached = true;
                return Err(ThreadError::Gone { tid });
            }
            Ok(None) | Err(Errno::EINTR) => return Ok(None),
            Err(errno) => {
                return Err(ThreadError::Ptrace {
                    tid,
                    request: "wait",
                    errno,
                });
            }
        };
        self.detached = true;
        let mut stopped = Stopped {
            tid,
            regs: zero_regs(),
            signal,
            detached: false,
        };
        stopped.regs =
            ptrace::getregs(Pid::from_raw(tid)).map_err(|errno| ThreadError::Ptrace {
                tid,
                request: "GETREGS",
                errno,
            })?;
        // At once: however it is let go, even by our death, the call goes on.
        stopped.rewrite_eintr()?;
        Ok(Some(stopped))
    }
}

impl Drop for Seized {
    fn drop(&mut self) {
        if self.detached {
            return;
        }
        // A running tracee cannot be detached; stop it first. On a busy machine it may wait long for a processor. Should
        // that fail, the end of this process detaches it. One that has ended is reaped: nobody else may.
        let interrupted = self.interrupt();
        if interrupted.is_ok() {
            // What was stopped is detached, with its signal, as it is dropped.
            let _ = self.wait(Instant::now() + Duration::from_secs(1));
        } else {
            let _ = poll_stop(self.tid);
        }
    }
}

impl Stopped {
    /// Writes `self.regs` to the thread.
    pub fn set_regs(&self) -> Result<(), ThreadError> {
        ptrace::setregs(Pid::from_raw(self.tid), self.regs).map_err(|errno| ThreadError::Ptrace {
            tid: self.tid,
            request: "SETREGS",
            errno,
        })
    }

    /// True if it was about to run a signal handler or die of a signal.
    pub fn has_signal(&self) -> bool {
        self.signal.is_some()
    }

    /// The extended state (x87, SSE, AVX …) in the layout of XSAVE.
    pub fn extended_state(&self) -> Result<Vec<u8>, ThreadError> {
        const NT_X86_XSTATE: usize = 0x202;
        let mut state = vec![0u8; 64 << 10];
        let mut vector = libc::iovec {
            iov_base: state.as_mut_ptr().cast(),
            iov_len: state.len(),
        };
        // SAFETY: the kernel writes at most `iov_len` bytes to `state`, which outlives the call, and updates `vector`.
        let result = unsafe {
            libc::ptrace(
                libc::PTRACE_GETREGSET,
                self.tid,
                NT_X86_XSTATE,
                &raw mut vector,
            )
        };
        Errno::result(result).map_err(|errno| ThreadError::Ptrace {
            tid: self.tid,
            request: "GETREGSET",
            errno,
        })?;
        state.truncate(vector.iov_len);
        Ok(state)
    }

    /// True if the thread stands inside a restartable sequence (rseq) that moving it would break.
    pub fn in_rseq(&self, read_word: impl Fn(u64) -> Option<u64>) -> bool {
        const PTRACE_GET_RSEQ_CONFIGURATION: u32 = 0x420f;
        /// Offset of `rseq_cs` in `struct rseq` of the kernel's `rseq.h`.
        const RSEQ_CS: u64 = 8;
        let mut configuration = [0u64; 3];
        // SAFETY: the kernel writes at most the 24 bytes whose size is passed.
        let result = unsafe {
            libc::ptrace(
                PTRACE_GET_RSEQ_CONFIGURATION as _,
                self.tid,
                size_of_val(&configuration),
                configuration.as_mut_ptr(),
            )
        };
        result > 0
            && configuration[0] != 0
            && read_word(configuration[0] + RSEQ_CS).is_some_and(|cs| cs != 0)
    }

    /// If the stop has made a system call return early with EINTR, lets the kernel start it again.
    ///
    /// Most calls are restarted by the kernel; these return EINTR after any stop (signal(7), "Interruption of system
    /// calls and library functions by stop signals"). Where a handler runs first, the kernel makes EINTR of this again.
    fn rewrite_eintr(&mut self) -> Result<(), ThreadError> {
        if self.was_interrupted() {
            self.regs.rax = -514i64 as u64; // -ERESTARTNOHAND
            self.set_regs()?;
        }
        Ok(())
    }

    /// True if a signal that has a handler waits for this thread or its process, or is being delivered.
    pub fn will_run_handler(&self) -> bool {
        let bit = |signal: i32| 1u64 << ((signal - 1) & 63);
        let waiting = pending(self.tid, false) | pending(self.tid, true);
        let signals = self.signal.map_or(0, bit) | (waiting & !blocked(self.tid));
        // Reading this takes longer than all of the above.
        signals != 0 && signals & caught(self.tid) != 0
    }

    fn was_interrupted(&self) -> bool {
        self.regs.rax as i64 == -i64::from(libc::EINTR)
            && EINTR_AFTER_STOP.contains(&(self.regs.orig_rax as i64))
    }

    /// How the interrupted system call, if any, goes on when the thread takes a detour first: `(rip, rax)`.
    pub fn resume_point(&self) -> (u64, u64) {
        const SYSCALL_LEN: u64 = 2;
        let again = self.regs.rip.wrapping_sub(SYSCALL_LEN);
        if (self.regs.orig_rax as i64) < 0 {
            return (self.regs.rip, self.regs.rax);
        }
        match self.regs.rax as i64 {
            // ERESTARTNOHAND, ERESTARTNOINTR, ERESTARTSYS
            -514..=-512 => (again, self.regs.orig_rax),
            // ERESTART_RESTARTBLOCK
            -516 => (again, libc::SYS_restart_syscall as u64),
            _ if self.was_interrupted() => (again, self.regs.orig_rax),
            _ => (self.regs.rip, self.regs.rax),
        }
    }

    /// Lets it run on, untraced, with the signal that it was to receive.
    pub fn resume(mut self) {
        self.detach();
    }

    fn detach(&mut self) {
        if !self.detached {
            self.detached = true;
            detach(self.tid, self.signal);
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.detach();
    }
}

/// Calls that fail with EINTR when their thread was stopped and continued.
const EINTR_AFTER_STOP: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_io_getevents,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
    libc::SYS_futex,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_io_uring_enter,
    333, // io_pgetevents
    libc::SYS_sendmmsg,
];

/// Signals that wait for a stopped thread, or for its whole process, as a mask.
fn pending(tid: i32, of_process: bool) -> u64 {
    /// `PTRACE_PEEKSIGINFO` and its arguments, of `linux/ptrace.h`.
    const PEEKSIGINFO: libc::c_uint = 0x4209;
    const MOST: usize = 32;
    #[repr(C)]
    struct Peek {
        first: u64,
        flags: u32,
        count: i32,
    }
    let peek = Peek {
        first: 0,
        flags: u32::from(of_process),
        count: MOST as i32,
    };
    // SAFETY: `siginfo_t` is plain data, for which all zeros is a value.
    let mut found: [libc::siginfo_t; MOST] = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel reads `peek` and writes at most `MOST` entries to `found`.
    let count = unsafe { libc::ptrace(PEEKSIGINFO, tid, &raw const peek, found.as_mut_ptr()) };
    let count = usize::try_from(count).unwrap_or(0).min(MOST);
    found[..count]
        .iter()
        .map(|info| 1u64 << ((info.si_signo - 1) & 63))
        .fold(0, |mask, signal| mask | signal)
}

/// The signals that a stopped thread blocks, as a mask.
fn blocked(tid: i32) -> u64 {
    const GETSIGMASK: libc::c_uint = 0x420a;
    let mut mask = 0u64;
    // SAFETY: the kernel writes the eight bytes whose size is passed.
    unsafe { libc::ptrace(GETSIGMASK, tid, size_of::<u64>(), &raw mut mask) };
    mask
}

/// The signals that a process has handlers for, as a mask; all if that cannot be read.
fn caught(tid: i32) -> u64 {
    text::read(format!("/proc/{tid}/status"))
        .ok()
        .and_then(|status| {
            let hex = status
                .lines()
                .find_map(|line| line.strip_prefix("SigCgt:"))?;
            u64::from_str_radix(hex.trim(), 16).ok()
        })
        .unwrap_or(u64::MAX)
}

/// What happened to a traced thread.
pub(super) enum Event {
    /// It has stopped, perhaps before the delivery of a signal.
    Stopped { signal: Option<i32> },
    /// It is gone.
    Ended,
}

/// Looks whether a traced thread has stopped or ended. By hand, since nix knows no real-time signals.
pub(super) fn poll_stop(tid: i32) -> Result<Option<Event>, Errno> {
    let mut status = 0;
    // SAFETY: waitpid writes one int.
    let found = unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL | libc::WNOHANG) };
    if Errno::result(found)? == 0 {
        return Ok(None);
    }
    if !libc::WIFSTOPPED(status) {
        return Ok(Some(Event::Ended));
    }
    // The upper half names the event of a stop that is no signal.
    let signal = (status >> 16 == 0).then(|| libc::WSTOPSIG(status));
    Ok(Some(Event::Stopped { signal }))
}

/// Lets a stopped thread run on with `signal`.
fn detach(tid: i32, signal: Option<i32>) {
    let signal = usize::try_from(signal.unwrap_or(0)).unwrap_or(0);
    // SAFETY: PTRACE_DETACH takes a thread and a signal number and touches no memory of ours.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, tid, 0usize, signal) };
}

fn zero_regs() -> libc::user_regs_struct {
    // SAFETY: `user_regs_struct` is plain integers, for which all zeros is a value.
    unsafe { std::mem::zeroed() }
}
