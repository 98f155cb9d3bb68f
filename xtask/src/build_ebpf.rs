//! `cargo xtask build-ebpf`: builds the BPF object that `cmt` embeds, the same bytes from any folder.
//!
//! The object is committed, so users and CI's other jobs need none of this. What the Rust toolchain lacks for it is laid
//! into `target/bpf-toolchain` once; nothing of the system or of rustup is changed.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::apt;
use crate::workspace::{cargo_home, output, run, sha256};

/// The Rust that builds the object: another version gives other bytes.
const RUST: &str = "1.95.0";
/// Debian's package of that version's library sources, its version and its SHA-256, for toolchains without rust-src.
const RUST_SRC: &str = "rust-src=1.95.0+dfsg1-2~bpo13+1";
const RUST_SRC_SUITE: &str = "trixie-backports";
const RUST_SRC_SHA256: &str = "7b76db5b880a77f9e52975d2baa6209d2f76d2c9c2789515c3088cb960e2c83b";
const BPF_LINKER: &str = "0.13.0";
/// The LLVM of [`RUST`].
const BPF_LINKER_LLVM: &str = "llvm-22";
const TARGET: &str = "bpfel-unknown-none";

/// Build the BPF object that cmt embeds
#[derive(clap::Args)]
pub struct Args {
    /// Build it, compare it with the committed one, and fail if they differ
    #[arg(long)]
    check: bool,
}

/// Builds the object and writes or compares it.
pub fn run_task(args: &Args) -> Result<()> {
    let workspace = cmt_tests::workspace();
    let toolchain = Toolchain::prepare(&cmt_tests::target().join("bpf-toolchain"))?;
    let built = build(&workspace, &toolchain)?;
    let committed = workspace.join("cmt-ebpf/cmt.bpf.o");
    if !args.check {
        fs::copy(&built, &committed)
            .with_context(|| format!("cannot write {}", committed.display()))?;
        println!("{}  {}", sha256(&committed)?, committed.display());
        return Ok(());
    }
    let (built_sum, committed_sum) = (sha256(&built)?, sha256(&committed)?);
    println!("{built_sum}  {}", built.display());
    println!("{committed_sum}  {}", committed.display());
    ensure!(
        built_sum == committed_sum,
        "the committed object is not what the sources give; run `cargo xtask build-ebpf` and commit it"
    );
    Ok(())
}

/// Where the parts are that the build needs.
struct Toolchain {
    /// `library` of the Rust sources.
    library: PathBuf,
    /// Folder of `bpf-linker`.
    bin: PathBuf,
}

impl Toolchain {
    /// Finds or fetches the parts; those that are in `folder` already are used as they are.
    fn prepare(folder: &Path) -> Result<Self> {
        let version = output(
            Command::new("rustc")
                .arg("--version")
                .env("RUSTUP_TOOLCHAIN", RUST),
        )?;
        ensure!(
            version.starts_with(&format!("rustc {RUST} ")),
            "the object is built with Rust {RUST}, and this is {version}; install that one (rustup toolchain install {RUST})"
        );
        fs::create_dir_all(folder)?;
        Ok(Self {
            library: rust_src(folder)?,
            bin: bpf_linker(folder)?,
        })
    }
}

fn sysroot() -> Result<PathBuf> {
    let mut rustc = Command::new("rustc");
    rustc
        .args(["--print", "sysroot"])
        .env("RUSTUP_TOOLCHAIN", RUST);
    Ok(output(&mut rustc)?.into())
}

/// The library sources: the toolchain's own, else Debian's.
fn rust_src(folder: &Path) -> Result<PathBuf> {
    let own = sysroot()?.join("lib/rustlib/src/rust/library");
    let fetched = folder.join("rust-src/library");
    for library in [own, fetched.clone()] {
        if library.join("Cargo.lock").exists() {
            return Ok(library);
        }
    }
    fetch_rust_src(folder).context(
        "no rust-src; add it to the toolchain (rustup component add rust-src), or build on Debian",
    )?;
    Ok(fetched)
}

/// Downloads Debian's package and unpacks it.
fn fetch_rust_src(folder: &Path) -> Result<()> {
    let package = apt::download(folder, RUST_SRC_SUITE, RUST_SRC)?;
    let sum = sha256(&package)?;
    ensure!(
        sum == RUST_SRC_SHA256,
        "{} has SHA-256 {sum}, not {RUST_SRC_SHA256}",
        package.display()
    );
    let archive = folder.join("rust-src.tar");
    let tar = fs::File::create(&archive)?;
    let status = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(&package)
        .stdout(tar)
        .status()?;
    ensure!(status.success(), "dpkg-deb: {status}");
    let unpacked = folder.join("rust-src");
    fs::create_dir_all(&unpacked)?;
    run(Command::new("tar")
        .args(["-x", "--strip-components=4", "-f"])
        .arg(&archive)
        .arg("-C")
        .arg(&unpacked)
        .arg(format!("./usr/src/rustc-{RUST}/library")))?;
    fs::remove_file(archive)?;
    Ok(())
}

/// Builds bpf-linker on the LLVM that rustc itself brings.
fn bpf_linker(folder: &Path) -> Result<PathBuf> {
    let bin = folder.join("bin");
    if bin.join("bpf-linker").exists() {
        return Ok(bin);
    }
    let llvm = fs::read_dir(sysroot()?.join("lib"))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("libLLVM.so."))
        })
        .context("the Rust toolchain has no libLLVM.so of its own")?;
    let lib = folder.join("llvm/lib");
    fs::create_dir_all(&lib)?;
    let name = llvm.file_name().context("no file name")?;
    for link in [lib.join("libLLVM.so"), lib.join(name)] {
        if !link.exists() {
            symlink(&llvm, link)?;
        }
    }
    let scratch = folder.join("target-bpf-linker");
    run(Command::new("cargo")
        .args([
            "install",
            "--quiet",
            "bpf-linker",
            "--version",
            BPF_LINKER,
            "--locked",
        ])
        .args(["--no-default-features", "--features", BPF_LINKER_LLVM])
        .arg("--root")
        .arg(folder)
        .arg("--target-dir")
        .arg(&scratch)
        .env("RUSTUP_TOOLCHAIN", RUST)
        .env("LLVM_PREFIX", folder.join("llvm")))?;
    fs::remove_dir_all(scratch)?;
    Ok(bin)
}

/// Compiles the crate; returns the object's path.
fn build(workspace: &Path, toolchain: &Toolchain) -> Result<PathBuf> {
    let target = cmt_tests::target().join("bpf");
    fetch(workspace)?;
    // The object's line table names source files; what differs from machine to machine is mapped away.
    let mut remapped = vec![
        (workspace.to_path_buf(), "/cmt"),
        (target.clone(), "/target"),
        (toolchain.library.clone(), "/rust/library"),
    ];
    // One folder for each registry that this cargo has used, named after its address.
    for registry in fs::read_dir(cargo_home()?.join("registry/src"))? {
        remapped.push((registry?.path(), "/registry"));
    }
    let mut flags: Vec<String> = ["debuginfo=2", "link-arg=--btf", "target-cpu=v3"]
        .iter()
        .flat_map(|flag| ["-C".to_string(), (*flag).to_string()])
        .collect();
    flags.extend(
        remapped
            .iter()
            .map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display())),
    );
    let path = env::var_os("PATH").unwrap_or_default();
    let path =
        env::join_paths(std::iter::once(toolchain.bin.clone()).chain(env::split_paths(&path)))?;
    let mut cargo = Command::new("cargo");
    cargo
        .args([
            "build",
            "--quiet",
            "--release",
            "--locked",
            "-Z",
            "build-std=core",
        ])
        .args(["--target", TARGET, "--target-dir"])
        .arg(&target)
        .current_dir(workspace.join("cmt-ebpf"))
        .env("RUSTUP_TOOLCHAIN", RUST)
        .env("PATH", path)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        // `-Z build-std` is for nightly compilers; this one builds the same code every time.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("__CARGO_TESTS_ONLY_SRC_ROOT", &toolchain.library);
    for inherited in [
        "RUSTFLAGS",
        "CARGO_TARGET_DIR",
        "CARGO_BUILD_TARGET",
        "RUSTC",
        "CARGO",
    ] {
        cargo.env_remove(inherited);
    }
    run(&mut cargo)?;
    strip(&target.join(TARGET).join("release/cmt"))
}

/// Leaves the debug sections out: the kernel reads BTF only, and they hold hashes of this machine's folders.
fn strip(linked: &Path) -> Result<PathBuf> {
    let sysroot = sysroot()?;
    let bin = fs::read_dir(sysroot.join("lib/rustlib"))?
        .filter_map(|entry| Some(entry.ok()?.path().join("bin/rust-objcopy")))
        .find(|path| path.exists())
        .context("the Rust toolchain has no rust-objcopy")?;
    let object = linked.with_extension("bpf.o");
    run(Command::new(bin)
        .arg("--strip-debug")
        .arg(linked)
        .arg(&object)
        .env("LD_LIBRARY_PATH", sysroot.join("lib")))?;
    Ok(object)
}

/// Downloads the crates, so that all registries' folders are there when the build's flags name them.
fn fetch(workspace: &Path) -> Result<()> {
    let mut cargo = Command::new("cargo");
    cargo
        .args(["fetch", "--quiet", "--locked"])
        .current_dir(workspace.join("cmt-ebpf"))
        .env("RUSTUP_TOOLCHAIN", RUST);
    run(&mut cargo)
}
