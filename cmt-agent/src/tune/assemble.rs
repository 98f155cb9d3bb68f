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
    /// with fresh memory. The estimate's row, or stock, takes its place where it is better by more than `margin`.
    pub fn settle(&mut self, series: &[Series], instant: Option<PlanRow>, margin: f64) {
        let [stock, pinned, found, estimate, fresh_stock, fresh] = series else {
            return;
        };
        let gbps = |series: &Series| self.key.1 as f64 / series.median();
        let class = &mut self.class;
        class.samples = stock.times.len() as u64;
        class.stock_gbps = gbps(stock);
        class.pinned_gbps = gbps(pinned);
        class.tuned_gbps = gbps(found);
        class.instant_gbps = Some(gbps(estimate));
        class.fresh_stock_gbps = Some(gbps(fresh_stock));
        class.fresh_tuned_gbps = Some(gbps(fresh));
        let worse_than = |other: &Series| other.beats(found, margin);
        if worse_than(stock) {
            self.row = None;
            class.tuned_gbps = gbps(stock);
            class.fresh_tuned_gbps = class.fresh_stock_gbps;
        } else if instant.is_some() && self.row != instant && worse_than(estimate) {
            self.row = instant;
            class.tuned_gbps = gbps(estimate);
            // Nobody has looked at this row with fresh memory.
            class.fresh_tuned_gbps = None;
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
        let found: Vec<&Cell> = cells.iter().filter(|cell| cell.key.0 == direction).collect();
        let rows = merged(stretch(estimate, direction, &found, first_bytes, last_bytes));
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
            // Not measured, and stock by the estimate.
            (512 * KIB, None),
            (1024 * KIB, Some(8)),
            (1 << 40, Some(8)),
        ] {
            assert_eq!(threads(bytes), wanted, "{bytes}");
        }
        let unmeasured = |bytes| (row(&plan, (Direction::DtoH, bytes)), row(&estimate, (Direction::DtoH, bytes)));
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
