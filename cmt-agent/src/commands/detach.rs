//! `cmt detach`: puts the original copier back.

use cmt_common::api::HOOKED;
use serde::Serialize;

use crate::target::Target;
use crate::{keeper, pipe};

/// Take the staging copier out of a process again
#[derive(clap::Args)]
pub struct Args {
    /// Process to detach from
    pid: u32,
    /// Print one JSON object (cmt/detach/1) instead of text
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    pid: u32,
    comm: String,
    /// Functions that have their own code again.
    restored: usize,
    /// From the beginning to the end.
    detach_ms: f64,
    /// How long the threads were stopped.
    pause_us: u64,
}

/// Detaches and says what was restored.
pub fn run(args: Args) -> anyhow::Result<()> {
    let target = Target::open(args.pid)?;
    let done = keeper::detach(&target)?;
    if args.json {
        let report = Report {
            schema: "cmt/detach/1",
            pid: target.pid,
            comm: target.comm,
            restored: done.restored,
            detach_ms: done.took.as_secs_f64() * 1e3,
            pause_us: done.pause.as_micros() as u64,
        };
        return pipe::print(&(serde_json::to_string(&report)? + "\n"));
    }
    pipe::print(&format!(
        "detached from {} ({}) in {:.0} ms:\n{} of {HOOKED} functions restored, threads stopped for {:.1} ms\n",
        target.pid,
        target.comm,
        done.took.as_secs_f64() * 1e3,
        done.restored,
        done.pause.as_secs_f64() * 1e3,
    ))
}
