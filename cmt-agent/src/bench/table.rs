//! The bench's report for a terminal of 80 columns.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};

use super::cpu::Rate;
use super::report::{Cell, Quantiles, Report, Stat};
use super::turns::{Added, Turn};
use super::wire::{Direction, Memory};
use crate::compare::bytes;

/// Widest line, in columns.
const WIDTH: usize = 80;

/// Everything but the plan.
pub fn text(report: &Report) -> String {
    let mut out = String::new();
    if report.stand_in {
        out += "On the stand-in for CUDA: real bytes, modelled time. These figures say nothing\nof any GPU.\n\n";
    }
    for (name, what) in report.machine.lines() {
        let _ = writeln!(out, "{}", clipped(&format!("{name:<8}{what}")));
    }
    let _ = write!(out, "\n{}", method(report));
    for direction in [Direction::HtoD, Direction::DtoH] {
        for memory in [Memory::Reused, Memory::Fresh] {
            let cells = report
                .cells
                .iter()
                .filter(|cell| (cell.direction, cell.memory) == (direction, memory));
            out += &copies(direction, memory, cells);
        }
    }
    out += &turns(&report.turns);
    out += &cpu_methods(&report.cpu_copies.one_core);
    out += &cpu_scaling(&report.cpu_copies.scaling);
    if report.interrupted {
        out += "\nInterrupted: what was measured until then.\n";
    }
    out
}

/// What the columns mean, and what stands behind them.
fn method(report: &Report) -> String {
    let mut text = String::from(
        "GB/s (1e9 bytes/s) and shares by the median time until the device is idle.\n\
         stock, pinned: before attaching and after detaching; tuned: attached.\n\
         p10 and p90: tuned, until idle. call: median until the tuned call returned.\n\
         CPU: processor seconds for 1 GiB, helpers included. n: samples, stock + tuned.\n\
         =: left to stock, all of them. Short copies of reused memory (HtoD below\n\
         2 MiB, DtoH below 128 KiB) come in a row here: alone, they are left to stock.\n",
    );
    let _ = writeln!(
        text,
        "Waiting for an idle device takes {}, which is part of every time until idle.",
        time(report.idle_synchronize_ns)
    );
    if let Some(limit) = &report.limited_by {
        let _ = writeln!(
            text,
            "Copies above {} were left out: not enough {limit}.",
            bytes(report.largest_bytes)
        );
    }
    let drifts = || report.cells.iter().filter_map(|cell| cell.drift);
    if let (Some(least), Some(most)) = (drifts().reduce(f64::min), drifts().reduce(f64::max)) {
        let _ = writeln!(
            text,
            "Stock's second median is {least:.2} to {most:.2} times its first: the machine's drift."
        );
    }
    text
}

fn copies<'a>(
    direction: Direction,
    memory: Memory,
    cells: impl Iterator<Item = &'a Cell>,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "size", "stock", "tuned", "pinned", "share", "gain", "p10", "p90", "call", "CPU", "CPU",
        "n",
    ]);
    table.add_row([
        "", "GB/s", "GB/s", "GB/s", "", "", "", "", "", "stock", "tuned", "",
    ]);
    for cell in cells {
        let rate = |stat: &Option<Stat>| show(stat.as_ref(), |stat| three(stat.gbps));
        let cpu = |stat: &Option<Stat>| show(stat.as_ref(), |stat| cpu_seconds(stat.cpu_s_per_gib));
        let tuned = |part: fn(&Stat) -> u64| show(cell.tuned.as_ref(), |stat| time(part(stat)));
        let samples = |stat: &Option<Stat>| stat.as_ref().map_or(0, |stat| stat.samples);
        let left = if cell.staged == Some(0.0) { "=" } else { "" };
        table.add_row([
            bytes(cell.bytes),
            rate(&cell.stock),
            format!("{left}{}", rate(&cell.tuned)),
            rate(&cell.pinned),
            show(cell.share_of_pinned, |share| format!("{share:.2}")),
            show(cell.speedup, |gain| format!("{gain:.2}x")),
            tuned(|stat| stat.idle_ns.p10),
            tuned(|stat| stat.idle_ns.p90),
            tuned(|stat| stat.call_ns.p50),
            cpu(&cell.stock),
            cpu(&cell.tuned),
            format!("{}+{}", samples(&cell.stock), samples(&cell.tuned)),
        ]);
    }
    let (direction, memory) = (direction.name(), memory.name());
    format!("\n{direction}, {memory} memory\n{}", trimmed(table))
}

/// What the payload leaves to the driver.
fn turns(turns: &[Turn]) -> String {
    let Some(first) = turns.first() else {
        return String::new();
    };
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "copies", "", "size", "call", "added", "", "idle", "added", "",
    ]);
    for turn in turns {
        let mut row = vec![
            turn.direction.name().to_owned(),
            turn.memory.name().to_owned(),
            bytes(turn.bytes),
        ];
        for added in [&turn.call, &turn.idle] {
            row.extend([time(added.stock_ns), percent(added), range(added)]);
        }
        table.add_row(row);
    }
    format!(
        "\nLeft to stock, attached and detached in turns ({} rounds): medians of stock until\n\
         the call returned and until the device was idle, and what attaching added:\n\
         percent, and nanoseconds of the middle eight tenths of the rounds.\n{}",
        first.rounds,
        trimmed(table)
    )
}

/// What was added, for stock's time.
pub(super) fn percent(added: &Added) -> String {
    let [_, median, _] = added.added_ns;
    format!(
        "{:+.1}%",
        median as f64 * 100.0 / added.stock_ns.max(1) as f64
    )
}

/// From the 10th percentile to the 90th.
pub(super) fn range(added: &Added) -> String {
    let [least, _, most] = added.added_ns;
    format!("{least:+}..{most:+}")
}

fn cpu_methods(rates: &[Rate]) -> String {
    let mut text = by_method(rates, |rate| bytes(rate.bytes as u64));
    if !text.is_empty() {
        text = format!("\nCPU copies on one core, GB/s (median) by size\n{text}");
    }
    text
}

fn cpu_scaling(rates: &[Rate]) -> String {
    let mut text = by_method(rates, |rate| rate.threads.to_string());
    if let (false, Some(rate)) = (text.is_empty(), rates.first()) {
        text = format!(
            "\nCPU copies of {}, GB/s (median) by threads, each on its own CPU\n{text}",
            bytes(rate.bytes as u64)
        );
    }
    text
}

/// One row a method, one column for each of what `column` says.
fn by_method(rates: &[Rate], column: impl Fn(&Rate) -> String) -> String {
    let mut methods: Vec<&str> = rates.iter().map(|rate| rate.method.as_str()).collect();
    methods.dedup();
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let Some(first) = methods.first() else {
        return String::new();
    };
    let mut header = vec!["method".to_owned()];
    header.extend(
        rates
            .iter()
            .filter(|rate| rate.method == *first)
            .map(&column),
    );
    table.set_header(header);
    for method in methods {
        let mut row = vec![method.to_owned()];
        row.extend(
            rates
                .iter()
                .filter(|rate| rate.method == method)
                .map(|rate| three(rate.gbps)),
        );
        table.add_row(row);
    }
    trimmed(table)
}

fn trimmed(mut table: Table) -> String {
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 1));
        if index > 0 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
        .to_string()
        .lines()
        .map(|line| format!(" {}\n", line.trim_end()))
        .collect()
}

fn clipped(line: &str) -> String {
    line.chars().take(WIDTH).collect()
}

fn show<T>(value: Option<T>, as_text: impl Fn(T) -> String) -> String {
    value.map_or("-".to_owned(), as_text)
}

/// Three digits.
pub(super) fn three(value: f64) -> String {
    match value {
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// Processor seconds, two digits of them.
pub(super) fn cpu_seconds(value: f64) -> String {
    match value {
        v if v < 1.0 => format!("{v:.2}"),
        v if v < 10.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// A duration without a space in it.
pub(super) fn time(ns: u64) -> String {
    let (value, unit) = match ns {
        0..1_000_000 => (ns as f64 / 1e3, "µs"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    format!("{}{unit}", three(value))
}

/// Median and both percentiles, for the page.
pub(super) fn spread(quantiles: &Quantiles) -> String {
    format!(
        "{} ({} – {})",
        time(quantiles.p50),
        time(quantiles.p10),
        time(quantiles.p90)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::Batches;
    use crate::bench::wire::Batch;

    #[test]
    fn the_widest_row_fits_the_terminal() {
        let batch = |ns| Batch {
            call_ns: vec![ns; 100],
            idle_ns: vec![ns; 100],
            cpu_ns: 20_000_000_000,
            wrong_at: None,
        };
        let (stock, tuned, pinned) = (
            batch(15_500_000_000),
            batch(155_500_000),
            batch(123_400_000),
        );
        let cell = Cell::of(
            Direction::HtoD,
            Memory::Fresh,
            512 << 20,
            &Batches {
                stock: Some(&stock),
                tuned: Some((&tuned, 0.0)),
                again: Some(&stock),
                pinned: [Some(&pinned); 3],
            },
        );
        let text = copies(Direction::HtoD, Memory::Fresh, [&cell].into_iter());
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
        }
        assert!(text.contains("=3.45"), "{text}");
        assert!(text.contains("200+100"), "{text}");
    }
}
