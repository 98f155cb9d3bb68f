//! `cargo xtask gpu`: lays everything that a GPU machine needs into one folder.
//!
//! That machine needs neither Rust nor a compiler: `run.sh` in the bundle does the rest there, against the real driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::test::fetch_libcudart;
use crate::workspace::{build_cmt, cargo, run};

/// Names the folder of frida-gum's devkit (docs/hooks.md).
const DEVKIT: &str = "FRIDA_GUM_DEVKIT";

/// Builds the bundle and prints its folder.
pub fn bundle() -> Result<()> {
    let cmt = build_cmt()?;
    let built = cmt_tests::built();
    let bundle = cmt_tests::target().join("gpu-bundle");
    if bundle.exists() {
        fs::remove_dir_all(&bundle)?;
    }
    let (victims, libraries) = (bundle.join("victims"), bundle.join("lib"));
    for folder in [&victims, &libraries] {
        fs::create_dir_all(folder)?;
    }
    copy_stripped(&cmt, &bundle.join("cmt"))?;
    match build_cmt_with_frida()? {
        Some(cmt) => copy_stripped(&cmt, &bundle.join("cmt-frida"))?,
        None => eprintln!("no cmt with the frida engine in the bundle: {DEVKIT} is not set"),
    }
    run(&mut cargo([
        "build",
        "--release",
        "--package",
        "cmt-copy",
        "--example",
        "gpu",
    ]))?;
    let engine = cmt_tests::target().join("release/examples/gpu");
    copy_stripped(&engine, &bundle.join("engine"))?;
    for path in programs(&built.folder)? {
        let name = path.file_name().context("a file has a name")?;
        copy_stripped(&path, &victims.join(name))?;
    }
    // Victims on the runtime need one; a machine with the driver alone has none.
    let libcudart = fetch_libcudart()?;
    fs::copy(&libcudart, libraries.join("libcudart.so.13"))?;
    let script = cmt_tests::workspace().join("xtask/gpu/run.sh");
    fs::copy(&script, bundle.join("run.sh")).with_context(|| script.display().to_string())?;
    println!("{}", bundle.display());
    Ok(())
}

/// A `cmt` with the other hook engine, in a target folder of its own; `None` if nobody says where its devkit is.
fn build_cmt_with_frida() -> Result<Option<PathBuf>> {
    if std::env::var_os(DEVKIT).is_none() {
        return Ok(None);
    }
    let target = cmt_tests::target().join("frida");
    let mut build = cargo([
        "build",
        "--release",
        "--package",
        "cmt-agent",
        "--features",
        "frida",
        "--target-dir",
    ]);
    run(build.arg(&target))?;
    Ok(Some(target.join("release/cmt")))
}

/// The executables in a folder of build products; its libraries are the stand-in and stay here.
fn programs(folder: &Path) -> Result<Vec<PathBuf>> {
    use std::os::unix::fs::PermissionsExt;
    let mut programs = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let file = fs::metadata(&path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let executable = file.is_file() && file.permissions().mode() & 0o111 != 0;
        if executable && !name.contains(".so") {
            programs.push(path);
        }
    }
    Ok(programs)
}

fn copy_stripped(from: &Path, to: &Path) -> Result<()> {
    let mut strip = Command::new("strip");
    // Keeps the dynamic symbols: the probes and the injector read no others.
    strip.arg("--strip-unneeded").arg("-o").arg(to).arg(from);
    run(&mut strip)
}
