//! A plan from what was found class by class, with the estimate's rows where nothing was measured.

use cmt_common::control::{PLAN_ROWS, Plan, PlanRow};

use super::search::Series;
use crate::bench::wire::Direction;
use crate::profile::Class;

/// What was measured at this size is better known of all larger copies than what is estimated.
const LARGE_BYTES: u64 = 256 << 20;

/// A direction, and the smallest size of a class, which reaches to below twice that.
pub type Key = (Direction, u64);

/// What was found for one class.
pub struct Cell {
    /// Which.
    pub key: Key,
    /// Its row; none for stock.
    pub row: Option<PlanRow>,
    /// Its figures.
    pub class: Class,
}

impl Cell {
    /// Takes the figures of a comparison of stock, pinned, the row that was found, the estimate's, and stock and the row
    /// with fresh memory; these samples have chosen nothing yet. In doubt the estimate's row stays, and stock stays where
    /// neither of the two is faster by more than `margin`.
    pub fn settle(&mut self, series: &[Series], instant: Option<PlanRow>, margin: f64) {
        let [stock, pinned, found, estimate, fresh_stock, fresh] = series else {
            return;
        };
        let gbps = |series: &Series| self.key.1 as f64 / series.median();
        // Of short copies only those are staged that come in a row, which new memory seldom does.
        let is_paced = cmt_copy::is_paced(self.key.0 == Direction::DtoH, self.key.1);
        let loses_fresh = !is_paced && fresh_stock.beats(fresh, margin);
        let found_wins = !loses_fresh && found.beats(stock, margin);
        let estimate_wins = instant.is_some() && estimate.beats(stock, margin);
        let estimate_first = self.row != instant && estimate.seems_faster(found, margin);
        let chosen = match (found_wins, estimate_wins) {
            (true, true) if estimate_first => Some(estimate),
            (true, _) => Some(found),
            (false, true) if self.row != instant => Some(estimate),
            (false, _) => None,
        };
        let is_found = chosen.is_some_and(|chosen| std::ptr::eq(chosen, found));
        let class = &mut self.class;
        class.samples = stock.times.len() as u64;
        class.stock_gbps = gbps(stock);
        class.pinned_gbps = gbps(pinned);
        class.tuned_gbps = gbps(chosen.unwrap_or(stock));
        class.instant_gbps = Some(gbps(estimate));
        class.fresh_stock_gbps = Some(gbps(fresh_stock));
        // Nobody has looked at the estimate's row with fresh memory here.
        class.fresh_tuned_gbps = match chosen {
            None => class.fresh_stock_gbps,
            Some(_) if is_paced => class.fresh_stock_gbps,
            Some(_) => is_found.then(|| gbps(fresh)),
        };
        if !is_found {
            self.row = chosen.and(instant);
        }
    }
}

fn rows(plan: &Plan, direction: Direction) -> &[PlanRow; PLAN_ROWS] {
    match direction {
        Direction::HtoD => &plan.htod,
        Direction::DtoH => &plan.dtoh,
    }
}

/// The row that stages copies of a size; its own bound is left out.
pub fn row(plan: &Plan, (direction, bytes): Key) -> Option<PlanRow> {
    rows(plan, direction)
        .iter()
        .find(|row| bytes <= row.up_to_bytes)
        .filter(|row| row.threads > 0)
        .map(unbounded)
}

/// The row of the smallest copies that are staged.
pub fn first(plan: &Plan, direction: Direction) -> Option<PlanRow> {
    let staged = rows(plan, direction).iter().find(|row| row.threads > 0);
    staged.map(unbounded)
}

fn unbounded(row: &PlanRow) -> PlanRow {
    PlanRow {
        up_to_bytes: u64::MAX,
        ..*row
    }
}

/// The plan: `cells` are sorted, and of classes between `first_bytes` and `last_bytes`.
pub fn plan(estimate: &Plan, cells: &[Cell], first_bytes: u64, last_bytes: u64) -> Plan {
    let mut plan = *estimate;
    for direction in [Direction::HtoD, Direction::DtoH] {
        let found: Vec<&Cell> = cells
            .iter()
            .filter(|cell| cell.key.0 == direction)
            .collect();
        let rows = merged(stretch(
            estimate,
            direction,
            &found,
            first_bytes,
            last_bytes,
        ));
        let to = match direction {
            Direction::HtoD => &mut plan.htod,
            Direction::DtoH => &mut plan.dtoh,
        };
        // With more rows than a plan holds the estimate stays.
        if rows.len() <= PLAN_ROWS {
            *to = [PlanRow::default(); PLAN_ROWS];
            to[..rows.len()].copy_from_slice(&rows);
        }
    }
    plan
}

/// Rows by size: stock, then class by class, then as estimated.
fn stretch(
    estimate: &Plan,
    direction: Direction,
    cells: &[&Cell],
    first_bytes: u64,
    last_bytes: u64,
) -> Vec<PlanRow> {
    let stock = PlanRow::default();
    let mut stretch = vec![PlanRow {
        up_to_bytes: first_bytes - 1,
        ..stock
    }];
    let mut bytes = first_bytes;
    while bytes <= last_bytes {
        let cell = cells.iter().find(|cell| cell.key.1 == bytes);
        let row = match cell {
            Some(cell) => cell.row,
            None => row(estimate, (direction, bytes)),
        };
        stretch.push(PlanRow {
            up_to_bytes: 2 * bytes - 1,
            ..row.unwrap_or(stock)
        });
        bytes *= 2;
    }
    let estimated = rows(estimate, direction);
    let mut above = estimated
        .iter()
        .filter(|row| row.up_to_bytes >= 2 * last_bytes)
        .peekable();
    let is_last_measured = cells.iter().any(|cell| cell.key.1 == last_bytes);
    if is_last_measured && (last_bytes >= LARGE_BYTES || above.peek().is_none()) {
        // The last bound falls.
        if let Some(last) = stretch.last_mut() {
            last.up_to_bytes = u64::MAX;
        }
    } else {
        stretch.extend(above);
    }
    stretch
}

/// One row in place of neighbours that say the same.
fn merged(rows: Vec<PlanRow>) -> Vec<PlanRow> {
    let mut merged: Vec<PlanRow> = Vec::new();
    for row in rows {
        match merged.last_mut() {
            Some(last) if unbounded(last) == unbounded(&row) => last.up_to_bytes = row.up_to_bytes,
            _ => merged.push(row),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    #[test]
    fn the_comparison_at_the_end_decides() {
        use crate::tune::search::Copier;
        let found = cell(Direction::HtoD, 2 << 20, Some(8)).row;
        let instant = cell(Direction::HtoD, 2 << 20, Some(4)).row;
        // Stock, found, estimate, fresh stock, fresh found, and what comes of it.
        for (times, instant, wanted) in [
            ([300, 100, 120, 300, 100], instant, found),
            ([300, 100, 90, 300, 100], instant, instant),
            ([300, 100, 99, 300, 100], instant, found),
            ([300, 100, 300, 300, 100], None, found),
            ([100, 100, 120, 300, 100], instant, None),
            ([100, 120, 120, 300, 100], instant, None),
            ([110, 120, 100, 300, 100], instant, instant),
            // With fresh memory it loses.
            ([300, 100, 120, 100, 200], instant, instant),
            ([300, 100, 300, 100, 200], None, None),
            ([300, 100, 100, 100, 200], found, None),
        ] {
            let mut cell = cell(Direction::HtoD, 2 << 20, Some(8));
            let [stock, tuned, estimate, fresh_stock, fresh] = times;
            let series = [stock, 80, tuned, estimate, fresh_stock, fresh].map(|time| Series {
                subject: Copier::Stock.into(),
                times: vec![f64::from(time); 5],
            });
            cell.settle(&series, instant, 0.02);
            assert_eq!(cell.row, wanted, "{times:?}");
            let time = match wanted {
                None => stock,
                row if row == found => tuned,
                _ => estimate,
            };
            let gbps = f64::from(2 << 20) / f64::from(time);
            assert!((cell.class.tuned_gbps - gbps).abs() < 1e-9, "{times:?}");
        }
    }

    fn cell(direction: Direction, bytes: u64, threads: Option<u32>) -> Cell {
        Cell {
            key: (direction, bytes),
            row: threads.map(|threads| PlanRow {
                up_to_bytes: u64::MAX,
                slot_bytes: 64 * KIB,
                slice_bytes: 16 * KIB,
                ring_bytes: 4096 * KIB,
                threads,
                store: 0,
            }),
            class: Class::default(),
        }
    }

    #[test]
    fn classes_stand_in_order_and_the_estimate_around_them() {
        let estimate = cmt_copy::plan::estimate(16);
        let cells = [
            cell(Direction::HtoD, 64 * KIB, None),
            cell(Direction::HtoD, 128 * KIB, Some(3)),
            cell(Direction::HtoD, 256 * KIB, Some(3)),
        ];
        let plan = plan(&estimate, &cells, 64 * KIB, 1024 * KIB);
        let threads = |bytes| row(&plan, (Direction::HtoD, bytes)).map(|row| row.threads);
        for (bytes, wanted) in [
            (4 * KIB, None),
            (64 * KIB, None),
            (128 * KIB, Some(3)),
            (512 * KIB - 1, Some(3)),
            // Not measured, and as estimated.
            (512 * KIB, Some(4)),
            (1024 * KIB, Some(6)),
            (1 << 40, Some(8)),
        ] {
            assert_eq!(threads(bytes), wanted, "{bytes}");
        }
        let unmeasured = |bytes| {
            (
                row(&plan, (Direction::DtoH, bytes)),
                row(&estimate, (Direction::DtoH, bytes)),
            )
        };
        for bytes in [64 * KIB, 256 * KIB, 1024 * KIB, 16 << 20, 1 << 40] {
            let (plan, estimate) = unmeasured(bytes);
            assert_eq!(plan, estimate, "{bytes}");
        }
        // Two classes that are copied alike are one row.
        let used = plan.htod.iter().filter(|row| row.up_to_bytes > 0);
        assert!(used.clone().is_sorted_by_key(|row| row.up_to_bytes));
        assert!(used.count() < 10);
    }

    #[test]
    fn a_full_search_fits_into_a_plan() {
        let estimate = cmt_copy::plan::estimate(16);
        let cells: Vec<Cell> = (15..=28)
            .map(|shift| cell(Direction::DtoH, 1 << shift, Some(1 + shift % 2)))
            .collect();
        let plan = plan(&estimate, &cells, 1 << 15, 1 << 28);
        for shift in 15..=28 {
            let found = row(&plan, (Direction::DtoH, 1 << shift)).expect("staged");
            assert_eq!(found.threads, 1 + shift % 2, "{shift}");
        }
        assert!(row(&plan, (Direction::DtoH, 1 << 40)).is_some());
    }
}
