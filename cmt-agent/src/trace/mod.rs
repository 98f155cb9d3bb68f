//! Traces the copies of live processes: probes on what they map now and later, and what the kernel counted so far.

pub mod duration;
pub mod events;
pub mod gain;
pub mod hgrm;
pub mod intervals;
mod life;
pub(crate) mod memory;
pub mod perfetto;
pub mod record;
pub mod report;
mod scan;
mod shared;
mod snapshot;
mod summary;
pub mod table;
pub mod view;
mod watched;

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use thiserror::Error;

use crate::probes::{self, Events, ProbeError, Probes, Reach};
use scan::Scanner;
pub use snapshot::{Drained, Process, Snapshot};

/// How often maps are read for new libraries and processes.
const SCAN_INTERVAL: Duration = Duration::from_millis(250);

/// Whose copies to trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// These processes, all their threads.
    Pids(Vec<u32>),
    /// Every process that maps a CUDA library, now or later.
    All,
}

/// Why a trace could not start or go on.
#[derive(Debug, Error)]
pub enum TraceError {
    /// No such process.
    #[error("no process has the id {pid}; nothing was traced")]
    NoSuchProcess {
        /// The id.
        pid: u32,
    },
    /// The id is that of a thread.
    #[error("{tid} is a thread of process {pid}; trace {pid}")]
    Thread {
        /// The id that was given.
        tid: u32,
        /// The process it belongs to.
        pid: u32,
    },
    /// A kernel thread, or a process that has ended and waits for its parent.
    #[error(
        "process {pid} has no memory of its own (a kernel thread, or it has ended); nothing was traced"
    )]
    NoMemory {
        /// The id.
        pid: u32,
    },
    /// The maps of a process may not be read.
    #[error("process {pid} may not be inspected: {reason}")]
    Inspect {
        /// The id.
        pid: u32,
        /// Why, and the remedy.
        reason: String,
    },
    /// More processes than one trace can tell apart.
    #[error("at most {most} processes can be named in another pid namespace than the host's")]
    TooMany {
        /// The limit.
        most: usize,
    },
    /// All processes of the host, from within a container.
    #[error(
        "--all needs the host's process ids; run it outside the container, or give it the host's pid namespace (docker --pid=host, hostPID: true)"
    )]
    PidNamespace,
    /// Probes could not be placed.
    #[error(transparent)]
    Probe(#[from] ProbeError),
}

/// A running trace. Dropping it takes the probes away.
pub struct Tracer {
    state: Arc<Mutex<State>>,
    scanning: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
    pair_ns: Option<u64>,
}

struct State {
    probes: Probes,
    scanner: Scanner,
}

impl Tracer {
    /// Loads the programs, places probes on what the targets map now, and keeps looking for more.
    /// `telling` makes single copies available, too: [`Tracer::take_events`].
    pub fn start(targets: Targets, telling: bool) -> Result<Self, TraceError> {
        let begun = Instant::now();
        allow_all_descriptors();
        let scanner = Scanner::new(&targets)?;
        let reach = match targets {
            Targets::Pids(_) if scanner.has_lost_a_first_thread() => Reach::Picked,
            Targets::Pids(_) => Reach::Chosen,
            Targets::All => Reach::All,
        };
        let mut probes = Probes::load(reach, telling)?;
        log::debug!("programs loaded after {:?}", begun.elapsed());
        let (pages, survey_links) = probes::learn(&mut probes);
        log::debug!("kernel surveyed after {:?}: {pages:?}", begun.elapsed());
        let (pair_ns, cost_links) = probes::pair_ns(&mut probes);
        log::debug!("cost measured after {:?}", begun.elapsed());
        let mut state = State { probes, scanner };
        let own = vec![survey_links, cost_links];
        state.scanner.begin(&mut state.probes, own, pages.err())?;
        log::debug!("probes in place after {:?}", begun.elapsed());
        let state = Arc::new(Mutex::new(state));
        let (stop, stopped) = mpsc::channel();
        let shared = Arc::clone(&state);
        let thread = thread::spawn(move || {
            while stopped.recv_timeout(SCAN_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let mut state = lock(&shared);
                let State { probes, scanner } = &mut *state;
                scanner.scan(probes);
                probes.flush_log();
            }
        });
        Ok(Self {
            state,
            scanning: Some((stop, thread)),
            pair_ns,
        })
    }

    /// The single copies, once, where they were asked for at the start.
    pub fn take_events(&self) -> Option<Events> {
        lock(&self.state).probes.events.take()
    }

    /// Everything counted since the start.
    pub fn snapshot(&self) -> Result<Snapshot, TraceError> {
        let state = lock(&self.state);
        state.scanner.snapshot(&state.probes)
    }

    /// Everything counted since the start, of ended processes once: for a trace of all processes that goes on for weeks.
    pub fn drain(&self) -> Result<Drained, TraceError> {
        let mut state = lock(&self.state);
        let State { probes, scanner } = &mut *state;
        scanner.drain(probes)
    }

    /// True once every process that was named has ended; never with [`Targets::All`].
    pub fn ended(&self) -> bool {
        lock(&self.state).scanner.ended()
    }

    /// What a pair of probes costs, in nanoseconds, as measured at the start.
    pub fn pair_ns(&self) -> Option<u64> {
        self.pair_ns
    }

    /// Takes the probes away and returns everything counted. Single copies may be read until the tracer is dropped.
    pub fn stop(&mut self) -> Result<Snapshot, TraceError> {
        self.halt();
        self.snapshot()
    }

    fn halt(&mut self) {
        if let Some((stop, thread)) = self.scanning.take() {
            drop(stop);
            // It can only have ended by a panic; there is nothing to add to its message.
            let _ = thread.join();
            let mut state = lock(&self.state);
            let State { probes, scanner } = &mut *state;
            probes::detach(scanner.end(probes));
            probes.flush_log();
        }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        self.halt();
    }
}

/// Every library's probes take some descriptors, so a node full of containers takes more than the usual limit.
fn allow_all_descriptors() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        log::debug!("the limit of descriptors stays: {error}");
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
