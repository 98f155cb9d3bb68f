//! Counts by process, where they are asked for: of a bounded number of processes, all others as one.
//!
//! A process that has ended stays for some scrapes, then its row goes. Rows are beside the node's sums, not part of them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::totals::Counts;
use crate::histogram::Stat;

/// Processes that have a row at once.
pub const MOST: usize = 64;
/// How long a process's last counts can be fetched, unless others need the room.
const KEPT: Duration = Duration::from_secs(300);

/// A process's counts.
#[derive(Debug)]
pub struct Row {
    /// Whose it was when it copied first.
    pub workload: String,
    /// In all directions and memory kinds.
    pub counts: Counts,
    ended: Option<Instant>,
}

/// All rows.
#[derive(Debug, Default)]
pub struct ByPid {
    rows: BTreeMap<u32, Row>,
    /// What was copied by processes while they had no row.
    pub other: Counts,
}

impl ByPid {
    /// Adds what a process has counted since it was last added.
    pub fn add(&mut self, pid: u32, workload: &str, grown: &Stat) {
        // A process that has ended copies no more: this is another one of the same id.
        if self.rows.get(&pid).is_some_and(|row| row.ended.is_some()) {
            self.rows.remove(&pid);
        }
        if !self.rows.contains_key(&pid) && !self.has_room() {
            self.other.add(grown);
            return;
        }
        let row = self.rows.entry(pid).or_insert_with(|| Row {
            workload: workload.to_owned(),
            counts: Counts::default(),
            ended: None,
        });
        row.counts.add(grown);
    }

    /// A process has ended, and everything it counted was added.
    pub fn end(&mut self, pid: u32) {
        if let Some(row) = self.rows.get_mut(&pid) {
            row.ended.get_or_insert_with(Instant::now);
        }
    }

    /// Takes out what could be fetched for long enough.
    pub fn sweep(&mut self) {
        self.rows
            .retain(|_, row| row.ended.is_none_or(|ended| ended.elapsed() < KEPT));
    }

    /// All rows by process.
    pub fn rows(&self) -> impl Iterator<Item = (u32, &Row)> {
        self.rows.iter().map(|(pid, row)| (*pid, row))
    }

    /// Whether there is room for another; the process that ended first makes it.
    fn has_room(&mut self) -> bool {
        if self.rows.len() < MOST {
            return true;
        }
        let ended = self
            .rows
            .iter()
            .filter_map(|(pid, row)| Some((row.ended?, *pid)));
        match ended.min() {
            Some((_, pid)) => self.rows.remove(&pid).is_some(),
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(count: u64) -> Stat {
        let mut stat = Stat::default();
        for _ in 0..count {
            stat.record(100, 5000);
        }
        stat
    }

    fn sum(by_pid: &ByPid) -> u64 {
        let rows = by_pid.rows().map(|(_, row)| row.counts.calls);
        rows.sum::<u64>() + by_pid.other.calls
    }

    #[test]
    fn who_finds_no_room_counts_as_other() {
        let mut by_pid = ByPid::default();
        let most = MOST as u32;
        for pid in 0..most + 5 {
            by_pid.add(pid, "comm/a", &calls(2));
        }
        assert_eq!((by_pid.rows().count(), by_pid.other.calls), (MOST, 10));
        // One ends: the next to copy has its place.
        by_pid.end(7);
        by_pid.end(9);
        by_pid.add(most, "comm/b", &calls(3));
        assert_eq!((by_pid.rows().count(), by_pid.other.calls), (MOST, 10));
        assert!(by_pid.rows().all(|(pid, _)| pid != 7), "it ended first");
        let (_, row) = by_pid.rows().find(|(pid, _)| *pid == most).expect("a row");
        assert_eq!((&*row.workload, row.counts.calls), ("comm/b", 3));
        // What had a row keeps it while it lives.
        by_pid.add(1, "comm/a", &calls(1));
        assert_eq!(
            by_pid
                .rows()
                .find(|(pid, _)| *pid == 1)
                .expect("a row")
                .1
                .counts
                .calls,
            3
        );
        assert_eq!(sum(&by_pid), 2 * (u64::from(most) + 5) - 2 + 3 + 1);
    }

    #[test]
    fn a_later_process_of_the_same_id_begins_anew() {
        let mut by_pid = ByPid::default();
        by_pid.add(5, "comm/a", &calls(9));
        by_pid.end(5);
        by_pid.sweep();
        assert_eq!(by_pid.rows().count(), 1, "it can still be fetched");
        by_pid.add(5, "comm/b", &calls(1));
        let (_, row) = by_pid.rows().next().expect("a row");
        assert_eq!((&*row.workload, row.counts.calls), ("comm/b", 1));
    }
}
