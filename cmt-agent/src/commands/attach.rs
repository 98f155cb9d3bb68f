//! `cmt attach`: traces a process, swaps its copier, traces it again, and shows both.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use cmt_common::control::Plan;
use serde::Serialize;

use crate::compare::{self, Comparison, Row, Window};
use crate::cpus::Cpus;
use crate::injector::{self, Attached};
use crate::output_file::OutputFile;
use crate::profile;
use crate::target::Target;
use crate::trace::report::Report;
use crate::trace::{Snapshot, Targets, Tracer, duration};
use crate::watch::{self, Slower};
use crate::{html, keeper, pipe, wait};

/// Swap the copier of a live process, and compare its copies before and after
#[derive(clap::Args)]
pub struct Args {
    /// Process to attach to
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pid: u32,
    /// How long to trace before attaching (500ms, 10s, 1m; 0s: not at all)
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration::parse)]
    before: Duration,
    /// How long to trace afterwards
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration::parse)]
    after: Duration,
    /// Copy by this profile, a file or one that cmt brings along, instead of the estimate for this machine
    #[arg(long, value_name = "NAME|FILE")]
    profile: Option<PathBuf>,
    /// Stage every copy that the plan stages, also where the driver is faster
    #[arg(long)]
    unguarded: bool,
    /// Detach again at the end
    #[arg(long)]
    revert: bool,
    /// Print one JSON object (cmt/attach/1)
    #[arg(long)]
    json: bool,
    /// Write the comparison as a page of HTML
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Object<'a> {
    schema: &'static str,
    pid: u32,
    engine: &'a str,
    patched: &'a [String],
    refused: Vec<Refused<'a>>,
    attach_ms: f64,
    hijack_us: u64,
    commit_pause_us: u64,
    commit_threads: usize,
    before: Report,
    after: Report,
    compare: Vec<&'a Row>,
    /// Classes that were slower afterwards: they copy as before again.
    handed_back: Vec<HandedBack>,
    /// Functions that failed afterwards but not before: everything was detached.
    failing: &'a [&'static str],
    kept: bool,
    /// False with `--unguarded`.
    guarded: bool,
}

#[derive(Serialize)]
struct HandedBack {
    direction: &'static str,
    size_class_bytes: u64,
    ratio: f64,
}

impl HandedBack {
    fn of(slower: &Slower) -> Self {
        Self {
            direction: if slower.dtoh { "DtoH" } else { "HtoD" },
            size_class_bytes: slower.class_bytes,
            ratio: slower.ratio,
        }
    }
}

#[derive(Serialize)]
struct Refused<'a> {
    function: &'a str,
    reason: &'a str,
}

/// Attaches. The target keeps the new copier unless `--revert` is given; Ctrl-C before the attach leaves it as it was,
/// Ctrl-C afterwards ends the second window early.
pub fn run(args: Args) -> anyhow::Result<()> {
    let plan = args.profile.as_deref().map(profile::read).transpose()?;
    let page = args
        .html
        .as_deref()
        .map(|path| OutputFile::open(path, "nothing was changed"))
        .transpose()?;
    // Refusals come before any time is spent tracing.
    let mut target = Target::open(args.pid)?;
    target.cuda()?;
    injector::check_attachable(&mut target)?;
    let threads = Cpus::of(args.pid)
        .context("reading the target's CPU limits")?
        .threads();
    let plan = plan.unwrap_or_else(|| cmt_copy::plan::estimate(threads));
    let mut rows = plan.htod.iter().chain(&plan.dtoh);
    if rows.all(|row| row.threads == 0) {
        if let Some(path) = &args.profile {
            bail!(
                "{}: nothing would be staged by this plan; nothing was changed",
                path.display()
            );
        }
        bail!(
            "process {} may use {threads} CPUs, and staging takes two; nothing was changed",
            args.pid
        );
    }

    let tracing = !(args.before.is_zero() && args.after.is_zero());
    let tracer = tracing
        .then(|| Tracer::start(Targets::Pids(vec![args.pid]), false))
        .transpose()?;
    let before = window(tracer.as_ref(), "before", args.before)?;
    if before.interrupted {
        bail!(
            "interrupted before anything was changed; process {} runs on as it was",
            args.pid
        );
    }
    if tracer.as_ref().is_some_and(Tracer::ended) {
        bail!("process {} ended before it could be attached to", args.pid);
    }
    // As it is now: soon it will be attached to.
    let pair_ns = tracer.as_ref().and_then(Tracer::pair_ns);
    let report_before = args.json.then(|| Report::new(&before.seen, pair_ns));
    let attached = match args.unguarded {
        false => keeper::attach(&target, &plan, threads)?,
        true => keeper::attach_unguarded(&target, &plan, threads)?,
    };
    let after = window(tracer.as_ref(), "after", args.after)?;
    // Of a process that has ended nobody can say what was staged.
    let staged = injector::staged_bytes(&mut target).ok().flatten();
    let comparison = Comparison::new(&Window::new(&before.seen), &Window::new(&after.seen))
        .judged_by(&plan, staged.as_ref());
    // Copies that the original function refuses are the application's own affair.
    let staged_failed = injector::staged_errors(&mut target).unwrap_or(0) > 0;
    let failing = match staged_failed {
        true => watch::failing(&before.seen, &after.seen),
        false => Vec::new(),
    };
    let ended = tracer.as_ref().is_some_and(Tracer::ended);
    let mut handed_back = Vec::new();
    // What has ended, or was detached from meanwhile, needs nothing more; the report is due all the same.
    let end = if ended {
        Ok(End::Gone)
    } else if args.revert || !failing.is_empty() {
        keeper::detach(&target).map(|_| End::Reverted)
    } else if injector::is_attached(&mut target) {
        if !args.unguarded {
            handed_back = watch::slower(&comparison);
        }
        hand_back(&mut target, &plan, &handed_back).map(|()| End::Kept)
    } else {
        Ok(End::Gone)
    };
    drop(tracer);

    // What cannot be told of does not undo what was done.
    let kept = matches!(end, Ok(End::Kept));
    let stays = |error: anyhow::Error| match kept {
        true => anyhow::anyhow!(
            "{error:#}; process {pid} stays attached, take it off with `cmt detach {pid}`",
            pid = args.pid
        ),
        false => error,
    };
    if end.is_err() {
        handed_back.clear();
    }
    let notes = notes(args.pid, &before, &after, &handed_back, &end);
    if let Some(report_before) = report_before {
        let object = Object {
            schema: "cmt/attach/1",
            pid: args.pid,
            engine: &attached.engine,
            patched: &attached.patched,
            refused: attached
                .refused
                .iter()
                .map(|(function, reason)| Refused { function, reason })
                .collect(),
            attach_ms: attached.took.as_secs_f64() * 1e3,
            hijack_us: attached.held.as_micros() as u64,
            commit_pause_us: attached.commit.pause.as_micros() as u64,
            commit_threads: attached.commit.threads,
            before: report_before,
            after: Report::new(&after.seen, pair_ns),
            compare: comparison.rows().collect(),
            handed_back: handed_back.iter().map(HandedBack::of).collect(),
            failing: &failing,
            kept,
            guarded: !args.unguarded,
        };
        pipe::print(&format!("{}\n", serde_json::to_string(&object)?)).map_err(stays)?;
    } else {
        let mut text = text(&target, &attached, &comparison, tracing);
        for note in &notes {
            text += &format!("\n{note}\n");
        }
        pipe::print(&text).map_err(stays)?;
    }
    if let Some(page) = page {
        page.write(&html::page(&target, &attached, &comparison, &notes))
            .map_err(stays)?;
    }
    end?;
    if !failing.is_empty() {
        bail!(
            "{} ({}); process {} was detached again and copies as before",
            match args.before.is_zero() {
                true => "copies fail, and whether they did before nobody has looked",
                false => "copies that had not failed before began to fail",
            },
            failing.join(", "),
            args.pid
        );
    }
    Ok(())
}

/// One window of time: what was seen in it, and whether Ctrl-C ended it.
struct Seen {
    seen: Snapshot,
    interrupted: bool,
}

fn window(tracer: Option<&Tracer>, name: &str, length: Duration) -> anyhow::Result<Seen> {
    let Some(tracer) = tracer else {
        return Ok(Seen {
            seen: Snapshot::empty(),
            interrupted: false,
        });
    };
    let start = tracer.snapshot()?;
    let interrupted = wait::with_progress(name, length, || tracer.ended())?;
    Ok(Seen {
        seen: tracer.snapshot()?.since(&start),
        interrupted,
    })
}

/// Gives the payload a plan without the classes that lost.
fn hand_back(target: &mut Target, plan: &Plan, slower: &[Slower]) -> anyhow::Result<()> {
    if slower.is_empty() {
        return Ok(());
    }
    let plan = slower.iter().fold(*plan, |plan, class| {
        plan.without(class.dtoh, class.class_bytes)
    });
    injector::set_plan(target, &plan)?;
    Ok(())
}

/// How the attach ended.
enum End {
    /// The new copier stays.
    Kept,
    /// Detached again.
    Reverted,
    /// The process has ended, or somebody else has detached from it.
    Gone,
}

/// What there is to say besides the comparison: one sentence each.
fn notes(
    pid: u32,
    before: &Seen,
    after: &Seen,
    handed_back: &[Slower],
    end: &anyhow::Result<End>,
) -> Vec<String> {
    let mut notes = Vec::new();
    if after.interrupted {
        notes.push("The second window was cut short.".to_owned());
    }
    notes.extend(watch::errors(&before.seen, &after.seen));
    notes.extend(handed_back.iter().map(|slower| {
        let HandedBack {
            direction,
            size_class_bytes,
            ratio,
        } = HandedBack::of(slower);
        format!(
            "{direction} {} was slower ({ratio:.2}x): such copies go to the original\nfunction again",
            compare::bytes(size_class_bytes)
        )
    }));
    notes.extend(match end {
        Ok(End::Kept) => Some(format!(
            "The new copier stays. Take it out with: cmt detach {pid}"
        )),
        Ok(End::Reverted) => Some(format!("reverted: process {pid} copies as it did before")),
        Ok(End::Gone) => Some(format!(
            "process {pid} has ended, or was detached from meanwhile"
        )),
        Err(_) => None,
    });
    notes
}

fn text(target: &Target, attached: &Attached, comparison: &Comparison, tracing: bool) -> String {
    let mut text = format!(
        "attached to {} ({}) in {:.0} ms:\n{} functions patched, {} threads stopped for {:.1} ms\n",
        target.pid,
        target.comm,
        attached.took.as_secs_f64() * 1e3,
        attached.patched.len(),
        attached.commit.threads,
        attached.commit.pause.as_secs_f64() * 1e3,
    );
    for (function, reason) in &attached.refused {
        text += &format!("not patched: {function}: {reason}\n");
    }
    if comparison.rows().next().is_some() {
        text += &format!("\n{}", comparison.text());
    } else if tracing {
        text += &format!(
            "\nno copy with pageable memory was seen; `cmt trace {}` shows what there is\n",
            target.pid
        );
    }
    text
}
