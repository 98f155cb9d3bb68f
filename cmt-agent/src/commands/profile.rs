//! `cmt profile`: the plans that are known, and whether a file holds one.

use std::path::{Path, PathBuf};

use anyhow::bail;
use serde::Serialize;

use crate::output_file::OutputFile;
use crate::pipe;
use crate::profile::{self, File, known};
use crate::tune::cache::{self, Cache};
use crate::tune::{classes_text, machine_text, plan_text};

/// List, show, export and check profiles: plans of machines that were tuned
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    job: Job,
}

#[derive(clap::Subcommand)]
enum Job {
    /// List those that cmt brings along and those that were measured here
    List {
        /// Print one JSON object (cmt/profiles/1)
        #[arg(long)]
        json: bool,
    },
    /// Show one as tables
    Show {
        /// A name of the list, or a file
        #[arg(value_name = "NAME|FILE")]
        which: String,
    },
    /// Write one as it is passed on
    Export {
        /// A name of the list
        name: String,
        /// Where to [default: stdout]
        file: Option<PathBuf>,
    },
    /// Say whether a file holds a profile: exit code 0, or 1 and the reason
    Check {
        /// The file
        file: PathBuf,
    },
}

/// What `list --json` prints.
#[derive(Serialize)]
struct List {
    schema: &'static str,
    profiles: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    name: String,
    /// None for one that cmt brings along.
    path: Option<PathBuf>,
    /// None for one that is sound.
    damaged: Option<String>,
    profile: Option<File>,
}

/// Does what is asked.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.job {
        Job::List { json } => list(json),
        Job::Show { which } => {
            let file = find(&which)?;
            let machine = file.machine.as_ref().map(machine_text);
            let found = file.measured.as_ref().map(|measured| {
                let (search, date) = (&measured.search, &measured.date);
                format!("measured by --search {search} on {date}\n")
            });
            pipe::print(&format!(
                "{}{}{}{}",
                machine.unwrap_or_default(),
                found.unwrap_or_default(),
                plan_text(&file),
                classes_text(&file)
            ))
        }
        Job::Export { name, file } => {
            let output = file
                .as_deref()
                .map(|path| OutputFile::open(path, "nothing was exported"))
                .transpose();
            let text = find(&name)?.to_text();
            match output? {
                Some(output) => output.write(&text),
                None => pipe::print(&text),
            }
        }
        Job::Check { file } => {
            let (read, _) = profile::read_file(&file)?;
            let stages = match read.stages() {
                true => "",
                false => ", that stages nothing",
            };
            let path = file.display();
            pipe::print(&format!("{path}: a sound profile{stages}\n"))
        }
    }
}

fn entries() -> Vec<Entry> {
    let known = known::all().map(|(name, text)| {
        entry(
            name.to_owned(),
            None,
            profile::parse_file(text, Path::new(name)),
        )
    });
    let kept = Cache::find().map_or_else(Vec::new, |cache| cache.files());
    let kept = kept.into_iter().map(|path| {
        let read = profile::read_file(&path);
        entry(cache::name(&path), Some(path), read)
    });
    known.chain(kept).collect()
}

fn entry(
    name: String,
    path: Option<PathBuf>,
    read: Result<(File, cmt_common::control::Plan), profile::ProfileError>,
) -> Entry {
    let (profile, damaged) = match read {
        Ok((file, _)) => (Some(file), None),
        Err(why) => (None, Some(format!("{:#}", anyhow::Error::from(why)))),
    };
    Entry {
        name,
        path,
        damaged,
        profile,
    }
}

fn list(json: bool) -> anyhow::Result<()> {
    let profiles = entries();
    if json {
        let list = List {
            schema: "cmt/profiles/1",
            profiles,
        };
        return pipe::print(&format!("{}\n", serde_json::to_string(&list)?));
    }
    if profiles.is_empty() {
        return pipe::print(
            "no profile is known: cmt brings none along yet, and `cmt tune` has kept none\n",
        );
    }
    let text: String = profiles.iter().map(line).collect();
    pipe::print(&text)
}

/// One of the list, in two lines.
fn line(entry: &Entry) -> String {
    let origin = match &entry.path {
        Some(_) => "measured here",
        None => "brought along",
    };
    let Some(file) = &entry.profile else {
        let why = entry.damaged.as_deref().unwrap_or_default();
        return format!("{}\n  damaged: {why}\n", entry.name);
    };
    let machine = file.machine.as_ref();
    let gpu = machine.and_then(|machine| machine.gpu.as_deref());
    let cpus = machine.map_or(0, |machine| machine.cpus);
    let search = file
        .measured
        .as_ref()
        .map_or("not", |measured| &measured.search);
    let date = file.measured.as_ref().map_or("", |measured| &measured.date);
    format!(
        "{}\n  {}, {cpus} CPUs; {origin}, {search} search {date}\n",
        entry.name,
        gpu.unwrap_or("unknown GPU")
    )
}

/// One by its name, else the file of that name.
fn find(which: &str) -> anyhow::Result<File> {
    let entries = entries();
    if let Some(entry) = entries.into_iter().find(|entry| entry.name == which) {
        return match (entry.profile, entry.damaged) {
            (Some(file), _) => Ok(file),
            (None, why) => bail!("{}", why.unwrap_or_default()),
        };
    }
    let path = Path::new(which);
    if !path.exists() {
        bail!("{which:?} is neither a profile of `cmt profile list` nor a file");
    }
    Ok(profile::read_file(path)?.0)
}
