//! `cargo xtask test`: the test ladder, rung by rung; and `cargo xtask test soak`, the long runs.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context, Result};

use crate::workspace::{build_cmt, cargo, has_gpu, is_root, line, run};

/// NVIDIA's libcudart and headers of CUDA 13 and 12, as PyPI has them.
const RUNTIME_WHEELS: [&str; 2] = [
    "nvidia-cuda-runtime>=13,<14",
    "nvidia-cuda-runtime-cu12>=12.9,<13",
];
const UNIT: &str = "unit";
const GPU: &str = "gpu";
const FLEET: &str = "fleet";
const LADDER: [&str; 6] = [UNIT, "stand-in", "kernel", "real-libcudart", FLEET, GPU];

/// What to run.
#[derive(clap::Args)]
pub struct Args {
    /// Only this, which is no part of the ladder
    #[arg(value_enum)]
    only: Option<Only>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Only {
    /// The long runs: 500 kills, 500 cycles, and cmt serve for CMT_SOAK_MINUTES (3)
    Soak,
    /// The protocol between callers and helpers under Miri (a nightly toolchain with miri and rust-src)
    Miri,
}

/// Runs the tests; fails when one does, or when one that can run on this machine did not.
pub fn run_task(args: &Args) -> Result<ExitCode> {
    match args.only {
        None => run_ladder(),
        Some(Only::Soak) => run_soak(),
        Some(Only::Miri) => run_miri(),
    }
}

/// Results of one rung.
#[derive(Default)]
struct Tally {
    passed: u32,
    failed: u32,
    skipped: u32,
    /// Of those: skipped for want of a package that only some targets need.
    lacking: u32,
    /// Why some were skipped.
    reason: String,
}

/// Builds what the rungs need, runs them all and sums up. Fails when a test did, or when a rung that can run on this
/// machine did not.
fn run_ladder() -> Result<ExitCode> {
    let cmt = build_cmt()?;
    cmt_tests::built();
    let libcudart = fetch_libcudart()
        .inspect_err(|error| eprintln!("no libcudart of NVIDIA's: {error:#}"))
        .ok();
    let scratch = tempfile::tempdir()?;
    let log = scratch.path().join("rungs");
    fs::write(&log, "")?;

    let mut unit = cargo([
        "test",
        "--workspace",
        "--exclude",
        "cmt-tests",
        "--no-fail-fast",
    ]);
    let (unit_status, unit_tally) = run_tests(&mut unit)?;
    let mut behaviour = cargo(["test", "--package", "cmt-tests", "--no-fail-fast"]);
    // Tests stop processes and count calls; two at a time would only slow each other down.
    behaviour.args(["--", "--test-threads", "1"]);
    behaviour.env("CMT_BIN", &cmt).env("CMT_RUNG_LOG", &log);
    if let Some(path) = libcudart {
        behaviour.env("CMT_LIBCUDART", path);
    }
    let (behaviour_status, behaviour_tally) = run_tests(&mut behaviour)?;

    let mut rungs = LADDER.map(|name| (name, Tally::default()));
    rungs[0].1 = unit_tally;
    read_log(&fs::read_to_string(&log)?, &mut rungs);
    count_the_rest(&behaviour_tally, &mut rungs);
    let complaints = judge(
        &rungs,
        unit_status.success() && behaviour_status.success(),
        std::env::var_os("CI").is_some(),
    );
    print(&rungs, &complaints);
    Ok(if complaints.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Kills and cycles by the hundred, and `cmt serve` for minutes. Their figures come as rows of a table, which is repeated at the end.
fn run_soak() -> Result<ExitCode> {
    let cmt = build_cmt()?;
    cmt_tests::built();
    let mut soak = cargo(["test", "--package", "cmt-tests", "--test", "soak"]);
    soak.args(["--", "--ignored", "--nocapture", "--test-threads", "1"]);
    soak.env("CMT_BIN", &cmt).env("CMT_REQUIRE_RUNGS", "1");
    let mut rows = Vec::new();
    let status = run_and_show(&mut soak, |text| {
        if text.starts_with("| ") {
            rows.push(text.to_owned());
        }
    })?;
    println!("\n| what | figure |\n|---|---|\n{}", rows.join("\n"));
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The slices' protocol and the plan that changes while it is read: every access checked for data races and for memory that
/// is no longer lent, in some of the orders in which threads can run.
fn run_miri() -> Result<ExitCode> {
    let mut miri = Command::new("rustup");
    miri.args(["run", "nightly", "cargo", "miri", "test", "--locked"]);
    miri.args([
        "--package",
        "cmt-copy",
        "--lib",
        "--",
        "protocol::",
        "plan::tests::a_row",
    ]);
    miri.env(
        "MIRIFLAGS",
        "-Zmiri-disable-isolation -Zmiri-many-seeds=0..4",
    );
    // The toolchain that runs this is in the environment.
    miri.env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN");
    miri.env("CARGO_TARGET_DIR", cmt_tests::target().join("miri"));
    println!("$ {}", line(&miri));
    run(&mut miri)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `cargo test`, passes its output on and adds its closing lines up.
fn run_tests(command: &mut Command) -> Result<(ExitStatus, Tally)> {
    let mut tally = Tally::default();
    let status = run_and_show(command, |text| add_closing_line(text, &mut tally))?;
    Ok((status, tally))
}

/// Runs `cargo test` and passes its output on, each line also to `look`.
fn run_and_show(command: &mut Command, mut look: impl FnMut(&str)) -> Result<ExitStatus> {
    println!("$ {}", line(command));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", line(command)))?;
    let stdout = child.stdout.take().context("no output")?;
    for text in BufReader::new(stdout).lines() {
        let text = text?;
        println!("{text}");
        look(&text);
    }
    Ok(child.wait()?)
}

/// `test result: ok. 7 passed; 0 failed; 1 ignored; …`
fn add_closing_line(text: &str, tally: &mut Tally) {
    let Some(rest) = text.strip_prefix("test result: ") else {
        return;
    };
    let words: Vec<&str> = rest.split_ascii_whitespace().collect();
    for pair in words.windows(2) {
        let Ok(count) = pair[0].parse::<u32>() else {
            continue;
        };
        match pair[1] {
            "passed;" => tally.passed += count,
            "failed;" => tally.failed += count,
            // Marked as no part of the ladder in the sources: figures to print, halves of other tests.
            _ => {}
        }
    }
}

/// Lines of the harness: `rung TAB result TAB test TAB reason`.
fn read_log(text: &str, rungs: &mut [(&'static str, Tally)]) {
    for entry in text.lines() {
        let fields: Vec<&str> = entry.splitn(4, '\t').collect();
        let &[name, result, _, reason] = fields.as_slice() else {
            continue;
        };
        let Some((_, tally)) = rungs.iter_mut().find(|(rung, _)| *rung == name) else {
            continue;
        };
        match result {
            "passed" => tally.passed += 1,
            "failed" => tally.failed += 1,
            _ => {
                tally.skipped += 1;
                tally.lacking += u32::from(result == "lacking");
                tally.reason = reason.to_string();
            }
        }
    }
}

/// Tests of the harness itself, and those that failed before they asked for their rung, count as unit tests.
fn count_the_rest(all: &Tally, rungs: &mut [(&'static str, Tally)]) {
    let sum = |count: fn(&Tally) -> u32| rungs[1..].iter().map(|(_, tally)| count(tally)).sum();
    // To cargo, a test that was skipped has passed.
    let passed: u32 = sum(|tally| tally.passed + tally.skipped);
    let failed: u32 = sum(|tally| tally.failed);
    let unit = &mut rungs[0].1;
    unit.passed += all.passed.saturating_sub(passed);
    unit.failed += all.failed.saturating_sub(failed);
    unit.skipped += all.skipped;
}

/// What is wrong with the results, if anything.
///
/// A package that is not there is nobody's fault on a user's machine; where all must run (`strict`), it is.
fn judge(rungs: &[(&'static str, Tally)], cargo_succeeded: bool, strict: bool) -> Vec<String> {
    let mut complaints = Vec::new();
    for (name, tally) in rungs {
        let can_run = match *name {
            UNIT => true,
            // It needs no rights, but a package.
            FLEET => tally.lacking == 0,
            GPU => has_gpu(),
            _ => is_root(),
        };
        if tally.failed > 0 {
            complaints.push(format!("{name}: {} failed", tally.failed));
        }
        let forgiven = if strict { 0 } else { tally.lacking };
        if can_run && tally.skipped > forgiven {
            complaints.push(format!(
                "{name} can run here, but {} were skipped: {}",
                tally.skipped, tally.reason
            ));
        }
        if can_run && *name != GPU && tally.passed == 0 {
            complaints.push(format!("{name} can run here, but no test of it did"));
        }
    }
    if !cargo_succeeded && complaints.is_empty() {
        complaints.push("cargo test failed".to_string());
    }
    complaints
}

fn print(rungs: &[(&'static str, Tally)], complaints: &[String]) {
    println!(
        "\n{:16}{:>8}{:>8}{:>9}",
        "rung", "passed", "failed", "skipped"
    );
    let mut total = Tally::default();
    for (name, tally) in rungs {
        let reason = match *name {
            GPU if !has_gpu() => "no NVIDIA GPU",
            _ => &tally.reason,
        };
        let counts = format!("{:>8}{:>8}{:>9}", tally.passed, tally.failed, tally.skipped);
        println!("{}", format!("{name:16}{counts}  {reason}").trim_end());
        total.passed += tally.passed;
        total.failed += tally.failed;
        total.skipped += tally.skipped;
    }
    for complaint in complaints {
        println!("{complaint}");
    }
    // A crash of a test process leaves no failed test behind; it still is a failure.
    let failed = total.failed.max(u32::from(!complaints.is_empty()));
    println!(
        "{} passed, {failed} failed, {} skipped",
        total.passed, total.skipped
    );
}

/// Unpacks NVIDIA's libcudart into the target folder, once.
pub fn fetch_libcudart() -> Result<PathBuf> {
    let folder = cmt_tests::target().join("nvidia-cuda-runtime");
    if let Some(found) = find_libcudart(&folder) {
        return Ok(found);
    }
    fs::create_dir_all(&folder)?;
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
        "--quiet",
    ]);
    pip.arg("--dest").arg(&folder).args(RUNTIME_WHEELS);
    run(&mut pip)?;
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "whl") {
            let mut unzip = Command::new("python3");
            unzip.args(["-m", "zipfile", "-e"]).arg(&path).arg(&folder);
            run(&mut unzip)?;
        }
    }
    find_libcudart(&folder).context("the wheel holds no libcudart.so.13")
}

fn find_libcudart(folder: &Path) -> Option<PathBuf> {
    let path = folder.join("nvidia/cu13/lib/libcudart.so.13");
    let both = path.exists() && folder.join("nvidia/cuda_runtime/include/cuda.h").exists();
    both.then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_add_up() {
        let mut tally = Tally::default();
        for text in [
            "running 3 tests",
            "test result: ok. 7 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.10s",
            "test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
        ] {
            add_closing_line(text, &mut tally);
        }
        assert_eq!((tally.passed, tally.failed, tally.skipped), (9, 3, 0));
    }

    #[test]
    fn the_log_is_sorted_by_rung() {
        let mut rungs = LADDER.map(|name| (name, Tally::default()));
        let log = "stand-in\tpassed\ta\t\nstand-in\tfailed\tb\t\ngpu\tskipped\tc\tno NVIDIA GPU\n";
        read_log(log, &mut rungs);
        assert_eq!((rungs[1].1.passed, rungs[1].1.failed), (1, 1));
        assert_eq!(rungs[5].1.skipped, 1);
        assert_eq!(rungs[5].1.reason, "no NVIDIA GPU");

        // 4 passed for cargo: one of stand-in, one skipped, two of the harness.
        let all = Tally {
            passed: 4,
            failed: 2,
            ..Tally::default()
        };
        count_the_rest(&all, &mut rungs);
        assert_eq!((rungs[0].1.passed, rungs[0].1.failed), (2, 1));
    }

    #[test]
    fn a_rung_without_a_test_and_a_failed_cargo_are_complained_of() {
        let mut rungs = [(UNIT, Tally::default())];
        assert_eq!(judge(&rungs, true, false).len(), 1);
        rungs[0].1.passed = 1;
        assert!(judge(&rungs, true, false).is_empty());
        assert_eq!(judge(&rungs, false, false).len(), 1);
        rungs[0].1.skipped = 1;
        assert_eq!(judge(&rungs, true, false).len(), 1);
        rungs[0].1.lacking = 1;
        assert!(judge(&rungs, true, false).is_empty());
        assert_eq!(judge(&rungs, true, true).len(), 1);
    }
}
