//! The report as one page of HTML that needs no network.

use std::fmt::Write as _;

use super::report::{Drawn, Report, Time, Worst};
use super::table::nodes;
use super::time::length;
use crate::html::{STYLE, document, escape};
use crate::origin::Origin;
use crate::trace::table::{grouped, size, time};

/// The page.
pub fn page(report: &Report) -> String {
    let mut body = format!(
        "<h1>{} <small>{} to {}</small></h1>\n",
        nodes(report.nodes.reporting),
        report.start,
        report.end
    );
    body += &format!(
        "<p>Inside pageable copies: {}. {}</p>\n",
        spent(&report.pageable),
        match &report.recoverable {
            Some(time) => format!("Attach would have given back: {}.", spent(time)),
            None => "What attach would give back no node estimates.".into(),
        }
    );
    body += &copies(report);
    body += &classes(report);
    body += "<h2>Latencies</h2>\n";
    for drawn in &report.latencies {
        body += &histogram(drawn);
    }
    let by = format!("{} seconds", report.worst_by);
    body += &worst(
        &format!("Worst workloads, by {by}"),
        &report.worst_workloads,
    );
    body += &worst(&format!("Worst nodes, by {by}"), &report.worst_nodes);
    for lost in &report.lost {
        let reason = escape(&lost.reason.replace('_', " "));
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(body, "<p>Lost {}: {reason}.</p>", grouped(lost.count));
    }
    let _ = writeln!(
        body,
        "<p><small>Counts: {}; {} came, went or restarted. Latencies from {} histograms. {} questions in {:.1} s.</small></p>",
        report.counts,
        nodes(report.nodes.broken),
        report.histograms,
        report.queries,
        report.took_s
    );
    document("cmt fleet", STYLE, &body, Some(&Origin::now()))
}

fn spent(time: &Time) -> String {
    format!(
        "<b>{}</b>, {} an hour, the time of {:.3} GPUs",
        length(time.seconds),
        length(time.seconds_per_hour),
        time.gpus
    )
}

fn copies(report: &Report) -> String {
    let rows: String = report
        .copies
        .iter()
        .map(|copies| {
            format!(
                "<tr><th>{} {}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>\n",
                escape(&copies.direction),
                escape(&copies.memory),
                grouped(copies.calls),
                grouped(copies.errors),
                size(copies.bytes as f64),
                grouped(copies.gb_per_day.round() as u64),
                length(copies.seconds),
                length(copies.wait_seconds),
            )
        })
        .collect();
    format!(
        "<h2>Copies</h2>\n<table><thead><tr><th>copies<th>calls<th>errors<th>bytes<th>GB a day<th>time<th>waits</tr></thead>\n\
         <tbody>{rows}</tbody></table>\n"
    )
}

fn classes(report: &Report) -> String {
    let rows: String = report
        .classes
        .iter()
        .map(|class| {
            format!(
                "<tr><th>{} {} {}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>\n",
                escape(&class.direction),
                escape(&class.memory),
                sized(class.size_class_bytes),
                grouped(class.calls),
                time(class.p50_ns),
                time(class.p90_ns),
                time(class.p99_ns),
                length(class.seconds),
            )
        })
        .collect();
    format!(
        "<h2>By size</h2>\n<table><thead><tr><th>from<th>calls<th>p50<th>p90<th>p99<th>time</tr></thead>\n\
         <tbody>{rows}</tbody></table>\n"
    )
}

fn sized(class: Option<u64>) -> String {
    class.map_or("other".into(), |bytes| size(bytes as f64))
}

fn histogram(drawn: &Drawn) -> String {
    let most = drawn.histogram.iter().map(|row| row.2).max().unwrap_or(0);
    if most == 0 {
        return String::new();
    }
    let name = match drawn.size_class_bytes {
        None => format!("<h3>{}</h3>", escape(&drawn.direction)),
        Some(_) => format!(
            "<details><summary>{} from {}</summary>",
            escape(&drawn.direction),
            sized(drawn.size_class_bytes)
        ),
    };
    let end = if drawn.size_class_bytes.is_some() {
        "</details>"
    } else {
        ""
    };
    let rows: String = drawn
        .histogram
        .iter()
        .map(|&(from_ns, to_ns, calls)| {
            let to = match to_ns {
                u64::MAX => "more".into(),
                to_ns => time(to_ns),
            };
            format!(
                "<tr><td>{} to {to}<td class=bar><div class=after style=\"width:{:.1}%\"></div><td>{}</tr>\n",
                time(from_ns),
                calls as f64 / most as f64 * 100.0,
                grouped(calls)
            )
        })
        .collect();
    format!("{name}<table>{rows}</table>{end}\n")
}

fn worst(title: &str, list: &[Worst]) -> String {
    if list.is_empty() {
        return String::new();
    }
    let most = list[0].value;
    let rows: String = list
        .iter()
        .map(|one| {
            format!(
                "<tr><th>{}<td class=bar><div class=before style=\"width:{:.1}%\"></div><td>{}</tr>\n",
                escape(&one.name),
                one.value / most * 100.0,
                length(one.value)
            )
        })
        .collect();
    format!("<h2>{title}</h2>\n<table>{rows}</table>\n")
}
