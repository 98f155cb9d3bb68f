//! Histograms of latencies, one a direction, side by side over the same latencies.

use std::collections::BTreeMap;

use cmt_common::api::Direction;
use cmt_common::histogram::{bucket_bounds, bucket_of};
use ratatui::text::{Line, Span};

use super::figures::{count, latency, pad};
use super::model::Class;
use super::palette::Palette;
use crate::histogram::Stat;

/// Cells of `1.2us to 2.4us`.
const RANGE: usize = 18;
/// Cells of a count, with a blank before it.
const COUNT: usize = 6;
/// Shorter bars say nothing, and a head would not fit above one with its count.
const SHORTEST_BAR: usize = 13;

/// One direction.
struct Bars {
    direction: Direction,
    stat: Stat,
}

/// At most `height` lines: heads, and ranges of latency as fine as they fit.
pub fn lines(
    classes: &BTreeMap<Class, Stat>,
    palette: Palette,
    width: usize,
    height: usize,
) -> Vec<Line<'static>> {
    let most = width.saturating_sub(RANGE) / (1 + SHORTEST_BAR + COUNT);
    let bars = directions(classes, most);
    let rows = height.saturating_sub(1);
    let Some((size, groups)) = grouped(&bars, rows) else {
        return Vec::new();
    };
    let bar = ((width - RANGE) / bars.len() - 1 - COUNT).min(60);

    let mut heads = " ".repeat(RANGE);
    for Bars { direction, stat } in &bars {
        let head = format!("{} {} calls", direction.name(), count(stat.count() as f64));
        heads += &format!(" {}", pad(&head, bar + COUNT, false));
    }
    let mut lines = vec![Line::styled(heads.trim_end().to_owned(), palette.head())];
    let first = groups.keys().next().copied().unwrap_or(0);
    let last = groups.keys().last().copied().unwrap_or(0);
    for group in first..=last {
        let (lo, hi) = bounds(group, size);
        let mut spans = vec![Span::raw(format!(
            "{:>7} to {:<7}",
            latency(lo),
            latency(hi)
        ))];
        for (at, Bars { direction, .. }) in bars.iter().enumerate() {
            let most = groups.values().map(|counts| counts[at]).max().unwrap_or(0);
            let calls = groups.get(&group).map_or(0, |counts| counts[at]);
            let cells = (calls as f64 / most.max(1) as f64 * bar as f64).ceil() as usize;
            let calls = match calls {
                0 => String::new(),
                calls => count(calls as f64),
            };
            let (filled, count) = ("█".repeat(cells), format!(" {calls}"));
            let blanks = (bar + COUNT).saturating_sub(cells + count.len());
            spans.push(Span::styled(
                format!(" {filled}"),
                palette.direction(*direction),
            ));
            spans.push(Span::raw(count + &" ".repeat(blanks)));
        }
        lines.push(Line::from(spans));
    }
    lines
}

/// The directions with a latency to show, at most `most` of them: those with most calls.
fn directions(classes: &BTreeMap<Class, Stat>, most: usize) -> Vec<Bars> {
    let mut merged = BTreeMap::<Direction, Stat>::new();
    for (class, stat) in classes {
        merged.entry(class.direction).or_default().merge(stat);
    }
    let mut bars: Vec<Bars> = merged
        .into_iter()
        .filter(|(_, stat)| stat.count() > 0)
        .map(|(direction, stat)| Bars { direction, stat })
        .collect();
    bars.sort_by_key(|bars| std::cmp::Reverse(bars.stat.count()));
    bars.truncate(most);
    bars.sort_by_key(|bars| bars.direction);
    bars
}

/// Buckets put together so that no more than `rows` ranges cover all: how many to the range, and the calls of each range by
/// direction. `None` where there is nothing, or no room.
fn grouped(bars: &[Bars], rows: usize) -> Option<(usize, BTreeMap<usize, Vec<u64>>)> {
    let buckets: Vec<(usize, usize, u64)> = bars
        .iter()
        .enumerate()
        .flat_map(|(at, bars)| {
            let buckets = bars.stat.histogram().into_iter();
            buckets.map(move |(lo, _, calls)| (bucket_of(lo), at, calls))
        })
        .collect();
    let first = buckets.iter().map(|(bucket, ..)| *bucket).min()?;
    let last = buckets.iter().map(|(bucket, ..)| *bucket).max()?;
    // Eight buckets are an octave: a range is a part of one, or several.
    let size = [1, 2, 4]
        .into_iter()
        .chain((8..).step_by(8))
        .find(|size| last / size - first / size < rows.max(1))
        .filter(|_| rows > 0)?;
    let mut groups = BTreeMap::<usize, Vec<u64>>::new();
    for (bucket, at, calls) in buckets {
        let counts = groups
            .entry(bucket / size)
            .or_insert_with(|| vec![0; bars.len()]);
        counts[at] += calls;
    }
    Some((size, groups))
}

/// The latencies of a range, the second exclusive.
fn bounds(group: usize, size: usize) -> (u64, u64) {
    let (first, last) = (group * size, group * size + size - 1);
    (bucket_bounds(first).0, bucket_bounds(last).1)
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::calls;
    use super::*;

    fn classes() -> BTreeMap<Class, Stat> {
        let class = |direction| Class {
            direction,
            memory: 0,
            size_class: 21,
        };
        let mut slow = calls(10, 1 << 20, 1_000_000);
        slow.merge(&calls(5, 1 << 20, 9_000_000));
        BTreeMap::from([
            (class(Direction::HtoD), calls(40, 1 << 20, 500_000)),
            (class(Direction::DtoH), slow),
        ])
    }

    #[test]
    fn ranges_are_as_fine_as_they_fit() {
        let text = |height| -> Vec<String> {
            let lines = lines(&classes(), Palette::PLAIN, 60, height);
            lines
                .iter()
                .map(|line| line.to_string().trim_end().to_owned())
                .collect()
        };
        assert_eq!(
            text(7),
            [
                "                   HtoD 40 calls        DtoH 15 calls",
                "  262us to 524us   ██████████████ 40",
                "  524us to 1.0ms                        ██████████████ 10",
                "  1.0ms to 2.1ms",
                "  2.1ms to 4.2ms",
                "  4.2ms to 8.4ms",
                "  8.4ms to 17ms                         ███████ 5",
            ]
        );
        assert!(text(9).len() <= 9);
        assert_eq!(text(1), [""; 0]);
        let calls: u64 = grouped(&directions(&classes(), 2), 4)
            .map(|(_, groups)| groups.values().flatten().sum())
            .unwrap_or(0);
        assert_eq!(calls, 55, "none is lost between ranges");
    }

    #[test]
    fn no_line_is_longer_or_more_than_there_is_room() {
        for (width, height) in (0..130).flat_map(|width| [(width, 3), (width, 40)]) {
            let lines = lines(&classes(), Palette::PLAIN, width, height);
            assert!(lines.len() <= height);
            assert!(lines.iter().all(|line| line.width() <= width), "{width}");
        }
    }
}
