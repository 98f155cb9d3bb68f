//! The processors of a machine: which kinds there are, which share a core, and which are near the GPU.
//!
//! Everything is read below a root folder, so that made-up machines can be tried.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::cpus::Cpus;
use crate::link;

/// Names a folder that takes the place of `/`, for tests: `sys` and `proc` below it are read.
const PRETEND: &str = "CMT_PRETEND_MACHINE";
/// A kind of core that is slower than so much of the fastest one is none of the fastest. Cores of one kind differ by less,
/// where the best of them clock a little higher.
const FAST_SHARE: f64 = 0.8;
/// The same where the kernel says how much work cores do (`cpu_capacity`): big cores next to one that is even bigger are at
/// 0.7 and more, small ones at 0.4 and less.
const FAST_CAPACITY: f64 = 0.6;

/// The folder that is read in place of `/`.
pub fn root() -> PathBuf {
    std::env::var_os(PRETEND).map_or_else(|| PathBuf::from("/"), PathBuf::from)
}

/// One processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Its number.
    pub id: u32,
    /// Lowest number of the processors that share its core.
    pub core: u32,
    /// Whether it is of the fastest kind.
    pub is_fast: bool,
    /// Its NUMA node.
    pub node: Option<u32>,
    /// Whether this process may use it.
    pub is_allowed: bool,
}

/// All processors that are online, and what this process may use of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    /// By number.
    pub cpus: Vec<Cpu>,
    /// Processors' worth of time that the cgroup grants.
    pub quota: Option<f64>,
    /// The NUMA node that the GPU is at; none if there are several such nodes, or the kernel does not know.
    pub gpu_node: Option<u32>,
}

impl Topology {
    /// This machine.
    pub fn here() -> Self {
        Self::under(&root())
    }

    /// The machine below `root`.
    pub fn under(root: &Path) -> Self {
        let folder = root.join("sys/devices/system/cpu");
        let allowed = Cpus::allowed_under(root);
        let mut online = list(&folder.join("online"));
        if online.is_empty() {
            online = allowed.clone();
        }
        let nodes = nodes(root);
        let fast = fast(root, &online);
        let cpus = online
            .iter()
            .map(|&id| {
                let topology = folder.join(format!("cpu{id}/topology"));
                let siblings = ["thread_siblings_list", "core_cpus_list"]
                    .iter()
                    .map(|name| list(&topology.join(name)))
                    .find(|siblings| siblings.contains(&id));
                Cpu {
                    id,
                    core: siblings.map_or(id, |siblings| siblings[0]),
                    is_fast: fast.contains(&id),
                    node: nodes
                        .iter()
                        .find(|(_, cpus)| cpus.contains(&id))
                        .map(|&(node, _)| node),
                    is_allowed: allowed.is_empty() || allowed.contains(&id),
                }
            })
            .collect();
        Self {
            cpus,
            quota: Cpus::quota_under(root),
            gpu_node: gpu_node(root),
        }
    }

    /// Those that this process may use.
    pub fn allowed(&self) -> impl Iterator<Item = &Cpu> {
        self.cpus.iter().filter(|cpu| cpu.is_allowed)
    }

    /// Threads of this process that may run at once without being throttled: at least 1.
    pub fn threads(&self) -> u32 {
        Cpus {
            allowed: (self.allowed().count() as u32).max(1),
            quota: self.quota,
        }
        .threads()
    }
}

/// The processors of the fastest kind.
fn fast(root: &Path, online: &[u32]) -> BTreeSet<u32> {
    // Intel's hybrid processors have a performance monitor for each kind.
    let of_monitor = list(&root.join("sys/devices/cpu_core/cpus"));
    if !of_monitor.is_empty() && !list(&root.join("sys/devices/cpu_atom/cpus")).is_empty() {
        return of_monitor.into_iter().collect();
    }
    for (name, share) in [
        ("cpu_capacity", FAST_CAPACITY),
        ("cpufreq/cpuinfo_max_freq", FAST_SHARE),
    ] {
        let speeds: Vec<(u32, f64)> = online
            .iter()
            .filter_map(|&id| {
                let file = root.join(format!("sys/devices/system/cpu/cpu{id}/{name}"));
                Some((id, word(&file)?.parse().ok()?))
            })
            .collect();
        // Half an answer is none.
        if speeds.len() == online.len() {
            let most = speeds.iter().map(|&(_, speed)| speed).fold(0.0, f64::max);
            let fast = speeds.iter().filter(|&&(_, speed)| speed >= share * most);
            return fast.map(|&(id, _)| id).collect();
        }
    }
    online.iter().copied().collect()
}

/// NUMA nodes with their processors.
fn nodes(root: &Path) -> Vec<(u32, Vec<u32>)> {
    let folder = root.join("sys/devices/system/node");
    list(&folder.join("online"))
        .into_iter()
        .map(|node| (node, list(&folder.join(format!("node{node}/cpulist")))))
        .collect()
}

fn gpu_node(root: &Path) -> Option<u32> {
    let found: BTreeSet<Option<u32>> = link::gpus(root)
        .iter()
        // -1 where it is not known.
        .map(|gpu| word(&gpu.join("numa_node")).and_then(|node| node.parse().ok()))
        .collect();
    match found.len() {
        1 => found.into_iter().next().flatten(),
        _ => None,
    }
}

/// What a file of one line says.
pub(crate) fn word(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// The numbers of a list such as `0-3,8` in a file, sorted; empty if there is none.
fn list(path: &Path) -> Vec<u32> {
    word(path).map_or_else(Vec::new, |text| numbers(&text))
}

/// The numbers of a list such as `0-3,8`, sorted.
pub(crate) fn numbers(list: &str) -> Vec<u32> {
    /// No kernel has more processors.
    const MOST: u32 = 1 << 16;
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let first: u32 = first.trim().parse().ok()?;
        let last: u32 = last.trim().parse().ok()?;
        Some(first..=last.min(MOST))
    });
    let numbers: BTreeSet<u32> = ranges.flatten().collect();
    numbers.into_iter().collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A machine below a folder: paths and what stands there.
    pub(crate) fn made_up(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("below the root")).expect("a folder");
            fs::write(path, format!("{text}\n")).expect("a file");
        }
        root
    }

    #[test]
    fn lists_are_read_and_nonsense_names_nothing() {
        assert_eq!(numbers("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(numbers("3,1"), [1, 3]);
        for nonsense in ["", "x", "-", "3-1", "99999999999"] {
            assert!(numbers(nonsense).is_empty(), "{nonsense}");
        }
        assert!(numbers("0-4294967295").len() <= 1 << 17);
    }

    #[test]
    fn this_machine_is_read() {
        let here = Topology::under(Path::new("/"));
        let threads = Cpus::of(std::process::id()).expect("ours").threads();
        assert_eq!(here.threads(), threads);
        assert!(here.cpus.iter().any(|cpu| cpu.is_fast && cpu.is_allowed));
    }

    #[test]
    fn kinds_of_cores_are_told_apart_by_monitor_capacity_and_clock() {
        let fast = |files: &[(&str, &str)]| {
            let root = made_up(&[&[("sys/devices/system/cpu/online", "0-3")], files].concat());
            let topology = Topology::under(root.path());
            let fast = topology.cpus.iter().filter(|cpu| cpu.is_fast);
            fast.map(|cpu| cpu.id).collect::<Vec<_>>()
        };
        let each = |name: &'static str, values: [&'static str; 4]| {
            let path = |id: usize| format!("sys/devices/system/cpu/cpu{id}/{name}");
            let files: Vec<(String, &str)> = (0..4).map(|id| (path(id), values[id])).collect();
            let files: Vec<(&str, &str)> =
                files.iter().map(|(path, text)| (&**path, *text)).collect();
            fast(&files)
        };
        assert_eq!(fast(&[]), [0, 1, 2, 3]);
        assert_eq!(
            fast(&[
                ("sys/devices/cpu_core/cpus", "0-1"),
                ("sys/devices/cpu_atom/cpus", "2-3")
            ]),
            [0, 1]
        );
        assert_eq!(each("cpu_capacity", ["1024", "760", "380", "380"]), [0, 1]);
        let clock = "cpufreq/cpuinfo_max_freq";
        assert_eq!(
            each(clock, ["5000000", "5200000", "3900000", "3900000"]),
            [0, 1]
        );
        assert_eq!(
            each(clock, ["5000000", "5200000", "?", "3900000"]),
            [0, 1, 2, 3]
        );
    }
}
