//! How many processors a process may keep busy: its affinity and the CPU quota of its cgroups.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use procfs::process::Process;
use procfs::{FromBufRead as _, ProcResult, ProcessCGroups};

use crate::target::file::{Access, open_regular};
use crate::target::text;
use crate::topology::numbers;

/// Where cgroups of version 2 and the CPU controller of version 1 are mounted.
const V2_ROOTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
const V1_ROOTS: [&str; 2] = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"];

/// Reads the quota of a cgroup's folder.
pub(crate) type Quota = fn(&Path) -> Option<f64>;

/// The processors that a process may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cpus {
    /// Processors that its affinity names.
    pub allowed: u32,
    /// Processors' worth of time that the tightest of its cgroups grants; `None` where no quota is set or can be seen.
    pub quota: Option<f64>,
}

impl Cpus {
    /// Those of process `pid`, as this process sees its cgroups.
    pub fn of(pid: u32) -> ProcResult<Self> {
        let process = Process::new(pid as i32)?;
        let ranges = text::status(&process)?
            .cpus_allowed_list
            .unwrap_or_default();
        let allowed: u32 = ranges.iter().map(|(first, last)| last - first + 1).sum();
        let (below, beyond) = sides(&text::relative(&process, "cgroup")?);
        let mut quotas = Vec::new();
        for (folder, read) in folders(&below)? {
            quotas.extend(read(&folder));
        }
        for (folder, read) in folders(&beyond)? {
            quotas.extend(read(Path::new(&format!(
                "/proc/{pid}/root{}",
                folder.display()
            ))));
        }
        Ok(Self {
            allowed: allowed.max(1),
            quota: quotas.into_iter().reduce(f64::min),
        })
    }

    /// Numbers of the processors that this process may use, by `proc/self/status` below `root`; empty if it is not there.
    pub(crate) fn allowed_under(root: &Path) -> Vec<u32> {
        let status = text::read(root.join("proc/self/status")).unwrap_or_default();
        let list = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        list.map_or_else(Vec::new, numbers)
    }

    /// The quota of this process, by `proc/self/cgroup` and the cgroups below `root`.
    pub(crate) fn quota_under(root: &Path) -> Option<f64> {
        let groups = text::read(root.join("proc/self/cgroup")).ok()?;
        folders(&groups)
            .ok()?
            .into_iter()
            .filter_map(|(folder, read)| read(&root.join(folder.strip_prefix("/").ok()?)))
            .reduce(f64::min)
    }

    /// Threads that may run at once without being throttled: at least 1.
    pub fn threads(&self) -> u32 {
        match self.quota {
            Some(quota) => self.allowed.min((quota as u32).max(1)),
            None => self.allowed,
        }
    }
}

/// Lines of a `/proc/PID/cgroup`: those of cgroups below our root, and the others, as those who live in them name them. Where we
/// are in a cgroup namespace, as in a pod, all but our own are others: named by way of our root, and of folders that we do not see.
fn sides(groups: &str) -> (String, String) {
    let mut sides = (String::new(), String::new());
    for line in groups.lines() {
        let at = line.match_indices(':').nth(1).map_or(0, |(at, _)| at + 1);
        let (hierarchy, path) = line.split_at(at);
        match path.strip_prefix("/..") {
            None => sides.0 += &format!("{line}\n"),
            Some(path) => {
                let path = path.trim_start_matches("/..").trim_start_matches('/');
                sides.1 += &format!("{hierarchy}/{path}\n");
            }
        }
    }
    sides
}

/// Every folder that may hold a quota for a process, by the text of its `/proc/PID/cgroup`, and how to read it there.
pub(crate) fn folders(groups: &str) -> ProcResult<Vec<(PathBuf, Quota)>> {
    let mut found = Vec::new();
    for group in ProcessCGroups::from_buf_read(groups.as_bytes())? {
        let (roots, read): (_, Quota) = if group.controllers.is_empty() || group.controllers == [""]
        {
            (V2_ROOTS, quota_v2)
        } else if group.controllers.iter().any(|name| name == "cpu") {
            (V1_ROOTS, quota_v1)
        } else {
            continue;
        };
        for root in roots {
            let folders = up_to_root(Path::new(root), &group.pathname);
            found.extend(folders.map(|folder| (folder, read)));
        }
    }
    Ok(found)
}

/// The cgroup's folder and those above it. A quota anywhere on the way counts.
fn up_to_root<'a>(root: &'a Path, group: &str) -> impl Iterator<Item = PathBuf> + 'a {
    let mut next = Some(root.join(group.trim_start_matches('/')));
    std::iter::from_fn(move || {
        let here = next.take()?;
        if here != root {
            next = here.parent().map(Path::to_path_buf);
        }
        Some(here)
    })
}

/// `cpu.max`: quota and period in microseconds, or `max` for no quota.
fn quota_v2(folder: &Path) -> Option<f64> {
    let text = read(&folder.join("cpu.max"))?;
    let (quota, period) = text.trim().split_once(' ')?;
    ratio(quota, period)
}

fn quota_v1(folder: &Path) -> Option<f64> {
    let read = |name| read(&folder.join(name));
    // -1 stands for no quota.
    ratio(
        read("cpu.cfs_quota_us")?.trim(),
        read("cpu.cfs_period_us")?.trim(),
    )
}

/// The beginning of a file, which may be of the process's own making.
fn read(path: &Path) -> Option<String> {
    let file = open_regular(path, Access::Read).ok()?;
    let mut text = String::new();
    file.take(64).read_to_string(&mut text).ok()?;
    Some(text)
}

fn ratio(quota: &str, period: &str) -> Option<f64> {
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0).then(|| quota as f64 / period as f64)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_is_beyond_our_cgroup_namespace_is_told_apart() {
        let groups = "1:cpu:/../pod:a/..b\n2:pids:/\n0::/../..\n9:name=systemd:/own\n";
        let (below, beyond) = sides(groups);
        assert_eq!(below, "2:pids:/\n9:name=systemd:/own\n");
        assert_eq!(beyond, "1:cpu:/pod:a/..b\n0::/\n");
    }

    #[test]
    fn a_quota_is_read_and_no_quota_is_none() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(quota_v2(folder.path()), None);
        for (text, quota) in [("max 100000\n", None), ("150000 100000\n", Some(1.5))] {
            fs::write(folder.path().join("cpu.max"), text).unwrap();
            assert_eq!(quota_v2(folder.path()), quota);
        }
        for (text, quota) in [("-1\n", None), ("200000\n", Some(2.0))] {
            fs::write(folder.path().join("cpu.cfs_quota_us"), text).unwrap();
            fs::write(folder.path().join("cpu.cfs_period_us"), "100000\n").unwrap();
            assert_eq!(quota_v1(folder.path()), quota);
        }
    }

    #[test]
    fn the_way_up_ends_at_the_root() {
        let paths: Vec<PathBuf> = up_to_root(Path::new("/r"), "/a/b").collect();
        assert_eq!(paths, ["/r/a/b", "/r/a", "/r"].map(PathBuf::from));
        assert_eq!(up_to_root(Path::new("/r"), "/").count(), 1);
    }

    #[test]
    fn threads_stay_within_affinity_and_quota() {
        for (allowed, quota, threads) in [
            (8, None, 8),
            (8, Some(2.5), 2),
            (2, Some(4.0), 2),
            (8, Some(0.5), 1),
        ] {
            assert_eq!(Cpus { allowed, quota }.threads(), threads);
        }
    }

    #[test]
    fn ours_are_found() {
        assert!(Cpus::of(std::process::id()).unwrap().allowed >= 1);
    }
}
