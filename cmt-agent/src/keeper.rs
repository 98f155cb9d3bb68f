//! The keeper: a short-lived process of its own that stops and patches the target.
//!
//! Threads are only ever held by the keeper. It runs in its own process group, so neither Ctrl-C nor the death of the
//! `cmt` that started it ends it halfway: it finishes what it has begun within a moment and lets all threads go. It
//! blocks all signals, since a service manager that stops a unit signals every process of it.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use cmt_common::control::Plan;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::alarm;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::injector::{self, Attached, Detached};
use crate::profile;
use crate::target::{Target, TargetError};

/// What the keeper is told to do; not for users.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    job: Job,
}

#[derive(clap::Subcommand)]
enum Job {
    /// Attach by the plan on stdin
    Attach {
        #[command(flatten)]
        whom: Whom,
        /// Threads that may move bytes
        threads: u32,
        /// Flags of the control block
        flags: u32,
    },
    /// Detach
    Detach {
        #[command(flatten)]
        whom: Whom,
    },
}

/// The process that was looked at, and no other that got its id since.
#[derive(clap::Args)]
struct Whom {
    /// Process
    pid: u32,
    /// When it started, in clock ticks
    started: u64,
}

impl Whom {
    fn open(&self) -> Result<Target, TargetError> {
        let target = Target::open(self.pid)?;
        match target.started() == self.started {
            true => Ok(target),
            false => Err(TargetError::Replaced { pid: self.pid }),
        }
    }
}

/// No keeper lives longer, in seconds: reading memory waits for whoever provides it, which may be the target itself.
/// More than all waits of an attach or a detach together.
const MOST_S: u32 = 300;

/// What the keeper answers, as JSON on stdout.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer<T> {
    Done(T),
    Failed(String),
}

/// Has a keeper attach to `target`; the time it took includes the keeper's start.
pub fn attach(target: &Target, plan: &Plan, threads: u32) -> anyhow::Result<Attached> {
    attach_with(target, plan, threads, 0)
}

/// The same, for measuring plans: every copy that the plan stages is staged.
pub fn attach_unguarded(target: &Target, plan: &Plan, threads: u32) -> anyhow::Result<Attached> {
    attach_with(target, plan, threads, injector::flag::UNGUARDED)
}

fn attach_with(target: &Target, plan: &Plan, threads: u32, flags: u32) -> anyhow::Result<Attached> {
    let started = Instant::now();
    let mut attached: Attached = ask(
        "attach",
        target,
        &[&threads.to_string(), &flags.to_string()],
        &profile::to_json(plan),
    )?;
    attached.took = started.elapsed();
    Ok(attached)
}

/// Has a keeper detach from `target`.
pub fn detach(target: &Target) -> anyhow::Result<Detached> {
    let started = Instant::now();
    let mut detached: Detached = ask("detach", target, &[], "")?;
    detached.took = started.elapsed();
    Ok(detached)
}

fn ask<T: DeserializeOwned>(
    job: &str,
    target: &Target,
    more: &[&str],
    input: &str,
) -> anyhow::Result<T> {
    let mut keeper = Command::new("/proc/self/exe")
        .args(["keeper", job])
        .arg(target.pid.to_string())
        .arg(target.started().to_string())
        .args(more)
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting the process that patches the target")?;
    let mut stdin = keeper.stdin.take().context("the keeper has no stdin")?;
    stdin
        .write_all(input.as_bytes())
        .context("telling the keeper what to do")?;
    drop(stdin);
    let output = keeper
        .wait_with_output()
        .context("waiting for the keeper")?;
    match serde_json::from_slice(&output.stdout) {
        Ok(Answer::Done(done)) => Ok(done),
        Ok(Answer::Failed(why)) => Err(anyhow!(why)),
        Err(_) => Err(anyhow!(
            "the process that patches the target ended with {} and no answer; see `cmt status`",
            output.status
        )),
    }
}

/// Runs as the keeper.
pub fn run(args: Args) -> anyhow::Result<()> {
    let mut blocked = SigSet::all();
    blocked.remove(Signal::SIGALRM);
    blocked.thread_block()?;
    alarm::set(MOST_S);
    injector::reap_the_ended();
    let text = match args.job {
        Job::Attach {
            whom,
            threads,
            flags,
        } => answer(attach_here(&whom, threads, flags)),
        Job::Detach { whom } => answer(detach_here(&whom)),
    }?;
    // Whoever asked may be gone.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

fn answer<T: Serialize>(result: anyhow::Result<T>) -> serde_json::Result<String> {
    serde_json::to_string(&match result {
        Ok(done) => Answer::Done(done),
        Err(error) => Answer::Failed(format!("{error:#}")),
    })
}

fn attach_here(whom: &Whom, threads: u32, flags: u32) -> anyhow::Result<Attached> {
    let mut input = String::new();
    std::io::stdin().read_to_string(&mut input)?;
    let plan = profile::parse(&input, Path::new("-"))?;
    Ok(injector::attach(&mut whom.open()?, &plan, threads, flags)?)
}

fn detach_here(whom: &Whom) -> anyhow::Result<Detached> {
    Ok(injector::detach(&mut whom.open()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_process_of_the_same_id_is_refused() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("a child");
        let pid = child.id();
        let target = loop {
            match Target::open(pid) {
                Err(TargetError::StaticBinary { .. }) => std::thread::yield_now(),
                opened => break opened.expect("a program on glibc"),
            }
        };
        let started = target.started();
        assert!(Whom { pid, started }.open().is_ok());
        let earlier = Whom {
            pid,
            started: started - 1,
        };
        assert!(matches!(earlier.open(), Err(TargetError::Replaced { .. })));
        child.kill().expect("our child");
        child.wait().expect("our child");
    }
}
