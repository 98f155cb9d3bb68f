//! Running a program so that its copies, and those of the processes it starts, are staged from the first one on.
//!
//! The payload is preloaded (`cmt-inject/src/launch/`); each process that copies hands its control block to a [`Desk`], which
//! puts the plan into it, and whose counters are what is told at the end. No process is stopped, traced or waited for, and the
//! program is as any other child: its terminal, signals and exit code are its own.

mod desk;
mod file;
mod gain;
mod program;

use std::ffi::OsString;
use std::io::Write as _;

use anyhow::Context as _;
use cmt_common::control::Plan;
use serde::Serialize;

pub use desk::Desk;
pub use file::place;
pub use gain::{Class, Gain, Measured};
pub use program::{Signals, environment, is_there};

use crate::output_file::OutputFile;
use crate::tune::From;

/// What `--json` keeps.
#[derive(Serialize)]
struct Object<'a> {
    schema: &'static str,
    command: Vec<String>,
    /// What it ended with; null if a signal ended it.
    exit_code: Option<i32>,
    /// The signal that ended it.
    signal: Option<i32>,
    seconds: f64,
    /// Where the plan is from.
    plan: &'a From,
    #[serde(flatten)]
    gain: &'a Gain,
}

/// Runs `command` by `plan`, then ends this process as the program ended. `measured` is what was measured when the plan was
/// made. `signals` were blocked before any other thread was started.
///
/// # Errors
/// When the program cannot be started, with nothing left behind.
pub fn run(
    command: &[OsString],
    plan: &Plan,
    measured: &Measured,
    from: &From,
    signals: &Signals,
    quiet: bool,
    json: Option<OutputFile>,
) -> anyhow::Result<()> {
    let files = place()?;
    let desk = Desk::open(plan, 0).context("opening a socket for the program's processes")?;
    let (program, arguments) = command.split_first().context("no program is named")?;
    let ended = program::run(program, arguments, &files, desk.path(), signals)?;
    let gain = Gain::of(&desk.close(), measured);
    if let Some(file) = json {
        let object = Object {
            schema: "cmt/run/1",
            command: command
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
            exit_code: ended.code(),
            signal: ended.signal(),
            seconds: ended.took.as_secs_f64(),
            plan: from,
            gain: &gain,
        };
        // The program's exit code is worth more than this file.
        let written = file.write(&format!("{}\n", serde_json::to_string(&object)?));
        if let Err(error) = written {
            say(&format!("{error:#}"));
        }
    }
    if !quiet && ended.has_run() {
        say(&gain.to_string());
    }
    ended.repeat()
}

/// A line on stderr, if there is anybody to read it: the program's exit code does not depend on that.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "cmt: {line}");
}
