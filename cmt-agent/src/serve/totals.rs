//! What a node has counted in all, folded so that its size does not depend on how many processes there were.
//!
//! Everything here only grows; only what goes by a name of a workload may go by another at once. Knows nothing of processes that live and end (that is `node`) nor of formats.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cmt_common::api::{COPY_FNS, Direction, MemoryKind};
use cmt_common::event::{CopyKey, LOST_REASONS};
use cmt_common::histogram::size_class_bytes;

use super::buckets::CLASSIC_SERIES;
use super::by_pid::ByPid;
use super::policy::{ACTIONS, Actions, MOST_ACTIONS};
use super::workloads::{FORMER, Workloads};
use crate::histogram::Stat;

/// Workloads that have a name unless another number is asked for.
pub const MOST_WORKLOADS: usize = 32;
/// Histograms with a size class of their own. HtoD and DtoH by pageable and pinned memory and all sizes are 44, DtoD 11.
const MOST_CLASSES: usize = 57;
/// Histograms for what is beyond, one a direction.
const OVERFLOW_CLASSES: usize = 5;
/// Directions and memory kinds that a workload uses, on average.
const FLOWS_PER_WORKLOAD: usize = 4;
/// Directions and memory kinds there are.
const FLOWS: usize = 5 * 4;
/// Counters of each flow.
const FLOW_SERIES: usize = 5;
/// Everything that has no more than one series, the reasons of losses among them.
const SINGLE_SERIES: usize = 32;

/// Series of a node stay below, unless more workloads are asked for.
const MOST_SERIES: usize = 2000;
const _: () = assert!(
    (MOST_CLASSES + OVERFLOW_CLASSES) * CLASSIC_SERIES
        + (MOST_WORKLOADS * FLOWS_PER_WORKLOAD + FLOWS) * FLOW_SERIES
        + MOST_WORKLOADS
        + 2
        + MOST_ACTIONS
        + ACTIONS
        + COPY_FNS.len()
        + 1
        + SINGLE_SERIES
        < MOST_SERIES
);

/// Copies of which latencies are shown together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class {
    /// Which way.
    pub direction: Direction,
    /// Of the host side.
    pub memory: &'static str,
    /// The smallest size, a power of four; `None` for the rest of a direction.
    pub size_bytes: Option<u64>,
}

/// Copies of one workload that are counted together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flow {
    /// Whose.
    pub workload: Arc<str>,
    /// Which way.
    pub direction: Direction,
    /// Of the host side.
    pub memory: &'static str,
}

/// What is counted of a flow.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// All calls, failed ones included.
    pub calls: u64,
    /// Calls that returned an error.
    pub errors: u64,
    /// Bytes copied.
    pub bytes: u64,
    /// Time in the calls.
    pub total_ns: u64,
    /// Time in waits right behind asynchronous ones.
    pub wait_ns: u64,
}

impl Counts {
    /// Adds what copies have counted since they were last added.
    pub fn add(&mut self, grown: &Stat) {
        self.calls += grown.calls;
        self.errors += grown.errors;
        self.bytes = self.bytes.saturating_add(grown.bytes);
        self.total_ns += grown.total_ns;
        self.wait_ns += grown.wait_ns;
    }

    fn merge(&mut self, other: &Self) {
        self.calls += other.calls;
        self.errors += other.errors;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.total_ns += other.total_ns;
        self.wait_ns += other.wait_ns;
    }
}

/// Pushes to a collector.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pushes {
    /// Those that were tried.
    pub all: u64,
    /// Of those: failed.
    pub failed: u64,
}

/// All counters of a node.
#[derive(Debug)]
pub struct Totals {
    /// Latencies.
    pub classes: BTreeMap<Class, Stat>,
    /// Calls and bytes.
    pub flows: BTreeMap<Flow, Counts>,
    /// Calls by name.
    pub functions: BTreeMap<&'static str, u64>,
    /// Seconds that attach would have given back, by workload.
    pub recoverable_s: BTreeMap<Arc<str>, f64>,
    /// What could not be recorded.
    pub lost: [u64; LOST_REASONS],
    /// Times that a pair of probes fired.
    pub probe_pairs: u64,
    /// What one costs, where that is known.
    pub pair_ns: Option<u64>,
    /// Processes that are attached now, where that may be looked at.
    pub attached: Option<usize>,
    /// Processes that map a CUDA library now.
    pub traced: usize,
    /// What was done by the policy, by workload and action; `None` without one.
    pub actions: Option<Actions>,
    /// Pushes so far; `None` where there are to be none.
    pub pushes: Option<Pushes>,
    /// The same by process, where that is asked for.
    pub by_pid: Option<ByPid>,
    workloads: Workloads,
    most_flows: usize,
}

impl Totals {
    /// Nothing yet; at most so many workloads will be told apart at once, each for so long after its last process.
    pub fn new(most_workloads: usize, names_kept: Duration) -> Self {
        Self {
            classes: BTreeMap::new(),
            flows: BTreeMap::new(),
            functions: BTreeMap::new(),
            recoverable_s: BTreeMap::new(),
            lost: [0; LOST_REASONS],
            probe_pairs: 0,
            pair_ns: None,
            attached: None,
            traced: 0,
            actions: None,
            pushes: None,
            by_pid: None,
            workloads: Workloads::new(most_workloads, names_kept),
            most_flows: most_workloads * FLOWS_PER_WORKLOAD,
        }
    }

    /// Adds what copies of `workload` under `key` have counted since they were last added.
    pub fn add(&mut self, key: &CopyKey, workload: &str, grown: &Stat) {
        let direction = Direction::from_raw(key.direction);
        let memory = memory(key);
        let class = Class {
            direction,
            memory,
            size_bytes: Some(size_class(key)),
        };
        self.class(class).merge(grown);
        let flow = Flow {
            workload: self.name(workload),
            direction,
            memory,
        };
        self.flow(flow).add(grown);
        if let Some(by_pid) = &mut self.by_pid {
            by_pid.add(key.pid, workload, grown);
        }
        let function = COPY_FNS
            .get(usize::from(key.function))
            .map_or("unknown", |function| function.name);
        *self.functions.entry(function).or_default() += grown.calls;
    }

    /// Adds what attach would have given back to `workload`.
    pub fn add_recoverable(&mut self, workload: &str, seconds: f64) {
        let workload = self.workloads.named_if_room(workload, Instant::now());
        *self.recoverable_s.entry(workload).or_default() += seconds;
    }

    /// Takes over counters that the kernel keeps. Those of losses include guesses that may turn out too high.
    pub fn raise(&mut self, lost: &[u64; LOST_REASONS], probe_pairs: u64) {
        for (own, now) in self.lost.iter_mut().zip(lost) {
            *own = (*own).max(*now);
        }
        self.probe_pairs = self.probe_pairs.max(probe_pairs);
    }

    /// A process of `workload` lives.
    pub fn see(&mut self, workload: &str) {
        self.workloads.see(workload, Instant::now());
    }

    fn name(&mut self, workload: &str) -> Arc<str> {
        let (name, given_up) = self.workloads.named(workload, Instant::now());
        if let Some(given_up) = given_up {
            self.fold(&given_up);
        }
        name
    }

    /// Moves all that counts under a name to that of former workloads. The number of flows does not grow by it.
    fn fold(&mut self, name: &Arc<str>) {
        let former: Arc<str> = FORMER.into();
        let of_name = |flow: &Flow, _: &mut Counts| flow.workload == *name;
        let moved: Vec<_> = self.flows.extract_if(.., of_name).collect();
        for (flow, counts) in moved {
            let workload = Arc::clone(&former);
            let sum = self.flows.entry(Flow { workload, ..flow }).or_default();
            sum.merge(&counts);
        }
        if let Some(seconds) = self.recoverable_s.remove(name) {
            *self.recoverable_s.entry(Arc::clone(&former)).or_default() += seconds;
        }
    }

    fn class(&mut self, class: Class) -> &mut Stat {
        let full = self.classes.len() >= MOST_CLASSES;
        let class = match full && !self.classes.contains_key(&class) {
            false => class,
            true => Class {
                memory: MemoryKind::Unknown.name(),
                size_bytes: None,
                ..class
            },
        };
        self.classes.entry(class).or_default()
    }

    fn flow(&mut self, flow: Flow) -> &mut Counts {
        let full = self.flows.len() >= self.most_flows;
        let flow = match full && !self.flows.contains_key(&flow) {
            false => flow,
            true => Flow {
                workload: self.workloads.other(),
                ..flow
            },
        };
        self.flows.entry(flow).or_default()
    }
}

/// The kind of the host side.
fn memory(key: &CopyKey) -> &'static str {
    match MemoryKind::from_raw(key.memory) {
        MemoryKind::Device => MemoryKind::Unknown.name(),
        kind => kind.name(),
    }
}

/// The smallest size of a copy's class: 0, 4 KiB, and fourfold up to 1 GiB.
fn size_class(key: &CopyKey) -> u64 {
    const SMALLEST: u64 = 4096;
    const LARGEST: u64 = 1 << 30;
    match size_class_bytes(key.size_class) {
        bytes if bytes < SMALLEST => 0,
        bytes => (1 << (bytes.ilog2() & !1)).min(LARGEST),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cmt_common::histogram::size_class_of;

    fn key(pid: u32, direction: u8, memory: u8, bytes: u64) -> CopyKey {
        CopyKey {
            pid,
            function: (pid % COPY_FNS.len() as u32) as u16,
            direction,
            memory,
            size_class: size_class_of(bytes),
            backing: 0,
            _pad: [0; 6],
        }
    }

    fn stat(bytes: u64) -> Stat {
        let mut stat = Stat::default();
        stat.record(bytes, 5000);
        stat
    }

    #[test]
    fn sizes_are_powers_of_four() {
        for (bytes, class) in [
            (0, 0),
            (1, 0),
            (4095, 0),
            (4096, 4096),
            (16383, 4096),
            (16384, 16384),
            (1 << 20, 1 << 20),
            ((1 << 22) - 1, 1 << 20),
            (1 << 30, 1 << 30),
            (1 << 40, 1 << 30),
        ] {
            assert_eq!(size_class(&key(1, 1, 0, bytes)), class, "{bytes}");
        }
    }

    #[test]
    fn whatever_is_copied_by_whomever_series_are_bounded_and_sums_are_right() {
        let mut totals = Totals::new(MOST_WORKLOADS, Duration::MAX);
        let (mut calls, mut bytes) = (0, 0);
        for pid in 0..10_000 {
            let size = 1u64 << (pid % 33);
            let key = key(pid, (pid % 5) as u8, (pid / 5 % 5) as u8, size);
            // Some copy in all ways, and many once.
            let workload = format!("comm/{}", if pid % 2 == 0 { pid % 34 } else { pid });
            totals.add(&key, &workload, &stat(size));
            totals.add_recoverable(&workload, 0.5);
            calls += 1;
            bytes += size;
        }
        assert!(totals.classes.len() <= MOST_CLASSES + OVERFLOW_CLASSES);
        assert!(totals.flows.len() <= MOST_WORKLOADS * FLOWS_PER_WORKLOAD + FLOWS);
        assert!(totals.recoverable_s.len() <= MOST_WORKLOADS + 1);
        assert!(totals.functions.len() <= COPY_FNS.len() + 1);
        let sum = |of: fn(&Counts) -> u64| totals.flows.values().map(of).sum::<u64>();
        assert_eq!(
            (sum(|flow| flow.calls), sum(|flow| flow.bytes)),
            (calls, bytes)
        );
        let latencies: u64 = totals.classes.values().map(Stat::count).sum();
        assert_eq!(latencies, calls);
        assert_eq!(totals.functions.values().sum::<u64>(), calls);
        assert_eq!(totals.recoverable_s.values().sum::<f64>(), 5000.0);
    }

    #[test]
    fn names_come_and_go_and_nothing_is_lost_or_grows_without_bound() {
        let mut totals = Totals::new(MOST_WORKLOADS, Duration::ZERO);
        let mut largest = 0;
        for pod in 0..2000u32 {
            let workload = format!("pod/{pod}");
            for (direction, memory) in [(1, 0), (2, 0), (2, 1)] {
                totals.add(&key(pod, direction, memory, 4096), &workload, &stat(4096));
            }
            totals.add_recoverable(&workload, 0.5);
            largest = largest.max(totals.flows.len());
            // The newest one always has a name.
            let flows = totals.flows.iter();
            let own = flows.filter(|(flow, _)| *flow.workload == *workload);
            assert_eq!(own.map(|(_, counts)| counts.calls).sum::<u64>(), 3);
            let calls: u64 = totals.flows.values().map(|counts| counts.calls).sum();
            assert_eq!(calls, 3 * u64::from(pod + 1));
        }
        assert!(largest <= MOST_WORKLOADS * FLOWS_PER_WORKLOAD + FLOWS);
        assert!(totals.recoverable_s.len() <= MOST_WORKLOADS + 2);
        assert_eq!(totals.recoverable_s.values().sum::<f64>(), 1000.0);
    }

    #[test]
    fn absurd_sizes_are_no_overflow() {
        let mut totals = Totals::new(1, Duration::MAX);
        for bytes in [u64::MAX, 1, u64::MAX] {
            totals.add(&key(1, 1, 0, bytes), "comm/liar", &stat(bytes));
        }
        let counts = totals.flows.values().next().expect("a flow");
        assert_eq!((counts.calls, counts.bytes), (3, u64::MAX));
    }

    #[test]
    fn losses_that_turn_out_smaller_do_not_shrink() {
        let mut totals = Totals::new(1, Duration::MAX);
        totals.raise(&[1, 2, 70, 0, 0], 10);
        totals.raise(&[1, 3, 0, 0, 0], 11);
        assert_eq!((totals.lost, totals.probe_pairs), ([1, 3, 70, 0, 0], 11));
    }
}
