//! What of the counts of single processes is in the totals already.
//!
//! Only differences are added, so that totals grow whatever becomes of a process's name or id, and every call is in them once:
//! whether it was seen while its process lived, after its end, or in parts.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::{Duration, Instant};

use cmt_common::event::CopyKey;

use super::totals::Totals;
use super::workloads;
use crate::histogram::Stat;
use crate::link::Link;
use crate::trace::Process;
use crate::trace::gain::{Gain, Means};

/// What could be gained is estimated from so long a time, or from so many classes, whatever comes first.
const ESTIMATE_EVERY: Duration = Duration::from_secs(10);
const MOST_ESTIMATED: usize = 1024;

/// What was added already.
pub struct Ledger {
    /// Of the processes that live.
    added: BTreeMap<CopyKey, Stat>,
    interval: Interval,
    /// Processes to which attach has nothing more to give, by the last two looks: one of them may have ended since.
    attached: [BTreeSet<u32>; 2],
}

/// What was counted since the last estimate.
struct Interval {
    begun: Instant,
    rows: BTreeMap<CopyKey, Stat>,
    /// Workload and CPUs of the processes.
    processes: BTreeMap<u32, (String, u32)>,
}

impl Ledger {
    /// Nothing was.
    pub fn new() -> Self {
        Self {
            added: BTreeMap::new(),
            interval: Interval::begin(),
            attached: Default::default(),
        }
    }

    /// These processes are attached to, or may be.
    pub fn see_attached(&mut self, pids: BTreeSet<u32>) {
        self.attached.swap(0, 1);
        self.attached[0] = pids;
    }

    /// Adds what was counted since the last time.
    pub fn add(
        &mut self,
        ended: BTreeMap<CopyKey, Stat>,
        rows: BTreeMap<CopyKey, Stat>,
        processes: &BTreeMap<u32, Process>,
        totals: &mut Totals,
    ) {
        // A process that lives may have got the id of one that has ended.
        for (key, stat) in &ended {
            let before = self.added.remove(key);
            self.add_row(totals, key, stat, before.as_ref(), processes);
        }
        if let Some(by_pid) = &mut totals.by_pid {
            ended.keys().for_each(|key| by_pid.end(key.pid));
            by_pid.sweep();
        }
        for (key, stat) in rows {
            let before = self.added.remove(&key);
            self.add_row(totals, &key, &stat, before.as_ref(), processes);
            self.added.insert(key, stat);
        }
        self.interval.close_if_over(totals);
    }

    /// All that a process that lives has counted so far.
    pub fn of_process(&self, pid: u32) -> BTreeMap<CopyKey, Stat> {
        let rows = self.added.range(CopyKey::of_process(pid));
        rows.map(|(key, stat)| (*key, stat.clone())).collect()
    }

    fn add_row(
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
        if self.attached.iter().any(|pids| pids.contains(&key.pid)) {
            return;
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use cmt_common::histogram::size_class_of;

    fn key(pid: u32) -> CopyKey {
        CopyKey {
            pid,
            function: 0,
            direction: 1,
            memory: 0,
            size_class: size_class_of(4096),
            backing: 0,
            _pad: [0; 6],
        }
    }

    #[test]
    fn what_is_attached_is_counted_but_not_estimated() {
        let mut ledger = Ledger::new();
        let mut totals = Totals::new(4, Duration::MAX);
        let mut add = |ledger: &mut Ledger, count| {
            ledger.add(
                BTreeMap::new(),
                row(1, count),
                &BTreeMap::new(),
                &mut totals,
            );
            let estimated = ledger.interval.rows.values().map(Stat::count).sum::<u64>();
            (calls(&totals), estimated)
        };
        assert_eq!(add(&mut ledger, 10), (10, 10));
        ledger.see_attached([1].into());
        assert_eq!(add(&mut ledger, 15), (15, 10));
        // It may have ended since.
        ledger.see_attached(BTreeSet::new());
        assert_eq!(add(&mut ledger, 18), (18, 10));
        ledger.see_attached(BTreeSet::new());
        assert_eq!(add(&mut ledger, 20), (20, 12));
    }

    /// One process with so many calls.
    fn row(pid: u32, calls: u64) -> BTreeMap<CopyKey, Stat> {
        let mut stat = Stat::default();
        for _ in 0..calls {
            stat.record(4096, 5000);
        }
        [(key(pid), stat)].into()
    }

    fn calls(totals: &Totals) -> u64 {
        totals.flows.values().map(|counts| counts.calls).sum()
    }

    #[test]
    fn every_call_is_added_once() {
        let mut ledger = Ledger::new();
        let mut totals = Totals::new(4, Duration::MAX);
        let none = BTreeMap::new;
        let mut whole = 0;
        for (ended, live, grown) in [
            (none(), row(1, 10), 10),
            (none(), row(1, 10), 0),
            (none(), row(1, 25), 15),
            // It ends, with calls that were not seen before; another begins.
            (row(1, 30), row(2, 7), 12),
            // One that nobody saw alive.
            (row(3, 4), row(2, 7), 4),
            // It ends, and its id is another's at once.
            (row(2, 8), row(2, 5), 6),
            (row(2, 5), none(), 0),
            (none(), none(), 0),
        ] {
            ledger.add(ended, live, &BTreeMap::new(), &mut totals);
            whole += grown;
            assert_eq!(calls(&totals), whole);
        }
        assert!(ledger.added.is_empty());
        let latencies: u64 = totals.classes.values().map(Stat::count).sum();
        assert_eq!(latencies, whole);
    }

    #[test]
    fn what_could_be_gained_is_added_before_it_takes_much_room() {
        let mut ledger = Ledger::new();
        let mut totals = Totals::new(4, Duration::MAX);
        for pid in 10..10 + 3 * MOST_ESTIMATED as u32 {
            let known = Process {
                comm: "crowd".into(),
                libraries: vec!["libcuda.so.1".into()],
                threads: 1,
                ..Process::default()
            };
            let processes = [(pid, known)].into();
            ledger.add(row(pid, 1), BTreeMap::new(), &processes, &mut totals);
            assert!(ledger.interval.rows.len() < MOST_ESTIMATED);
        }
        // With one CPU there is nothing to gain, which is an estimate.
        assert_eq!(totals.recoverable_s.get("comm/crowd"), Some(&0.0));
    }
}
