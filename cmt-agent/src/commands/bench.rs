//! `cmt bench`: stock, tuned and pinned copies of this machine, side by side.

use std::path::PathBuf;

use crate::bench::{self, Report, SMALLEST_BYTES, Settings};
use crate::output_file::OutputFile;
use crate::{pipe, profile};

/// Measure stock, tuned and pinned copies on this machine, side by side
#[derive(clap::Args)]
pub struct Args {
    /// Fewer samples, sizes at factors of 4 and up to 256 MiB: half a minute
    #[arg(long)]
    quick: bool,
    /// Copy no more than this at once (64KiB, 16MiB, 2GiB) [default: 1GiB]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    largest: Option<u64>,
    /// Copy by this profile, a file or one that cmt brings along, instead of the estimate for this machine
    #[arg(long, value_name = "NAME|FILE")]
    profile: Option<PathBuf>,
    /// Show the report in this file, which --json has written, and measure nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["quick", "largest", "profile"])]
    from: Option<PathBuf>,
    /// Print one JSON object (cmt/bench/1)
    #[arg(long)]
    json: bool,
    /// Write the report as a page of HTML with graphs
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Measures and reports.
pub fn run(args: Args) -> anyhow::Result<()> {
    let settings = Settings {
        quick: args.quick,
        largest: args.largest,
        plan: args.profile.as_deref().map(profile::read).transpose()?,
    };
    // A page that cannot be written is found out before minutes are spent.
    let page = args
        .html
        .map(|path| OutputFile::open(&path, "nothing was measured"))
        .transpose()?;
    let report = match args.from {
        Some(path) => Report::read(&path)?,
        None => bench::run(&settings)?,
    };
    if args.json {
        pipe::print(&format!("{}\n", serde_json::to_string(&report)?))?;
    } else {
        pipe::print(&bench::text(&report))?;
    }
    if let Some(page) = page {
        page.write(&bench::page(&report)?)?;
    }
    Ok(())
}

/// A size as people write it; the error is a sentence.
fn size(text: &str) -> Result<u64, String> {
    const LARGEST: u64 = 1 << 40;
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[number.len()..] {
        "" | "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        unit => return Err(format!("unknown unit {unit:?}; use KiB, MiB or GiB")),
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift))
        .filter(|size| (SMALLEST_BYTES..=LARGEST).contains(size) && size.is_power_of_two())
        .ok_or_else(|| {
            format!("{text:?} is no power of two from 4KiB up; write 64KiB, 16MiB or 1GiB")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_understood_and_nonsense_is_refused() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4KiB", 4096),
            ("16M", 16 << 20),
            ("1GiB", 1 << 30),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "MiB",
            "-1MiB",
            "3MiB",
            "1KiB",
            "4KB",
            "0",
            "99999999999GiB",
        ] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
