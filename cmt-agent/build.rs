//! Builds the payload, and what the loader preloads to bring it in, so that `cmt` can carry both inside itself.
//!
//! Cargo's artifact dependencies would do this, but need a nightly toolchain. The payload is always built optimised:
//! it runs in other people's processes, whatever profile `cmt` itself is built with.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let manifest = PathBuf::from(env("CARGO_MANIFEST_DIR"));
    let workspace = manifest.parent().expect("the workspace's folder");
    let out = PathBuf::from(env("OUT_DIR"));
    let target_dir = out.join("payload");
    if std::env::var_os("CARGO_FEATURE_FUZZING").is_some() {
        for name in ["payload.so", "preload.so"] {
            std::fs::write(out.join(name), "").expect("an empty library");
        }
        return;
    }
    preload(&workspace.join("cmt-inject/src/launch/preload.s"), &out);
    // Relative to this package, so that they hold where the folder is moved together with what was built in it.
    for source in ["cmt-inject", "cmt-copy", "cmt-common", "Cargo.lock"] {
        println!("cargo::rerun-if-changed=../{source}");
    }
    let mut cargo = Command::new(env("CARGO"));
    cargo
        .current_dir(workspace)
        .args([
            "build",
            "--release",
            "--lib",
            "--package",
            "cmt-inject",
            "--target-dir",
        ])
        .arg(&target_dir)
        .env("CARGO_PROFILE_RELEASE_STRIP", "true")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false");
    // Clippy and the like wrap the compiler of the build that we are part of, not ours.
    for wrapper in [
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTC_WRAPPER",
        "CARGO_ENCODED_RUSTFLAGS",
    ] {
        cargo.env_remove(wrapper);
    }
    let features: Vec<_> = ["frida", "frida-download"]
        .into_iter()
        .filter(|name| {
            let variable = format!("CARGO_FEATURE_{}", name.to_uppercase().replace('-', "_"));
            std::env::var_os(variable).is_some()
        })
        .collect();
    cargo.args(["--features", &features.join(",")]);
    println!("cargo::rerun-if-env-changed=FRIDA_GUM_DEVKIT");
    if let Ok(devkit) = std::env::var("FRIDA_GUM_DEVKIT") {
        // frida-gum-sys has no way of its own to be told where its header is.
        cargo.env("BINDGEN_EXTRA_CLANG_ARGS", format!("-I{devkit}"));
    }
    let status = cargo.status().expect("cargo runs");
    assert!(status.success(), "building the payload failed: {status}");
    copy(
        &target_dir.join("release/libcmt_inject.so"),
        &out.join("payload.so"),
    );
}

fn preload(source: &Path, out: &Path) {
    let status = cc::Build::new()
        .get_compiler()
        .to_command()
        .args(["-shared", "-nostdlib", "-s", "-Wl,-z,now", "-o"])
        .arg(out.join("preload.so"))
        .arg(source)
        .status()
        .expect("a C compiler, which links Rust programs, too");
    assert!(
        status.success(),
        "building the preloaded library failed: {status}"
    );
}

fn env(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

fn copy(from: &Path, to: &Path) {
    std::fs::copy(from, to).unwrap_or_else(|error| panic!("copying {}: {error}", from.display()));
}
