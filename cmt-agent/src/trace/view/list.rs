//! The list of processes.

use std::borrow::Cow;

use ratatui::text::Line;

use super::columns::{self, Column};
use super::draw::rule;
use super::figures::{count, gb_per_s, percent};
use super::model::{HISTORY_S, Moment, Row, Window};
use super::palette::Palette;
use super::state::{Sort, State};

/// The columns, each with what `s` calls it. A sign for the order stands beside the head, so they are one cell wider.
const SORTS: [Sort; 7] = [
    Sort::Pid,
    Sort::Name,
    Sort::Calls,
    Sort::HtoD,
    Sort::DtoH,
    Sort::Copying,
    Sort::Pageable,
];
const COLUMNS: [Column; 7] = [
    Column::figure("pid", 7, 0),
    Column::name("process", 15, 1),
    Column::figure("calls/s", 8, 5),
    Column::figure("HtoD", 6, 3),
    Column::figure("DtoH", 6, 4),
    Column::figure("copying", 8, 2),
    Column::figure("pageable", 9, 6),
];
/// The sign of the chosen line, and that of a process that has ended.
const MARK: usize = 2;
/// Less says nothing of the past.
const SHORTEST_PAST: usize = 10;

/// Title, heads and as many processes as fit `height` lines: the sum of all, then those around the chosen one.
pub fn lines(
    moment: &Moment,
    state: &State,
    palette: Palette,
    width: usize,
    height: usize,
) -> Vec<Line<'static>> {
    let rows = state.rows(moment);
    let (all, processes) = (&rows[0], &rows[1..]);
    let room = height.saturating_sub(3);
    let chosen = processes.iter().position(|row| row.who == state.who);
    let first = chosen.map_or(0, |at| (at + 1).saturating_sub(room));
    let last = (first + room).min(processes.len());
    let shown = &processes[first..last];

    let some = match shown.len() {
        1 if processes.len() == 1 => "1 process".to_owned(),
        all if all == processes.len() => format!("{all} processes"),
        0 => format!("{} processes", processes.len()),
        _ => format!("processes {} to {last} of {}", first + 1, processes.len()),
    };
    let what = "GB/s and time by the clock".to_owned();
    let mut lines = vec![
        rule(&[some, what, when(state.window).into()], width).style(palette.head()),
        heads(state, width).style(palette.head()),
    ];
    for row in [all].into_iter().chain(shown) {
        let is_chosen = row.who == state.who;
        let line = line(moment, row, is_chosen, width);
        lines.push(match is_chosen {
            true => line.style(palette.chosen()),
            false => line,
        });
    }
    lines.truncate(height);
    lines
}

/// The time that figures are of, in words.
pub fn when(window: Window) -> &'static str {
    match window {
        Window::Second => "last second",
        Window::Start => "since the start",
    }
}

/// The columns that fit, and the cells that are left for the past.
fn layout(width: usize) -> (Vec<usize>, usize) {
    let shown = columns::fitting(&COLUMNS, width.saturating_sub(MARK));
    let used = MARK + columns::width(&COLUMNS, &shown) + 1;
    let past = width.saturating_sub(used).min(HISTORY_S);
    (shown, if past < SHORTEST_PAST { 0 } else { past })
}

fn heads(state: &State, width: usize) -> Line<'static> {
    let (shown, past) = layout(width);
    let heads = columns::line(&COLUMNS, &shown, |at| {
        let head = COLUMNS[at].head;
        if SORTS[at] != state.sort {
            return head.into();
        }
        let downwards = matches!(state.sort, Sort::Pid | Sort::Name) == state.reversed;
        format!("{head}{}", if downwards { '▼' } else { '▲' }).into()
    });
    let past = if past > 0 { " last 60 s" } else { "" };
    Line::from(format!("{:MARK$}{heads}{past}", ""))
}

fn line(moment: &Moment, row: &Row, chosen: bool, width: usize) -> Line<'static> {
    let (shown, past) = layout(width);
    let cells = columns::line(&COLUMNS, &shown, |at| -> Cow<'_, str> {
        match SORTS[at] {
            Sort::Pid => row
                .who
                .map_or(Cow::Borrowed(""), |pid| pid.to_string().into()),
            Sort::Name => Cow::Borrowed(&row.comm),
            Sort::Calls => count(row.calls_per_s).into(),
            Sort::HtoD => gb_per_s(row.htod_gb_per_s).into(),
            Sort::DtoH => gb_per_s(row.dtoh_gb_per_s).into(),
            Sort::Copying => percent(row.copying).into(),
            Sort::Pageable => percent(row.pageable).into(),
        }
    });
    let mark = if chosen { '>' } else { ' ' };
    let ended = if row.ended { '†' } else { ' ' };
    let history = moment.history(row.who);
    Line::from(format!(
        "{mark}{ended}{cells} {}",
        sparkline(&history, past)
    ))
}

/// The past in so many cells, the present at the right, the highest as the highest bar. Seconds before the trace are blank.
fn sparkline(history: &[f32], cells: usize) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    if cells == 0 {
        return String::new();
    }
    let seconds = HISTORY_S.div_ceil(cells);
    let mut means: Vec<f32> = history
        .rchunks(seconds)
        .take(cells)
        .map(|some| some.iter().sum::<f32>() / some.len() as f32)
        .collect();
    means.reverse();
    let most = means.iter().copied().fold(0.0, f32::max);
    let bars = means.iter().map(|mean| match mean / most {
        share if share > 0.0 => BARS[((share * 7.0).ceil() as usize).clamp(1, 7)],
        // No copy, now or ever.
        _ => BARS[0],
    });
    let blanks = HISTORY_S.div_ceil(seconds).min(cells) - means.len();
    " ".repeat(blanks) + &bars.collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_past_ends_at_the_right_and_its_highest_is_the_highest() {
        assert_eq!(sparkline(&[], 60), " ".repeat(60));
        let line = sparkline(&[0.0, 2.0, 4.0], 60);
        assert_eq!(line.trim_start(), "▁▅█");
        assert_eq!(line.chars().count(), 60);
        // Five seconds to the cell.
        let mut history = vec![0.0; 55];
        history.extend([1.0; 5]);
        assert_eq!(sparkline(&history, 12), "▁▁▁▁▁▁▁▁▁▁▁█");
        assert_eq!(sparkline(&[0.0; 60], 12), "▁".repeat(12));
        assert_eq!(sparkline(&[1.0], 0), "");
    }

    #[test]
    fn the_most_important_columns_stay() {
        for width in 0..200 {
            let (shown, past) = layout(width);
            let used = MARK + columns::width(&COLUMNS, &shown);
            assert!(shown.is_empty() || used <= width);
            assert!(past == 0 || used + 1 + past <= width);
        }
        assert_eq!(layout(80), ((0..7).collect(), 12));
        assert_eq!(layout(128).1, HISTORY_S);
        assert_eq!(layout(35).0, [0, 1, 5]);
    }
}
