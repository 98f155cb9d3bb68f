//! Before and after, by direction and size class: what `cmt attach` prints.
//!
//! Knows nothing of how the numbers were measured. Only copies with pageable or unknown host memory are compared: the
//! others go to the original function on both sides.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use cmt_common::api::{Direction, MemoryKind};
use cmt_common::control::{Plan, SIZE_CLASSES, size_class};
use cmt_common::event::CopyKey;
use cmt_common::histogram::{BUCKETS, bucket_bounds, bucket_of, size_class_bytes};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::histogram::Stat;
use crate::trace::Snapshot;

/// Classes of copies in one window of time.
#[derive(Clone, Debug, Default)]
pub struct Window {
    classes: BTreeMap<(Direction, u8), Stat>,
}

impl Window {
    /// The copies of one window that attaching touches: those of pageable memory, and those of which nothing is known.
    pub fn new(snapshot: &Snapshot) -> Self {
        let mut window = Self::default();
        for (key, stat) in &snapshot.rows {
            window.add(key, stat);
        }
        window
    }

    fn add(&mut self, key: &CopyKey, stat: &Stat) {
        let memory = MemoryKind::from_raw(key.memory);
        if matches!(memory, MemoryKind::Pageable | MemoryKind::Unknown) && stat.count() > 0 {
            let direction = Direction::from_raw(key.direction);
            self.classes
                .entry((direction, key.size_class))
                .or_default()
                .merge(stat);
        }
    }
}

/// One line of the comparison, as it stands in `cmt/attach/1`.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// HtoD, DtoH …
    pub direction: &'static str,
    /// Smallest size of the class, in bytes.
    pub size_class_bytes: u64,
    /// Calls in the first window.
    pub calls_before: u64,
    /// Calls in the second.
    pub calls_after: u64,
    /// Median latency in the first window; none without calls.
    pub p50_before_ns: Option<u64>,
    /// Median latency in the second.
    pub p50_after_ns: Option<u64>,
    /// 90th percentiles.
    pub p90_before_ns: Option<u64>,
    /// The same in the second window.
    pub p90_after_ns: Option<u64>,
    /// 99th percentiles.
    pub p99_before_ns: Option<u64>,
    /// The same in the second window.
    pub p99_after_ns: Option<u64>,
    /// Bytes by the time spent in the calls, in 1e9 bytes a second.
    pub gbps_before: Option<f64>,
    /// The same in the second window.
    pub gbps_after: Option<f64>,
    /// `gbps_after / gbps_before`; none where one window saw no such copies.
    pub speedup: Option<f64>,
    /// Time that a call was waited for after it had returned, as far as the trace tells the stream's waits from others; none
    /// without calls.
    pub wait_before_ns: Option<u64>,
    /// The same in the second window.
    pub wait_after_ns: Option<u64>,
    /// False where such copies were left to the original function: then any difference has other causes.
    pub staged: bool,
    /// Less than half of their bytes were staged: such a class may have lost by it, but no gain is counted.
    pub partly: bool,
    /// Whether a loss may come of the attach: by waiting for its turn a copy loses that is not staged in the end.
    #[serde(skip)]
    pub may_lose: bool,
    /// Whether a gain may come of it.
    #[serde(skip)]
    may_gain: bool,
}

/// How much less time copies of the first window would have taken at the rates of the second, in ns of their threads.
#[derive(Clone, Copy, Debug)]
struct Saved {
    /// In the calls.
    calls: f64,
    /// With what was waited for after them, as far as that takes away from the former: calls that return sooner behind
    /// other work only move a wait. Waits hold other work's time, too, so they are no loss by themselves.
    in_all: f64,
}

impl Saved {
    /// `None` where one window saw no such copies.
    fn of(before: &Stat, after: &Stat) -> Option<Self> {
        before.gb_per_s()?;
        after.gb_per_s().filter(|rate| *rate > 0.0)?;
        let share = before.bytes as f64 / after.bytes as f64;
        let less = |before: u64, after: u64| before as f64 - after as f64 * share;
        let calls = less(before.total_ns, after.total_ns);
        let waits = less(before.wait_ns, after.wait_ns);
        let in_all = calls.min((calls + waits).max(0.0));
        Some(Self { calls, in_all })
    }

    /// Whether most of it is waited for afterwards, and it is more than noise.
    fn is_moved(&self, before: &Stat) -> bool {
        self.calls > before.total_ns as f64 / 20.0 && self.in_all < self.calls / 2.0
    }
}

/// Bytes by direction (HtoD, DtoH) and size class.
pub type StagedBytes = [[u64; SIZE_CLASSES]; 2];

/// The comparison of two windows.
#[derive(Clone, Debug)]
pub struct Comparison {
    rows: Vec<(Row, Stat, Stat)>,
}

impl Comparison {
    /// Compares two windows: one row for each class that either of them saw.
    pub fn new(before: &Window, after: &Window) -> Self {
        let keys: std::collections::BTreeSet<_> = before
            .classes
            .keys()
            .chain(after.classes.keys())
            .copied()
            .collect();
        let class = |window: &Window, key| window.classes.get(key).cloned().unwrap_or_default();
        let rows = keys
            .iter()
            .map(|key| {
                let (before, after) = (class(before, key), class(after, key));
                let (gbps_before, gbps_after) = (before.gb_per_s(), after.gb_per_s());
                let row = Row {
                    direction: key.0.name(),
                    size_class_bytes: size_class_bytes(key.1),
                    calls_before: before.count(),
                    calls_after: after.count(),
                    p50_before_ns: before.quantile(0.5),
                    p50_after_ns: after.quantile(0.5),
                    p90_before_ns: before.quantile(0.9),
                    p90_after_ns: after.quantile(0.9),
                    p99_before_ns: before.quantile(0.99),
                    p99_after_ns: after.quantile(0.99),
                    gbps_before,
                    gbps_after,
                    speedup: gbps_before
                        .zip(gbps_after)
                        .map(|(before, after)| after / before),
                    wait_before_ns: before.wait_ns.checked_div(before.count()),
                    wait_after_ns: after.wait_ns.checked_div(after.count()),
                    staged: true,
                    partly: false,
                    may_lose: true,
                    may_gain: true,
                };
                (row, before, after)
            })
            .collect();
        Self { rows }
    }

    /// The same, with the classes marked that were left to the original function: by `plan`, or, where it is known how much was
    /// `staged` since the attach, in fact. Next to nothing is none.
    pub fn judged_by(mut self, plan: &Plan, staged: Option<&StagedBytes>) -> Self {
        for (row, _, after) in &mut self.rows {
            let to_host = row.direction == Direction::DtoH.name();
            let rows = match row.direction {
                _ if to_host => &plan.dtoh,
                direction if direction == Direction::HtoD.name() => &plan.htod,
                _ => continue,
            };
            let last = row.size_class_bytes.saturating_mul(2).saturating_sub(1);
            row.staged = rows
                .iter()
                .filter(|plan| plan.up_to_bytes >= row.size_class_bytes)
                .scan(row.size_class_bytes, |from, plan| {
                    let within = *from <= last;
                    *from = plan.up_to_bytes.saturating_add(1);
                    within.then_some(plan.threads)
                })
                .any(|threads| threads > 0);
            row.may_lose = row.staged;
            let is_paced = cmt_copy::is_paced(to_host, row.size_class_bytes);
            if let Some(staged) = staged.filter(|_| after.bytes > 0) {
                let bytes = staged[usize::from(to_host)][size_class(row.size_class_bytes)];
                row.staged &= bytes > 0 && bytes >= after.bytes / 20;
                row.partly = row.staged && bytes < after.bytes / 2;
                row.may_lose &= row.staged || !is_paced;
            }
            // Where it is not known, those that need a pace may have kept none.
            row.may_gain = row.staged && !row.partly && !(is_paced && staged.is_none());
        }
        self
    }

    /// The rows alone.
    pub fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().map(|(row, ..)| row)
    }

    /// How much less time the copies of the first window would have taken at the rates of the second, as far as staging can have
    /// caused it, in ns of their threads, with what was waited for after them. Classes that one window did not see count nothing.
    pub fn saved_ns(&self) -> f64 {
        let saved = self.rows.iter().filter_map(|(row, before, after)| {
            let saved = Saved::of(before, after)?.in_all;
            match saved > 0.0 {
                true => row.may_gain.then_some(saved),
                false => row.may_lose.then_some(saved),
            }
        });
        saved.fold(0.0, std::ops::Add::add)
    }

    /// Each row with what is to be said of its speed: how many times as fast, or why that is no gain.
    pub fn verdicts(&self) -> impl Iterator<Item = (&Row, String)> {
        self.rows.iter().map(|(row, before, after)| {
            let ratio = optional(row.speedup, |speedup| format!("{speedup:.1}x"));
            let verdict = match Saved::of(before, after) {
                _ if !row.staged => "not staged".to_owned(),
                Some(_) if row.partly => format!("{ratio} partly"),
                Some(saved) if saved.is_moved(before) => "waits more".to_owned(),
                _ => ratio,
            };
            (row, verdict)
        })
    }

    /// A line for each class whose calls return sooner only for the program to wait more behind them.
    pub fn moved_waits(&self) -> Vec<String> {
        let staged = self.rows.iter().filter(|(row, ..)| row.staged);
        let moved = staged.filter_map(|(row, before, after)| {
            let saved = Saved::of(before, after).filter(|saved| saved.is_moved(before))?;
            let of_a_call = |ns: f64| duration((ns / before.count() as f64) as u64);
            Some(format!(
                "{} {}: calls take {} less, {} of which is waited for later",
                row.direction,
                bytes(row.size_class_bytes),
                of_a_call(saved.calls),
                of_a_call(saved.calls - saved.in_all),
            ))
        });
        moved.collect()
    }

    /// Table and histograms, at most 80 columns wide.
    pub fn text(&self) -> String {
        let mut out = self.table();
        for line in self.moved_waits() {
            let _ = writeln!(out, "\n{line}");
        }
        // The classes in which most time was lost come first; the rest stands in the table.
        let mut by_time: Vec<_> = self.rows.iter().filter(|(row, ..)| row.staged).collect();
        by_time.sort_by_key(|(_, before, after)| {
            std::cmp::Reverse(before.total_ns.max(after.total_ns))
        });
        for (row, before, after) in by_time.into_iter().take(2) {
            let _ = write!(
                out,
                "\n{}",
                side_by_side(
                    &format!("{} {}", row.direction, bytes(row.size_class_bytes)),
                    before,
                    after
                )
            );
        }
        out
    }

    fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header([
            "copies", "", "calls", "median", "p90", "p99", "GB/s", "speed-up",
        ]);
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for (row, verdict) in self.verdicts() {
            let line =
                |name: &str, window, calls: u64, quantiles: [Option<u64>; 3], gbps, speedup| {
                    let mut cells = vec![name.to_owned(), String::from(window), calls.to_string()];
                    cells.extend(quantiles.map(|ns| ns.map_or("-".to_owned(), duration)));
                    cells.push(optional(gbps, |gbps| format!("{gbps:.2}")));
                    cells.push(speedup);
                    cells
                };
            table.add_row(line(
                &format!("{} {}", row.direction, bytes(row.size_class_bytes)),
                "before",
                row.calls_before,
                [row.p50_before_ns, row.p90_before_ns, row.p99_before_ns],
                row.gbps_before,
                String::new(),
            ));
            table.add_row(line(
                "",
                "after",
                row.calls_after,
                [row.p50_after_ns, row.p90_after_ns, row.p99_after_ns],
                row.gbps_after,
                verdict,
            ));
        }
        let table = table.to_string();
        table
            .lines()
            .map(|line| format!("{}\n", line.trim_end()))
            .collect()
    }
}

fn optional(value: Option<f64>, show: impl Fn(f64) -> String) -> String {
    value.map_or("-".to_owned(), show)
}

/// Two histograms with common rows, two buckets wide each.
fn side_by_side(title: &str, before: &Stat, after: &Stat) -> String {
    const BAR: usize = 22;
    /// Buckets of the kernel's histogram in one row.
    const WIDTH: usize = 2;
    const MOST_ROWS: usize = 24;
    let counts = |stat: &Stat| -> Vec<u64> {
        let mut counts = vec![0; BUCKETS];
        for (lo, _, count) in stat.histogram() {
            counts[bucket_of(lo)] = count;
        }
        counts
    };
    let (before, after) = (counts(before), counts(after));
    let used = |&index: &usize| before[index] + after[index] > 0;
    let (Some(first), Some(last)) = ((0..BUCKETS).find(used), (0..BUCKETS).rev().find(used)) else {
        return String::new();
    };
    let mut width = WIDTH;
    while (last / width) - (first / width) >= MOST_ROWS {
        width *= 2;
    }
    let grouped = |counts: &[u64]| -> Vec<u64> {
        (first / width..=last / width)
            .map(|row| counts.iter().skip(row * width).take(width).sum())
            .collect()
    };
    let (left, right) = (grouped(&before), grouped(&after));
    let mut out = format!("{title:<22}{:<29}{}\n", "before", "after");
    let bar = |count: u64, all: &[u64]| {
        let most = all.iter().copied().max().unwrap_or(0).max(1);
        let len = (count as f64 / most as f64 * BAR as f64).ceil() as usize;
        "#".repeat(len)
    };
    let mut gap = false;
    for (index, (&l, &r)) in left.iter().zip(&right).enumerate() {
        if l + r == 0 {
            gap = true;
            continue;
        }
        if std::mem::take(&mut gap) {
            out.push_str("       …\n");
        }
        let row = first / width + index;
        let (lo, _) = bucket_bounds(row * width);
        let (_, hi) = bucket_bounds(((row + 1) * width - 1).min(BUCKETS - 2));
        let range = format!("{:>8} - {:<8}", duration(lo), duration(hi));
        let cell = |count: u64, all: &[u64]| match count {
            0 => String::new(),
            count => format!("{} {count}", bar(count, all)),
        };
        let _ = writeln!(out, "{range:<21} {:<29}{}", cell(l, &left), cell(r, &right));
    }
    out
}

/// A duration with three digits and its unit.
pub fn duration(ns: u64) -> String {
    let (value, unit) = match ns {
        0..1_000 => (ns as f64, "ns"),
        1_000..1_000_000 => (ns as f64 / 1e3, "µs"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    match value {
        v if v < 10.0 && unit != "ns" => format!("{v:.2} {unit}"),
        v if v < 100.0 && unit != "ns" => format!("{v:.1} {unit}"),
        v => format!("{v:.0} {unit}"),
    }
}

/// A size with a binary unit.
pub fn bytes(size: u64) -> String {
    match size {
        0..1024 => format!("{size} B"),
        1024..0x10_0000 => format!("{} KiB", size >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", size >> 20),
        _ => format!("{} GiB", size >> 30),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cmt_common::histogram::size_class_of;

    fn window(direction: Direction, memory: MemoryKind, size: u64, latencies: &[u64]) -> Window {
        let mut stat = Stat::default();
        for &ns in latencies {
            stat.record(size, ns);
        }
        let key = CopyKey {
            pid: 1,
            function: 0,
            direction: direction as u8,
            memory: memory as u8,
            size_class: size_class_of(size),
            backing: 0,
            _pad: [0; 6],
        };
        let mut window = Window::default();
        window.add(&key, &stat);
        window
    }

    #[test]
    fn speedup_is_the_ratio_of_rates() {
        let before = window(
            Direction::HtoD,
            MemoryKind::Pageable,
            1 << 20,
            &[1_000_000, 1_000_000],
        );
        let after = window(
            Direction::HtoD,
            MemoryKind::Pageable,
            1 << 20,
            &[100_000, 300_000],
        );
        let comparison = Comparison::new(&before, &after);
        let row = comparison.rows().next().expect("one row");
        assert_eq!((row.calls_before, row.calls_after), (2, 2));
        assert!((row.speedup.expect("both windows saw it") - 5.0).abs() < 1e-9);
        let text = comparison.text();
        assert!(text.contains("5.0x"), "{text}");
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
    }

    #[test]
    fn copies_gain_where_most_of_them_were_staged_and_lose_where_some_were() {
        let plan = cmt_copy::plan::estimate(16);
        let judged = |direction, bytes: u64, after_ns, staged_bytes: Option<u64>| {
            let seen = |ns| window(direction, MemoryKind::Pageable, bytes, &[ns; 10]);
            let staged = staged_bytes.map(|bytes_in_all| {
                let mut staged = [[0; SIZE_CLASSES]; 2];
                staged[usize::from(direction == Direction::DtoH)][size_class(bytes)] = bytes_in_all;
                staged
            });
            let comparison = Comparison::new(&seen(1_000_000), &seen(after_ns));
            let comparison = comparison.judged_by(&plan, staged.as_ref());
            let saved_ns = comparison.saved_ns();
            (comparison.rows().next().expect("one row").staged, saved_ns)
        };
        let (kib, mib) = (1 << 10, 1 << 20);
        let (faster, slower) = (400_000, 1_500_000);
        let not_staged = [
            (Direction::HtoD, 64 * kib, faster, Some(10 * mib)),
            (Direction::HtoD, mib, slower, Some(mib / 3)),
            (Direction::HtoD, 2 * mib, faster, Some(0)),
            (Direction::DtoH, mib, faster, Some(0)),
        ];
        for (direction, bytes, after_ns, staged_bytes) in not_staged {
            let judgement = judged(direction, bytes, after_ns, staged_bytes);
            assert_eq!(judgement, (false, 0.0), "{direction:?} {bytes}");
        }
        // Longer ones may have waited for nothing.
        let (staged, saved_ns) = judged(Direction::DtoH, 4 * mib, slower, Some(0));
        assert!(!staged && saved_ns < -4e6, "{saved_ns}");
        for known in [Some(4 * mib), None] {
            assert_eq!(judged(Direction::HtoD, mib, faster, known), (true, 0.0));
            let (staged, saved_ns) = judged(Direction::HtoD, mib, slower, known);
            assert!(staged && saved_ns < -4e6, "{saved_ns}");
        }
        for (direction, bytes, staged_bytes) in [
            (Direction::HtoD, mib, Some(5 * mib)),
            (Direction::HtoD, 2 * mib, Some(19 * mib)),
            (Direction::HtoD, 2 * mib, None),
            (Direction::DtoH, mib, Some(9 * mib)),
            (Direction::DtoH, mib, None),
        ] {
            let (staged, saved_ns) = judged(direction, bytes, faster, staged_bytes);
            assert!(
                staged && saved_ns > 5e6,
                "{direction:?} {bytes}: {saved_ns}"
            );
        }
    }

    #[test]
    fn a_wait_that_only_moved_is_no_gain() {
        let ms = 1_000_000;
        let seen = |call_ms: u64, wait_ms: u64| {
            let calls = [call_ms * ms; 10];
            let mut window = window(Direction::HtoD, MemoryKind::Pageable, 16 << 20, &calls);
            for stat in window.classes.values_mut() {
                (stat.waited, stat.wait_ns) = (10, 10 * wait_ms * ms);
            }
            window
        };
        let compared = |before, after| {
            let comparison = Comparison::new(&before, &after);
            let verdict = comparison.verdicts().next().expect("one row").1;
            (
                (comparison.saved_ns() / ms as f64).round(),
                verdict,
                comparison.moved_waits(),
            )
        };
        let line = "HtoD 16 MiB: calls take 99.0 ms less, 98.0 ms of which is waited for later";
        assert_eq!(
            compared(seen(100, 1), seen(1, 99)),
            (10.0, "waits more".to_owned(), vec![line.to_owned()])
        );
        // Other work behind the copy took longer, which is no loss.
        assert_eq!(compared(seen(100, 1), seen(1, 300)).0, 0.0);
        // Nor is what took less a gain of the copy.
        assert_eq!(
            compared(seen(100, 300), seen(20, 1)),
            (800.0, "5.0x".to_owned(), vec![])
        );
        assert_eq!(compared(seen(100, 1), seen(20, 11)).0, 700.0);
        assert_eq!(compared(seen(100, 1), seen(97, 9)).1, "1.0x", "noise");
        assert_eq!(compared(seen(20, 300), seen(30, 1)).0, -100.0);
        let text = Comparison::new(&seen(100, 1), &seen(1, 99)).text();
        assert!(text.contains(line), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80));
    }

    #[test]
    fn a_class_seen_once_has_no_speedup() {
        let after = window(Direction::DtoH, MemoryKind::Pageable, 4096, &[5_000]);
        let comparison = Comparison::new(&Window::default(), &after);
        let row = comparison.rows().next().expect("one row");
        assert_eq!(
            (row.calls_before, row.p50_before_ns, row.speedup),
            (0, None, None)
        );
    }

    #[test]
    fn pinned_copies_are_not_compared() {
        let pinned = window(Direction::HtoD, MemoryKind::Pinned, 4096, &[5_000]);
        assert_eq!(Comparison::new(&pinned, &pinned).rows().count(), 0);
    }

    #[test]
    fn wide_histograms_stay_within_the_page() {
        let latencies: Vec<u64> = (0..40).map(|octave| 1 << octave).collect();
        let before = window(Direction::HtoD, MemoryKind::Pageable, 4096, &latencies);
        let text = Comparison::new(&before, &before).text();
        assert!(text.lines().count() < 40, "{text}");
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
    }
}
