//! Runs what was packed on another distribution's glibc: `cmt`, and a copying program that it attaches to, both with that
//! root, that loader and that libc.
//!
//! The program and the stand-in are linked by zig as `cmt` is, so the root needs nothing but a glibc. It is not written
//! to: a scratch folder is laid over it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use cmt_tests::Victim;

use super::{GLIBC, Tools};
use crate::apt;
use crate::workspace::{is_root, output, run};

/// The oldest Debian whose packages its mirrors still have.
const SUITE: &str = "bullseye";
/// How often it attaches and detaches.
const CYCLES: u32 = 10;
/// Lays $1 over $2 on $3, with what a container has besides, and becomes the program $4 there.
const ENTER: &str = r#"
set -e
mount -t overlay -o "lowerdir=$1:$2" overlay "$3"
for part in proc sys dev; do mount --rbind "/$part" "$3/$part"; done
root=$3
shift 3
exec chroot "$root" "$@""#;

/// Fails for users who cannot do what [`check`] does.
pub fn require_root() -> Result<()> {
    ensure!(
        is_root(),
        "--check makes a root of its own and patches a process, which takes root: \
         sudo env \"PATH=$PATH\" cargo xtask dist --check"
    );
    Ok(())
}

/// Attaches and detaches there, and prints which glibc it was.
pub fn check(archive: &Path, root: Option<&Path>, tools: &Tools) -> Result<()> {
    let scratch = cmt_tests::target().join("dist-userland");
    let root = match root {
        Some(root) => root.canonicalize().context(root.display().to_string())?,
        None => debian(&scratch)?,
    };
    let (upper, merged) = (scratch.join("upper"), scratch.join("merged"));
    if upper.exists() {
        fs::remove_dir_all(&upper)?;
    }
    for folder in ["cmt", "proc", "sys", "dev"] {
        fs::create_dir_all(upper.join(folder))?;
    }
    fs::create_dir_all(&merged)?;
    run(Command::new("tar")
        .args(["--strip-components=1", "--extract", "--file"])
        .arg(archive)
        .arg("--directory")
        .arg(upper.join("cmt")))?;
    build_victim(tools, &upper.join("cmt"))?;

    let mut enter = Command::new("unshare");
    enter
        .args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            ENTER,
            "sh",
        ])
        .args([&upper, &root, &merged])
        .args(["/cmt/victim-drv", "--threads", "2", "--bytes", "64K,4M"])
        .args(["--idle-threads", "4", "--malloc-storm", "1"])
        .env("LD_LIBRARY_PATH", "/cmt");
    let victim = Victim::spawn(enter);
    println!("in {}:", root.display());
    story(victim, &merged)
}

/// Unpacks Debian's libc6 into a folder.
fn debian(scratch: &Path) -> Result<PathBuf> {
    let root = scratch.join(SUITE);
    if !root.join("lib64").exists() {
        let package = apt::download(scratch, SUITE, "libc6")
            .context("no root at hand; name one: cargo xtask dist --check ROOT")?;
        run(Command::new("dpkg-deb")
            .arg("--extract")
            .arg(package)
            .arg(&root))?;
    }
    Ok(root)
}

/// Builds the stand-in and a copying program for that glibc.
fn build_victim(tools: &Tools, into: &Path) -> Result<()> {
    let tests = cmt_tests::workspace().join("tests");
    let cc = || {
        let mut cc = tools.command(&tools.zig());
        cc.arg("cc")
            .arg(format!("--target=x86_64-linux-gnu.{}.{}", GLIBC.0, GLIBC.1))
            .args(["-std=c11", "-O2", "-fno-omit-frame-pointer", "-pthread"]);
        cc
    };
    let mut driver = cc();
    for entry in fs::read_dir(tests.join("stand-in"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "c") && !path.ends_with("runtime.c") {
            driver.arg(path);
        }
    }
    let libcuda = into.join("libcuda.so.1");
    run(driver
        .args(["-fPIC", "-shared", "-fvisibility=hidden", "-ldl"])
        .args(["-Wl,-soname,libcuda.so.1", "-o"])
        .arg(&libcuda))?;
    let sources = ["copier.c", "options.c", "parked.c", "api_driver.c"];
    run(cc()
        .args(sources.map(|source| tests.join("victims").join(source)))
        .arg(&libcuda)
        .arg("-o")
        .arg(into.join("victim-drv")))
}

/// Attach, a look at what it did, detach; all of it in the program's root.
fn story(victim: Victim, root: &Path) -> Result<()> {
    let pid = victim.pid.to_string();
    // Run as a program, glibc says which one it is.
    let version = inside(&pid, &[&libc_of(victim.pid, root)?])?;
    let version = version.lines().next().context("libc says nothing")?;
    println!("{version}");
    println!("{}", inside(&pid, &["/cmt/cmt", "--version"])?.trim_end());
    let doctor = json(&pid, &["doctor"])?;
    ensure!(doctor["attach"] == true, "cmt doctor: {doctor}");
    let mut copies = 0;
    for cycle in 0..CYCLES {
        // The first one traces as well, before and after.
        let window = if cycle == 0 { "1s" } else { "0s" };
        let attach = ["attach", &pid, "--before", window, "--after", window];
        let attached = json(&pid, &attach)?;
        if cycle == 0 {
            let status = json(&pid, &["status", &pid])?;
            let staged = [0, 1].map(|way| &status["processes"][0]["staged"][way]["calls"]);
            let staged = staged.map(|calls| calls.as_u64().unwrap_or_default());
            ensure!(
                !staged.contains(&0),
                "nothing was staged: {status}; attach: {attached}"
            );
            copies = staged.iter().sum();
        }
        inside(&pid, &["/cmt/cmt", "detach", &pid])?;
    }
    launched(&pid)?;
    let account = victim.stop();
    ensure!(account["mismatches"] == 0, "wrong bytes: {account}");
    println!(
        "attached and detached {CYCLES} times, {copies} copies staged in the first: {account}"
    );
    Ok(())
}

/// Another such program, started by `cmt`.
fn launched(pid: &str) -> Result<()> {
    let program = [
        "/cmt/victim-drv",
        "--bytes",
        "4M",
        "--exact",
        "--calls",
        "20",
    ];
    // The root cannot be written to, but for what is mounted there.
    let kept = "/dev/shm/cmt-dist-run.json";
    let tune = [
        "/cmt/cmt", "tune", "--search", "instant", "--json", kept, "--",
    ];
    let mut command = inside_command(pid, &[&tune[..], &program[..]].concat());
    let said = output(
        command
            .env("LD_LIBRARY_PATH", "/cmt")
            .env("XDG_CACHE_HOME", "/dev/shm")
            .env("TMPDIR", "/dev/shm"),
    )?;
    let account: serde_json::Value =
        serde_json::from_str(said.lines().last().context("it says nothing")?)?;
    ensure!(account["mismatches"] == 0, "wrong bytes: {account}");
    // There is nothing else in that root, as a program to read it.
    let run = fs::read_to_string(kept)?;
    fs::remove_file(kept)?;
    let run: serde_json::Value = serde_json::from_str(&run)?;
    let staged = [0, 1].map(|way| run["staged"][way]["calls"].as_u64().unwrap_or_default());
    ensure!(!staged.contains(&0), "nothing was staged: {run}");
    println!("started by cmt tune: {staged:?} of 20 copies staged");
    Ok(())
}

/// Path of the libc that a process with that root has mapped, as the process sees it.
fn libc_of(pid: u32, root: &Path) -> Result<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let paths = maps
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().nth(5));
    let is_libc = |path: &&str| path.ends_with("/libc.so.6") || path.contains("/libc-2.");
    let path = paths.into_iter().find(is_libc).context("it maps no libc")?;
    let root = root.to_str().context("a path that is no text")?;
    Ok(path.trim_start_matches(root).to_string())
}

/// The object that a command of `cmt` prints there.
fn json(pid: &str, args: &[&str]) -> Result<serde_json::Value> {
    let command: Vec<&str> = ["/cmt/cmt"]
        .iter()
        .chain(args)
        .chain(&["--json"])
        .copied()
        .collect();
    Ok(serde_json::from_str(&inside(pid, &command)?)?)
}

/// What a command prints, run in a process's mounts and on its root.
fn inside(pid: &str, command: &[&str]) -> Result<String> {
    output(&mut inside_command(pid, command))
}

fn inside_command(pid: &str, command: &[&str]) -> Command {
    let mut nsenter = Command::new("nsenter");
    nsenter
        .args(["--target", pid, "--mount", "--root", "--wd"])
        .args(command);
    nsenter
}
