//! The bench as one page of HTML that needs no network.

use std::fmt::Write as _;

use super::chart::{self, Axis, Series};
use super::cpu::Rate;
use super::report::{Cell, Quantiles, Report, Stat};
use super::table::{cpu_seconds, percent, range, spread, three, time};
use super::turns::Turn;
use super::wire::{Direction, Memory};
use crate::compare::bytes;
use crate::html::{document, escape};

const STYLE: &str = include_str!("page.css");
/// Where the colours of the methods begin, after those of stock, tuned and pinned.
const METHOD_COLOURS: u8 = 3;

/// The page.
pub fn page(report: &Report) -> anyhow::Result<String> {
    let title = format!("cmt bench: {}", escape(&report.machine.gpu));
    let mut body = format!("<h1>{title}</h1>\n");
    if report.stand_in {
        body += "<p class=warning>On the stand-in for CUDA: real bytes, modelled time. These figures say nothing of any GPU.</p>\n";
    }
    if report.interrupted {
        body += "<p class=warning>Interrupted: what was measured until then.</p>\n";
    }
    body += &machine(report);
    body += &method(report);
    body += "<h2>Copies between host and device</h2>\n<p class=legend><i class=c0></i>stock <i class=c1></i>tuned <i class=c2></i>pinned</p>\n<div class=charts>\n";
    let groups = [
        (Direction::HtoD, Memory::Reused),
        (Direction::HtoD, Memory::Fresh),
        (Direction::DtoH, Memory::Reused),
        (Direction::DtoH, Memory::Fresh),
    ];
    for (direction, memory) in groups {
        let cells = of(report, direction, memory);
        let name = format!("{}, {} memory", direction.name(), memory.name());
        let graph = chart::draw(Axis::Bytes, Axis::Rate, &lines(&cells, bandwidth))?;
        body += &figure(&format!("{name}: GB/s by size"), &graph);
        let graph = chart::draw(Axis::Bytes, Axis::Duration, &lines(&cells, latency))?;
        body += &figure(&format!("{name}: time until the device is idle"), &graph);
    }
    body += "</div>\n";
    body += &cpu_copies(report)?;
    body += "<h2>All figures</h2>\n";
    for (direction, memory) in groups {
        body += &table(
            &format!("{}, {} memory", direction.name(), memory.name()),
            &of(report, direction, memory),
        );
    }
    body += &turns(&report.turns);
    Ok(document(&title, STYLE, &body, report.origin.as_ref()))
}

fn of(report: &Report, direction: Direction, memory: Memory) -> Vec<&Cell> {
    report
        .cells
        .iter()
        .filter(|cell| (cell.direction, cell.memory) == (direction, memory))
        .collect()
}

fn machine(report: &Report) -> String {
    let mut text = String::from("<dl>\n");
    for (name, what) in report.machine.lines() {
        let _ = writeln!(text, "<dt>{name}</dt><dd>{}</dd>", escape(&what));
    }
    text + "</dl>\n"
}

fn method(report: &Report) -> String {
    let mut text = String::from(
        "<p>Lines are medians, bands go from the 10th to the 90th percentile. Stock and pinned were measured before attaching \
         and after detaching, tuned while attached, with <code>cuMemcpyHtoD</code> and <code>cuMemcpyDtoH</code> in a process \
         of its own. Rates and shares count the time until the device is idle. The bytes of one copy of each kind were \
         checked. Short copies of reused memory (HtoD below 2 MiB, DtoH below 128 KiB) come in a row here: alone, they are left \
         to stock.",
    );
    let _ = write!(
        text,
        " Waiting for an idle device takes {}, which is part of every time until idle.",
        time(report.idle_synchronize_ns)
    );
    if let Some(attach) = &report.attach {
        let _ = write!(
            text,
            " Up to {} threads moved bytes; {} functions were patched in {:.0} ms.",
            attach.threads, attach.patched, attach.attach_ms
        );
    }
    if let Some(limit) = &report.limited_by {
        let _ = write!(
            text,
            " Copies above {} were left out: not enough {}.",
            bytes(report.largest_bytes),
            escape(limit)
        );
    }
    if report.quick {
        text += " This was the quick run: few samples.";
    }
    text + "</p>\n"
}

fn figure(caption: &str, graph: &str) -> String {
    if graph.is_empty() {
        return String::new();
    }
    format!("<figure><figcaption>{caption}</figcaption>{graph}</figure>\n")
}

/// A point's median, and the ends of its band.
type Point = fn(&Cell, &Stat) -> (f64, f64, f64);

fn bandwidth(cell: &Cell, stat: &Stat) -> (f64, f64, f64) {
    let gbps = |ns: u64| cell.bytes as f64 / ns.max(1) as f64;
    let Quantiles { p10, p50, p90 } = stat.idle_ns;
    (gbps(p50), gbps(p90), gbps(p10))
}

fn latency(_: &Cell, stat: &Stat) -> (f64, f64, f64) {
    let Quantiles { p10, p50, p90 } = stat.idle_ns;
    (p50 as f64, p10 as f64, p90 as f64)
}

fn lines(cells: &[&Cell], point: Point) -> Vec<Series> {
    let copiers: [fn(&Cell) -> Option<&Stat>; 3] = [
        |cell| cell.stock.as_ref(),
        |cell| cell.tuned.as_ref(),
        |cell| cell.pinned.as_ref(),
    ];
    (0..)
        .zip(copiers)
        .map(|(colour, copier)| Series {
            colour,
            points: cells
                .iter()
                .filter_map(|cell| {
                    let (median, from, to) = point(cell, copier(cell)?);
                    Some((cell.bytes as f64, median, from, to))
                })
                .collect(),
        })
        .collect()
}

fn cpu_copies(report: &Report) -> anyhow::Result<String> {
    let copies = &report.cpu_copies;
    let mut methods: Vec<&str> = copies
        .one_core
        .iter()
        .map(|rate| rate.method.as_str())
        .collect();
    methods.dedup();
    if methods.is_empty() {
        return Ok(String::new());
    }
    let lines = |rates: &[Rate], x: fn(&Rate) -> f64| -> Vec<Series> {
        (METHOD_COLOURS..)
            .zip(&methods)
            .map(|(colour, method)| Series {
                colour,
                points: rates
                    .iter()
                    .filter(|rate| rate.method == *method)
                    .map(|rate| (x(rate), rate.gbps, rate.gbps_p10, rate.gbps_p90))
                    .collect(),
            })
            .collect()
    };
    let legend: String = (METHOD_COLOURS..)
        .zip(&methods)
        .map(|(colour, method)| format!("<i class=c{colour}></i>{} ", escape(method)))
        .collect();
    let one_core = lines(&copies.one_core, |rate| rate.bytes as f64);
    let scaling = lines(&copies.scaling, |rate| rate.threads as f64);
    let size = copies.scaling.first().map_or(0, |rate| rate.bytes as u64);
    Ok(format!(
        "<h2>CPU copies, memory to memory</h2>\n<p class=legend>{legend}</p>\n<p>nt: non-temporal stores. Blocks up to the \
         size of a cache are copied within it.</p>\n<div class=charts>\n{}{}</div>\n",
        figure(
            "One core: GB/s by size",
            &chart::draw(Axis::Bytes, Axis::RateByTens, &one_core)?
        ),
        figure(
            &format!("{}: GB/s by threads, each on its own CPU", bytes(size)),
            &chart::draw(Axis::Count, Axis::Rate, &scaling)?
        ),
    ))
}

fn table(name: &str, cells: &[&Cell]) -> String {
    if cells.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "<h3>{name}</h3>\n<div class=wide><table><thead><tr><th>size<th><th>GB/s<th>of pinned<th>gain<th>until idle (p10 – p90)\
         <th>call (p10 – p90)<th>CPU-s/GiB<th>samples</tr></thead>\n"
    );
    for cell in cells {
        let copiers = [
            ("stock", &cell.stock),
            ("tuned", &cell.tuned),
            ("pinned", &cell.pinned),
            ("pinned, attached", &cell.pinned_attached),
        ];
        for (index, (copier, stat)) in copiers.into_iter().enumerate() {
            let Some(stat) = stat else { continue };
            let tuned = |value: Option<f64>, unit: &str| match (index, value) {
                (1, Some(value)) => format!("{value:.2}{unit}"),
                _ => String::new(),
            };
            let left = index == 1 && cell.staged == Some(0.0);
            let _ = writeln!(
                text,
                "<tr><th>{}</th><td><i class=c{}></i>{copier}{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                if index == 0 {
                    bytes(cell.bytes)
                } else {
                    String::new()
                },
                index.min(2),
                if left { " (left to stock)" } else { "" },
                three(stat.gbps),
                tuned(cell.share_of_pinned, ""),
                tuned(cell.speedup, "×"),
                spread(&stat.idle_ns),
                spread(&stat.call_ns),
                cpu_seconds(stat.cpu_s_per_gib),
                stat.samples,
            );
        }
    }
    text + "</table></div>\n"
}

/// What the payload leaves to the driver.
fn turns(turns: &[Turn]) -> String {
    let Some(first) = turns.first() else {
        return String::new();
    };
    let mut text = format!(
        "<h3>Left to stock, attached and detached in turns ({} rounds)</h3>\n<p>Medians of stock, and what attaching added \
         to them: percent, and nanoseconds of the middle eight tenths of the rounds.</p>\n<div class=wide><table><thead><tr><th>size\
         <th>copies<th>call, stock<th>added<th>ns (p10..p90)<th>until idle, stock<th>added<th>ns (p10..p90)</tr></thead>\n",
        first.rounds
    );
    for turn in turns {
        let [call, idle] = [&turn.call, &turn.idle].map(|added| {
            format!(
                "<td>{}</td><td>{}</td><td>{}</td>",
                time(added.stock_ns),
                percent(added),
                range(added)
            )
        });
        let _ = writeln!(
            text,
            "<tr><th>{}</th><td>{} {}</td>{call}{idle}</tr>",
            bytes(turn.bytes),
            turn.direction.name(),
            turn.memory.name()
        );
    }
    text + "</table></div>\n"
}
