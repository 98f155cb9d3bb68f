//! The report of a trace: the object that `--json` prints (`cmt/trace/1`) and that the text is drawn from.

use std::collections::{BTreeMap, BTreeSet};

use cmt_common::api::{Backing, COPY_FNS, Direction, MemoryKind};
use cmt_common::event::CopyKey;
use cmt_common::histogram::size_class_bytes;
use serde::Serialize;

use super::Snapshot;
use super::gain::Gain;
use crate::histogram::Stat;
use crate::link::Link;
use crate::workload::Workload;

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
    /// True where some of the calls cost more: functions that do not begin with an instruction that the kernel emulates.
    pub at_least: bool,
}

/// One process.
#[derive(Clone, Debug, Serialize)]
pub struct ProcessReport {
    /// Process id.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Whom it belongs to: container, pod, unit.
    pub workload: Workload,
    /// What `cmt attach` would give back.
    pub gain: Gain,
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
    /// What pageable host memory is made of: `anonymous`, `huge`, `file`, `shared`, `untouched` when the call began; `unknown`
    /// for other memory, and where page tables cannot be read.
    pub backing: &'static str,
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
    /// Asynchronous calls behind which the thread waited for their stream, with no other copy in between.
    pub waited: u64,
    /// Time in those waits: with `total_ns` it is what the callers felt.
    pub wait_ns: u64,
    /// From the beginning of those calls to the end of their waits.
    pub until_ns: u64,
    /// What the last failed call returned; null where none failed.
    pub last_error: Option<u64>,
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
        let link = Link::best();
        let seconds = snapshot.duration.as_secs_f64();
        let copied: BTreeSet<u32> = snapshot.rows.keys().map(|key| key.pid).collect();
        let mut processes: BTreeMap<u32, ProcessReport> = snapshot
            .processes
            .iter()
            .filter(|(pid, process)| process.named || copied.contains(pid))
            .map(|(pid, process)| {
                let report = ProcessReport {
                    pid: *pid,
                    comm: process.comm.clone(),
                    workload: process.workload.clone(),
                    gain: Gain::of_process(snapshot, *pid, link.as_ref()),
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
        Self {
            schema: SCHEMA,
            duration_s: seconds,
            processes: processes.into_values().collect(),
            lost: snapshot.lost_total(),
            overhead: Overhead {
                calls: snapshot.probe_pairs,
                pair_ns,
                at_least: snapshot.single_stepped,
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
            backing: Backing::from_raw(key.backing).name(),
            size_class_bytes: size_class_bytes(key.size_class),
            calls: stat.calls,
            errors: stat.errors,
            bytes: stat.bytes,
            total_ns: stat.total_ns,
            waited: stat.waited,
            wait_ns: stat.wait_ns,
            until_ns: stat.until_ns,
            last_error: (stat.errors > 0).then_some(stat.last_error),
            latency_ns: Latency::of(stat),
            histogram: stat.histogram(),
        }
    }
}
