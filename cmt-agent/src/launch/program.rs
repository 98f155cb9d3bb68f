//! The program: started with the payload preloaded, handed the signals that are sent to us, and waited for.
#![expect(
    unsafe_code,
    reason = "the child's signal mask, before it runs the program"
)]

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use cmt_common::launch::{PAYLOAD_VARIABLE, SOCKET_VARIABLE};
use nix::errno::Errno;
use nix::sys::prctl::set_dumpable;
use nix::sys::signal::{
    SigHandler, SigSet, SigmaskHow, Signal, kill, pthread_sigmask, raise, signal,
};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpgid, getpgrp, getsid};

use super::file::Files;

const PRELOAD: &str = "LD_PRELOAD";
/// Exit codes of `env` and of shells for a program that is not there, and for one that cannot be run.
const NOT_FOUND: i32 = 127;
const NOT_RUN: i32 = 126;
/// `si_code` of signals that the kernel itself sends, as for Ctrl-C (`asm-generic/siginfo.h`).
const SI_KERNEL: i32 = 0x80;
/// Those that are handed on, besides real-time ones, which nobody sends to a program by name.
const HANDED_ON: [Signal; 8] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGCONT,
];
/// By which a terminal stops programs: the program stops, or does not, and this process with it.
const STOPPING: [Signal; 3] = [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU];
/// Says to sanitizers that something else may be loaded before their runtime; what is interposes nothing.
const ASAN_OPTIONS: &str = "ASAN_OPTIONS";
const ANY_ORDER: &str = "verify_asan_link_order=0";

/// Whether SIGPIPE was ignored when this process began: Rust ignores it before `main`.
static SIGPIPE_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = look_at_sigpipe;

extern "C" fn look_at_sigpipe() {
    // SAFETY: only asks; a structure of plain numbers, for which zeros are valid.
    let ignored = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    };
    SIGPIPE_WAS_IGNORED.store(ignored, Ordering::Relaxed);
}

/// Signals to hand on, blocked in this process, and what was there before.
pub struct Signals {
    incoming: SignalFd,
    mask_before: SigSet,
    /// Whoever has started this process does not want to know of its children.
    children_were_ignored: bool,
}

impl Signals {
    /// Blocks them in this thread, and in those that it starts from now on.
    pub fn block() -> anyhow::Result<Self> {
        let mut ours: SigSet = HANDED_ON.into_iter().collect();
        ours.add(Signal::SIGCHLD);
        let incoming = SignalFd::with_flags(&ours, SfdFlags::SFD_CLOEXEC)
            .context("opening a descriptor for signals")?;
        ours.extend(STOPPING);
        let mut mask_before = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&ours), Some(&mut mask_before))
            .context("blocking signals")?;
        // SAFETY: both dispositions run no code of ours. What is written when nobody reads fails instead of ending us.
        let before = unsafe {
            signal(Signal::SIGPIPE, SigHandler::SigIgn)?;
            signal(Signal::SIGCHLD, SigHandler::SigDfl)?
        };
        Ok(Self {
            incoming,
            mask_before,
            children_were_ignored: matches!(before, SigHandler::SigIgn),
        })
    }

    /// Gives the program the dispositions and the mask that it would have without us. Called between fork and exec.
    fn restore(mask: SigSet, children_were_ignored: bool) -> io::Result<()> {
        let of = |was_ignored| match was_ignored {
            true => SigHandler::SigIgn,
            false => SigHandler::SigDfl,
        };
        // SAFETY: none of them runs code.
        unsafe {
            signal(
                Signal::SIGPIPE,
                of(SIGPIPE_WAS_IGNORED.load(Ordering::Relaxed)),
            )?;
            signal(Signal::SIGCHLD, of(children_were_ignored))?;
        }
        Ok(mask.thread_set_mask()?)
    }
}

/// How the program ended, or that it could not be started.
pub struct Ended {
    code: Option<i32>,
    signal: Option<Signal>,
    has_run: bool,
    /// How long it ran.
    pub took: Duration,
}

/// Whether there is a program of that name, as far as can be seen without running it.
pub fn is_there(program: &OsStr) -> bool {
    if program.as_bytes().contains(&b'/') {
        return Path::new(program).exists();
    }
    // Where there is no PATH, the system has one of its own.
    std::env::var_os("PATH")
        .is_none_or(|path| std::env::split_paths(&path).any(|folder| folder.join(program).exists()))
}

/// Starts the program and waits until it has ended; processes that it leaves behind are not waited for.
///
/// Where it cannot be started, it ends as with `env`: with 127 if it is not there, else with 126.
pub fn run(
    program: &OsStr,
    arguments: &[OsString],
    files: &Files,
    socket: &Path,
    signals: &Signals,
) -> anyhow::Result<Ended> {
    let started = Instant::now();
    let mut command = Command::new(program);
    command.args(arguments).envs(environment(files, socket));
    let (mask, ignored) = (signals.mask_before, signals.children_were_ignored);
    // SAFETY: a few system calls, which may be made between fork and exec.
    unsafe { command.pre_exec(move || Signals::restore(mask, ignored)) };
    let mut ended = match command.spawn() {
        Ok(child) => wait(Pid::from_raw(child.id().cast_signed()), signals)
            .context("waiting for the program")?,
        Err(error) => {
            let _ = writeln!(io::stderr(), "cmt: {}: {error}", program.display());
            let code = match error.kind() {
                io::ErrorKind::NotFound => NOT_FOUND,
                _ => NOT_RUN,
            };
            Ended {
                has_run: false,
                ..Ended::with_code(code)
            }
        }
    };
    ended.took = started.elapsed();
    Ok(ended)
}

/// What a program needs in its environment to be staged by the desk at `socket`.
pub fn environment(files: &Files, socket: &Path) -> [(&'static str, OsString); 4] {
    [
        (PRELOAD, with(PRELOAD, files.preload.as_os_str())),
        (ASAN_OPTIONS, with(ASAN_OPTIONS, ANY_ORDER.as_ref())),
        (PAYLOAD_VARIABLE, files.payload.clone().into()),
        (SOCKET_VARIABLE, socket.into()),
    ]
}

/// A variable's list with ours at its end: what the user has there comes first.
fn with(variable: &str, ours: &OsStr) -> OsString {
    match std::env::var_os(variable).filter(|theirs| !theirs.is_empty()) {
        Some(mut theirs) => {
            theirs.push(":");
            theirs.push(ours);
            theirs
        }
        None => ours.into(),
    }
}

fn wait(program: Pid, signals: &Signals) -> nix::Result<Ended> {
    // As the first process of a pid namespace we are the parent of all whose own has ended.
    let whom = match Pid::this() == Pid::from_raw(1) {
        true => None,
        false => Some(program),
    };
    let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
    loop {
        match waitpid(whom, Some(flags)) {
            Ok(WaitStatus::Exited(pid, code)) if pid == program => {
                return Ok(Ended::with_code(code));
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == program => {
                return Ok(Ended {
                    code: None,
                    signal: Some(signal),
                    has_run: true,
                    took: Duration::ZERO,
                });
            }
            Ok(WaitStatus::Stopped(pid, by)) if pid == program && STOPPING.contains(&by) => {
                stop_as_well(program, by)?;
            }
            Ok(WaitStatus::StillAlive) => hand_on(program, &signals.incoming)?,
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Stops this process by the signal that has stopped the program: a terminal's, which its shell continues for both. What
/// stops the program alone is somebody else's business.
fn stop_as_well(program: Pid, by: Signal) -> nix::Result<()> {
    if getpgid(Some(program))? != getpgrp() {
        return Ok(());
    }
    let mut only = SigSet::empty();
    only.add(by);
    // Pending while it is blocked; where no shell controls jobs the kernel ignores it.
    raise(by)?;
    only.thread_unblock()?;
    only.thread_block()
}

/// Waits for a signal, and hands it on unless the program has it already.
fn hand_on(program: Pid, incoming: &SignalFd) -> nix::Result<()> {
    let came = match incoming.read_signal() {
        Err(Errno::EINTR) => return Ok(()),
        came => came?,
    };
    let Some((came, signal)) =
        came.and_then(|came| Some((came, Signal::try_from(came.ssi_signo.cast_signed()).ok()?)))
    else {
        return Ok(());
    };
    let from_kernel = came.ssi_code == SI_KERNEL;
    let is_there_already = match signal {
        Signal::SIGCHLD => true,
        // The terminal sends them to all processes in its foreground.
        Signal::SIGINT | Signal::SIGQUIT => from_kernel,
        // To these when the session's leader has ended; when the terminal goes, to the leader alone.
        Signal::SIGHUP => from_kernel && getsid(None)? != Pid::this(),
        _ => false,
    };
    if !is_there_already {
        // It has not been waited for, so its id is its own.
        let _ = kill(program, signal);
    }
    Ok(())
}

impl Ended {
    fn with_code(code: i32) -> Self {
        Self {
            code: Some(code),
            signal: None,
            has_run: true,
            took: Duration::ZERO,
        }
    }

    /// Whether it could be started.
    pub fn has_run(&self) -> bool {
        self.has_run
    }

    /// Its exit code; none if a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.code
    }

    /// The signal that ended it.
    pub fn signal(&self) -> Option<i32> {
        self.signal.map(|signal| signal as i32)
    }

    /// Ends this process in the same way.
    pub fn repeat(&self) -> ! {
        if let Some(number) = self.signal {
            // It has left its own core file, if any.
            let _ = set_dumpable(false);
            // SAFETY: the default disposition runs no code of ours.
            let _ = unsafe { signal(number, SigHandler::SigDfl) };
            let mut only = SigSet::empty();
            only.add(number);
            let _ = only.thread_unblock();
            let _ = raise(number);
            std::process::exit(128 + number as i32);
        }
        std::process::exit(self.code.unwrap_or(1));
    }
}
