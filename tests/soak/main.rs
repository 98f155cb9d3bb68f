//! The long runs: `cargo xtask test soak`. They are no part of the ladder, so each is marked as ignored.
//!
//! `CMT_SOAK_SEED` sets the seed of all that is random; it is printed. `CMT_SOAK_MINUTES` sets how long `cmt serve` runs. Figures come as rows of a table.

mod cycles;
mod figures;
mod kills;
mod serve;

use cmt_tests::{Rung, require};

/// Sets the seed of all that is random.
const SEED: &str = "CMT_SOAK_SEED";

/// The seed to use.
///
/// # Panics
/// When `CMT_SOAK_SEED` is no number.
fn seed() -> u64 {
    std::env::var(SEED).map_or_else(
        |_| fastrand::u64(..),
        |text| text.parse().expect("CMT_SOAK_SEED is a number"),
    )
}

#[test]
#[ignore = "takes minutes; cargo xtask test soak runs it"]
fn five_hundred_kills() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    kills::run(seed());
}

#[test]
#[ignore = "takes minutes; cargo xtask test soak runs it"]
fn five_hundred_cycles_under_a_malloc_storm() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    cycles::run();
}

#[test]
#[ignore = "takes minutes; cargo xtask test soak runs it"]
fn a_node_that_serves_while_processes_come_and_go() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    serve::run(seed());
}
