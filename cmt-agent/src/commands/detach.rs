//! `cmt detach`: puts the original copier back.

use cmt_common::api::HOOKED;

use crate::target::Target;
use crate::{keeper, pipe};

/// Take the staging copier out of a process again
#[derive(clap::Args)]
pub struct Args {
    /// Process to detach from
    pid: u32,
}

/// Detaches and says what was restored.
pub fn run(args: Args) -> anyhow::Result<()> {
    let target = Target::open(args.pid)?;
    let done = keeper::detach(&target)?;
    pipe::print(&format!(
        "detached from {} ({}) in {:.0} ms:\n{} of {HOOKED} functions restored, threads stopped for {:.1} ms\n",
        target.pid,
        target.comm,
        done.took.as_secs_f64() * 1e3,
        done.restored,
        done.pause.as_secs_f64() * 1e3,
    ))
}
