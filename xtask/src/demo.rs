//! `cargo xtask demo`: the whole story on one machine: trace a live process, swap its copier, compare, swap it back.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use cmt_tests::{Victim, built};
use serde_json::Value;

use crate::workspace::{build_cmt, has_gpu, is_root, line};

const VICTIM: &str = "victim-drv";
const SIZES: &str = "1M,16M,64M";
/// Long enough for copies of each size.
const WINDOW: &str = "5s";

/// Show trace, attach and detach on a workload of this machine
#[derive(clap::Args)]
pub struct Args {
    /// Print the object of `cmt attach --json` on stdout, and everything else on stderr
    #[arg(long)]
    json: bool,
}

/// Runs it all.
///
/// # Errors
/// When a step fails, or the workload saw a wrong byte.
pub fn run(args: Args) -> Result<()> {
    if !is_root() {
        bail!(
            "the demo probes and patches a process, which takes root: \
             sudo env \"PATH=$PATH\" cargo xtask demo"
        );
    }
    let cmt = build_cmt()?;
    let workload = Workload::choose();
    eprintln!("\nworkload: {VICTIM} on {}", workload.name());
    let victim = Victim::spawn(workload.command());
    let pid = victim.pid.to_string();
    let step = |args: &[&str]| {
        let mut command = Command::new(&cmt);
        command.args(args);
        command
    };

    show(step(&["trace", &pid, "--for", "3s"]))?;
    let attach = ["attach", &pid, "--before", WINDOW, "--after", WINDOW];
    let mut attach = step(&attach);
    if args.json {
        attach.arg("--json");
    }
    print!("{}", capture(&mut attach)?);
    show(step(&["detach", &pid]))?;
    check(&victim.stop())
}

/// What the demo copies on.
enum Workload {
    /// The GPU of this machine.
    Gpu,
    /// Our own libcuda.
    StandIn,
}

impl Workload {
    fn choose() -> Self {
        if has_gpu() && has_libcuda() {
            Self::Gpu
        } else {
            Self::StandIn
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Gpu => "this machine's GPU",
            Self::StandIn => "the stand-in (no GPU here): real bytes, modelled link",
        }
    }

    fn command(&self) -> Command {
        let mut command = match self {
            Self::Gpu => Command::new(built().victim(VICTIM)),
            Self::StandIn => Victim::command(VICTIM),
        };
        command.args(["--bytes", SIZES]);
        command
    }
}

/// Does the loader find a libcuda?
fn has_libcuda() -> bool {
    let listed = Command::new("ldconfig").arg("-p").output();
    listed.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("libcuda.so.1"))
}

/// Runs a step, its report on standard error: standard output is for the comparison.
fn show(mut command: Command) -> Result<()> {
    let report = capture(&mut command)?;
    eprint!("{report}");
    Ok(())
}

fn capture(command: &mut Command) -> Result<String> {
    eprintln!("\n$ {}", line(command));
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", line(command)))?;
    let report = String::from_utf8(output.stdout)?;
    ensure!(
        output.status.success(),
        "{}: {}\n{report}",
        line(command),
        output.status
    );
    Ok(report)
}

/// The workload's own account of the bytes that it got back.
fn check(account: &Value) -> Result<()> {
    let wrong = account["mismatches"]
        .as_u64()
        .with_context(|| format!("the workload left no account: {account}"))?;
    ensure!(
        wrong == 0,
        "the workload saw {wrong} wrong bytes: {account}"
    );
    eprintln!("\nevery byte that the workload copied was right, before, during and after");
    Ok(())
}
