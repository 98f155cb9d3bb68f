//! `cmt tune`: runs a program with the best plan for this machine.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::cpus::Cpus;
use crate::launch::Measured;
use crate::{launch, profile};

/// Run a program so that its copies are staged from the first one on
#[derive(clap::Args)]
pub struct Args {
    /// Copy by the plan in this file
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Do not tell at the end what was gained
    #[arg(long)]
    quiet: bool,
    /// Write what was gained to this file (cmt/run/1)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Program to run, and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Runs it; ends as it ends.
pub fn run(args: Args) -> anyhow::Result<()> {
    let plan = match &args.profile {
        Some(path) => profile::read(path)?,
        None => cmt_copy::plan::estimate(Cpus::of(std::process::id())?.threads()),
    };
    let measured = Measured::default();
    launch::run(
        &args.command,
        &plan,
        &measured,
        args.quiet,
        args.json.as_deref(),
    )
}
