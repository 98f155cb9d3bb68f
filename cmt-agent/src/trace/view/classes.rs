//! The classes of a process's copies, one line each.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use cmt_common::histogram::size_class_bytes;
use ratatui::text::{Line, Span};

use super::columns::{self, Column};
use super::figures::{count, gb_per_s, latency};
use super::model::Class;
use super::palette::Palette;
use crate::histogram::Stat;
use crate::trace::table;

const COLUMNS: [Column; 10] = [
    Column::name("way", 7, 0),
    Column::name("memory", 8, 1),
    Column::figure("size", 7, 2),
    Column::figure("calls", 6, 3),
    Column::figure("errors", 6, 6),
    Column::figure("GB/s", 6, 4),
    Column::figure("p50", 7, 5),
    Column::figure("p90", 7, 9),
    Column::figure("p99", 7, 7),
    Column::figure("max", 7, 8),
];

/// Heads and at most `height` lines in all: where there are more classes, those that took most time.
pub fn lines(
    classes: &BTreeMap<Class, Stat>,
    palette: Palette,
    width: usize,
    height: usize,
) -> Vec<Line<'static>> {
    let shown = columns::fitting(&COLUMNS, width);
    let heads = columns::line(&COLUMNS, &shown, |at| COLUMNS[at].head.into());
    let mut lines = vec![Line::styled(heads, palette.head())];
    let mut room = height.saturating_sub(1);
    if classes.len() > room {
        room = room.saturating_sub(1);
    }
    let mut by_time: Vec<(&Class, &Stat)> = classes.iter().collect();
    by_time.sort_by_key(|(_, stat)| Reverse((stat.total_ns, stat.calls)));
    let hidden = by_time.split_off(room.min(by_time.len()));
    by_time.sort_by_key(|(class, _)| **class);
    for (class, stat) in by_time {
        lines.push(line(*class, stat, &shown, palette));
    }
    if !hidden.is_empty() {
        let calls: u64 = hidden.iter().map(|(_, stat)| stat.calls).sum();
        let text = format!(
            "and {} more classes that took less time, {} calls",
            hidden.len(),
            count(calls as f64)
        );
        if text.len() <= width {
            lines.push(Line::from(text));
        }
    }
    lines.truncate(height);
    lines
}

fn line(class: Class, stat: &Stat, shown: &[usize], palette: Palette) -> Line<'static> {
    let quantile = |q| stat.quantile(q).map_or("-".into(), latency);
    let cells = columns::line(&COLUMNS, shown, |at| -> Cow<'_, str> {
        match at {
            0 => class.direction.name().into(),
            1 => class.memory().into(),
            2 => table::size(size_class_bytes(class.size_class) as f64).into(),
            3 => count(stat.calls as f64).into(),
            4 => count(stat.errors as f64).into(),
            5 => gb_per_s(stat.gb_per_s().unwrap_or(0.0)).into(),
            6 => quantile(0.5).into(),
            7 => quantile(0.9).into(),
            8 => quantile(0.99).into(),
            _ if stat.count() == 0 => "-".into(),
            _ => latency(stat.max_ns).into(),
        }
    });
    // The way stands first and in one colour with the bars of its latencies.
    let way = cells.find(' ').unwrap_or(cells.len());
    let (way, rest) = cells.split_at(way);
    Line::from(vec![
        Span::styled(way.to_owned(), palette.direction(class.direction)),
        Span::raw(rest.to_owned()),
    ])
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::calls;
    use super::*;
    use cmt_common::api::{Direction, MemoryKind};

    fn class(direction: Direction, size_class: u8) -> Class {
        Class {
            direction,
            memory: MemoryKind::Pageable as u8,
            size_class,
        }
    }

    fn text(lines: Vec<Line<'_>>) -> Vec<String> {
        lines.iter().map(Line::to_string).collect()
    }

    #[test]
    fn a_class_shows_its_counts() {
        let mut stat = calls(30, 64 << 20, 7_790_000);
        stat.calls += 2;
        stat.errors += 2;
        let mut failed = Stat::default();
        failed.calls = 5;
        failed.errors = 5;
        let classes = BTreeMap::from([
            (class(Direction::HtoD, 27), stat),
            (class(Direction::DtoH, 27), failed),
        ]);
        assert_eq!(
            text(lines(&classes, Palette::PLAIN, 80, 9)),
            [
                "way     memory      size  calls errors   GB/s     p50     p90     p99     max",
                "HtoD    pageable   64MiB     32      2   8.61   7.6ms   7.7ms   7.8ms   7.8ms",
                "DtoH    pageable   64MiB      5      5      -       -       -       -       -",
            ]
        );
    }

    #[test]
    fn without_room_for_all_those_that_took_most_time_stay() {
        let classes: BTreeMap<Class, Stat> = (1..=9u8)
            .map(|size| {
                let stat = calls(2, 1 << size, 1000 * u64::from(size % 5));
                (class(Direction::HtoD, size), stat)
            })
            .collect();
        let shown = text(lines(&classes, Palette::PLAIN, 80, 4));
        assert_eq!(shown.len(), 4);
        assert!(
            shown[1].contains(" 8B ") && shown[2].contains("256B"),
            "{shown:?}"
        );
        assert_eq!(shown[3], "and 7 more classes that took less time, 14 calls");
        for height in 0..12 {
            let all = lines(&classes, Palette::PLAIN, 80, height);
            assert!(all.len() <= height);
        }
    }
}
