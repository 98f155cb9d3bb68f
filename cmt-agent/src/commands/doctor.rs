//! `cmt doctor`: says whether trace and attach would work here, and what to do where they would not.

use anyhow::bail;
use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width, presets};

use crate::doctor::{Check, Report, State, examine};
use crate::pipe;
use crate::probes::rights::{OURSELVES, SETCAP};

/// Report and table both fit a terminal of this width.
const COLUMNS: u16 = 80;

/// Check whether trace and attach would work on this machine
#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON object (cmt/doctor/1)
    #[arg(long)]
    json: bool,
}

/// Exit code 0 if both would work.
pub fn run(args: Args) -> anyhow::Result<()> {
    let report = examine();
    if args.json {
        pipe::print(&format!("{}\n", serde_json::to_string(&report)?))?;
    } else {
        pipe::print(&format!("{}\n", text(&report)))?;
    }
    match (report.trace, report.attach) {
        (true, true) => Ok(()),
        (true, false) => bail!("trace would work here, attach would not"),
        (false, _) => bail!("neither trace nor attach would work here"),
    }
}

fn text(report: &Report) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(COLUMNS);
    for (index, check) in report.checks.iter().enumerate() {
        let next = report.checks.get(index + 1);
        // Neighbours with the same remedy share it.
        let shared = next.is_some_and(|next| next.remedy == check.remedy);
        table.add_row([
            state(check),
            check.name.to_string(),
            explain(check, !shared),
        ]);
    }
    for (column, width) in [(0, 9), (1, 24)] {
        if let Some(column) = table.column_mut(column) {
            column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(width)));
        }
    }
    let word = |works| {
        if works {
            "would work"
        } else {
            "would not work"
        }
    };
    format!(
        "{}\n{}\ncmt trace {}, cmt attach {}.",
        table.trim_fmt(),
        setcap(report),
        word(report.trace),
        word(report.attach)
    )
}

/// The command that grants most, on lines of its own: in the table it would be cut in pieces.
fn setcap(report: &Report) -> String {
    let remedies = report
        .checks
        .iter()
        .filter_map(|check| check.remedy.as_deref());
    let commands =
        remedies.filter_map(|remedy| remedy.split_once(SETCAP)?.1.strip_suffix(OURSELVES));
    match commands.max_by_key(|capabilities| capabilities.len()) {
        Some(capabilities) => format!("\n{SETCAP} \\\n{} \\\n{OURSELVES}\n", capabilities.trim()),
        None => String::new(),
    }
}

fn state(check: &Check) -> String {
    match check.state {
        State::Ok => "ok",
        State::Info => "-",
        State::Warning => "warning",
        State::Failed => "FAILED",
    }
    .to_string()
}

fn explain(check: &Check, with_remedy: bool) -> String {
    let mut lines = vec![check.found.clone()];
    lines.extend(check.meaning.as_deref().map(str::to_owned));
    if let Some(remedy) = check.remedy.as_deref().filter(|_| with_remedy) {
        lines.push(match remedy.split_once(SETCAP) {
            Some((before, _)) => format!("-> {before}see below"),
            None => format!("-> {remedy}"),
        });
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_fits_80_columns_and_names_every_check() {
        let report = examine();
        let text = text(&report);
        for line in text.lines() {
            assert!(line.chars().count() <= COLUMNS.into(), "{line}");
        }
        for check in &report.checks {
            assert!(text.contains(check.name), "{} is missing", check.name);
        }
    }
}
