//! Starts victims and the real `cmt` binary for the tests.
//!
//! A test opens with `let Some(_turn) = require(Rung::StandIn) else { return };`, starts a [`Victim`], runs [`cmt`] and
//! compares what it says with what the victim counted itself. Nothing here knows how `cmt` works.

mod build;
mod cycles;
mod prometheus;
mod rung;
mod serve;
mod tool;
mod trace;
mod victim;

pub use build::{Built, built};
pub use cycles::{attach, attach_halfway, cycles, detach, refusal, wait_until_staged};
pub use prometheus::{CLASSIC, Engine, Prometheus, free_port, unix_time};
pub use rung::{Rung, Turn, libcudart, require, require_packages};
pub use serve::{Named, Samples, Serve, account_of, until};
pub use tool::{Finished, Running, cmt, cmt_command, spawn_cmt};
pub use trace::Trace;
pub use victim::{Footprint, Victim};

use std::path::PathBuf;

/// The workspace's folder.
pub fn workspace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests/ lies in the workspace")
        .to_path_buf()
}

/// The folder of build products.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}
