//! The bench's end of the pipe to the process that it measures, with an ear for Ctrl-C.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, anyhow, bail};
use nix::sys::signal::{SigSet, Signal};
use procfs::process::Process;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::wire::{Device, Reply, Request};

/// A process that is ending, by field 9 of `/proc/PID/stat` (`include/linux/sched.h`).
const PF_EXITING: u32 = 4;

/// What may come next.
enum Event {
    /// The process says something.
    Line(String),
    /// It has closed its output.
    End,
    /// Ctrl-C or SIGTERM.
    Interrupted,
}

/// A process that copies on command; it ends when this is dropped.
pub struct Session {
    child: Child,
    stdin: ChildStdin,
    events: Receiver<Event>,
    interrupted: bool,
    _listener: Listener,
}

impl Session {
    /// Starts the process, with more in its environment than is in ours, and waits until it has a context. `None` if interrupted meanwhile.
    ///
    /// # Errors
    /// When it finds no libcuda or no device, in its own words.
    pub fn start(environment: &[(&str, OsString)]) -> anyhow::Result<Option<(Self, Device)>> {
        let (send, events) = channel();
        let listener = listen_for_signals(send.clone())?;
        let mut child = Command::new("/proc/self/exe")
            .args(["bench-copier", &std::process::id().to_string()])
            .envs(environment.iter().map(|(name, value)| (name, value)))
            // Ctrl-C is for the bench, which ends the process.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting the process to measure")?;
        let stdin = child.stdin.take().context("the process has no stdin")?;
        let stdout = child.stdout.take().context("the process has no stdout")?;
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if send.send(Event::Line(line)).is_err() {
                    return;
                }
            }
            let _ = send.send(Event::End);
        });
        let mut session = Self {
            child,
            stdin,
            events,
            interrupted: false,
            _listener: listener,
        };
        Ok(match session.next()? {
            None => None,
            Some(Reply::Ready(device)) => Some((session, device)),
            Some(other) => bail!("the process to measure began with {other:?}"),
        })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a request and waits for the answer; `None` once interrupted.
    pub fn ask(&mut self, request: &Request) -> anyhow::Result<Option<Reply>> {
        if self.is_interrupted() {
            return Ok(None);
        }
        if let Some(status) = self.child.try_wait()? {
            bail!("the process to measure ended with {status}");
        }
        writeln!(self.stdin, "{}", serde_json::to_string(request)?)
            .context("telling the process what to measure")?;
        self.next()
    }

    /// Whether Ctrl-C or SIGTERM has come.
    pub fn is_interrupted(&mut self) -> bool {
        match self.events.try_recv() {
            Ok(Event::Interrupted) => self.interrupted = true,
            // What else comes between two requests is the end, and `ask` finds the process gone.
            Ok(_) | Err(TryRecvError::Empty | TryRecvError::Disconnected) => {}
        }
        self.interrupted
    }

    /// `why`, or that the process was ended by a signal, where that is what `why` comes from.
    pub fn explain(&mut self, why: anyhow::Error) -> anyhow::Error {
        // An ending process loses its memory first, so what reads it fails before it can be waited for.
        let ends = Process::new(self.pid() as i32)
            .and_then(|process| process.stat())
            .is_ok_and(|stat| stat.flags & PF_EXITING != 0);
        let status = match ends {
            true => self.child.wait().ok(),
            false => self.child.try_wait().ok().flatten(),
        };
        match status {
            Some(status) if status.signal().is_some() => {
                anyhow!("the process to measure ended with {status}")
            }
            _ => why,
        }
    }

    fn next(&mut self) -> anyhow::Result<Option<Reply>> {
        match self.events.recv() {
            Ok(Event::Line(line)) => match serde_json::from_str(&line)? {
                Reply::Failed(why) => Err(anyhow!(why)),
                reply => Ok(Some(reply)),
            },
            Ok(Event::Interrupted) => {
                self.interrupted = true;
                Ok(None)
            }
            Ok(Event::End) | Err(_) => bail!(
                "the process to measure ended with {} in the middle of a measurement",
                self.child.wait()?
            ),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A thread that listens for signals, until this is dropped.
struct Listener {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Signals are to find no thread of ours any more that takes them: whoever comes next may have to hand them on.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sends [`Event::Interrupted`] for each Ctrl-C and SIGTERM from now on, whatever this thread blocks.
fn listen_for_signals(send: Sender<Event>) -> anyhow::Result<Listener> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime that waits for signals")?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
        )
    };
    let (stop, mut stopped) = oneshot::channel();
    let thread = thread::spawn(move || {
        let ours: SigSet = [Signal::SIGINT, Signal::SIGTERM].into_iter().collect();
        let _ = ours.thread_unblock();
        runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = &mut stopped => return,
                }
                if send.send(Event::Interrupted).is_err() {
                    return;
                }
            }
        });
    });
    Ok(Listener {
        stop: Some(stop),
        thread: Some(thread),
    })
}
