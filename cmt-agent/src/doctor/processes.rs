//! CUDA libraries: those that are installed, and the processes that map one now.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use procfs::process::{Process, all_processes};
use serde::Serialize;

use super::Check;
use super::Need::Trace;
use crate::target::{maps, text};
use crate::workload::Workload;

/// A process that maps a CUDA library now.
#[derive(Clone, Debug, Serialize)]
pub struct CudaProcess {
    /// Process id.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Paths of its libcuda and libcudart, as it sees them.
    pub libraries: Vec<String>,
    /// The container that it runs in: the start of its id, where its cgroups name one.
    pub container: Option<String>,
}

pub(super) fn running() -> Vec<CudaProcess> {
    let Ok(all) = all_processes() else {
        return Vec::new();
    };
    all.flatten()
        .filter_map(|process| look_at(&process))
        .collect()
}

/// `None` for a process that maps no CUDA library, has ended, or may not be looked at.
fn look_at(process: &Process) -> Option<CudaProcess> {
    if process.pid as u32 == std::process::id() {
        return None;
    }
    let libraries: BTreeSet<String> = maps::of(process)
        .ok()?
        .iter()
        .filter_map(|mapping| mapping.path())
        .filter(|path| is_cuda(path))
        .map(|path| text::printable(&path.to_string_lossy()))
        .collect();
    (!libraries.is_empty()).then(|| CudaProcess {
        pid: process.pid as u32,
        comm: text::comm(process).unwrap_or_default(),
        libraries: libraries.into_iter().collect(),
        container: Workload::of(process.pid as u32).container,
    })
}

fn is_cuda(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_bytes();
    name.starts_with(b"libcuda.so") || name.starts_with(b"libcudart.so")
}

pub(super) fn check(processes: &[CudaProcess]) -> Check {
    const NAME: &str = "CUDA processes";
    if processes.is_empty() {
        return Check::info(NAME, Trace, "none now that may be looked at");
    }
    const SHOWN: usize = 8;
    let mut lines: Vec<String> = processes.iter().take(SHOWN).map(line).collect();
    if processes.len() > SHOWN {
        lines.push(format!("and {} more", processes.len() - SHOWN));
    }
    Check::ok(NAME, Trace, lines.join("\n"))
}

fn line(process: &CudaProcess) -> String {
    let names: Vec<&str> = process
        .libraries
        .iter()
        .filter_map(|path| path.rsplit('/').next())
        .collect();
    let within = match &process.container {
        Some(id) => format!(" in container {id}"),
        None => String::new(),
    };
    format!(
        "{} ({}){within}: {}",
        process.pid,
        process.comm,
        names.join(", ")
    )
}

pub(super) fn installed() -> Check {
    const NAME: &str = "CUDA libraries";
    let mut folders: Vec<PathBuf> = [
        "/usr/local/cuda/lib64",
        "/usr/lib64",
        "/usr/lib/x86_64-linux-gnu",
    ]
    .map(PathBuf::from)
    .into();
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    folders.extend(std::env::split_paths(&path));
    folders.extend(configured());
    let found: BTreeSet<PathBuf> = folders
        .iter()
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flatten()
        .filter_map(|entry| fs::canonicalize(entry.ok()?.path()).ok())
        .filter(|path| is_cuda(path))
        .collect();
    if found.is_empty() {
        return Check::info(NAME, Trace, "none installed")
            .means("wheels and containers bring their own, which are found where they are mapped");
    }
    let paths: Vec<String> = found
        .iter()
        .map(|path| text::printable(&path.to_string_lossy()))
        .collect();
    Check::ok(NAME, Trace, paths.join("\n"))
}

/// Folders that the loader is told of in `/etc/ld.so.conf.d`.
fn configured() -> Vec<PathBuf> {
    let files = fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten();
    files
        .filter_map(|file| fs::read_to_string(file.ok()?.path()).ok())
        .flat_map(|text| {
            let folders = text.lines().filter(|line| line.starts_with('/'));
            folders.map(|line| line.trim().into()).collect::<Vec<_>>()
        })
        .collect()
}
