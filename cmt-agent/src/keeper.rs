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
use nix::sys::signal::SigSet;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::injector::{self, Attached, Detached};
use crate::profile;
use crate::target::Target;

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
        /// Process
        pid: u32,
        /// Threads that may move bytes
        threads: u32,
    },
    /// Detach
    Detach {
        /// Process
        pid: u32,
    },
}

/// What the keeper answers, as JSON on stdout.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer<T> {
    Done(T),
    Failed(String),
}

/// Has a keeper attach to `pid`; the time it took includes the keeper's start.
pub fn attach(pid: u32, plan: &Plan, threads: u32) -> anyhow::Result<Attached> {
    let started = Instant::now();
    let mut attached: Attached = ask(
        &["attach", &pid.to_string(), &threads.to_string()],
        &profile::to_json(plan),
    )?;
    attached.took = started.elapsed();
    Ok(attached)
}

/// Has a keeper detach from `pid`.
pub fn detach(pid: u32) -> anyhow::Result<Detached> {
    let started = Instant::now();
    let mut detached: Detached = ask(&["detach", &pid.to_string()], "")?;
    detached.took = started.elapsed();
    Ok(detached)
}

fn ask<T: DeserializeOwned>(job: &[&str], input: &str) -> anyhow::Result<T> {
    let mut keeper = Command::new("/proc/self/exe")
        .arg("keeper")
        .args(job)
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
    SigSet::all().thread_block()?;
    injector::reap_the_ended();
    let text = match args.job {
        Job::Attach { pid, threads } => answer(attach_here(pid, threads)),
        Job::Detach { pid } => answer(detach_here(pid)),
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

fn attach_here(pid: u32, threads: u32) -> anyhow::Result<Attached> {
    let mut input = String::new();
    std::io::stdin().read_to_string(&mut input)?;
    let plan = profile::parse(&input, Path::new("-"))?;
    Ok(injector::attach(&mut Target::open(pid)?, &plan, threads)?)
}

fn detach_here(pid: u32) -> anyhow::Result<Detached> {
    Ok(injector::detach(&mut Target::open(pid)?)?)
}
