//! Stopping and resuming threads of a target with ptrace.
//!
//! A thread that is dropped while stopped goes on: [`Stopped`] detaches on drop, and the kernel does the same if `cmt`
//! dies. All calls for one thread must come from the thread of ours that seized it.
#![expect(unsafe_code, reason = "ptrace requests that nix does not wrap")]

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::ptrace;
use nix::unistd::Pid;

use crate::target::text;

/// Why a thread could not be stopped or read.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    /// It has ended: nothing to do.
    #[error("thread {tid} has ended")]
    Gone {
        /// Which.
        tid: i32,
    },
    /// Something else traces it, or we may not.
    #[error(
        "thread {tid} cannot be traced: {errno}; is a debugger, strace or another cmt attached?"
    )]
    Refused {
        /// Which.
        tid: i32,
        /// What the kernel said.
        errno: Errno,
    },
    /// It did not stop in time, as threads in uninterruptible sleep do not.
    #[error(
        "thread {tid} did not stop within {waited_ms} ms (uninterruptible sleep?); nothing was changed, try again"
    )]
    DoesNotStop {
        /// Which.
        tid: i32,
        /// How long we waited.
        waited_ms: u128,
    },
    /// The threads could not be listed.
    #[error("its threads cannot be listed; has it ended? Nothing was changed")]
    NoList,
    /// A ptrace request failed.
    #[error("ptrace {request} on thread {tid}: {errno}")]
    Ptrace {
        /// Which thread.
        tid: i32,
        /// Which request.
        request: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
}

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
    tid: i32,
    detached: bool,
}

impl Seized {
    /// Starts tracing a thread without stopping it.
    pub fn seize(tid: i32) -> Result<Self, ThreadError> {
        match ptrace::seize(Pid::from_raw(tid), ptrace::Options::empty()) {
            Ok(()) => {
                SEIZED
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .insert(tid);
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
    fn look(&mut self) -> Result<Option<Stopped>, ThreadError> {
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

/// How often somebody looks who waits for a stop: all the time at first, since most threads stop within microseconds.
struct Pace {
    started: Instant,
    deadline: Instant,
    looks: u32,
}

impl Pace {
    fn new(deadline: Instant) -> Self {
        Self {
            started: Instant::now(),
            deadline,
            looks: 0,
        }
    }

    /// Passes the time until the next look; fails at the deadline. `tid` is the thread to blame.
    fn pause(&mut self, tid: i32) -> Result<(), ThreadError> {
        if Instant::now() >= self.deadline {
            let waited_ms = self.started.elapsed().as_millis();
            return Err(ThreadError::DoesNotStop { tid, waited_ms });
        }
        self.looks += 1;
        if self.looks > 200 {
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
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
enum Event {
    /// It has stopped, perhaps before the delivery of a signal.
    Stopped { signal: Option<i32> },
    /// It is gone.
    Ended,
}

/// Looks whether a traced thread has stopped or ended. By hand, since nix knows no real-time signals.
fn poll_stop(tid: i32) -> Result<Option<Event>, Errno> {
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

/// Stops every thread of a process: those that `list` names, again and again until it names no new one.
///
/// Nothing is stopped if the threads cannot be listed. Returns them with the moment at which the first was told to stop. On failure all threads run on.
pub fn stop_all(
    list: impl Fn() -> Option<Vec<i32>>,
    limit: Duration,
) -> Result<(Vec<Stopped>, Instant), ThreadError> {
    let deadline = Instant::now() + limit;
    let mut pace = Pace::new(deadline);
    let mut stopped: Vec<Stopped> = Vec::new();
    let mut since = None;
    loop {
        let mut fresh = Vec::new();
        let tids = list().filter(|tids| !tids.is_empty());
        let tids = tids.ok_or(ThreadError::NoList)?;
        // One that starts new threads as fast as they are stopped must not keep us for ever.
        if Instant::now() >= deadline
            && let Some(&tid) = tids
                .iter()
                .find(|&&tid| stopped.iter().all(|it| it.tid != tid))
        {
            let waited_ms = limit.as_millis();
            return Err(ThreadError::DoesNotStop { tid, waited_ms });
        }
        for &tid in &tids {
            if stopped.iter().any(|thread| thread.tid == tid) {
                continue;
            }
            match Seized::seize(tid) {
                Ok(seized) => fresh.push(seized),
                Err(ThreadError::Gone { .. }) => {}
                // A thread that is exiting refuses too, and a main thread that has called pthread_exit stays as a zombie.
                Err(_) if has_ended(tid) => {}
                Err(error) => return Err(error),
            }
        }
        let since = *since.get_or_insert_with(Instant::now);
        if fresh.is_empty() {
            // Some may have ended before they were seized, and another process's threads have got their ids. While they
            // stand still they keep them.
            stopped.retain(|thread| tids.contains(&thread.tid));
            return Ok((stopped, since));
        }
        fresh.retain(|seized| seized.interrupt().is_ok());
        while !fresh.is_empty() {
            let mut outcome = Ok(());
            // Each as soon as it stops: until an interrupted call is rewritten, our death would leave it with EINTR.
            fresh.retain_mut(|seized| match seized.look() {
                Ok(Some(thread)) => {
                    stopped.push(thread);
                    false
                }
                Ok(None) => true,
                Err(ThreadError::Gone { .. }) => false,
                Err(error) => {
                    outcome = Err(error);
                    true
                }
            });
            if let Some(seized) = fresh.last() {
                outcome = outcome.and_then(|()| pace.pause(seized.tid));
            }
            if let Err(error) = outcome {
                // Before those that do not stop are waited for.
                drop((stopped, fresh));
                return Err(error);
            }
        }
    }
}

/// Refuses a process with a thread that will not stop: one that has been in uninterruptible sleep for as long as we
/// looked, as the parent of a vfork is. Nothing is stopped for this.
pub fn check_stoppable(list: impl Fn() -> Option<Vec<i32>>) -> Result<(), ThreadError> {
    const LOOKS: u32 = 100;
    const PAUSE: Duration = Duration::from_millis(20);
    // One that wakes now and then can be stopped then.
    let mut asleep: Vec<_> = list()
        .ok_or(ThreadError::NoList)?
        .into_iter()
        .map(|tid| (tid, switches_of(tid)))
        .collect();
    for _ in 0..LOOKS {
        asleep
            .retain(|&(tid, switches)| state_of(tid) == Some('D') && switches_of(tid) == switches);
        if asleep.is_empty() {
            return Ok(());
        }
        std::thread::sleep(PAUSE);
    }
    Err(ThreadError::DoesNotStop {
        tid: asleep[0].0,
        waited_ms: u128::from(LOOKS) * PAUSE.as_millis(),
    })
}

/// How often a thread went to sleep so far.
fn switches_of(tid: i32) -> Option<u64> {
    let status = text::read(format!("/proc/{tid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

/// Reaps traced threads that have ended, from a thread of its own for as long as this process lives.
///
/// A thread that execs waits until all others of its process are reaped, and whoever seizes it waits for the exec:
/// a target that execs while we stop it and we would wait for each other for ever.
///
/// Only zombies are waited for: a wait for any would take the stops of the others, too.
pub fn reap_the_ended() {
    std::thread::spawn(|| {
        loop {
            std::thread::sleep(Duration::from_millis(10));
            let seized = SEIZED
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            for tid in seized {
                if state_of(tid) == Some('Z') {
                    let _ = poll_stop(tid);
                }
            }
        }
    });
}

/// Threads that this process has ever seized.
static SEIZED: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

/// The thread that traces `tid`, if one does.
fn tracer_of(tid: i32) -> Option<i32> {
    let status = text::read(format!("/proc/{tid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("TracerPid:"))?;
    line.trim().parse().ok().filter(|&tracer| tracer != 0)
}

fn has_ended(tid: i32) -> bool {
    matches!(state_of(tid), None | Some('Z' | 'X'))
}

/// The kernel's letter for what a thread does; `None` if there is no such thread.
fn state_of(tid: i32) -> Option<char> {
    state_in(&text::read(format!("/proc/{tid}/stat")).ok()?)
}

/// The same, from the text of `/proc/TID/stat`.
pub(crate) fn state_in(stat: &str) -> Option<char> {
    // It follows the name, which is in brackets and may hold anything.
    stat.rsplit(')').next()?.trim_start().chars().next()
}

fn zero_regs() -> libc::user_regs_struct {
    // SAFETY: `user_regs_struct` is plain integers, for which all zeros is a value.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::process::{Child, Command};

    use super::*;

    struct Sleepers(RefCell<Vec<Child>>);

    impl Sleepers {
        fn one_more(&self) -> i32 {
            let child = Command::new("sleep").arg("60").spawn().expect("a child");
            let tid = child.id() as i32;
            self.0.borrow_mut().push(child);
            tid
        }
    }

    impl Drop for Sleepers {
        fn drop(&mut self) {
            for child in self.0.get_mut() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }

    #[test]
    fn what_is_no_thread_of_the_target_is_let_go() {
        let sleepers = Sleepers(RefCell::default());
        let (ours, strange) = (sleepers.one_more(), sleepers.one_more());
        // As if the second had ended and its id been taken before it was seized.
        let lists = RefCell::new(vec![vec![ours], vec![ours, strange]]);
        let list = || lists.borrow_mut().pop();
        let (stopped, _) = stop_all(list, Duration::from_secs(5)).expect("they sleep");
        let tids: Vec<i32> = stopped.iter().map(|thread| thread.tid).collect();
        assert_eq!(tids, [ours]);
        assert_eq!(
            (tracer_of(ours).is_some(), tracer_of(strange)),
            (true, None)
        );
    }

    #[test]
    fn threads_without_end_are_given_up() {
        let sleepers = Sleepers(RefCell::default());
        let tids = RefCell::new(Vec::new());
        let list = || {
            tids.borrow_mut().push(sleepers.one_more());
            Some(tids.borrow().clone())
        };
        let given_up = stop_all(list, Duration::from_millis(100)).expect_err("there are ever more");
        assert!(
            matches!(given_up, ThreadError::DoesNotStop { .. }),
            "{given_up}"
        );
        assert!(tids.borrow().iter().all(|&tid| tracer_of(tid).is_none()));
    }
}
