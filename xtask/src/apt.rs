//! Downloads one Debian package, of whatever suite, with state of its own: nothing of the system's apt is changed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::workspace::{output, run};

/// Downloads `package` of a suite into `folder/dl`, from the mirror that apt uses here.
pub fn download(folder: &Path, suite: &str, package: &str) -> Result<PathBuf> {
    let apt = folder.join("apt");
    let downloads = folder.join("dl");
    for part in ["lists/partial", "cache/archives/partial", "none", "state"] {
        fs::create_dir_all(apt.join(part))?;
    }
    fs::create_dir_all(&downloads)?;
    fs::write(apt.join("state/status"), "")?;
    let indexes = output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(SITE)",
        "Created-By: Packages",
    ]))?;
    let mut sites: Vec<&str> = indexes
        .lines()
        .filter(|site| !site.contains("security"))
        .collect();
    sites.sort_unstable();
    let site = sites.first().context("apt knows no mirror")?;
    fs::write(
        apt.join("sources.list"),
        format!(
            "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {site} {suite} main\n"
        ),
    )?;
    let options = [
        ("Dir::State", "state"),
        ("Dir::State::Lists", "lists"),
        ("Dir::State::status", "state/status"),
        ("Dir::Cache", "cache"),
        ("Dir::Etc::sourcelist", "sources.list"),
        ("Dir::Etc::sourceparts", "none"),
        ("Dir::Etc::preferencesparts", "none"),
    ]
    .map(|(option, path)| format!("{option}={}", apt.join(path).display()));
    let apt_get = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        for option in &options {
            command.args(["-o", option]);
        }
        command.args([
            "-o",
            "APT::Sandbox::User=root",
            "-o",
            "Acquire::Languages=none",
            "-qq",
        ]);
        command.args(args).current_dir(&downloads);
        command
    };
    run(&mut apt_get(&["update"]))?;
    run(&mut apt_get(&["download", package]))?;
    fs::read_dir(&downloads)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .context("apt downloaded nothing")
}
