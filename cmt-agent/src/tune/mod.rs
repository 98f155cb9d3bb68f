//! `cmt tune`: the best plan for this machine, by estimate or by measurement, and where it is kept.

mod assemble;
pub mod cache;
mod candidates;
pub mod host;
pub mod instant;
mod measure;
mod run;
mod search;
mod table;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cmt_common::control::Plan;
use serde::{Deserialize, Serialize};

use crate::origin::Origin;
use crate::profile::{self, File, Machine, Measured, known};
use crate::target::text::printable;
use crate::topology;
use cache::{Cache, Kept};
use host::Host;
use instant::Estimate;
use measure::Halt;
pub use table::{classes_text, machine_text, plan_text, text};

/// How much is spent on a plan.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// What is kept for this machine, or an estimate, at once
    Instant,
    /// A search of under 10 seconds
    Fast,
    /// A search of under 3 minutes
    Full,
}

impl Kind {
    /// As profiles have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Instant => "instant",
            Self::Fast => "fast",
            Self::Full => "full",
        }
    }

    /// How a measured plan was found.
    pub fn of(measured: &Measured) -> Self {
        match &*measured.search {
            "full" => Self::Full,
            _ => Self::Fast,
        }
    }
}

/// What is asked for.
pub struct Wish<'a> {
    /// What to spend.
    pub kind: Kind,
    /// A plan that somebody has found already.
    pub profile: Option<&'a Path>,
    /// Measure although there is a result.
    pub fresh: bool,
    /// Where it cannot be measured, an estimate does.
    pub or_estimate: bool,
    /// Show no progress.
    pub quiet: bool,
}

/// Where a plan comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum From {
    /// Measured just now.
    Search,
    /// Measured earlier, on this machine: the file.
    Cache(PathBuf),
    /// A file that the user named.
    File(PathBuf),
    /// Measured on a machine like this one: its name.
    Nearest(String),
    /// Not measured at all.
    Estimate,
}

/// A plan for this machine.
pub struct Tuned {
    /// The plan.
    pub plan: Plan,
    /// The plan as a profile, with what is known of it.
    pub file: File,
    /// Where it comes from.
    pub from: From,
    /// What was asked for.
    pub kind: Kind,
    /// Threads that this process may use.
    pub threads: u32,
    /// Why an estimate stages nothing, or what else there is to say.
    pub notes: Vec<String>,
    /// Where later calls find it.
    pub cached: Option<PathBuf>,
    /// Finding it took so long.
    pub took: Duration,
    /// Whether Ctrl-C cut it short.
    pub interrupted: bool,
}

/// Finds a plan.
///
/// # Errors
/// When the profile is refused; and where it has to be measured, as `cmt bench`.
pub fn tune(wish: &Wish) -> anyhow::Result<Tuned> {
    let started = Instant::now();
    let host = Host::under(&topology::root());
    let mut tuned = match wish.profile {
        Some(path) => {
            let (file, plan) = profile::read_file(path)?;
            Tuned::new(file, plan, From::File(path.to_owned()))
        }
        None => for_host(wish, &host)?,
    };
    tuned.kind = wish.kind;
    tuned.threads = host.topology.threads();
    tuned.took = started.elapsed();
    Ok(tuned)
}

/// A plan for this machine: what is kept, an estimate, or a search.
fn for_host(wish: &Wish, host: &Host) -> anyhow::Result<Tuned> {
    let cache = Cache::find();
    let kept = cache.as_ref().and_then(|cache| look_up(cache, host));
    let kept_kind = kept.as_ref().map(|kept| Kind::of_file(&kept.file));
    if let Some(kept) = kept.filter(|_| !wish.fresh && kept_kind >= Some(wish.kind)) {
        let mut tuned = Tuned::new(kept.file, kept.plan, From::Cache(kept.path.clone()));
        tuned.cached = Some(kept.path);
        return Ok(tuned);
    }
    let estimate = instant::estimate(host);
    if wish.kind == Kind::Instant {
        return Ok(at_once(host, estimate));
    }
    let outcome = match run::run(wish.kind, host, &estimate, wish.quiet) {
        Err(why) if wish.or_estimate && why.downcast_ref::<Halt>().is_none() => {
            let mut tuned = at_once(host, estimate);
            tuned.notes.push(format!("not measured: {why:#}"));
            return Ok(tuned);
        }
        outcome => outcome?,
    };
    let (machine, is_here) = measured_machine(host, &outcome.device);
    let origin = Origin::now();
    let measured = Measured {
        date: origin.time,
        version: origin.version,
        search: wish.kind.name().to_owned(),
        interrupted: outcome.interrupted,
        classes: outcome.classes,
    };
    let file = File::on(&outcome.plan, &machine, Some(measured));
    let mut tuned = Tuned::new(file, outcome.plan, From::Search);
    tuned.interrupted = outcome.interrupted;
    if !outcome.stages {
        let note = "the payload leaves all copies to the driver on this machine";
        tuned.notes.push(note.to_owned());
    }
    if outcome.not_reached > 0 {
        tuned.notes.push(format!(
            "{} size classes were not reached in time, and are estimated",
            outcome.not_reached
        ));
    }
    let reason = if outcome.interrupted {
        "interrupted: what was not measured is estimated".to_owned()
    } else if !is_here {
        format!("{} is no GPU that the kernel knows", outcome.device)
    } else if kept_kind > Some(wish.kind) {
        "what a full search has found stays".to_owned()
    } else if let Some(cache) = cache {
        match cache.keep(&host.machine, &tuned.file) {
            Ok(path) => {
                tuned.cached = Some(path);
                return Ok(tuned);
            }
            Err(why) => format!("{why:#}"),
        }
    } else {
        "there is no folder for it, set HOME or XDG_CACHE_HOME".to_owned()
    };
    tuned.notes.push(format!("not kept: {reason}"));
    Ok(tuned)
}

/// What was measured here earlier. What is damaged is told of, and measured anew.
fn look_up(cache: &Cache, host: &Host) -> Option<Kept> {
    cache.look_up(&host.machine).unwrap_or_else(|why| {
        eprintln!("cmt: {:#}; it is not used", anyhow::Error::from(why));
        None
    })
}

/// What can be said without measuring: by a machine like this one, or by the estimate.
fn at_once(host: &Host, estimate: Estimate) -> Tuned {
    let nearest = known::nearest(&host.machine).filter(|_| estimate.declined.is_none());
    if let Some((name, file, mut plan)) = nearest {
        for row in plan.htod.iter_mut().chain(&mut plan.dtoh) {
            row.threads = row.threads.min(host.topology.threads());
        }
        let file = file.with(&plan);
        return Tuned::new(file, plan, From::Nearest(name));
    }
    let file = File::on(&estimate.plan, &host.machine, None);
    let mut tuned = Tuned::new(file, estimate.plan, From::Estimate);
    tuned.notes.extend(estimate.declined);
    tuned
}

/// The machine that was measured, and whether it is what the kernel says: CUDA may have another device, and the kernel may
/// not know what it is called.
fn measured_machine(host: &Host, device: &str) -> (Machine, bool) {
    let named = host.machine.gpu.as_ref();
    let named = named.filter(|gpu| !gpu.starts_with(host::UNNAMED));
    let is_here = named.is_none_or(|gpus| gpus.split(", ").any(|gpu| gpu == device));
    let gpu = Some(printable(device));
    let machine = host.machine.clone();
    (Machine { gpu, ..machine }, is_here)
}

impl Tuned {
    fn new(file: File, plan: Plan, from: From) -> Self {
        Self {
            plan,
            file,
            from,
            kind: Kind::Instant,
            threads: 1,
            notes: Vec::new(),
            cached: None,
            took: Duration::ZERO,
            interrupted: false,
        }
    }
}

impl Kind {
    fn of_file(file: &File) -> Self {
        file.measured.as_ref().map_or(Self::Instant, Self::of)
    }
}
