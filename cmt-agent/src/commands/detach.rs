//! `cmt detach`: puts the original copier back.

use cmt_common::api::HOOKED;

use crate::keeper;
use crate::target::Target;

/// Take the staging copier out of a process again
#[derive(clap::Args)]
pub struct Args {
    /// Process to detach from
    pid: u32,
}

/// Detaches and says what was restored.
pub fn run(args: Args) -> anyhow::Result<()> {
    let target = Target::open(args.pid)?;
    let done = keeper::detach(args.pid)?;
    println!(
        "detached from {} ({}): {} of {HOOKED} functions restored, threads stopped for {} µs, {:.0} ms in all",
        target.pid,
        target.comm,
        done.restored,
        done.pause.as_micros(),
        done.took.as_secs_f64() * 1e3,
    );
    Ok(())
}
