//! `cargo xtask dist`: packs a `cmt` for other machines, the same archive every time.
//!
//! The binary and the payload inside it run on glibc 2.28 and newer: zig links both against the symbols of that version.
//! What the linking was to give is read back from the finished file ([`inspect`]), and `--check` runs it on another
//! distribution's glibc ([`userland`]).

mod inspect;
mod notices;
mod userland;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::workspace::{cargo_home, output, run, sha256};

/// The oldest glibc that what is packed runs on (Debian 10, RHEL 8).
const GLIBC: (u32, u32) = (2, 28);
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Pack cmt for other machines: target/dist/cmt-VERSION-x86_64-linux-gnu.tar.gz
#[derive(clap::Args)]
pub struct Args {
    /// Then run what was packed on the glibc of a distribution that lies in
    /// ROOT (default: Debian 11's, from the mirror that apt uses); takes root
    #[arg(long, value_name = "ROOT")]
    check: Option<Option<PathBuf>>,
}

/// Builds, inspects and packs; prints what it made.
pub fn run_task(args: &Args) -> Result<()> {
    if args.check.is_some() {
        userland::require_root()?;
    }
    let tools = Tools::prepare(&cmt_tests::target().join("dist-tools"))?;
    let cmt = build(&tools)?;
    inspect::inspect(&fs::read(&cmt)?, GLIBC, &own_paths()?)
        .with_context(|| format!("{} is not fit for a release", cmt.display()))?;
    let archive = pack(&cmt)?;
    println!("{}  {}", sha256(&archive)?, archive.display());
    if let Some(root) = &args.check {
        userland::check(&archive, root.as_deref(), &tools)?;
    }
    Ok(())
}

/// The linker and what drives it.
struct Tools {
    folder: PathBuf,
}

impl Tools {
    /// Installs what `xtask/dist/requirements.txt` lists into `folder`, unless that was done.
    fn prepare(folder: &Path) -> Result<Self> {
        let wanted = cmt_tests::workspace().join("xtask/dist/requirements.txt");
        let stamp = folder.join("requirements.txt");
        let tools = Self {
            folder: folder.to_path_buf(),
        };
        if fs::read(&stamp).is_ok_and(|installed| Some(installed) == fs::read(&wanted).ok()) {
            return Ok(tools);
        }
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        run(Command::new("python3")
            .args(["-m", "pip", "--disable-pip-version-check", "install"])
            .args(["--quiet", "--no-deps", "--require-hashes", "--target"])
            .arg(folder)
            .arg("--requirement")
            .arg(&wanted))
        .context("dist links with zig, which pip installs (apt-get install python3-pip)")?;
        fs::copy(&wanted, stamp)?;
        Ok(tools)
    }

    fn zig(&self) -> PathBuf {
        self.folder.join("ziglang/zig")
    }

    /// A command that keeps its caches with the tools.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("CARGO_ZIGBUILD_ZIG_PATH", self.zig())
            .env("CARGO_ZIGBUILD_CACHE_DIR", self.folder.join("cache"))
            .env("ZIG_GLOBAL_CACHE_DIR", self.folder.join("cache/zig"))
            .env("ZIG_LOCAL_CACHE_DIR", self.folder.join("cache/zig"));
        command
    }
}

/// Builds `cmt`, stripped and without a trace of this machine's folders.
fn build(tools: &Tools) -> Result<PathBuf> {
    let workspace = cmt_tests::workspace();
    let target = cmt_tests::target().join("dist-build");
    // So that the registries' folders are there when the flags name them.
    run(crate::workspace::cargo(["fetch", "--quiet", "--locked"]).args(["--target", TRIPLE]))?;
    let mut remapped = vec![
        (workspace.clone(), "/cmt"),
        (target.clone(), "/target"),
        (sysroot()?, "/rust"),
    ];
    for registry in fs::read_dir(cargo_home()?.join("registry/src"))? {
        remapped.push((registry?.path(), "/registry"));
    }
    let mut flags = Vec::new();
    for (from, to) in remapped {
        let flag = format!("--remap-path-prefix={}={to}", from.display());
        ensure!(
            !flag.contains(char::is_whitespace),
            "{} has a space in its name, which cargo's flags cannot hold",
            from.display()
        );
        flags.push(flag);
    }
    let mut zigbuild = tools.command(&tools.folder.join("bin/cargo-zigbuild"));
    zigbuild
        .args([
            "zigbuild",
            "--release",
            "--locked",
            "--package",
            "cmt-agent",
        ])
        .arg("--target")
        .arg(format!("{TRIPLE}.{}.{}", GLIBC.0, GLIBC.1))
        .arg("--target-dir")
        .arg(&target)
        .current_dir(&workspace)
        // The payload's build inherits all of these, and `--target` does not reach it: it is for this very target anyway.
        .env(
            "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
            flags.join(" "),
        )
        .env("CARGO_PROFILE_RELEASE_STRIP", "true")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false");
    for inherited in [
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_TARGET_DIR",
        "CARGO_BUILD_TARGET",
        "FRIDA_GUM_DEVKIT",
    ] {
        zigbuild.env_remove(inherited);
    }
    run(&mut zigbuild)?;
    Ok(target.join(TRIPLE).join("release/cmt"))
}

fn sysroot() -> Result<PathBuf> {
    let mut rustc = Command::new("rustc");
    Ok(output(rustc.args(["--print", "sysroot"]))?.into())
}

/// The folders of this machine that no released file may name.
fn own_paths() -> Result<Vec<PathBuf>> {
    let mut paths = vec![
        cmt_tests::workspace(),
        cmt_tests::target(),
        cargo_home()?,
        sysroot()?,
    ];
    // Its hidden folders, where tools keep things: `/root/` alone is also a part of `/proc/1/root/`.
    paths.extend(std::env::var_os("HOME").map(|home| Path::new(&home).join(".")));
    // "/" is in every file.
    paths.retain(|path| path.parent().is_some());
    Ok(paths)
}

/// Lays the package's folder out and makes the archive of it: the same bytes from the same files.
fn pack(cmt: &Path) -> Result<PathBuf> {
    let dist = cmt_tests::target().join("dist");
    if dist.exists() {
        fs::remove_dir_all(&dist)?;
    }
    let name = format!("cmt-{}-x86_64-linux-gnu", env!("CARGO_PKG_VERSION"));
    let folder = dist.join(&name);
    fs::create_dir_all(&folder)?;
    let workspace = cmt_tests::workspace();
    fs::copy(cmt, folder.join("cmt"))?;
    for entry in fs::read_dir(&workspace)? {
        let file_name = entry?.file_name();
        let name = file_name.to_string_lossy();
        if name.starts_with("LICENSE") || ["README.md", "CHANGELOG.md"].contains(&&*name) {
            fs::copy(workspace.join(&file_name), folder.join(&file_name))?;
        }
    }
    for part in ["docs", "examples"] {
        copy_tree(&workspace.join(part), &folder.join(part))?;
    }
    notices::collect(&folder.join("licenses"))?;
    let archive = dist.join(format!("{name}.tar.gz"));
    let tar = dist.join(format!("{name}.tar"));
    run(Command::new("tar")
        .args(["--create", "--sort=name", "--format=gnu"])
        .args([
            "--owner=0",
            "--group=0",
            "--numeric-owner",
            "--mode=u=rwX,go=rX",
        ])
        .arg(format!("--mtime=@{}", commit_time()))
        .arg("--file")
        .arg(&tar)
        .arg("--directory")
        .arg(&dist)
        .arg(&name))?;
    run(Command::new("gzip").args(["--no-name", "--best"]).arg(&tar))?;
    fs::remove_dir_all(folder)?;
    let sums = format!("{}  {name}.tar.gz\n", sha256(&archive)?);
    fs::write(dist.join("SHA256SUMS"), sums)?;
    Ok(archive)
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

/// When the packed sources were committed, in seconds since 1970; 0 outside a git checkout.
fn commit_time() -> String {
    let mut git = Command::new("git");
    git.args(["log", "-1", "--format=%ct"])
        .current_dir(cmt_tests::workspace());
    output(&mut git).unwrap_or_else(|_| "0".to_string())
}
