//! The report of a trace: the object that `--json` prints (`cmt/trace/1`) and that the text is drawn from.

use std::collections::BTreeMap;

use cmt_common::api::{COPY_FNS, Direction, MemoryKind};
use cmt_common::event::CopyKey;
use cmt_common::histogram::size_class_bytes;
use serde::Serialize;

use super::Snapshot;
use crate::histogram::Stat;

/// The name and version of the format.
pub const SCHEMA: &str = "cmt/trace/1";

/// A whole report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// How long was traced, in seconds.
    pub duration_s: f64,
    /// Processes that were named or that copied.
    pub processes: Vec<ProcessReport>,
    /// Calls and ranges that could not be recorded.
    pub lost: u64,
    /// What tracing itself took.
    pub overhead: Overhead,
}

/// What tracing took: the product of both is CPU time of the traced processes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Overhead {
    /// Calls that passed a pair of probes: copies, calls nested in them, allocations.
    pub calls: u64,
    /// Cost of one pair in nanoseconds, measured when the trace began; null where that failed.
    pub pair_ns: Option<u64>,
}

/// One process.
#[derive(Clone, Debug, Serialize)]
pub struct ProcessReport {
    /// Process id.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Its copies by class.
    pub copies: Vec<CopyReport>,
}

/// One class of copies. Latencies, bytes and histogram are those of successful calls.
#[derive(Clone, Debug, Serialize)]
pub struct CopyReport {
    /// The outermost CUDA function that was called.
    pub function: &'static str,
    /// `HtoD`, `DtoH`, `DtoD`, `HtoH` or `unknown`.
    pub direction: &'static str,
    /// Kind of the host memory: `pageable`, `pinned`, `managed`, or `unknown` where there is none or nothing is known.
    pub memory: &'static str,
    /// Smallest size of the class, a power of two: a copy belongs to it up to twice as many bytes (exclusive).
    pub size_class_bytes: u64,
    /// All calls.
    pub calls: u64,
    /// Calls that returned an error.
    pub errors: u64,
    /// Bytes copied.
    pub bytes: u64,
    /// Time spent in the calls.
    pub total_ns: u64,
    /// Quantiles; null where nothing succeeded.
    pub latency_ns: Option<Latency>,
    /// Buckets that are not empty: lower bound, upper bound (exclusive), calls.
    pub histogram: Vec<(u64, u64, u64)>,
}

/// Quantiles of a latency in nanoseconds, within 12.5 %; the maximum is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Latency {
    /// Median.
    pub p50: u64,
    /// 90 %.
    pub p90: u64,
    /// 99 %.
    pub p99: u64,
    /// The longest.
    pub max: u64,
}

impl Latency {
    /// `None` where nothing succeeded.
    pub fn of(stat: &Stat) -> Option<Self> {
        Some(Self {
            p50: stat.quantile(0.5)?,
            p90: stat.quantile(0.9)?,
            p99: stat.quantile(0.99)?,
            max: stat.max_ns,
        })
    }
}

impl Report {
    /// The report of what `snapshot` counted.
    pub fn new(snapshot: &Snapshot, pair_ns: Option<u64>) -> Self {
        let mut processes: BTreeMap<u32, ProcessReport> = snapshot
            .processes
            .iter()
            .map(|(pid, process)| {
                let report = ProcessReport {
                    pid: *pid,
                    comm: process.comm.clone(),
                    copies: Vec::new(),
                };
                (*pid, report)
            })
            .collect();
        for (key, stat) in &snapshot.rows {
            if let Some(process) = processes.get_mut(&key.pid) {
                process.copies.push(CopyReport::new(key, stat));
            }
        }
        processes
            .retain(|pid, process| !process.copies.is_empty() || snapshot.processes[pid].named);
        Self {
            schema: SCHEMA,
            duration_s: snapshot.duration.as_secs_f64(),
            processes: processes.into_values().collect(),
            lost: snapshot.lost_total(),
            overhead: Overhead {
                calls: snapshot.probe_pairs,
                pair_ns,
            },
        }
    }
}

impl CopyReport {
    fn new(key: &CopyKey, stat: &Stat) -> Self {
        Self {
            function: COPY_FNS
                .get(key.function as usize)
                .map_or("unknown", |function| function.name),
            direction: Direction::from_raw(key.direction).name(),
            memory: MemoryKind::from_raw(key.memory).name(),
            size_class_bytes: size_class_bytes(key.size_class),
            calls: stat.calls,
            errors: stat.errors,
            bytes: stat.bytes,
            total_ns: stat.total_ns,
            latency_ns: Latency::of(stat),
            histogram: stat.histogram(),
        }
    }
}
