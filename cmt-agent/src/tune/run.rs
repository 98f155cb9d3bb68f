//! A search on this machine: class by class, then all that was found against what the estimate says.

use std::time::Duration;

use anyhow::{bail, ensure};
use cmt_common::control::{Plan, PlanRow};
use cmt_copy::plan::LEAST_TO_DEVICE_BYTES;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::Kind;
use super::assemble::{self, Cell, Key};
use super::candidates::Space;
use super::host::Host;
use super::instant::Estimate;
use super::measure::{Halt, Rig};
use super::search::{self, Copier, Effort, Found, Series, Subject, Timer as _};
use crate::bench::wire::Direction;
use crate::compare;
use crate::cores::Cores;
use crate::profile::Class;

/// Everything random follows from it, so that a search can be repeated.
const SEED: u64 = 0x636d_7431;
/// A row loses against another if it is slower by more than this.
const MARGIN: f64 = 0.02;
/// Copies by which choices of cores are compared.
const CORES_BYTES: [u64; 3] = [1 << 20, 16 << 20, 64 << 20];
const CORES_PASSES: usize = 7;

/// How much a search does, and when it has to be where.
struct Limits {
    /// Size classes: powers of two.
    first: u32,
    last: u32,
    candidates: usize,
    finalists: usize,
    /// Where fresh memory is looked at.
    fresh_up_to: u64,
    search: Duration,
    /// Everything.
    all: Duration,
}

impl Limits {
    fn of(kind: Kind) -> Self {
        match kind {
            Kind::Full => Self {
                first: 15,
                last: 28,
                candidates: 96,
                finalists: 8,
                fresh_up_to: u64::MAX,
                search: Duration::from_secs(115),
                all: Duration::from_secs(160),
            },
            _ => Self {
                first: 16,
                last: 26,
                candidates: 24,
                finalists: 3,
                // There the cut-over is decided, and little time is lost by new mappings.
                fresh_up_to: 4 << 20,
                search: Duration::from_millis(7300),
                all: Duration::from_millis(8500),
            },
        }
    }
}

/// What a search brought.
pub struct Outcome {
    /// The plan.
    pub plan: Plan,
    /// Figures by class, HtoD first, smallest first.
    pub classes: Vec<Class>,
    /// The device as the driver names it.
    pub device: String,
    /// Whether Ctrl-C came before its end.
    pub interrupted: bool,
    /// Classes that there was no time for; the estimate's rows stand there.
    pub not_reached: usize,
    /// Whether any copy was staged when that was asked for.
    pub stages: bool,
}

/// Searches.
///
/// # Errors
/// Without libcuda, device or rights; when the process that copies fails; when a byte was wrong; and when interrupted
/// before anything was measured.
pub fn run(kind: Kind, host: &Host, estimate: &Estimate, quiet: bool) -> anyhow::Result<Outcome> {
    let limits = Limits::of(kind);
    let threads = host.topology.threads();
    let bar = bar(quiet)?;
    bar.set_message("starting");
    let Some(mut rig) = Rig::start(threads)? else {
        bail!(Halt::Interrupted);
    };
    rig.cores = Cores::of(estimate.plan.cores);
    let Some(largest) = rig.allocate(1 << limits.last)? else {
        bail!(Halt::Interrupted);
    };
    // The largest come first: they take longest, and what is left over is for the others.
    let keys: Vec<Key> = (limits.first..=limits.last)
        .rev()
        .map(|shift| 1 << shift)
        .filter(|&bytes| bytes <= largest)
        .flat_map(|bytes| [Direction::HtoD, Direction::DtoH].map(|way| (way, bytes)))
        .filter(|&(way, bytes)| way == Direction::DtoH || bytes >= LEAST_TO_DEVICE_BYTES)
        .collect();
    ensure!(
        !keys.is_empty(),
        "there is not enough memory to measure copies of {}; nothing was saved",
        compare::bytes(1 << limits.first)
    );
    let passes = if kind == Kind::Full { 2 } else { 1 };
    bar.set_length(keys.len() as u64 * passes);
    let mut search = Search {
        rig: &mut rig,
        limits: &limits,
        estimate: &estimate.plan,
        // Where the estimate stages nothing there is something to begin with all the same.
        seeds: cmt_copy::plan::estimate(threads.max(2)),
        threads,
        dice: fastrand::Rng::with_seed(SEED),
        bar: &bar,
        cells: Vec::new(),
        stages: false,
    };
    let mut finished = search.search_all(&keys)?;
    ensure!(!search.cells.is_empty(), Halt::Interrupted);
    if finished && kind == Kind::Full {
        finished = search.choose_cores(&host.topology)?.is_some()
            && search.compare_with_estimate()?.is_some();
    }
    let (mut cells, stages) = (search.cells, search.stages);
    cells.sort_by_key(|cell| cell.key);
    let plan = Plan {
        cores: rig.cores.number(),
        ..assemble::plan(&estimate.plan, &cells, 1 << limits.first, 1 << limits.last)
    };
    if finished {
        finished = check(&mut rig, &plan, &cells, &limits, &bar)?.is_some();
    }
    bar.finish_and_clear();
    let interrupted = rig.is_interrupted();
    Ok(Outcome {
        plan,
        not_reached: match interrupted {
            true => 0,
            false => keys.len() - cells.len(),
        },
        classes: cells.into_iter().map(|cell| cell.class).collect(),
        device: rig.device().to_owned(),
        interrupted: interrupted || !finished,
        stages,
    })
}

fn bar(quiet: bool) -> anyhow::Result<ProgressBar> {
    let target = match quiet {
        true => ProgressDrawTarget::hidden(),
        false => ProgressDrawTarget::stderr(),
    };
    let bar = ProgressBar::with_draw_target(Some(1), target);
    bar.set_style(ProgressStyle::with_template(
        "tuning: {msg:24} {wide_bar} {eta}",
    )?);
    Ok(bar)
}

/// Every class once more by the plan that will be in force, every byte compared. `None` once interrupted.
fn check(
    rig: &mut Rig,
    plan: &Plan,
    cells: &[Cell],
    limits: &Limits,
    bar: &ProgressBar,
) -> anyhow::Result<Option<()>> {
    /// Filling and comparing more than this takes longer than a fast search has.
    const LARGEST_FAST: u64 = 16 << 20;
    bar.set_message("checking every byte");
    let largest = LARGEST_FAST.max(limits.fresh_up_to);
    for cell in cells.iter().filter(|cell| cell.key.1 <= largest) {
        rig.turn_to(cell.key.0, cell.key.1);
        if rig.check(plan)?.is_none() {
            return Ok(None);
        }
    }
    Ok(Some(()))
}

struct Search<'a> {
    rig: &'a mut Rig,
    limits: &'a Limits,
    estimate: &'a Plan,
    seeds: Plan,
    threads: u32,
    dice: fastrand::Rng,
    bar: &'a ProgressBar,
    cells: Vec<Cell>,
    stages: bool,
}

impl Search<'_> {
    /// False once interrupted.
    fn search_all(&mut self, keys: &[Key]) -> anyhow::Result<bool> {
        for (index, &key) in keys.iter().enumerate() {
            let left = self.limits.search.saturating_sub(self.rig.elapsed());
            if left.is_zero() {
                break;
            }
            let budget = left / (keys.len() - index) as u32;
            self.show(key);
            self.rig.turn_to(key.0, key.1);
            let Some(cell) = self.search(key, budget)? else {
                return Ok(false);
            };
            self.cells.push(cell);
            self.bar.inc(1);
        }
        Ok(true)
    }

    fn show(&self, (direction, bytes): Key) {
        let message = format!("{} {}", direction.name(), compare::bytes(bytes));
        self.bar.set_message(message);
    }

    fn search(&mut self, key: Key, budget: Duration) -> anyhow::Result<Option<Cell>> {
        let estimate = assemble::row(self.estimate, key);
        let seed = estimate.or_else(|| assemble::row(&self.seeds, key));
        let seed = seed.or_else(|| assemble::first(&self.seeds, key.0));
        let Some(seed) = seed else {
            bail!("there is no row to begin with");
        };
        let space = Space::new(key.1, self.threads);
        match self.rig.is_staged(seed)? {
            None => return Ok(None),
            Some(true) => self.stages = true,
            Some(false) => return self.stock_only(key),
        }
        let effort = Effort {
            budget,
            candidates: self.limits.candidates,
            finalists: self.limits.finalists,
            fresh: key.1 <= self.limits.fresh_up_to
                && !cmt_copy::is_paced(key.0 == Direction::DtoH, key.1),
        };
        let found = search::search(self.rig, estimate, &seed, &space, effort, &mut self.dice)?;
        Ok(found.map(|found| Cell {
            key,
            row: found.row,
            class: class(key, &found),
        }))
    }

    /// The payload leaves these copies to the driver, whatever the plan says.
    fn stock_only(&mut self, key: Key) -> anyhow::Result<Option<Cell>> {
        let subjects = [Copier::Stock, Copier::Pinned].map(Subject::from);
        let series = search::interleave(self.rig, &subjects, Duration::ZERO, &mut self.dice)?;
        Ok(series.map(|series| {
            let gbps = |series: &Series| key.1 as f64 / series.median();
            Cell {
                key,
                row: None,
                class: Class {
                    direction: key.0.name().to_owned(),
                    bytes: key.1,
                    samples: series[0].times.len() as u64,
                    stock_gbps: gbps(&series[0]),
                    tuned_gbps: gbps(&series[0]),
                    pinned_gbps: gbps(&series[1]),
                    ..Class::default()
                },
            }
        }))
    }

    /// Tries where helpers run best with the rows that were found. `None` once interrupted.
    fn choose_cores(&mut self, topology: &crate::topology::Topology) -> anyhow::Result<Option<()>> {
        let choices = Cores::different(topology);
        let cells: Vec<(Key, PlanRow)> = self
            .cells
            .iter()
            .filter(|cell| CORES_BYTES.contains(&cell.key.1))
            .filter_map(|cell| Some((cell.key, cell.row?)))
            .collect();
        if choices.len() < 2 || cells.is_empty() {
            return Ok(Some(()));
        }
        self.bar.set_message("cores");
        let before = self.rig.cores;
        // Sums of logarithms of what a choice takes over what the estimate's takes.
        let mut sums = vec![0.0; choices.len()];
        for &(key, row) in &cells {
            self.rig.turn_to(key.0, key.1);
            let mut times = vec![Vec::new(); choices.len()];
            let mut order: Vec<usize> = (0..choices.len()).collect();
            for _ in 0..CORES_PASSES {
                self.dice.shuffle(&mut order);
                for &index in &order {
                    self.rig.cores = choices[index];
                    let Some(time) = self.rig.visit(Copier::Row(row).into())? else {
                        self.rig.cores = before;
                        return Ok(None);
                    };
                    times[index].push(time);
                }
            }
            let own = choices.iter().position(|&choice| choice == before);
            let own = search::median(&times[own.unwrap_or(0)]);
            for (sum, times) in sums.iter_mut().zip(&times) {
                *sum += (search::median(times) / own).ln();
            }
        }
        let best = (0..choices.len()).min_by(|&a, &b| sums[a].total_cmp(&sums[b]));
        let is_better = |&best: &usize| (sums[best] / cells.len() as f64).exp() < 1.0 - MARGIN;
        self.rig.cores = best.filter(is_better).map_or(before, |best| choices[best]);
        Ok(Some(()))
    }

    /// Once more, with samples that nothing was chosen by: stock, pinned, what was found and what the estimate says, with
    /// fresh memory too. What loses against the estimate or stock here is not kept. `None` once interrupted.
    fn compare_with_estimate(&mut self) -> anyhow::Result<Option<()>> {
        let count = self.cells.len();
        for index in 0..count {
            let left = self.limits.all.saturating_sub(self.rig.elapsed());
            let until = self.rig.elapsed() + left / (count - index) as u32;
            let Cell { key, row, .. } = self.cells[index];
            self.show(key);
            self.bar.inc(1);
            let Some(row) = row else { continue };
            self.rig.turn_to(key.0, key.1);
            let instant = assemble::row(self.estimate, key);
            let fresh = |copier| Subject {
                copier,
                fresh: true,
            };
            let subjects = [
                Copier::Stock.into(),
                Copier::Pinned.into(),
                Copier::Row(row).into(),
                instant.map_or(Copier::Stock, Copier::Row).into(),
                fresh(Copier::Stock),
                fresh(Copier::Row(row)),
            ];
            let series = search::interleave(self.rig, &subjects, until, &mut self.dice)?;
            let Some(series) = series else {
                return Ok(None);
            };
            self.cells[index].settle(&series, instant, MARGIN);
        }
        Ok(Some(()))
    }
}

/// The figures of a class.
fn class((direction, bytes): Key, found: &Found) -> Class {
    let gbps = |ns: f64| bytes as f64 / ns;
    Class {
        direction: direction.name().to_owned(),
        bytes,
        samples: found.passes as u64,
        stock_gbps: gbps(found.stock_ns),
        tuned_gbps: gbps(found.tuned_ns),
        pinned_gbps: gbps(found.pinned_ns),
        candidates: found.tried as u32,
        finalists: found.flat.finalists as u32,
        near: found.flat.near as u32,
        spread: found.flat.spread,
        ..Class::default()
    }
}
