//! Lays beside the binary what the licences of the crates in it ask for: their texts.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::TRIPLE;
use crate::workspace::{cargo, output};

/// How names of licence files begin.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// Copies the licence files of all crates that are linked into `cmt` or its payload to `folder/CRATE-VERSION/`, and lists
/// their licences in `folder/README.md`.
pub fn collect(folder: &Path) -> Result<()> {
    let linked = linked()?;
    let mut metadata = cargo(["metadata", "--format-version=1", "--locked"]);
    metadata.args(["--filter-platform", TRIPLE]);
    let metadata: Value = serde_json::from_str(&output(&mut metadata)?)?;
    let mut list = "# Crates inside `cmt`, and their licences\n\n".to_string();
    let mut count = 0;
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let field = |name: &str| package[name].as_str().unwrap_or_default();
        let (name, version) = (field("name"), field("version"));
        // Those of the workspace itself have no source, and its licence.
        if package["source"].is_null() || !linked.contains(&format!("{name} v{version}")) {
            continue;
        }
        let sources = Path::new(field("manifest_path")).parent();
        copy_licences(
            sources.context("a manifest lies in a folder")?,
            &folder.join(format!("{name}-{version}")),
        )?;
        let (license, home) = (field("license"), field("repository"));
        list += &format!("- {name} {version}: {license} ({home})\n");
        count += 1;
    }
    ensure!(count > 0, "cargo metadata names no crate that is linked");
    Ok(fs::write(folder.join("README.md"), list)?)
}

/// Crates that end up in the files, as `NAME vVERSION`.
fn linked() -> Result<BTreeSet<String>> {
    let mut tree = cargo(["tree", "--locked", "--edges=normal,no-proc-macro"]);
    tree.args(["--package=cmt-agent", "--package=cmt-inject"]);
    tree.args(["--target", TRIPLE, "--prefix=none", "--format={p}"]);
    let first_two = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    Ok(output(&mut tree)?.lines().map(first_two).collect())
}

fn copy_licences(sources: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(sources)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        if NAMES.iter().any(|start| name.starts_with(start)) && entry.file_type()?.is_file() {
            fs::create_dir_all(to)?;
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}
