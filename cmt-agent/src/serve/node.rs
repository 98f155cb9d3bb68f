//! The trace of a node that runs for weeks: moves what the kernel counted into the totals, again and again.
//!
//! Only differences are added, so that totals grow whatever becomes of a process's name or id.

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cmt_common::event::CopyKey;

use super::totals::Totals;
use super::workloads;
use crate::commands::status;
use crate::histogram::Stat;
use crate::link::Link;
use crate::trace::gain::{Gain, Means};
use crate::trace::{Drained, Process, Targets, TraceError, Tracer};

/// What could be gained is estimated from so long a time, or from so many classes, whatever comes first.
const ESTIMATE_EVERY: Duration = Duration::from_secs(10);
const MOST_ESTIMATED: usize = 1024;

/// A running trace of all processes. Dropping it takes the probes away.
pub struct Node {
    tracer: Tracer,
    totals: Arc<Mutex<Totals>>,
    /// What was added already of the processes that live.
    added: BTreeMap<CopyKey, Stat>,
    interval: Interval,
    /// Live processes that map a CUDA library.
    traced: Vec<u32>,
    warned: usize,
}

/// What was counted since the last estimate.
struct Interval {
    begun: Instant,
    rows: BTreeMap<CopyKey, Stat>,
    /// Workload and CPUs of the processes.
    processes: BTreeMap<u32, (String, u32)>,
}

impl Node {
    /// Places probes; counts into `totals` from then on.
    pub fn start(totals: Arc<Mutex<Totals>>) -> Result<Self, TraceError> {
        let tracer = Tracer::start(Targets::All, false)?;
        lock(&totals).pair_ns = tracer.pair_ns();
        let mut node = Self {
            tracer,
            totals,
            added: BTreeMap::new(),
            interval: Interval::begin(),
            traced: Vec::new(),
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
        for (key, stat) in ended {
            let before = self.added.remove(&key);
            self.add(&mut totals, &key, &stat, before.as_ref(), &live.processes);
        }
        for (key, stat) in live.rows {
            let before = self.added.remove(&key);
            self.add(&mut totals, &key, &stat, before.as_ref(), &live.processes);
            self.added.insert(key, stat);
        }
        self.interval.close_if_over(&mut totals);
        self.traced = live
            .processes
            .iter()
            .filter(|(_, process)| !process.ended && !process.libraries.is_empty())
            .map(|(pid, _)| *pid)
            .collect();
        totals.traced = self.traced.len();
        for warning in live.warnings.iter().skip(self.warned) {
            eprintln!("cmt: warning: {warning}");
        }
        self.warned = live.warnings.len();
        Ok(())
    }

    /// The processes that may be attached.
    pub fn traced(&self) -> Vec<u32> {
        self.traced.clone()
    }

    fn add(
        &mut self,
        totals: &mut Totals,
        key: &CopyKey,
        stat: &Stat,
        before: Option<&Stat>,
        processes: &BTreeMap<u32, Process>,
    ) {
        if before == Some(stat) {
            return;
        }
        let grown = match before {
            Some(before) => stat.since(before),
            None => stat.clone(),
        };
        let process = processes.get(&key.pid).cloned().unwrap_or_default();
        let (workload, threads) = self
            .interval
            .processes
            .entry(key.pid)
            .or_insert_with(|| (workloads::of(key.pid, &process), 0));
        *threads = process.threads.max(*threads);
        totals.add(key, workload, &grown);
        self.interval.rows.entry(*key).or_default().merge(&grown);
        self.interval.close_if_over(totals);
    }
}

impl Interval {
    fn begin() -> Self {
        Self {
            begun: Instant::now(),
            rows: BTreeMap::new(),
            processes: BTreeMap::new(),
        }
    }

    fn close_if_over(&mut self, totals: &mut Totals) {
        if self.begun.elapsed() >= ESTIMATE_EVERY || self.rows.len() >= MOST_ESTIMATED {
            mem::replace(self, Self::begin()).estimate(totals);
        }
    }

    /// Adds what attach would have given back. What cannot be estimated adds nothing.
    fn estimate(self, totals: &mut Totals) {
        let link = Link::best();
        let minutes = self.begun.elapsed().as_secs_f64() / 60.0;
        for (pid, (workload, threads)) in self.processes {
            let means = Means {
                link: link.clone(),
                threads,
            };
            let rows = self.rows.range(CopyKey::of_process(pid));
            if let Some(saved) = Gain::of(rows, minutes * 60.0, &means).saved_s_per_minute {
                totals.add_recoverable(&workload, saved * minutes);
            }
        }
    }
}

/// How many of these processes are attached.
pub fn attached(pids: &[u32]) -> usize {
    pids.iter().filter(|pid| status::is_attached(**pid)).count()
}

/// The totals, whoever held them last.
pub fn lock(totals: &Mutex<Totals>) -> MutexGuard<'_, Totals> {
    totals.lock().unwrap_or_else(PoisonError::into_inner)
}
