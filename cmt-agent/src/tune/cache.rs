//! Plans that were measured on this machine, one file each (`cmt/profile/1`), found again by what the machine is.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash as _, Hasher as _};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cmt_common::control::Plan;
use nix::unistd::geteuid;

use super::host::UNNAMED;
use crate::profile::{self, File, Machine, ProfileError};

/// Where root keeps them.
const OF_ROOT: &str = "/var/cache/cmt";

/// The folder of profiles that were measured here.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// One of them.
pub struct Kept {
    /// Its file.
    pub path: PathBuf,
    /// What it says.
    pub file: File,
    /// The plan in it.
    pub plan: Plan,
}

impl Cache {
    /// `$XDG_CACHE_HOME/cmt`, else root's own, else `~/.cache/cmt`; none without a home.
    pub fn find() -> Option<Self> {
        let variable = |name| {
            let path = PathBuf::from(std::env::var_os(name)?);
            // A relative one is to be ignored (XDG Base Directory Specification).
            path.is_absolute().then_some(path)
        };
        let folder = match variable("XDG_CACHE_HOME") {
            Some(folder) => folder.join("cmt"),
            None if geteuid().is_root() => OF_ROOT.into(),
            None => variable("HOME")?.join(".cache/cmt"),
        };
        Some(Self { folder })
    }

    /// What was measured on this machine by this version.
    ///
    /// # Errors
    /// When there is a file and it is damaged.
    pub fn look_up(&self, machine: &Machine) -> Result<Option<Kept>, ProfileError> {
        let path = self.path(machine);
        let (file, plan) = match profile::read_file(&path) {
            Err(ProfileError::Read { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                return Ok(None);
            }
            read => read?,
        };
        let is_ours = file.measured.as_ref().is_some_and(|measured| {
            measured.version == env!("CARGO_PKG_VERSION") && !measured.interrupted
        });
        let is_of = file.machine.as_ref().is_some_and(|of| fits(of, machine));
        Ok((is_ours && is_of).then_some(Kept { path, file, plan }))
    }

    /// Keeps a result; whoever reads meanwhile reads the old one or the new one.
    pub fn keep(&self, machine: &Machine, file: &File) -> anyhow::Result<PathBuf> {
        let path = self.path(machine);
        let written = || -> std::io::Result<()> {
            fs::create_dir_all(&self.folder)?;
            let mut new = tempfile::Builder::new()
                .prefix(".new-")
                .tempfile_in(&self.folder)?;
            new.write_all(file.to_text().as_bytes())?;
            new.as_file().sync_all()?;
            new.persist(&path)?;
            Ok(())
        };
        written().with_context(|| format!("{} cannot be written", path.display()))?;
        Ok(path)
    }

    /// Files of all machines and versions, as they are named.
    pub fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let mut files: Vec<PathBuf> = entries
            .map(|entry| entry.path())
            .filter(|path| {
                path.extension()
                    .is_some_and(|extension| extension == "json")
            })
            .collect();
        files.sort();
        files
    }

    fn path(&self, machine: &Machine) -> PathBuf {
        let mut hasher = DefaultHasher::new();
        let text = serde_json::to_string(machine).expect("plain numbers and names");
        (text, env!("CARGO_PKG_VERSION")).hash(&mut hasher);
        let gpu = machine.gpu.as_deref().unwrap_or("gpu");
        let name: String = gpu
            .chars()
            .take(40)
            .map(|c| match c.is_ascii_alphanumeric() {
                true => c.to_ascii_lowercase(),
                false => '-',
            })
            .collect();
        self.folder
            .join(format!("{name}-{:016x}.json", hasher.finish()))
    }
}

/// Whether a profile is of this very machine. The kernel may not name the GPU that CUDA does.
fn fits(of: &Machine, here: &Machine) -> bool {
    let same_gpu = match (&of.gpu, &here.gpu) {
        (Some(of), Some(here)) if !here.starts_with(UNNAMED) => {
            here.split(", ").any(|gpu| gpu == of)
        }
        _ => true,
    };
    same_gpu
        && *here
            == Machine {
                gpu: here.gpu.clone(),
                ..of.clone()
            }
}

/// The name of a profile's file.
pub fn name(path: &Path) -> String {
    path.file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Measured;

    fn machine() -> Machine {
        Machine {
            gpu: Some("NVIDIA H200".to_owned()),
            driver: Some("580.1".to_owned()),
            cpus: 16,
            quota: Some(1.5),
            ..Machine::default()
        }
    }

    fn file(search: &str, version: &str) -> File {
        let measured = Measured {
            date: String::new(),
            version: version.to_owned(),
            search: search.to_owned(),
            interrupted: false,
            classes: Vec::new(),
        };
        File::on(&cmt_copy::plan::estimate(8), &machine(), Some(measured))
    }

    const VERSION: &str = env!("CARGO_PKG_VERSION");

    #[test]
    fn what_is_kept_is_found_again_and_for_no_other_machine() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache {
            folder: folder.path().join("new/cmt"),
        };
        assert!(cache.look_up(&machine()).expect("nothing yet").is_none());
        let path = cache
            .keep(&machine(), &file("fast", VERSION))
            .expect("kept");
        let kept = cache.look_up(&machine()).expect("sound").expect("there");
        assert_eq!(
            (kept.path, kept.plan),
            (path.clone(), cmt_copy::plan::estimate(8))
        );
        assert_eq!(cache.files(), std::slice::from_ref(&path));
        for other in [
            Machine {
                cpus: 8,
                ..machine()
            },
            Machine {
                quota: None,
                ..machine()
            },
            Machine {
                driver: Some("581".to_owned()),
                ..machine()
            },
            Machine {
                kernel: Some("7.0".to_owned()),
                ..machine()
            },
        ] {
            assert!(
                cache.look_up(&other).expect("nothing").is_none(),
                "{other:?}"
            );
            // Not even under its own name.
            fs::copy(&path, cache.path(&other)).expect("a copy");
            assert!(
                cache.look_up(&other).expect("foreign").is_none(),
                "{other:?}"
            );
        }
    }

    #[test]
    fn results_of_other_versions_and_damaged_ones_are_not_used() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache {
            folder: folder.path().to_owned(),
        };
        let path = cache
            .keep(&machine(), &file("full", "0.0.1"))
            .expect("kept");
        assert!(cache.look_up(&machine()).expect("sound").is_none());
        fs::write(&path, "{\"schema\": \"cmt/profile/1\"").expect("cut off");
        let error = cache
            .look_up(&machine())
            .err()
            .expect("damaged")
            .to_string();
        assert!(error.contains("not a cmt/profile/1 object"), "{error}");
    }
}
