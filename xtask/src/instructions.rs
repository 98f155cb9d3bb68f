//! `cargo xtask instructions`: how many instructions a patched function adds to a call that it passes through.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::workspace::{cargo, line, run};

const EXAMPLE: &str = "pass_through";
/// Two numbers of calls: their difference leaves out what starting and ending takes.
const CALLS: [u64; 2] = [1_000, 11_000];

/// Counts and prints. Needs valgrind.
///
/// # Errors
/// When the example cannot be built or counted.
pub fn run_task() -> Result<()> {
    let profile = ["--release", "--package", "cmt-inject", "--example", EXAMPLE];
    run(cargo(["build"]).args(profile))?;
    let [alone, replaced] = [per_call("alone")?, per_call("replaced")?];
    println!("instructions a call below the cut-over (callgrind):");
    println!("  the function alone       {alone:6.1}");
    println!("  by way of its replacement{replaced:6.1}");
    println!("  added                    {:6.1}", replaced - alone);
    println!("The jump in the patched function, its thunk and its trampoline add a few more.");
    Ok(())
}

fn per_call(way: &str) -> Result<f64> {
    let [few, many] = CALLS.map(|calls| instructions(way, calls));
    let added = many?.checked_sub(few?).context("more calls took less")?;
    Ok(added as f64 / (CALLS[1] - CALLS[0]) as f64)
}

/// All instructions of one run.
fn instructions(way: &str, calls: u64) -> Result<u64> {
    let example = cmt_tests::target().join("release/examples").join(EXAMPLE);
    let mut command = Command::new("valgrind");
    command
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(example)
        .args([way, &calls.to_string()]);
    let output = command
        .stdin(Stdio::null())
        .output()
        .context("starting valgrind (apt-get install valgrind)")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}: {}\n{said}",
        line(&command),
        output.status
    );
    let count = said
        .lines()
        .find_map(|line| line.split_once("Collected :"))
        .with_context(|| format!("valgrind counted nothing:\n{said}"))?;
    Ok(count.1.trim().parse()?)
}
