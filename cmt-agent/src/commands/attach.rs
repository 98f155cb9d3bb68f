//! `cmt attach`.

use cmt_common::control::Plan;

use crate::injector;
use crate::target::Target;

/// Swap the copier of a live process
#[derive(clap::Args)]
pub struct Args {
    /// Process to attach to
    pid: u32,
}

/// Attaches.
pub fn run(args: Args) -> anyhow::Result<()> {
    let mut target = Target::open(args.pid)?;
    let done = injector::attach(&mut target, &Plan::NONE, 0)?;
    println!("{done:?}");
    Ok(())
}
