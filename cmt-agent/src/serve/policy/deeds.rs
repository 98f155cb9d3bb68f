//! What is done to a process: looking into it, attaching, detaching. A process that has another's id is left alone.

use anyhow::{Context as _, bail};
use cmt_common::control::Plan;

use crate::compare::StagedBytes;
use crate::cpus::Cpus;
use crate::injector::{self, Standing};
use crate::keeper;
use crate::target::Target;

/// Whether it is attached to, or was.
pub fn standing(pid: u32) -> anyhow::Result<Standing> {
    Ok(injector::standing(&mut Target::look_at(pid)?)?)
}

/// Staged copies that have failed in it; 0 where it cannot be looked at.
pub fn staged_errors(pid: u32) -> u64 {
    let Ok(mut target) = Target::look_at(pid) else {
        return 0;
    };
    injector::staged_errors(&mut target).unwrap_or(0)
}

/// What was staged in it since it was attached; `None` where it cannot be looked at.
pub fn staged_bytes(pid: u32) -> Option<StagedBytes> {
    injector::staged_bytes(&mut Target::look_at(pid).ok()?).ok()?
}

/// Attaches by the estimate for this machine, as `cmt attach` does.
pub fn attach(pid: u32, started: u64) -> anyhow::Result<Plan> {
    let mut target = open(pid, started)?;
    target.cuda()?;
    injector::check_attachable(&mut target)?;
    let threads = Cpus::of(pid)
        .context("reading the target's CPU limits")?
        .threads();
    let plan = cmt_copy::plan::estimate(threads);
    if plan == Plan::NONE {
        bail!("it may use {threads} CPUs, and staging takes two; nothing was changed");
    }
    keeper::attach(&target, &plan, threads)?;
    Ok(plan)
}

/// Puts the original copier back.
pub fn detach(pid: u32, started: u64) -> anyhow::Result<()> {
    keeper::detach(&open(pid, started)?)?;
    Ok(())
}

fn open(pid: u32, started: u64) -> anyhow::Result<Target> {
    let target = Target::open(pid)?;
    if target.started() != started {
        bail!("process {pid} has ended, and another has its id");
    }
    Ok(target)
}
