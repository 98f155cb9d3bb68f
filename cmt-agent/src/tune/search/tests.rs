//! The search on a made-up machine, whose best row is known.

use cmt_common::control::store;

use super::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Copies of 4 MiB, by a model: every step away from the best row costs some percent, and every sample has some noise.
struct Model {
    best: PlanRow,
    best_ns: f64,
    stock_ns: f64,
    /// The same with fresh memory.
    fresh_stock_ns: f64,
    fresh_staged_ns: f64,
    noise: f64,
    /// What a step away from the best row costs, over the usual.
    steepness: f64,
    /// Part of all visits that a neighbour makes this much slower, in bursts of `burst` visits.
    burst: Option<(f64, usize)>,
    left_of_burst: usize,
    clock: f64,
    dice: fastrand::Rng,
    visits: usize,
    /// Ctrl-C comes at this visit.
    interrupted_at: Option<usize>,
}

impl Model {
    fn new(seed: u64) -> Self {
        Self {
            best: PlanRow {
                up_to_bytes: u64::MAX,
                slot_bytes: 512 * KIB,
                slice_bytes: 64 * KIB,
                ring_bytes: 8 * MIB,
                threads: 10,
                store: store::NON_TEMPORAL,
            },
            best_ns: 100e3,
            stock_ns: 300e3,
            fresh_stock_ns: 900e3,
            fresh_staged_ns: 400e3,
            noise: 0.02,
            steepness: 1.0,
            burst: None,
            left_of_burst: 0,
            clock: 0.0,
            dice: fastrand::Rng::with_seed(seed),
            visits: 0,
            interrupted_at: None,
        }
    }

    /// What a row takes without noise.
    fn staged(&self, row: &PlanRow) -> f64 {
        let octaves = |a: u64, b: u64| (a as f64 / b as f64).log2().abs();
        let far = 0.10 * octaves(row.threads.into(), self.best.threads.into())
            + 0.05 * octaves(row.slot_bytes, self.best.slot_bytes)
            + 0.04 * octaves(row.slice_bytes, self.best.slice_bytes)
            + 0.02 * octaves(row.ring_bytes, self.best.ring_bytes)
            + if row.store == self.best.store {
                0.0
            } else {
                0.15
            };
        self.best_ns * (1.0 + self.steepness * far)
    }
}

impl Timer for Model {
    fn visit(&mut self, subject: Subject) -> anyhow::Result<Option<f64>> {
        self.visits += 1;
        if self.interrupted_at.is_some_and(|at| self.visits > at) {
            return Ok(None);
        }
        let time = match (subject.copier, subject.fresh) {
            (Copier::Stock, false) => self.stock_ns,
            (Copier::Stock, true) => self.fresh_stock_ns,
            (Copier::Pinned, _) => 80e3,
            (Copier::Row(row), false) => self.staged(&row),
            (Copier::Row(_), true) => self.fresh_staged_ns,
        };
        let mut time = time * (1.0 + self.noise * self.dice.f64());
        if let Some((part, length)) = self.burst {
            if self.left_of_burst == 0 && self.dice.f64() < part / length as f64 {
                self.left_of_burst = length;
            }
            if self.left_of_burst > 0 {
                self.left_of_burst -= 1;
                time *= 3.0;
            }
        }
        self.clock += time * 4.0;
        Ok(Some(time))
    }

    fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.clock as u64)
    }
}

const EFFORT: Effort = Effort {
    budget: Duration::from_millis(500),
    candidates: 64,
    finalists: 6,
    fresh: true,
};

/// The row that an estimate would have.
fn estimate() -> PlanRow {
    PlanRow {
        slot_bytes: MIB,
        slice_bytes: 128 * KIB,
        threads: 6,
        ..Model::new(0).best
    }
}

fn find(model: &mut Model, estimate: Option<PlanRow>, seed: PlanRow) -> Option<Found> {
    let mut dice = fastrand::Rng::with_seed(3);
    let space = Space::new(4 * MIB, 16);
    search(model, estimate, &seed, &space, EFFORT, &mut dice).expect("a model does not fail")
}

#[test]
fn the_optimum_is_found_within_a_few_percent_and_in_time() {
    for seed in 0..40 {
        let mut model = Model::new(seed);
        let found = find(&mut model, Some(estimate()), estimate()).expect("found");
        let row = found.row.expect("staged");
        let over = model.staged(&row) / model.best_ns - 1.0;
        let before = model.staged(&estimate()) / model.best_ns - 1.0;
        assert!(over < 0.06 && over < before, "{seed}: {over} {row:?}");
        assert!(found.tried >= 30, "{found:?}");
        assert!(
            model.elapsed() < EFFORT.budget.mul_f64(1.25),
            "{:?}",
            model.elapsed()
        );
        assert!((found.stock_ns / model.stock_ns - 1.0).abs() < 0.03);
        assert!((found.tuned_ns / model.staged(&row) - 1.0).abs() < 0.03);
    }
}

#[test]
fn a_noisy_neighbour_does_not_choose() {
    let mut worse = 0;
    for seed in 0..40 {
        let mut model = Model::new(seed);
        // A fifth of the time everything takes three times as long, for some dozen visits at once.
        model.burst = Some((0.2, 12));
        let found = find(&mut model, Some(estimate()), estimate()).expect("found");
        let row = found.row.expect("staged");
        let over = model.staged(&row) / model.staged(&estimate());
        assert!(
            over <= 1.0 + 1e-9,
            "{seed}: worse than the estimate: {over} {row:?}"
        );
        worse += u32::from(model.staged(&row) / model.best_ns > 1.15);
    }
    assert!(worse <= 4, "{worse} of 40");
}

#[test]
fn the_estimate_stays_where_nothing_is_better_than_noise() {
    for seed in 0..40 {
        let mut model = Model::new(seed);
        let best = model.best;
        let found = find(&mut model, Some(best), best).expect("found");
        assert_eq!(found.row, Some(best), "{seed}");
        // And where all rows are alike.
        let mut model = Model::new(seed);
        (model.steepness, model.noise) = (0.0, 0.2);
        let found = find(&mut model, Some(estimate()), estimate()).expect("found");
        assert_eq!(found.row, Some(estimate()), "{seed}");
    }
}

#[test]
fn stock_stays_unless_a_row_is_better_than_noise() {
    for (stock_ns, staged) in [(90e3, false), (101e3, false), (130e3, true)] {
        for seed in 0..20 {
            let mut model = Model::new(seed);
            model.stock_ns = stock_ns;
            let best = model.best;
            for estimate in [Some(best), None] {
                let found = find(&mut model, estimate, best).expect("found");
                assert_eq!(
                    found.row.is_some(),
                    staged,
                    "{seed} {stock_ns} {estimate:?}"
                );
                if !staged {
                    assert_eq!(found.tuned_ns, found.stock_ns);
                }
            }
        }
    }
}

#[test]
fn a_row_that_loses_with_fresh_memory_is_not_taken() {
    for seed in 0..20 {
        let mut model = Model::new(seed);
        (model.fresh_stock_ns, model.fresh_staged_ns) = (100e3, 130e3);
        let found = find(&mut model, Some(estimate()), estimate()).expect("found");
        assert_eq!(found.row, None, "{seed}");
    }
}

#[test]
fn flatness_counts_those_near_the_best() {
    let series = |time: f64| Series {
        subject: Copier::Row(estimate()).into(),
        times: vec![time; 5],
    };
    let rows = [100.0, 101.0, 102.9, 104.0, 150.0].map(series);
    assert_eq!(
        flat(&rows),
        Flat {
            finalists: 5,
            near: 3,
            spread: 0.5
        }
    );
    let mut model = Model::new(1);
    let peak = find(&mut model, None, estimate()).expect("found").flat;
    assert!(peak.near < peak.finalists && peak.spread > 0.03, "{peak:?}");
}

#[test]
fn an_interrupted_search_says_so_at_every_place() {
    for at in [0, 1, 5, 50, 300, 600] {
        let mut model = Model::new(1);
        model.interrupted_at = Some(at);
        assert!(
            find(&mut model, Some(estimate()), estimate()).is_none(),
            "{at}"
        );
    }
}

#[test]
fn one_candidate_is_enough() {
    let mut model = Model::new(1);
    let mut dice = fastrand::Rng::with_seed(3);
    let space = Space::new(4 * MIB, 16);
    let effort = Effort {
        candidates: 1,
        finalists: 1,
        ..EFFORT
    };
    let found = search(&mut model, None, &estimate(), &space, effort, &mut dice);
    let found = found.expect("no failure").expect("found");
    // And those around it.
    assert!(
        found.row.is_some() && (2..20).contains(&found.tried),
        "{found:?}"
    );
}
