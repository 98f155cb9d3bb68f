//! A trace as text of at most 80 columns.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;

use cmt_common::api::Direction;
use cmt_common::event::LOST_NAMES;

use super::report::{CopyReport, ProcessReport, Report};
use super::{Snapshot, Targets, summary};
use crate::histogram::Stat;

/// Cells of the longest bar of a histogram.
const BAR: usize = 40;
/// Classes of one function that a table shows.
const MOST_ROWS: usize = 24;

/// The report of a trace that has ended.
pub fn render(snapshot: &Snapshot, report: &Report, targets: &Targets) -> String {
    let mut text = tables(&Report::new(
        &snapshot.without_backing(),
        report.overhead.pair_ns,
    ));
    for process in &report.processes {
        text += &summary::of(process, snapshot);
    }
    if snapshot.calls() == 0 {
        text += &nothing_seen(snapshot, targets);
    } else {
        text += &histograms(snapshot);
    }
    text += &footer(snapshot, report);
    text
}

/// The tables alone.
pub fn tables(report: &Report) -> String {
    let mut text = String::new();
    for process in &report.processes {
        if !process.copies.is_empty() {
            table(&mut text, process, report.duration_s);
        }
    }
    text
}

fn table(text: &mut String, process: &ProcessReport, duration_s: f64) {
    let calls: u64 = process.copies.iter().map(|copy| copy.calls).sum();
    let bytes: u64 = process.copies.iter().map(|copy| copy.bytes).sum();
    let total_ns: u64 = process.copies.iter().map(|copy| copy.total_ns).sum();
    let copied = format!(
        "{} (pid {}): {} copies, {}",
        process.comm,
        process.pid,
        grouped(calls),
        size(bytes as f64),
    );
    let took = format!("{} in copies, traced {duration_s:.1}s", time(total_ns));
    let gap = match copied.chars().count() + took.len() {
        0..=78 => ", ",
        _ => ",\n  ",
    };
    *text += &format!("{copied}{gap}{took}\n");
    for copies in process
        .copies
        .chunk_by(|one, other| one.function == other.function)
    {
        function(text, copies);
    }
}

/// The classes of one function: where there are very many, those that took most time.
fn function(text: &mut String, copies: &[CopyReport]) {
    // Writing to a String cannot fail, here and below.
    let _ = writeln!(
        text,
        "  {}\n    {:<7} {:<8} {:>7} {:>9} {:>6} {:>6} {:>6} {:>6} {:>6} {:>6}",
        copies[0].function,
        "",
        "memory",
        "size",
        "calls",
        "errors",
        "GB/s",
        "p50",
        "p90",
        "p99",
        "max"
    );
    let mut shown: Vec<usize> = (0..copies.len()).collect();
    shown.sort_by_key(|at| Reverse(copies[*at].total_ns));
    let hidden = shown.split_off(MOST_ROWS.min(copies.len()));
    shown.sort_unstable();
    for at in shown {
        row(text, &copies[at]);
    }
    if !hidden.is_empty() {
        let hidden_sum =
            |of: fn(&CopyReport) -> u64| hidden.iter().map(|at| of(&copies[*at])).sum();
        let _ = writeln!(
            text,
            "    and {} classes that took less time: {} calls, {} in copies",
            hidden.len(),
            short(hidden_sum(|copy| copy.calls), 12),
            time(hidden_sum(|copy| copy.total_ns)),
        );
    }
}

fn row(text: &mut String, copy: &CopyReport) {
    let rate = if copy.total_ns > 0 {
        rate(copy.bytes as f64 / copy.total_ns as f64)
    } else {
        "-".into()
    };
    let latency = |of: fn(&super::report::Latency) -> u64| {
        copy.latency_ns
            .as_ref()
            .map_or("-".into(), |latency| time(of(latency)))
    };
    let _ = writeln!(
        text,
        "    {:<7} {:<8} {:>7} {:>9} {:>6} {:>6} {:>6} {:>6} {:>6} {:>6}",
        copy.direction,
        copy.memory,
        size(copy.size_class_bytes as f64),
        short(copy.calls, 9),
        short(copy.errors, 6),
        rate,
        latency(|l| l.p50),
        latency(|l| l.p90),
        latency(|l| l.p99),
        latency(|l| l.max),
    );
}

/// A rate in at most 6 columns. A call that only begins a copy seems to move thousands of GB/s.
fn rate(gb_per_s: f64) -> String {
    match gb_per_s {
        _ if gb_per_s < 999.95 => format!("{gb_per_s:.1}"),
        _ => short(gb_per_s as u64, 6),
    }
}

/// A number in `width` columns, of at least 5: with all its digits where they fit.
fn short(number: u64, width: usize) -> String {
    let digits = number.to_string();
    match digits.len() <= width {
        true => digits,
        false => scaled(number as f64, 1000.0, &["", "k", "M", "G", "T", "P", "E"]),
    }
}

/// One histogram a direction, two buckets of latency to the octave.
fn histograms(snapshot: &Snapshot) -> String {
    let mut directions: BTreeMap<u8, Stat> = BTreeMap::new();
    for (key, stat) in &snapshot.rows {
        directions.entry(key.direction).or_default().merge(stat);
    }
    let mut text = String::new();
    for (direction, stat) in directions {
        let bars = bars(&stat);
        let most = bars.values().copied().max().unwrap_or(0);
        if most == 0 {
            continue;
        }
        let _ = writeln!(text, "\n{} latency", Direction::from_raw(direction).name());
        let (first, last) = (
            *bars.keys().next().unwrap_or(&0),
            *bars.keys().last().unwrap_or(&0),
        );
        for octave in first..=last {
            let calls = bars.get(&octave).copied().unwrap_or(0);
            text += &bar(1 << octave, 2 << octave, calls, most);
        }
    }
    text
}

/// A row of a histogram: from one latency to another, a bar, and the calls.
pub fn bar(from_ns: u64, to_ns: u64, calls: u64, most: u64) -> String {
    let cells = (calls as f64 / most as f64 * BAR as f64).ceil() as usize;
    let to = match to_ns {
        u64::MAX => "more".into(),
        to_ns => time(to_ns),
    };
    format!(
        "  {:>6} to {to:>6} |{:<BAR$}| {}\n",
        time(from_ns),
        "#".repeat(cells),
        grouped(calls)
    )
}

fn bars(stat: &Stat) -> BTreeMap<u32, u64> {
    let mut bars = BTreeMap::new();
    for (lo, _, calls) in stat.histogram() {
        *bars.entry(lo.max(1).ilog2()).or_default() += calls;
    }
    bars
}

/// Why there is nothing to show: what could not be seen is no zero.
fn nothing_seen(snapshot: &Snapshot, targets: &Targets) -> String {
    let mut text = String::new();
    let seen: Vec<_> = snapshot
        .processes
        .iter()
        .filter(|(_, process)| !process.libraries.is_empty())
        .collect();
    match targets {
        Targets::Pids(pids) => {
            for pid in pids {
                let Some(process) = snapshot.processes.get(pid) else {
                    continue;
                };
                let _ = if process.libraries.is_empty() {
                    writeln!(
                        text,
                        "{} (pid {pid}): maps no CUDA library, so there was nothing to probe.",
                        process.comm
                    )
                } else {
                    let start = format!(
                        "{} (pid {pid}): no copy function was called; probes were on",
                        process.comm
                    );
                    writeln!(text, "{}", list(&start, &process.libraries))
                };
            }
        }
        Targets::All if seen.is_empty() => {
            text += "No process maps a CUDA library, so there was nothing to probe.\n";
        }
        Targets::All => {
            let _ = writeln!(
                text,
                "No copy function was called; probes were on the CUDA libraries of {} processes.",
                seen.len()
            );
        }
    }
    text
}

fn footer(snapshot: &Snapshot, report: &Report) -> String {
    let mut text = String::new();
    for (name, lost) in LOST_NAMES.iter().zip(snapshot.lost) {
        if lost > 0 {
            let _ = writeln!(text, "lost {}: {name}", grouped(lost));
        }
    }
    let ended: Vec<String> = snapshot
        .processes
        .iter()
        .filter(|(_, process)| process.ended && process.named)
        .map(|(pid, _)| pid.to_string())
        .collect();
    if !ended.is_empty() {
        let _ = writeln!(text, "{}", list("ended during the trace:", &ended));
    }
    let calls = report.overhead.calls;
    let _ = match report.overhead.pair_ns {
        Some(pair_ns) => writeln!(
            text,
            "\ntracing itself: {} probed calls x {} = {}{} of the targets' time",
            grouped(calls),
            time(pair_ns),
            if report.overhead.at_least {
                "at least "
            } else {
                ""
            },
            time(calls.saturating_mul(pair_ns))
        ),
        None => writeln!(
            text,
            "\ntracing itself: {} probed calls, cost of each not measurable here",
            grouped(calls)
        ),
    };
    text
}

/// What `start` announces, on as many lines as it takes.
pub fn list(start: &str, items: &[String]) -> String {
    let mut text = start.to_owned();
    let mut used = text.chars().count();
    for (at, item) in items.iter().enumerate() {
        let comma = if at + 1 < items.len() { "," } else { "" };
        let cells = item.chars().count() + comma.len();
        let gap = if used + 1 + cells > 80 { "\n  " } else { " " };
        used = if gap == " " { used + 1 } else { 2 } + cells;
        text += &format!("{gap}{item}{comma}");
    }
    text
}

/// A time in three digits: `820ns`, `1.2us`, `34ms`, `5.6s`.
pub fn time(ns: u64) -> String {
    scaled(ns as f64, 1000.0, &["ns", "us", "ms", "s"])
}

/// A size by powers of 1024: `64M`, `1.5G`.
pub fn size(bytes: f64) -> String {
    scaled(
        bytes,
        1024.0,
        &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"],
    )
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= step * 0.9995 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    if unit == 0 || value >= 9.95 || value.fract() == 0.0 {
        format!("{value:.0}{}", units[unit])
    } else {
        format!("{value:.1}{}", units[unit])
    }
}

/// `1234567` as `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::gain::{Gain, Means};
    use crate::workload::Workload;

    #[test]
    fn figures_are_short_and_right() {
        assert_eq!(time(0), "0ns");
        assert_eq!(time(999), "999ns");
        assert_eq!(time(1_234), "1.2us");
        assert_eq!(time(34_567_890), "35ms");
        assert_eq!(time(123_000_000_000), "123s");
        assert_eq!(size(4096.0), "4KiB");
        assert_eq!(size(1.5 * 1024.0 * 1024.0), "1.5MiB");
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(rate(999.9), "999.9");
        assert_eq!(rate(214_748.4), "214748");
        assert_eq!(rate(12_345_678.0), "12M");
        assert_eq!(short(999_999_999, 9), "999999999");
        assert_eq!(short(u64::MAX, 9), "18E");
    }

    fn copies(function: &'static str, count: u64, each: u64) -> Vec<CopyReport> {
        let copy = |at| CopyReport {
            function,
            direction: "unknown",
            memory: "pageable",
            backing: "unknown",
            size_class_bytes: 1u64 << (at % 64),
            calls: each + at,
            errors: each,
            bytes: each,
            total_ns: at,
            waited: 0,
            wait_ns: 0,
            until_ns: 0,
            last_error: None,
            latency_ns: None,
            histogram: Vec::new(),
        };
        (0..count).map(copy).collect()
    }

    #[test]
    fn a_table_of_anything_fits_80_columns_and_has_an_end() {
        let mut all = copies("cudaMemcpy", 3, 1);
        all.extend(copies("cudaMemcpyAsync", 100, u64::MAX >> 12));
        let process = ProcessReport {
            pid: u32::MAX,
            comm: "fifteen-letters".into(),
            workload: Workload::default(),
            gain: Gain::of(
                std::iter::empty(),
                1.0,
                &Means {
                    link: None,
                    threads: 1,
                },
            ),
            copies: all,
        };
        let mut text = String::new();
        table(&mut text, &process, 1e6);
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
        let (few, many) = text
            .split_once("  cudaMemcpyAsync\n")
            .expect("two functions");
        assert_eq!(few.lines().count(), 2 + 2 + 3, "{text}");
        assert_eq!(many.lines().count(), 1 + MOST_ROWS + 1, "{text}");
        let rest = "    and 76 classes that took less time: ";
        assert!(
            many.lines()
                .last()
                .is_some_and(|line| line.starts_with(rest))
        );
    }

    #[test]
    fn long_lists_go_on_in_the_next_line() {
        let pids: Vec<String> = (1_000_000..1_000_030).map(|pid| pid.to_string()).collect();
        let text = list("ended during the trace:", &pids);
        assert!(text.lines().count() > 1 && text.lines().all(|line| line.len() <= 80));
        assert_eq!(text.split([',', ':']).count(), 31);
    }
}
