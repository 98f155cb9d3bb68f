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
use crate::profile::known;
use crate::profile::{self, File, Measured};
use crate::topology;
use cache::Cache;
use host::Host;
pub use table::{classes_text, machine_text, plan_text, text};

/// How much is spent on a plan.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// An estimate, at once
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
pub fn tune(wish: &Wish) -> anyhow::Result<Tuned> {
    let started = Instant::now();
    let host = Host::under(&topology::root());
    let threads = host.topology.threads();
    let tuned = |file: File, plan, from| Tuned {
        plan,
        file,
        from,
        kind: wish.kind,
        threads,
        notes: Vec::new(),
        cached: None,
        took: started.elapsed(),
        interrupted: false,
    };
    if let Some(path) = wish.profile {
        let (file, plan) = profile::read_file(path)?;
        return Ok(tuned(file, plan, From::File(path.to_owned())));
    }
    let cache = Cache::find();
    let mut notes = Vec::new();
    let found = cache.as_ref().and_then(|cache| {
        let found = cache.look_up(&host.machine);
        found.unwrap_or_else(|why| {
            notes.push(format!("{why:#}; it is not used"));
            None
        })
    });
    let kept = found.as_ref().map(|kept| Kind::of_file(&kept.file));
    if let Some(kept) = found.filter(|kept| !wish.fresh && Kind::of_file(&kept.file) >= wish.kind) {
        let from = From::Cache(kept.path.clone());
        return Ok(Tuned {
            notes,
            cached: Some(kept.path),
            ..tuned(kept.file, kept.plan, from)
        });
    }
    let estimate = instant::estimate(&host);
    if wish.kind == Kind::Instant {
        if let Some((name, file, plan)) =
            known::nearest(&host.machine).filter(|_| estimate.declined.is_none())
        {
            return Ok(Tuned {
                notes,
                ..tuned(file, plan, From::Nearest(name))
            });
        }
        notes.extend(estimate.declined.clone());
        let file = File::on(&estimate.plan, &host.machine, None);
        return Ok(Tuned {
            notes,
            ..tuned(file, estimate.plan, From::Estimate)
        });
    }
    let outcome = run::run(wish.kind, &host, &estimate, wish.quiet)?;
    let origin = Origin::now();
    let mut machine = host.machine.clone();
    // Where CUDA has another device than the kernel names, it is not this machine that was measured.
    let is_here = machine
        .gpu
        .as_ref()
        .is_none_or(|gpu| gpu.split(", ").any(|gpu| gpu == outcome.device) || gpu.starts_with("PCI "));
    if !is_here || machine.gpu.as_ref().is_none_or(|gpu| gpu.starts_with("PCI ")) {
        machine.gpu = Some(crate::target::text::printable(&outcome.device));
    }
    let measured = Measured {
        date: origin.time,
        version: origin.version,
        search: wish.kind.name().to_owned(),
        interrupted: outcome.interrupted,
        classes: outcome.classes,
    };
    let file = File::on(&outcome.plan, &machine, Some(measured));
    let mut cached = None;
    match &cache {
        _ if outcome.interrupted => {
            notes.push("interrupted: what was not measured is estimated, and nothing is kept".to_owned());
        }
        None => notes.push("there is no folder to keep it in: set HOME or XDG_CACHE_HOME".to_owned()),
        _ if !is_here => notes.push(format!(
            "{} is not the GPU that the kernel knows: not kept",
            outcome.device
        )),
        _ if kept > Some(wish.kind) => notes.push(format!(
            "the result of an earlier `--search {}` stays the one that is kept",
            kept.map_or("", Kind::name)
        )),
        Some(cache) => match cache.keep(&host.machine, &file) {
            Ok(path) => cached = Some(path),
            Err(why) => notes.push(format!("{why:#}; it is not kept")),
        },
    }
    if !outcome.stages {
        notes.push("the payload leaves all copies to the driver on this machine".to_owned());
    }
    if outcome.not_reached > 0 {
        notes.push(format!(
            "{} size classes were not reached in time, and are estimated",
            outcome.not_reached
        ));
    }
    Ok(Tuned {
        notes,
        cached,
        interrupted: outcome.interrupted,
        ..tuned(file, outcome.plan, From::Search)
    })
}

impl Kind {
    fn of_file(file: &File) -> Self {
        file.measured.as_ref().map_or(Self::Instant, Self::of)
    }
}
