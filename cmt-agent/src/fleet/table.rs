//! The report as text of at most 80 columns.

use std::fmt::Write as _;

use super::report::{Drawn, Report, Time, Worst};
use super::time::length;
use crate::trace::table::{bar, grouped, list, size, time};

/// Cells of a workload's or a node's name.
const NAME: usize = 60;

/// The report.
pub fn render(report: &Report) -> String {
    let mut text = format!(
        "{}, {} to {} ({})\n",
        nodes(report.nodes.reporting),
        report.start,
        report.end,
        length(report.range_s)
    );
    if report.copies.is_empty() {
        text += "No copies in this range.\n";
        return text + &footer(report);
    }
    text += &copies(report);
    text += &losses(report);
    text += &classes(report);
    for drawn in &report.latencies {
        // Of a direction that has one size only, the whole is the same.
        let same = |other: &&Drawn| other.direction == drawn.direction;
        if drawn.size_class_bytes.is_none() || report.latencies.iter().filter(same).count() > 2 {
            text += &histogram(drawn);
        }
    }
    let by = match report.worst_by {
        "recoverable" => "seconds that attach would have given back",
        _ => "seconds inside pageable copies",
    };
    text += &worst(
        &format!("worst workloads, by {by}"),
        &report.worst_workloads,
    );
    text += &worst(&format!("worst nodes, by {by}"), &report.worst_nodes);
    text + &footer(report)
}

pub(super) fn nodes(count: u64) -> String {
    match count {
        1 => "1 node".into(),
        _ => format!("{} nodes", grouped(count)),
    }
}

// Writing to a String cannot fail, here and below.
fn copies(report: &Report) -> String {
    let mut text = format!(
        "\n  {:<7} {:<8} {:>15} {:>9} {:>9} {:>10} {:>6} {:>6}\n",
        "copies", "", "calls", "errors", "bytes", "GB/day", "time", "waits"
    );
    for copies in &report.copies {
        let _ = writeln!(
            text,
            "  {:<7} {:<8} {:>15} {:>9} {:>9} {:>10} {:>6} {:>6}",
            copies.direction,
            copies.memory,
            grouped(copies.calls),
            grouped(copies.errors),
            size(copies.bytes as f64),
            grouped(copies.gb_per_day.round() as u64),
            length(copies.seconds),
            length(copies.wait_seconds),
        );
    }
    text
}

fn losses(report: &Report) -> String {
    let line = |what: &str, time: &Time| {
        format!(
            "{what:<28} {:>6}: {} an hour, the time of {:.3} GPUs\n",
            length(time.seconds),
            length(time.seconds_per_hour),
            time.gpus
        )
    };
    let mut text = "\n".to_owned() + &line("inside pageable copies", &report.pageable);
    text += &match &report.recoverable {
        Some(recoverable) => line("attach would have given back", recoverable),
        None => "what attach would give back no node estimates\n".into(),
    };
    text
}

fn classes(report: &Report) -> String {
    let mut text = format!(
        "\n  {:<7} {:<8} {:>8} {:>15} {:>7} {:>7} {:>7} {:>8}\n",
        "class", "", "size", "calls", "p50", "p90", "p99", "time"
    );
    for class in &report.classes {
        let _ = writeln!(
            text,
            "  {:<7} {:<8} {:>8} {:>15} {:>7} {:>7} {:>7} {:>8}",
            class.direction,
            class.memory,
            class
                .size_class_bytes
                .map_or("other".into(), |bytes| size(bytes as f64)),
            grouped(class.calls),
            time(class.p50_ns),
            time(class.p90_ns),
            time(class.p99_ns),
            length(class.seconds),
        );
    }
    text
}

/// As `cmt trace` draws it.
pub(super) fn histogram(drawn: &Drawn) -> String {
    let most = drawn.histogram.iter().map(|row| row.2).max().unwrap_or(0);
    if most == 0 {
        return String::new();
    }
    let mut text = match drawn.size_class_bytes {
        None => format!("\n{} latency\n", drawn.direction),
        Some(bytes) => format!("\n{} {} latency\n", drawn.direction, size(bytes as f64)),
    };
    let last = drawn.histogram.iter().rposition(|row| row.2 > 0);
    for &(from_ns, to_ns, calls) in drawn.histogram.iter().take(last.map_or(0, |at| at + 1)) {
        text += &bar(from_ns, to_ns, calls, most);
    }
    text
}

fn worst(title: &str, list: &[Worst]) -> String {
    if list.is_empty() {
        return String::new();
    }
    let mut text = format!("\n{title}\n");
    for one in list {
        let name: String = one.name.chars().take(NAME).collect();
        let _ = writeln!(text, "  {name:<NAME$} {:>8}", length(one.value));
    }
    text
}

fn footer(report: &Report) -> String {
    let mut text = String::from("\n");
    for lost in &report.lost {
        let _ = writeln!(
            text,
            "lost {}: {}",
            grouped(lost.count),
            lost.reason.replace('_', " ")
        );
    }
    if !report.nodes.lost.is_empty() {
        let names: Vec<String> = report
            .nodes
            .lost
            .iter()
            .map(|node| node.name.clone())
            .collect();
        let _ = writeln!(text, "{}", list("  most of it on", &names));
    }
    if report.nodes.broken > 0 {
        let _ = writeln!(
            text,
            "{} came, went or restarted in this range",
            nodes(report.nodes.broken)
        );
    }
    let counts = match report.counts {
        "exact" => "counts are exact as of the last scrapes",
        "recorded" => {
            "counts are from recorded rates (--exact adds up every node's), the worst exact"
        }
        "extrapolated" => "counts are extrapolated by Prometheus: too many nodes restarted",
        _ => "counts of the nodes that restarted are extrapolated, all others exact",
    };
    let _ = writeln!(
        text,
        "{counts}\nlatencies are from {} histograms; {} questions in {:.1} s",
        report.histograms, report.queries, report.took_s
    );
    text
}
