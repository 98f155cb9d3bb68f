//! Lays the parts of the view out on a terminal of any size.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;
use unicode_width::UnicodeWidthStr as _;

use super::figures::{clock, count, join};
use super::model::{Moment, Who};
use super::palette::Palette;
use super::state::State;
use super::{classes, latencies, list};
use crate::link::Link;
use crate::trace::gain::Gain;
use crate::trace::{Targets, table};

/// From this width on, latencies stand beside the rest.
const WIDE: u16 = 160;
/// What the list and the classes use of it: the list with a minute of the past.
const LEFT: u16 = 128;

/// What stays the same during a trace.
#[derive(Debug)]
pub struct Subject {
    /// Whose copies are traced.
    pub targets: Targets,
    /// How long the trace is to be; `None` until somebody ends it.
    pub length: Option<Duration>,
    /// What a pair of probes costs.
    pub pair_ns: Option<u64>,
    /// The way to this machine's GPUs.
    pub link: Option<Link>,
}

/// Draws everything.
pub fn draw(
    frame: &mut Frame<'_>,
    subject: &Subject,
    moment: &Moment,
    state: &State,
    palette: Palette,
) {
    let mut area = frame.area();
    for line in header(subject, moment, state, palette, area.width.into()) {
        if area.height > 0 {
            put(frame, vec![line], top(&mut area, 1));
        }
    }
    if area.height > 6 {
        let last = Rect {
            y: area.bottom() - 1,
            height: 1,
            ..area
        };
        area.height -= 1;
        let keys = keys(state, area.width.into());
        put(frame, vec![Line::from(keys)], last);
    }
    if state.help {
        let width = area.width.into();
        let lines = HELP.lines().filter(|line| line.width() <= width);
        put(frame, lines.map(Line::from).collect(), area);
        return;
    }
    body(frame, area, subject, moment, state, palette);
}

fn body(
    frame: &mut Frame<'_>,
    mut area: Rect,
    subject: &Subject,
    moment: &Moment,
    state: &State,
    palette: Palette,
) {
    let shown = moment.classes(state.window, state.who, state.size);
    let titled = |title: String, lines: Vec<Line<'static>>, width: usize| {
        let title = rule(&[title], width).style(palette.head());
        [title].into_iter().chain(lines).collect::<Vec<_>>()
    };
    let mut beside = None;
    if area.width >= WIDE {
        let left = Rect {
            width: LEFT,
            ..area
        };
        beside = Some(Rect {
            x: area.x + LEFT + 2,
            width: area.width - LEFT - 2,
            ..area
        });
        area = left;
    }
    let width = usize::from(area.width);
    // Title, heads, the sum of all and a line for each process.
    let processes = moment.rows(state.window).len() as u16 + 2;
    // What attach would bring, under the classes of a single process.
    let advice = state
        .who
        .filter(|_| !shown.is_empty())
        .map(|pid| Gain::of_process(&moment.whole, pid, subject.link.as_ref()).advice);
    let table = shown.len().max(1) as u16 + 2 + u16::from(advice.is_some());
    let (list_height, table_height) = match (area.height, beside) {
        (height @ 0..9, _) => (height, 0),
        (height @ 9..18, None) => {
            let list = processes.min(height / 2);
            (list, height - list)
        }
        (height, None) => {
            let list = processes.min((height * 2 / 5).max(5));
            // Latencies take six lines and their title at first, or fewer if they fill no more.
            let latencies = latencies::lines(&shown, palette, width, 6).len() as u16 + 1;
            (list, table.min(height - list - latencies))
        }
        (height, Some(_)) => {
            let list = processes.min(height.saturating_sub(table).max(height / 2));
            (list, height - list)
        }
    };
    let lines = list::lines(moment, state, palette, width, list_height.into());
    put(frame, lines, top(&mut area, list_height));

    let whose = whose(moment, state);
    if table_height > 0 {
        let room = usize::from(table_height) - 1;
        let advice = advice.filter(|_| room > 3);
        let mut lines = match shown.is_empty() {
            true => vec![Line::from(join(&[why_nothing(moment, state)], width))],
            false => classes::lines(&shown, palette, width, room - usize::from(advice.is_some())),
        };
        lines.extend(advice.map(|advice| Line::from(join(&[advice], width))));
        let title = format!("{whose}, {}, GB/s in the calls", list::when(state.window));
        put(
            frame,
            titled(title, lines, width),
            top(&mut area, table_height),
        );
    }
    let room = beside.unwrap_or(area);
    if room.height > 2 && table_height > 0 {
        let width = usize::from(room.width);
        let lines = latencies::lines(&shown, palette, width, usize::from(room.height) - 1);
        if !lines.is_empty() {
            put(
                frame,
                titled(format!("latency, {whose}"), lines, width),
                room,
            );
        }
    }
}

fn header(
    subject: &Subject,
    moment: &Moment,
    state: &State,
    palette: Palette,
    width: usize,
) -> [Line<'static>; 2] {
    let whole = &moment.whole;
    let what = match &subject.targets {
        Targets::All => "every CUDA process".to_owned(),
        Targets::Pids(pids) => match pids[..] {
            [pid] => named(moment, Some(pid)),
            _ => format!("{} processes", pids.len()),
        },
    };
    let time = match subject.length {
        Some(length) => format!("{} of {}", clock(whole.duration), clock(length)),
        None => clock(whole.duration),
    };
    let frozen = if state.frozen {
        "FROZEN (f goes on)"
    } else {
        ""
    };
    let first = [format!("cmt trace: {what}"), time, frozen.to_owned()];

    let calls = whole.probe_pairs;
    let cost = match subject.pair_ns {
        Some(pair_ns) => format!(
            "{} probed calls x {} = {}",
            count(calls as f64),
            table::time(pair_ns),
            table::time(calls.saturating_mul(pair_ns))
        ),
        None => format!("{} probed calls", count(calls as f64)),
    };
    let alarm = |number: u64, what: &str| match number {
        0 => String::new(),
        number => format!("{what}: {}", count(number as f64)),
    };
    let lost = alarm(whole.lost_total(), "LOST");
    let warnings = alarm(whole.warnings.len() as u64, "WARNINGS");
    let alarms = join(&[lost, warnings], width);
    let alarmed = !alarms.is_empty();
    // In as many words as there is room for.
    let room = width.saturating_sub(alarms.width() + usize::from(alarmed) * 2);
    let cost = [
        format!("tracing itself: {cost} of the targets' time"),
        format!("tracing: {cost}"),
        cost,
    ]
    .into_iter()
    .find(|cost| cost.width() <= room)
    .unwrap_or_default();
    let second = Line::from(join(&[alarms, cost], width));
    [
        Line::styled(join(&first, width), palette.head()),
        match alarmed {
            true => second.style(palette.warning()),
            false => second,
        },
    ]
}

fn keys(state: &State, width: usize) -> String {
    let frozen = if state.frozen { "f go on" } else { "f freeze" };
    let parts = [
        "q quit",
        "? help",
        "↑↓ process",
        "←→ size",
        "s/S sort",
        "t second/start",
        frozen,
    ];
    join(&parts.map(str::to_owned), width)
}

/// A process by name and id.
fn named(moment: &Moment, who: Who) -> String {
    match who {
        None => "all processes".to_owned(),
        Some(pid) => match moment.whole.processes.get(&pid) {
            Some(process) => format!("{} (pid {pid})", process.comm),
            None => format!("pid {pid}"),
        },
    }
}

/// Whose copies of which size the lower parts show.
fn whose(moment: &Moment, state: &State) -> String {
    let size = match state.size {
        Some(class) => {
            let bytes = cmt_common::histogram::size_class_bytes(class);
            format!("{} and more", table::size(bytes as f64))
        }
        None => "all sizes".to_owned(),
    };
    format!("{}, {size}", named(moment, state.who))
}

/// Why there is no class to show.
fn why_nothing(moment: &Moment, state: &State) -> String {
    let processes = &moment.whole.processes;
    let some = match state.who {
        Some(pid) => processes.get(&pid).into_iter().collect(),
        None => processes.values().collect::<Vec<_>>(),
    };
    if some
        .iter()
        .all(|process| process.libraries.is_empty() && !process.ended)
    {
        return "no CUDA library is mapped, so there is nothing to probe yet".to_owned();
    }
    format!("no copy, {}", list::when(state.window))
}

/// A rule across the width with a title in it.
pub fn rule(parts: &[String], width: usize) -> Line<'static> {
    let title = super::figures::clip(&parts.join(", "), width.saturating_sub(6));
    let start = format!("── {title} ");
    let rest = "─".repeat(width.saturating_sub(start.width()));
    Line::from(start + &rest)
}

/// Cuts lines off the top of an area.
fn top(area: &mut Rect, height: u16) -> Rect {
    let height = height.min(area.height);
    let top = Rect { height, ..*area };
    area.y += height;
    area.height -= height;
    top
}

fn put(frame: &mut Frame<'_>, lines: Vec<Line<'_>>, area: Rect) {
    frame.render_widget(Paragraph::new(lines), area);
}

/// What the keys do and what the columns mean.
const HELP: &str = "
 ↑ ↓  k j         another process; the first line is the sum of all
 ← →              only copies of one size, and all sizes again
 s  S             sort by the next column; the other way round
 t                figures of the last second, or since the start
 f  blank         let the display stand still; tracing goes on
 PgUp PgDn Home End      further in the list
 q  Esc  Ctrl-C   end the trace and print the report

 HtoD  DtoH    GB/s to the GPU and from it, by the clock (1 GB = 1e9 bytes)
 copying       time in copies by the clock: threads add up, so beyond 100%
 pageable      share of the bytes that came from or went to pageable memory
 last 60 s     GB/s both ways, each line by its own highest
 GB/s          in the table: by the time inside the calls
 size          the smallest of a class: up to twice as much belongs to it
 †             this process has ended

 any key goes back";

#[cfg(test)]
mod tests;
