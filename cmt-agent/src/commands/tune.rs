//! `cmt tune`: the best plan for this machine, and programs that run by it.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::ensure;
use serde::Serialize;

use crate::launch::{self, Measured, Signals};
use crate::output_file::OutputFile;
use crate::pipe;
use crate::profile::File;
use crate::tune::{self, From, Kind, Tuned, Wish};

/// Find the best plan for this machine, and run a command by it
#[derive(clap::Args)]
pub struct Args {
    /// What to spend on the plan
    #[arg(long, value_enum, value_name = "KIND", default_value = "fast")]
    search: Kind,
    /// Take the plan of this profile, a file or one that cmt brings along, and search for none
    #[arg(long, value_name = "NAME|FILE", conflicts_with_all = ["search", "fresh"])]
    profile: Option<PathBuf>,
    /// Write the plan as a profile
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Measure although this machine has been measured before
    #[arg(long)]
    fresh: bool,
    /// Show no progress, and say nothing of the gain
    #[arg(long)]
    quiet: bool,
    /// Write one JSON object to FILE: the plan (cmt/tune/1; to stdout where no FILE is named), or what the command has gained
    /// (cmt/run/1)
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    json: Option<Option<PathBuf>>,
    /// Command to run by the plan
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// What `--json` writes.
#[derive(Serialize)]
struct Object<'a> {
    schema: &'static str,
    search: Kind,
    from: &'a From,
    took_s: f64,
    interrupted: bool,
    threads: u32,
    cached: Option<&'a PathBuf>,
    saved: Option<&'a PathBuf>,
    notes: &'a [String],
    profile: &'a File,
}

/// Finds a plan, and runs the command by it or shows it.
pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(
        args.command.is_empty() || args.json != Some(None),
        "--json needs a FILE where a command runs, whose stdout is its own; nothing was done"
    );
    // Before any other thread is there, which would take them.
    let signals = match args.command.is_empty() {
        true => None,
        false => Some(Signals::block()?),
    };
    const UNTOUCHED: &str = "nothing was measured, nothing started";
    let save = args
        .save
        .as_deref()
        .map(|path| OutputFile::open(path, UNTOUCHED))
        .transpose()?;
    let json = match &args.json {
        Some(Some(path)) => Some(OutputFile::open(path, UNTOUCHED)?),
        _ => None,
    };
    // No search for what cannot be started, which says so itself.
    let is_there = args.command.first().is_none_or(|it| launch::is_there(it));
    let tuned = tune::tune(&Wish {
        kind: if is_there { args.search } else { Kind::Instant },
        profile: args.profile.as_deref(),
        fresh: args.fresh,
        or_estimate: !args.command.is_empty(),
        quiet: args.quiet,
    })?;
    if let Some(save) = save.filter(|_| is_there) {
        save.write(&tuned.file.to_text())?;
    }
    if let Some(signals) = signals {
        for note in tuned.notes.iter().filter(|_| !args.quiet) {
            eprintln!("cmt: {note}");
        }
        ensure!(
            !tuned.interrupted,
            "interrupted before {} was started",
            args.command[0].display()
        );
        let measured = measured(&tuned);
        let (plan, from) = (&tuned.plan, &tuned.from);
        return launch::run(
            &args.command,
            plan,
            &measured,
            from,
            &signals,
            args.quiet,
            json,
        );
    }
    match (json, &args.json) {
        (Some(file), _) => file.write(&object(&args, &tuned)?)?,
        (None, Some(_)) => return pipe::print(&object(&args, &tuned)?),
        (None, None) => {}
    }
    let mut text = tune::text(&tuned);
    if let Some(path) = &args.save {
        text += &format!("\nsaved in {}\n", path.display());
    }
    pipe::print(&text)
}

/// What was measured on this machine. What another one has said of itself is no measure of what is gained here.
fn measured(tuned: &Tuned) -> Measured {
    let is_ours = matches!(tuned.from, From::Search | From::Cache(_));
    let measured = tuned.file.measured.as_ref().filter(|_| is_ours);
    let classes = measured.into_iter().flat_map(|measured| &measured.classes);
    let classes = classes.map(|class| launch::Class {
        dtoh: class.direction == "DtoH",
        bytes: class.bytes,
        stock_gbps: class.stock_gbps,
        tuned_gbps: class.tuned_gbps,
    });
    Measured {
        classes: classes.collect(),
    }
}

fn object(args: &Args, tuned: &Tuned) -> anyhow::Result<String> {
    let object = Object {
        schema: "cmt/tune/1",
        search: tuned.kind,
        from: &tuned.from,
        took_s: tuned.took.as_secs_f64(),
        interrupted: tuned.interrupted,
        threads: tuned.threads,
        cached: tuned.cached.as_ref(),
        saved: args.save.as_ref(),
        notes: &tuned.notes,
        profile: &tuned.file,
    };
    Ok(serde_json::to_string(&object)? + "\n")
}
