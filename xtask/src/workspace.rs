//! Where things lie, and how other programs are run.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// Is there a GPU that CUDA programs could use?
pub fn has_gpu() -> bool {
    Path::new("/dev/nvidiactl").exists()
}

/// Do we run as root?
pub fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// The cargo that runs us, in the workspace's folder.
pub fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).current_dir(cmt_tests::workspace());
    command
}

/// Runs a command to its end; its output goes to our standard error.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .status()
        .with_context(|| format!("cannot start {}", line(command)))?;
    ensure!(status.success(), "{}: {status}", line(command));
    Ok(())
}

/// What a command prints, without the end of its last line.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {}", line(command)))?;
    ensure!(
        output.status.success(),
        "{}: {} {}",
        line(command),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?.trim_end().to_string())
}

/// The SHA-256 of a file.
pub fn sha256(path: &Path) -> Result<String> {
    let line = output(Command::new("sha256sum").arg(path))?;
    let sum = line.split_ascii_whitespace().next();
    Ok(sum.context("sha256sum said nothing")?.to_string())
}

/// Cargo's own folder, where registries are.
pub fn cargo_home() -> Result<PathBuf> {
    match (env::var_os("CARGO_HOME"), env::var_os("HOME")) {
        (Some(home), _) => Ok(home.into()),
        (None, Some(home)) => Ok(Path::new(&home).join(".cargo")),
        (None, None) => bail!("neither CARGO_HOME nor HOME is set"),
    }
}

/// A command as one would type it.
pub fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(OsStr::to_string_lossy).collect();
    words.join(" ")
}

/// Builds the `cmt` that users get.
pub fn build_cmt() -> Result<PathBuf> {
    run(&mut cargo(["build", "--release", "--package", "cmt-agent"]))?;
    Ok(cmt_tests::target().join("release/cmt"))
}
