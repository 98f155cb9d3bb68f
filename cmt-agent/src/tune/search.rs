//! Finds the best row of a plan for copies of one size: successive halving on interleaved samples.
//!
//! It knows nothing of processes and devices: a [`Timer`] makes the copies. In each pass every candidate is visited once, in
//! random order, so that what else the machine does hits all alike; a candidate counts by the median of its visits, so that a
//! burst that is over within a pass counts little.

use std::time::Duration;

use cmt_common::control::PlanRow;

use super::candidates::Space;

/// Passes of each rung at least, and at most.
const PASSES_LEAST: usize = 3;
const PASSES_MOST: usize = 60;
/// Visits from which it is known how long one takes.
const CALIBRATION: u32 = 2;
/// Parts of the time that are for candidates from everywhere, and for those around the best of them. The rest is for the
/// finalists.
const GENERATION_SHARES: [f64; 2] = [0.35, 0.2];
/// A row replaces the estimate's only if it is faster by more than this, and stock only by more than that, and if
/// it was so in most passes.
const MARGIN: f64 = 0.02;
const MARGIN_STOCK: f64 = 0.03;
const MOST_PASSES: f64 = 0.75;
/// Finalists within so much of the best are as good.
const FLAT: f64 = 0.03;

/// What a visit times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copier {
    /// The driver's own copies of pageable memory.
    Stock,
    /// Pinned copies.
    Pinned,
    /// Staged ones.
    Row(PlanRow),
}

/// A way to time, and whether with host memory that is new in each copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    /// What copies.
    pub copier: Copier,
    /// With fresh memory.
    pub fresh: bool,
}

impl From<Copier> for Subject {
    fn from(copier: Copier) -> Self {
        Self {
            copier,
            fresh: false,
        }
    }
}

/// Times copies of one size in one direction.
pub trait Timer {
    /// Makes a few copies and returns their median in nanoseconds; `None` once interrupted.
    fn visit(&mut self, subject: Subject) -> anyhow::Result<Option<f64>>;

    /// How long it has been at work.
    fn elapsed(&self) -> Duration;
}

/// How much is spent on one size.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// On the whole search; what must be is done though it takes longer.
    pub budget: Duration,
    /// Rows to try at first.
    pub candidates: usize,
    /// Rows that stay to the end.
    pub finalists: usize,
    /// Whether to look at fresh memory as well.
    pub fresh: bool,
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The best row; none if stock is as good.
    pub row: Option<PlanRow>,
    /// Medians of the final passes in nanoseconds.
    pub stock_ns: f64,
    /// By `row`, or as stock.
    pub tuned_ns: f64,
    /// Of pinned copies.
    pub pinned_ns: f64,
    /// Passes of which these are medians.
    pub passes: usize,
    /// Candidates that were tried.
    pub tried: usize,
    /// How the finalists compare.
    pub flat: Flat,
}

/// How flat the optimum is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flat {
    /// Finalists.
    pub finalists: usize,
    /// Those within 3 % of the best.
    pub near: usize,
    /// By how much the last one was slower than the best.
    pub spread: f64,
}

/// Times of one subject, by pass.
pub struct Series {
    /// What was timed.
    pub subject: Subject,
    /// A time for each pass.
    pub times: Vec<f64>,
}

impl Series {
    /// The median.
    pub fn median(&self) -> f64 {
        median(&self.times)
    }

    /// What this took over what `other` took, pass by pass.
    fn ratios(&self, other: &Self) -> Vec<f64> {
        let pairs = self.times.iter().zip(&other.times);
        pairs.map(|(own, other)| own / other).collect()
    }

    /// Whether this was faster than `other` by more than `margin`, by the median of all passes.
    pub fn seems_faster(&self, other: &Self, margin: f64) -> bool {
        median(&self.ratios(other)) < 1.0 - margin
    }

    /// The same, and in most passes.
    pub fn beats(&self, other: &Self, margin: f64) -> bool {
        let ratios = self.ratios(other);
        let faster = ratios.iter().filter(|&&ratio| ratio < 1.0).count();
        !ratios.is_empty()
            && median(&ratios) < 1.0 - margin
            && faster as f64 >= MOST_PASSES * ratios.len() as f64
    }
}

/// Visits all of `subjects` in passes of random order until `until`, so often at least; `None` once interrupted.
pub fn interleave(
    timer: &mut impl Timer,
    subjects: &[Subject],
    until: Duration,
    dice: &mut fastrand::Rng,
) -> anyhow::Result<Option<Vec<Series>>> {
    let mut series: Vec<Series> = subjects
        .iter()
        .map(|&subject| Series {
            subject,
            times: Vec::new(),
        })
        .collect();
    let mut order: Vec<usize> = (0..subjects.len()).collect();
    for pass in 0..PASSES_MOST {
        if pass >= PASSES_LEAST && timer.elapsed() >= until {
            break;
        }
        dice.shuffle(&mut order);
        for &index in &order {
            let Some(time) = timer.visit(subjects[index])? else {
                return Ok(None);
            };
            series[index].times.push(time);
        }
    }
    Ok(Some(series))
}

/// Searches. `estimate` is the row to beat, if there is one; `seed` is a row to begin with. `None` once interrupted.
pub fn search(
    timer: &mut impl Timer,
    estimate: Option<PlanRow>,
    seed: &PlanRow,
    space: &Space,
    effort: Effort,
    dice: &mut fastrand::Rng,
) -> anyhow::Result<Option<Found>> {
    let started = timer.elapsed();
    let mut rows = with(estimate, space.candidates(seed, effort.candidates, dice));
    // What a visit takes says how many candidates there is time for.
    for _ in 0..CALIBRATION {
        if timer.visit(Copier::Row(rows[0]).into())?.is_none() {
            return Ok(None);
        }
    }
    let visit = (timer.elapsed() - started).as_secs_f64() / f64::from(CALIBRATION);
    let mut tried = 0;
    let mut until = started;
    // The second generation stands around the best of the first.
    for (generation, share) in GENERATION_SHARES.into_iter().enumerate() {
        let budget = effort.budget.mul_f64(share);
        // Halving visits a candidate of the first rung some two times three passes.
        let room = (budget.as_secs_f64() / (2.0 * PASSES_LEAST as f64 * visit.max(1e-9))) as usize;
        let known = rows.len();
        if generation > 0 {
            rows = with(estimate, around(&rows, space));
            rows.truncate(room.max(known));
            if rows.len() == known {
                break;
            }
            tried += rows.len() - known;
        } else {
            rows.truncate(room.max(effort.finalists));
            tried += rows.len();
        }
        let Some(kept) = halve(timer, rows, estimate, effort.finalists, until, budget, dice)?
        else {
            return Ok(None);
        };
        rows = kept;
        until += budget;
    }
    let mut subjects: Vec<Subject> = rows.iter().map(|&row| Copier::Row(row).into()).collect();
    subjects.extend([Copier::Stock, Copier::Pinned].map(Subject::from));
    let fresh_share = if effort.fresh { 0.8 } else { 1.0 };
    let until = started + effort.budget.mul_f64(fresh_share);
    let Some(mut series) = interleave(timer, &subjects, until, dice)? else {
        return Ok(None);
    };
    let pinned = series.pop().expect("put in last");
    let stock = series.pop().expect("put in before it");
    let flat = flat(&series);
    let chosen = choose(&series, estimate, &stock);
    let mut row = chosen.and_then(row_of);
    if effort.fresh && row.is_some() {
        let estimate = series
            .iter()
            .filter(|series| series.beats(&stock, MARGIN_STOCK))
            .filter_map(row_of)
            .find(|row| Some(*row) == estimate);
        let until = started + effort.budget;
        match survives_fresh_memory(timer, row, estimate, until, dice)? {
            None => return Ok(None),
            Some(kept) => row = kept,
        }
    }
    let tuned = series.iter().find(|series| row_of(series) == row);
    Ok(Some(Found {
        row,
        stock_ns: stock.median(),
        tuned_ns: tuned.filter(|_| row.is_some()).unwrap_or(&stock).median(),
        pinned_ns: pinned.median(),
        passes: stock.times.len(),
        tried,
        flat,
    }))
}

/// `rows` behind `first`, which then is not among them a second time.
fn with(first: Option<PlanRow>, mut rows: Vec<PlanRow>) -> Vec<PlanRow> {
    rows.retain(|row| Some(*row) != first);
    first.into_iter().chain(rows).collect()
}

/// `rows`, the best first, and those one step from the best two.
fn around(rows: &[PlanRow], space: &Space) -> Vec<PlanRow> {
    let mut all = rows.to_vec();
    for row in rows.iter().take(2) {
        for neighbour in space.neighbours(row) {
            if !all.contains(&neighbour) {
                all.push(neighbour);
            }
        }
    }
    all
}

/// Halves `rows` until `finalists` are left, the best first; the estimate stays in any case. `None` once interrupted.
fn halve(
    timer: &mut impl Timer,
    mut rows: Vec<PlanRow>,
    estimate: Option<PlanRow>,
    finalists: usize,
    mut until: Duration,
    budget: Duration,
    dice: &mut fastrand::Rng,
) -> anyhow::Result<Option<Vec<PlanRow>>> {
    let rungs = (rows.len() as f64 / finalists as f64)
        .log2()
        .ceil()
        .max(1.0);
    while rows.len() > finalists {
        until += budget.div_f64(rungs);
        let subjects: Vec<Subject> = rows.iter().map(|&row| Copier::Row(row).into()).collect();
        let Some(mut series) = interleave(timer, &subjects, until, dice)? else {
            return Ok(None);
        };
        series.sort_by(|one, other| one.median().total_cmp(&other.median()));
        let keep = (rows.len() / 2).max(finalists);
        rows = series.iter().take(keep).filter_map(row_of).collect();
        // It is compared with at the end, and a place more costs little.
        rows.extend(estimate.filter(|estimate| !rows.contains(estimate)));
        if keep == finalists {
            break;
        }
    }
    Ok(Some(rows))
}

/// The row to use; none for stock.
fn choose<'a>(rows: &'a [Series], estimate: Option<PlanRow>, stock: &Series) -> Option<&'a Series> {
    let best = rows
        .iter()
        .min_by(|one, other| one.median().total_cmp(&other.median()))?;
    let estimate = rows
        .iter()
        .find(|series| estimate.is_some() && row_of(series) == estimate);
    let chosen = match estimate {
        Some(estimate) if !best.beats(estimate, MARGIN) => estimate,
        _ => best,
    };
    chosen.beats(stock, MARGIN_STOCK).then_some(chosen)
}

/// `row` if it does not lose against stock with fresh memory, else the estimate's if that does not, else none.
fn survives_fresh_memory(
    timer: &mut impl Timer,
    row: Option<PlanRow>,
    estimate: Option<PlanRow>,
    until: Duration,
    dice: &mut fastrand::Rng,
) -> anyhow::Result<Option<Option<PlanRow>>> {
    let mut rows: Vec<PlanRow> = row.into_iter().collect();
    rows.extend(estimate.filter(|estimate| !rows.contains(estimate)));
    let fresh = |copier| Subject {
        copier,
        fresh: true,
    };
    let mut subjects: Vec<Subject> = rows.iter().map(|&row| fresh(Copier::Row(row))).collect();
    subjects.push(fresh(Copier::Stock));
    let Some(series) = interleave(timer, &subjects, until, dice)? else {
        return Ok(None);
    };
    let (stock, rows) = series.split_last().expect("stock at least");
    let kept = rows.iter().find(|row| !stock.beats(row, MARGIN_STOCK));
    Ok(Some(kept.and_then(row_of)))
}

fn flat(rows: &[Series]) -> Flat {
    let medians = rows.iter().map(Series::median);
    let best = medians.clone().fold(f64::INFINITY, f64::min);
    let worst = medians.clone().fold(0.0, f64::max);
    Flat {
        finalists: rows.len(),
        near: medians.filter(|&time| time <= best * (1.0 + FLAT)).count(),
        spread: worst / best - 1.0,
    }
}

fn row_of(series: &Series) -> Option<PlanRow> {
    match series.subject.copier {
        Copier::Row(row) => Some(row),
        _ => None,
    }
}

/// The median; of nothing it is infinite.
pub fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::INFINITY)
}

#[cfg(test)]
mod tests;
