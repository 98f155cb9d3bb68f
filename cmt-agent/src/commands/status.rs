//! `cmt status`: what the payload does in each attached process, by its own counters.

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use cmt_common::api::COPY_FNS;
use cmt_common::control::{PASS_REASON_NAMES, state};
use comfy_table::{Table, presets};
use serde::Serialize;

use crate::injector::{self, ControlMap, InjectError};
use crate::probes::rights::{self, Deed};
use crate::target::{Target, TargetError};
use crate::{pipe, profile};

/// Show which processes are attached and what the payload counted in them
#[derive(clap::Args)]
pub struct Args {
    /// Process to look at; all attached ones if none is named
    pid: Option<u32>,
    /// Print one JSON object (cmt/status/1)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    processes: Vec<Process>,
}

#[derive(Serialize)]
struct Process {
    pid: u32,
    comm: String,
    state: &'static str,
    engine: String,
    /// False where it was attached with `--unguarded`.
    guarded: bool,
    /// Seconds since the last attach.
    attached_s: Option<f64>,
    patched: Vec<&'static str>,
    staged: [Staged; 2],
    passed: Vec<Passed>,
    panics: u64,
    pinned_bytes: u64,
    helpers: u32,
    /// What copies of each size are done by (`cmt/profile/1`).
    plan: profile::File,
}

#[derive(Serialize)]
struct Staged {
    direction: &'static str,
    calls: u64,
    bytes: u64,
    errors: u64,
}

#[derive(Serialize)]
struct Passed {
    reason: &'static str,
    calls: u64,
}

/// Prints the state of one process or of all attached ones.
pub fn run(args: Args) -> anyhow::Result<()> {
    let (processes, unseen) = match args.pid {
        Some(pid) => (vec![one(pid)?], 0),
        None => all()?,
    };
    if unseen > 0 {
        eprintln!(
            "cmt: {unseen} of the processes may not be inspected, and may be attached too: {}",
            rights::refusal(Deed::Look { own: false })
        );
    }
    let text = if args.json {
        let report = Report {
            schema: "cmt/status/1",
            processes,
        };
        format!("{}\n", serde_json::to_string(&report)?)
    } else if processes.is_empty() && unseen > 0 {
        "no process that may be looked at is attached\n".to_owned()
    } else if processes.is_empty() {
        "no process is attached\n".to_owned()
    } else {
        processes.iter().map(text_of).collect()
    };
    pipe::print(&text)
}

fn one(pid: u32) -> anyhow::Result<Process> {
    let mut target = Target::look_at(pid)?;
    match injector::find_control(&mut target)? {
        Some(control) => Ok(describe(&target, &control)),
        None => bail!("process {pid} ({}) is not attached", target.comm),
    }
}

/// All attached processes, and how many may not be looked at. Those that share a parent's block by fork, or that were
/// detached from, are left out.
fn all() -> anyhow::Result<(Vec<Process>, usize)> {
    let (mut attached, mut unseen) = (Vec::new(), 0);
    for process in procfs::process::all_processes().context("listing processes")? {
        let Some(pid) = process.ok().and_then(|found| u32::try_from(found.pid).ok()) else {
            continue;
        };
        match Target::look_at(pid) {
            Ok(target) => match attached_one(target) {
                Err(InjectError::NotAllowed { .. }) => unseen += 1,
                found => attached.extend(found.ok().flatten()),
            },
            Err(TargetError::NoPermission { .. }) => unseen += 1,
            Err(_) => {} // No program that could be attached to.
        }
    }
    Ok((attached, unseen))
}

/// Whether the new copier is in process `pid`; `None` where that may not be looked at.
pub fn is_attached(pid: u32) -> Option<bool> {
    match Target::look_at(pid) {
        Ok(target) => match attached_one(target) {
            Err(InjectError::NotAllowed { .. }) => None,
            found => Some(found.is_ok_and(|found| found.is_some())),
        },
        Err(TargetError::NoPermission { .. }) => None,
        Err(_) => Some(false),
    }
}

fn attached_one(mut target: Target) -> Result<Option<Process>, InjectError> {
    let Some(control) = injector::find_control(&mut target)? else {
        return Ok(None);
    };
    injector::check_owner(&target, &control)?;
    let left = control.state.load(Ordering::Acquire) == state::STOPPED;
    Ok((!left).then(|| describe(&target, &control)))
}

fn describe(target: &Target, control: &ControlMap) -> Process {
    let is_served = injector::has_control_thread(target, control);
    say(target.pid, target.comm.clone(), is_served, control)
}

/// What a control block says, as text and as an object.
#[cfg(any(test, feature = "fuzzing"))]
pub fn both(control: &ControlMap) -> (String, String) {
    let process = say(1, String::new(), true, control);
    let object = serde_json::to_string(&process).expect("plain numbers and texts");
    (text_of(&process), object)
}

fn say(pid: u32, comm: String, is_served: bool, control: &ControlMap) -> Process {
    let counters = &control.counters;
    let now = control.state.load(Ordering::Acquire);
    let since = Duration::from_nanos(control.enabled_at_ns.load(Ordering::Relaxed));
    let direction = |index: usize| Staged {
        direction: ["HtoD", "DtoH"][index],
        calls: counters.staged_calls[index].load(Ordering::Relaxed),
        bytes: counters.staged_bytes[index].load(Ordering::Relaxed),
        errors: counters.staged_errors[index].load(Ordering::Relaxed),
    };
    Process {
        pid,
        comm,
        state: match now {
            state::LOADED => "loaded",
            state::PREPARED => "prepared",
            state::ENABLED if is_served => "attached",
            state::ENABLED => "attached, control thread gone",
            state::DISABLED => "disabled",
            _ => "detached",
        },
        engine: control.engine(),
        guarded: control.flags.load(Ordering::Relaxed) & injector::flag::UNGUARDED == 0,
        attached_s: (now == state::ENABLED)
            .then(|| {
                SystemTime::now()
                    .duration_since(SystemTime::UNIX_EPOCH + since)
                    .ok()
            })
            .flatten()
            .map(|elapsed| elapsed.as_secs_f64()),
        patched: COPY_FNS
            .iter()
            .zip(&control.hooks)
            .filter(|(_, slot)| slot.committed.load(Ordering::Acquire) == 1)
            .map(|(function, _)| function.name)
            .collect(),
        staged: [direction(0), direction(1)],
        passed: PASS_REASON_NAMES
            .iter()
            .zip(&counters.passed)
            .map(|(&reason, calls)| Passed {
                reason,
                calls: calls.load(Ordering::Relaxed),
            })
            .filter(|passed| passed.calls > 0)
            .collect(),
        panics: counters.panics.load(Ordering::Relaxed),
        pinned_bytes: counters.pinned_bytes.load(Ordering::Relaxed),
        helpers: counters.helpers.load(Ordering::Relaxed),
        plan: profile::File::of(&control.plan()),
    }
}

fn text_of(process: &Process) -> String {
    let mut text = String::new();
    let since = process
        .attached_s
        .map(|s| format!(" for {s:.0} s"))
        .unwrap_or_default();
    text += &format!(
        "{} ({}): {}{since}\n",
        process.pid, process.comm, process.state
    );
    let unguarded = if process.guarded {
        ""
    } else {
        ", without guard"
    };
    text += &format!(
        "  engine {}{unguarded}, {} functions patched, {} helpers, {:.1} MiB pinned\n",
        process.engine,
        process.patched.len(),
        process.helpers,
        process.pinned_bytes as f64 / f64::from(1 << 20),
    );
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_header(["", "calls", "GB", "errors"]);
    for staged in &process.staged {
        table.add_row([
            format!("staged {}", staged.direction),
            staged.calls.to_string(),
            format!("{:.3}", staged.bytes as f64 / 1e9),
            staged.errors.to_string(),
        ]);
    }
    for passed in &process.passed {
        table.add_row([
            format!("original: {}", passed.reason),
            passed.calls.to_string(),
        ]);
    }
    if process.panics > 0 {
        table.add_row(["panics caught".to_owned(), process.panics.to_string()]);
    }
    text += &format!(
        "{table}
"
    );
    if process.attached_s.is_some() {
        for (direction, rows) in [("HtoD", &process.plan.htod), ("DtoH", &process.plan.dtoh)] {
            text += &format!(" plan for {direction}\n");
            for row in rows {
                text += &format!("   {row}\n");
            }
        }
    }
    text
}
