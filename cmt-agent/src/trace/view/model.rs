//! What the view shows: the counts of a trace as rates, by process and by class. Knows nothing of terminals.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use cmt_common::api::{Direction, MemoryKind};
use cmt_common::event::CopyKey;

use crate::histogram::Stat;
use crate::trace::Snapshot;

/// Seconds of the past that are kept.
pub const HISTORY_S: usize = 60;
/// A shorter time says nothing of rates.
const SHORTEST: Duration = Duration::from_millis(50);

/// What a line stands for: a process, or all of them.
pub type Who = Option<u32>;

/// The time that figures are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Since the last look, a second ago.
    Second,
    /// Since the start of the trace.
    Start,
}

/// The counts of one moment, and the way there.
#[derive(Debug)]
pub struct Moment {
    /// Since the start.
    pub whole: Snapshot,
    /// Since the moment before.
    second: Snapshot,
    /// GB/s by second, the latest last; shorter than [`HISTORY_S`] at first.
    history: BTreeMap<Who, VecDeque<f32>>,
}

/// One line of the list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// Which process; `None` is their sum.
    pub who: Who,
    /// Its name.
    pub comm: String,
    /// Whether it has ended.
    pub ended: bool,
    /// Calls a second.
    pub calls_per_s: f64,
    /// Bytes to the GPU, in 1e9 a second of wall time.
    pub htod_gb_per_s: f64,
    /// Bytes from the GPU, likewise.
    pub dtoh_gb_per_s: f64,
    /// Time in copies by wall time; threads add up.
    pub copying: f64,
    /// Pageable bytes by all bytes between host and GPU.
    pub pageable: f64,
}

/// What the table tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class {
    /// Way of the bytes.
    pub direction: Direction,
    /// [`MemoryKind`] of the host side as a number.
    pub memory: u8,
    /// As `cmt_common::histogram` counts them.
    pub size_class: u8,
}

impl Class {
    /// The name of its memory.
    pub fn memory(self) -> &'static str {
        MemoryKind::from_raw(self.memory).name()
    }
}

#[derive(Clone, Copy, Default)]
struct Sums {
    calls: u64,
    total_ns: u64,
    htod: u64,
    dtoh: u64,
    pageable: u64,
}

impl Sums {
    fn add(&mut self, key: &CopyKey, stat: &Stat) {
        self.calls += stat.calls;
        self.total_ns += stat.total_ns;
        match Direction::from_raw(key.direction) {
            Direction::HtoD => self.htod += stat.bytes,
            Direction::DtoH => self.dtoh += stat.bytes,
            _ => return,
        }
        if MemoryKind::from_raw(key.memory) == MemoryKind::Pageable {
            self.pageable += stat.bytes;
        }
    }
}

impl Moment {
    /// What `whole` shows, after what was shown before.
    pub fn new(whole: Snapshot, before: Option<&Self>) -> Self {
        let second = match before {
            Some(before) => whole.since(&before.whole),
            None => whole.clone(),
        };
        let mut history = before.map_or_else(BTreeMap::new, |before| before.history.clone());
        if second.duration >= SHORTEST {
            let seconds = second.duration.as_secs_f64();
            let past = history.get(&None).map_or(0, VecDeque::len);
            let sums = sums(&second);
            history.retain(|who, _| who.is_none_or(|pid| whole.processes.contains_key(&pid)));
            for who in sums.keys().copied().chain([None]) {
                // Of one that is new, the past is known: it made no copy.
                history.entry(who).or_insert_with(|| vec![0.0; past].into());
            }
            for (who, rates) in &mut history {
                let bytes = sums.get(who).map_or(0, |sums| sums.htod + sums.dtoh);
                rates.push_back((bytes as f64 / 1e9 / seconds) as f32);
                if rates.len() > HISTORY_S {
                    rates.pop_front();
                }
            }
        }
        Self {
            whole,
            second,
            history,
        }
    }

    /// The counts of a window.
    pub fn counts(&self, window: Window) -> &Snapshot {
        match window {
            Window::Second => &self.second,
            Window::Start => &self.whole,
        }
    }

    /// GB/s of the past, the latest last.
    pub fn history(&self, who: Who) -> Vec<f32> {
        match self.history.get(&who) {
            Some(rates) => rates.iter().copied().collect(),
            // It has made no copy yet.
            None => vec![0.0; self.history.get(&None).map_or(0, VecDeque::len)],
        }
    }

    /// The sum of all, then every process that was named, has a CUDA library, or has copied, by id.
    pub fn rows(&self, window: Window) -> Vec<Row> {
        let counts = self.counts(window);
        let sums = sums(counts);
        let row = |who, comm: &str, ended| {
            let sums: Sums = sums.get(&who).copied().unwrap_or_default();
            let mut row = Row {
                who,
                comm: comm.to_owned(),
                ended,
                ..Row::default()
            };
            if counts.duration >= SHORTEST {
                let seconds = counts.duration.as_secs_f64();
                row.calls_per_s = sums.calls as f64 / seconds;
                row.htod_gb_per_s = sums.htod as f64 / 1e9 / seconds;
                row.dtoh_gb_per_s = sums.dtoh as f64 / 1e9 / seconds;
                row.copying = sums.total_ns as f64 / 1e9 / seconds;
                row.pageable = sums.pageable as f64 / (sums.htod + sums.dtoh).max(1) as f64;
            }
            row
        };
        let copied: std::collections::BTreeSet<u32> =
            self.whole.rows.keys().map(|key| key.pid).collect();
        let processes = self.whole.processes.iter().filter(|(pid, process)| {
            process.named || !process.libraries.is_empty() || copied.contains(pid)
        });
        let mut rows = vec![row(None, "all", false)];
        rows.extend(processes.map(|(pid, process)| {
            // In a trace of all processes, only those that live are looked at.
            let ended = process.ended || !process.named && process.libraries.is_empty();
            row(Some(*pid), &process.comm, ended)
        }));
        rows
    }

    /// The classes of a process, or of all: of one size class, or of every size.
    pub fn classes(&self, window: Window, who: Who, size: Option<u8>) -> BTreeMap<Class, Stat> {
        let mut classes = BTreeMap::<Class, Stat>::new();
        for (key, stat) in &self.counts(window).rows {
            if who.is_none_or(|pid| pid == key.pid)
                && size.is_none_or(|size| size == key.size_class)
            {
                let class = Class {
                    direction: Direction::from_raw(key.direction),
                    memory: key.memory,
                    size_class: key.size_class,
                };
                classes.entry(class).or_default().merge(stat);
            }
        }
        classes
    }

    /// The size classes that a process has used since the start.
    pub fn sizes(&self, who: Who) -> Vec<u8> {
        let keys = self.whole.rows.keys();
        let mut sizes: Vec<u8> = keys
            .filter(|key| who.is_none_or(|pid| pid == key.pid))
            .map(|key| key.size_class)
            .collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

fn sums(counts: &Snapshot) -> BTreeMap<Who, Sums> {
    let mut sums = BTreeMap::<Who, Sums>::new();
    for (key, stat) in &counts.rows {
        sums.entry(None).or_default().add(key, stat);
        sums.entry(Some(key.pid)).or_default().add(key, stat);
    }
    sums
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::time::Instant;

    use cmt_common::histogram::size_class_of;

    use crate::trace::Process;

    pub fn key(pid: u32, direction: Direction, memory: MemoryKind, bytes: u64) -> CopyKey {
        CopyKey {
            pid,
            function: 0,
            direction: direction as u8,
            memory: memory as u8,
            size_class: size_class_of(bytes),
            backing: 0,
            _pad: [0; 6],
        }
    }

    pub fn process(comm: &str) -> Process {
        Process {
            comm: comm.to_owned(),
            libraries: vec!["libcuda.so.1".into()],
            ..Process::default()
        }
    }

    /// A trace that has run for `seconds` and that has seen nothing yet.
    pub fn nothing(start: Instant, seconds: u64) -> Snapshot {
        let duration = Duration::from_secs(seconds);
        Snapshot {
            at: start + duration,
            duration,
            ..Snapshot::empty()
        }
    }

    pub fn calls(count: u64, bytes: u64, ns: u64) -> Stat {
        let mut stat = Stat::default();
        for _ in 0..count {
            stat.record(bytes, ns);
        }
        stat
    }

    #[test]
    fn rates_are_those_of_the_window() {
        let start = Instant::now();
        let (pageable, pinned) = (MemoryKind::Pageable, MemoryKind::Pinned);
        let mut early = nothing(start, 8);
        early.processes.insert(7, process("python3"));
        early.processes.insert(9, process("idle"));
        early.processes.insert(1, Process::default());
        let up = key(7, Direction::HtoD, pageable, 1 << 20);
        early.rows.insert(up, calls(8, 1 << 20, 1_000_000));
        let mut late = Snapshot {
            at: start + Duration::from_secs(10),
            duration: Duration::from_secs(10),
            ..early.clone()
        };
        late.rows.insert(up, calls(28, 1 << 20, 1_000_000));
        let down = key(7, Direction::DtoH, pinned, 1 << 20);
        late.rows.insert(down, calls(60, 1 << 20, 2_000_000));

        let early = Moment::new(early, None);
        let late = Moment::new(late, Some(&early));
        let rows = late.rows(Window::Second);
        let who: Vec<Who> = rows.iter().map(|row| row.who).collect();
        assert_eq!(
            who,
            [None, Some(7), Some(9)],
            "and not the one without CUDA"
        );
        // Two seconds: 20 copies of a millisecond to the GPU, 60 of two from it.
        let mebibyte_gb = (1u64 << 20) as f64 / 1e9;
        for row in &rows[..2] {
            assert_eq!(row.calls_per_s, 40.0);
            assert!((row.htod_gb_per_s - 10.0 * mebibyte_gb).abs() < 1e-9);
            assert!((row.dtoh_gb_per_s - 30.0 * mebibyte_gb).abs() < 1e-9);
            assert_eq!((row.copying, row.pageable), (0.07, 0.25));
        }
        assert_eq!(rows[2].calls_per_s, 0.0);
        let whole = &late.rows(Window::Start)[1];
        assert_eq!(whole.calls_per_s, 8.8);
        assert_eq!((whole.pageable * 88.0).round(), 28.0);

        let classes = late.classes(Window::Second, Some(7), None);
        let counted: Vec<_> = classes
            .iter()
            .map(|(class, stat)| (class.direction, stat.calls))
            .collect();
        assert_eq!(counted, [(Direction::HtoD, 20), (Direction::DtoH, 60)]);
        assert_eq!(late.sizes(None), [size_class_of(1 << 20)]);
        assert!(late.classes(Window::Start, Some(9), None).is_empty());
        assert!(late.classes(Window::Start, None, Some(1)).is_empty());
    }

    #[test]
    fn the_past_is_a_minute_long_and_begins_with_the_trace() {
        let start = Instant::now();
        let up = key(7, Direction::HtoD, MemoryKind::Pageable, 1 << 20);
        let mut moment = Moment::new(nothing(start, 0), None);
        assert_eq!(moment.history(None).len(), 0, "no time has passed");
        for second in 1..=70 {
            let mut whole = nothing(start, second);
            if second > 65 {
                whole.processes.insert(7, process("late"));
                whole.rows.insert(up, calls(second - 65, 1 << 20, 1000));
            }
            moment = Moment::new(whole, Some(&moment));
        }
        for who in [None, Some(7)] {
            let past = moment.history(who);
            assert_eq!(past.len(), HISTORY_S);
            assert!(past[..55].iter().all(|rate| *rate == 0.0));
            assert!(past[55..].iter().all(|rate| *rate > 0.001));
        }
    }
}
