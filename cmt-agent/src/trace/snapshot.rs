//! What was counted up to a moment.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cmt_common::event::{CopyKey, LOST_REASONS};

use crate::histogram::Stat;
use crate::workload::Workload;

/// A process of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Its name, at most 15 bytes.
    pub comm: String,
    /// When it started, in clock ticks: tells it from a later one with the same id.
    pub started: u64,
    /// True once it has ended.
    pub ended: bool,
    /// True where it was asked for by id.
    pub named: bool,
    /// The CUDA libraries that it maps, by name.
    pub libraries: Vec<String>,
    /// Whom it belongs to.
    pub workload: Workload,
    /// CPUs that it may use; 0 where not known.
    pub threads: u32,
}

/// Everything counted from the start of a trace to one moment, or between two moments.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// When.
    pub at: Instant,
    /// How long the trace had run, or the time between the two moments.
    pub duration: Duration,
    /// Counters and latencies.
    pub rows: BTreeMap<CopyKey, Stat>,
    /// What could not be recorded, by [`cmt_common::event::Lost`].
    pub lost: [u64; LOST_REASONS],
    /// Times that a pair of probes fired: copies, the calls nested in them, and allocations.
    pub probe_pairs: u64,
    /// True where some of those cost more than what was measured for one: see [`crate::probes::Library::single_stepped`].
    pub single_stepped: bool,
    /// The processes, by id.
    pub processes: BTreeMap<u32, Process>,
    /// What went wrong on the way, in sentences.
    pub warnings: Vec<String>,
}

/// A snapshot of a trace that goes on for weeks.
#[derive(Clone, Debug)]
pub struct Drained {
    /// What processes counted in all that have ended since the snapshot before. It is in no later one.
    pub ended: BTreeMap<CopyKey, Stat>,
    /// What the others have counted so far. Its processes are those of both.
    pub live: Snapshot,
}

impl Snapshot {
    /// What a trace that never ran has seen.
    pub fn empty() -> Self {
        Self {
            at: Instant::now(),
            duration: Duration::ZERO,
            rows: BTreeMap::new(),
            lost: [0; LOST_REASONS],
            probe_pairs: 0,
            single_stepped: false,
            processes: BTreeMap::new(),
            warnings: Vec::new(),
        }
    }

    /// What was counted after `earlier`, an older snapshot of the same trace. Classes in which nothing changed are left out.
    pub fn since(&self, earlier: &Self) -> Self {
        let rows = self
            .rows
            .iter()
            .map(|(key, stat)| {
                let stat = match earlier.rows.get(key) {
                    Some(earlier) => stat.since(earlier),
                    None => stat.clone(),
                };
                (*key, stat)
            })
            // A snapshot may have been taken between the count of a call and that of its bytes: these come later, alone.
            .filter(|(_, stat)| {
                stat.calls | stat.errors | stat.bytes | stat.total_ns | stat.count() > 0
            })
            .collect();
        let mut lost = self.lost;
        for (own, earlier) in lost.iter_mut().zip(earlier.lost) {
            *own = own.saturating_sub(earlier);
        }
        Self {
            at: self.at,
            duration: self.at.duration_since(earlier.at),
            rows,
            lost,
            probe_pairs: self.probe_pairs.saturating_sub(earlier.probe_pairs),
            single_stepped: self.single_stepped,
            processes: self.processes.clone(),
            warnings: self.warnings.clone(),
        }
    }

    /// The same with classes that differ in nothing but what their memory is made of as one.
    pub fn without_backing(&self) -> Self {
        let mut rows: BTreeMap<CopyKey, Stat> = BTreeMap::new();
        for (key, stat) in &self.rows {
            let key = CopyKey { backing: 0, ..*key };
            rows.entry(key).or_default().merge(stat);
        }
        Self {
            rows,
            ..self.clone()
        }
    }

    /// All calls.
    pub fn calls(&self) -> u64 {
        self.rows.values().map(|stat| stat.calls).sum()
    }

    /// All losses.
    pub fn lost_total(&self) -> u64 {
        self.lost.iter().sum()
    }
}
