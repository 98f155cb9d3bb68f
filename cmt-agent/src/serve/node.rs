//! The trace of a node that runs for weeks: moves what the kernel counted into the totals, again and again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ledger::Ledger;
use super::totals::Totals;
use super::workloads;
use crate::commands::status;
use crate::trace::{Drained, Process, Snapshot, Targets, TraceError, Tracer};

/// A running trace of all processes. Dropping it takes the probes away.
pub struct Node {
    tracer: Tracer,
    totals: Arc<Mutex<Totals>>,
    ledger: Ledger,
    /// Live processes that map a CUDA library.
    traced: BTreeMap<u32, Process>,
    warned: usize,
}

impl Node {
    /// Places probes; counts into `totals` from then on.
    pub fn start(totals: Arc<Mutex<Totals>>) -> Result<Self, TraceError> {
        let tracer = Tracer::start(Targets::All, false)?;
        lock(&totals).pair_ns = tracer.pair_ns();
        let mut node = Self {
            tracer,
            totals,
            ledger: Ledger::new(),
            traced: BTreeMap::new(),
            warned: 0,
        };
        node.turn()?;
        Ok(node)
    }

    /// Adds what was counted since the last turn.
    pub fn turn(&mut self) -> Result<(), TraceError> {
        let Drained { ended, live } = self.tracer.drain()?;
        let totals = Arc::clone(&self.totals);
        let mut totals = lock(&totals);
        totals.raise(&live.lost, live.probe_pairs);
        self.ledger
            .add(ended, live.rows, &live.processes, &mut totals);
        self.traced = live
            .processes
            .into_iter()
            .filter(|(_, process)| !process.ended && !process.libraries.is_empty())
            .collect();
        totals.traced = self.traced.len();
        for (_, _, workload) in self.processes() {
            totals.see(&workload);
        }
        for warning in live.warnings.iter().skip(self.warned) {
            eprintln!("cmt: warning: {warning}");
        }
        self.warned = live.warnings.len();
        Ok(())
    }

    /// The processes that may be attached.
    pub fn traced(&self) -> Vec<u32> {
        self.traced.keys().copied().collect()
    }

    /// Takes what [`look`] has found, and counts it; all of it or nothing.
    pub fn see(&mut self, looked: BTreeMap<u32, Option<bool>>) {
        let known: Option<Vec<bool>> = looked.values().copied().collect();
        let count = |known: Vec<bool>| known.into_iter().filter(|attached| *attached).count();
        lock(&self.totals).attached = known.map(count);
        let attached = looked.into_iter().filter(|(_, is)| *is != Some(false));
        self.ledger
            .see_attached(attached.map(|(pid, _)| pid).collect());
    }

    /// The processes that may be attached, each with the name of its workload.
    pub fn processes(&self) -> impl Iterator<Item = (u32, &Process, String)> {
        let named = self.traced.iter();
        named.map(|(pid, process)| (*pid, process, workloads::of(*pid, process)))
    }

    /// All that a process has counted, as of the last turn.
    pub fn counted(&self, pid: u32) -> Snapshot {
        Snapshot {
            rows: self.ledger.of_process(pid),
            ..Snapshot::empty()
        }
    }
}

/// Whether these processes are attached; `None` of those that may not be looked at.
pub fn look(pids: Vec<u32>) -> BTreeMap<u32, Option<bool>> {
    let looked = pids.into_iter().map(|pid| (pid, status::is_attached(pid)));
    looked.collect()
}

/// The totals, whoever held them last.
pub fn lock(totals: &Mutex<Totals>) -> MutexGuard<'_, Totals> {
    totals.lock().unwrap_or_else(PoisonError::into_inner)
}
