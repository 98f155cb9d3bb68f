//! The program: started with the payload preloaded, handed the signals that are sent to us, and waited for.
#![expect(
    unsafe_code,
    reason = "the child's signal mask, before it runs the program"
)]

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use cmt_common::launch::{PAYLOAD_VARIABLE, SOCKET_VARIABLE};
use nix::errno::Errno;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{
    SigHandler, SigSet, SigmaskHow, Signal, kill, pthread_sigmask, raise, signal,
};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;

use super::file::Files;

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

/// Signals to hand on, blocked in this process, and the mask that was there before.
pub struct Signals {
    incoming: SignalFd,
    before: SigSet,
}

impl Signals {
    /// Blocks them in this thread, and in those that it starts from now on.
    pub fn block() -> anyhow::Result<Self> {
        let mut ours: SigSet = HANDED_ON.into_iter().collect();
        ours.add(Signal::SIGCHLD);
        let mut before = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&ours), Some(&mut before))
            .context("blocking signals")?;
        let incoming = SignalFd::with_flags(&ours, SfdFlags::SFD_CLOEXEC)
            .context("opening a descriptor for signals")?;
        Ok(Self { incoming, before })
    }
}

/// How the program ended.
pub struct Ended {
    status: ExitStatus,
    /// How long it ran.
    pub took: Duration,
}

/// Starts the program and waits until it has ended; processes that it leaves behind are not waited for.
///
/// Where it cannot be started, this process ends as `env` would: with 127 if it is not there, else with 126.
pub fn run(
    program: &OsStr,
    arguments: &[OsString],
    files: &Files,
    socket: &Path,
    signals: &Signals,
) -> anyhow::Result<Ended> {
    let started = Instant::now();
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env("LD_PRELOAD", preloaded(&files.preload))
        .env(PAYLOAD_VARIABLE, &files.payload)
        .env(SOCKET_VARIABLE, socket);
    let mask = signals.before;
    // SAFETY: one system call, which may be made between fork and exec.
    unsafe { command.pre_exec(move || Ok(mask.thread_set_mask()?)) };
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("cmt: {}: {error}", program.display());
            std::process::exit(match error.kind() {
                io::ErrorKind::NotFound => NOT_FOUND,
                _ => NOT_RUN,
            });
        }
    };
    let status = wait(&mut child, signals).context("waiting for the program")?;
    Ok(Ended {
        status,
        took: started.elapsed(),
    })
}

/// What the user preloads comes first.
fn preloaded(ours: &Path) -> OsString {
    match std::env::var_os("LD_PRELOAD").filter(|theirs| !theirs.is_empty()) {
        Some(mut theirs) => {
            theirs.push(":");
            theirs.push(ours);
            theirs
        }
        None => ours.into(),
    }
}

fn wait(child: &mut Child, signals: &Signals) -> io::Result<ExitStatus> {
    let pid = Pid::from_raw(child.id().cast_signed());
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        let incoming = match signals.incoming.read_signal() {
            Err(Errno::EINTR) => continue,
            incoming => incoming?,
        };
        let number = incoming.map_or(0, |it| it.ssi_signo.cast_signed());
        // The terminal sends to all processes in its foreground, the program among them.
        let from_terminal = incoming.is_some_and(|it| it.ssi_code == SI_KERNEL);
        if let Ok(number) = Signal::try_from(number)
            && number != Signal::SIGCHLD
            && !from_terminal
        {
            // It has not been waited for, so its id is its own.
            let _ = kill(pid, number);
        }
    }
}

impl Ended {
    /// Its exit code; none if a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The signal that ended it.
    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    /// Ends this process in the same way.
    pub fn repeat(&self) -> ! {
        if let Some(number) = self.signal() {
            // It has left its own core file, if any.
            let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
            if let Ok(number) = Signal::try_from(number) {
                // SAFETY: the default disposition runs no code of ours.
                let _ = unsafe { signal(number, SigHandler::SigDfl) };
                let mut only = SigSet::empty();
                only.add(number);
                let _ = only.thread_unblock();
                let _ = raise(number);
            }
            std::process::exit(128 + number);
        }
        std::process::exit(self.code().unwrap_or(1));
    }
}
