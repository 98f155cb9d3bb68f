//! The machine that a bench ran on, as the kernel and the driver describe it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use nix::sys::utsname::uname;
use procfs::Current as _;
use serde::{Deserialize, Serialize};

use super::wire::Device;
use crate::cpus::Cpus;
use crate::link::Link;

/// What figures depend on. What is not known is none.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// The device's name.
    pub gpu: String,
    /// Its place on the bus.
    pub pci_bus_id: String,
    /// Version of NVIDIA's kernel module.
    pub driver: Option<String>,
    /// CUDA version that libcuda speaks.
    pub cuda: String,
    /// The link, as negotiated when it was under load.
    pub link: Option<Link>,
    /// Model name of the processor.
    pub cpu: Option<String>,
    /// Processors that are online.
    pub cpus: usize,
    /// Processors that this process may use.
    pub cpus_allowed: u32,
    /// Processors' worth of time that its cgroup grants.
    pub cpu_quota: Option<f64>,
    /// Physical cores behind them.
    pub cores: Option<usize>,
    /// Caches of the first processor, as in `L2 2048K`.
    pub caches: Vec<String>,
    /// NUMA nodes.
    pub numa_nodes: Option<usize>,
    /// All memory.
    pub memory_bytes: Option<u64>,
    /// Name and release of the kernel.
    pub kernel: Option<String>,
    /// Transparent huge pages: always, madvise or never.
    pub huge_pages: Option<String>,
}

impl Machine {
    /// This machine with `device`.
    pub fn describe(device: &Device) -> Self {
        let cpus = Cpus::of(std::process::id());
        let info = procfs::CpuInfo::current().ok();
        Self {
            gpu: device.name.clone(),
            pci_bus_id: device.pci_bus_id.clone(),
            driver: read("/sys/module/nvidia/version"),
            cuda: format!(
                "{}.{}",
                device.cuda_version / 1000,
                device.cuda_version % 1000 / 10
            ),
            link: None,
            cpu: info
                .as_ref()
                .and_then(|info| info.model_name(0).map(str::to_owned)),
            cpus: info.as_ref().map_or(0, procfs::CpuInfo::num_cores),
            cpus_allowed: cpus.as_ref().map_or(0, |cpus| cpus.allowed),
            cpu_quota: cpus.ok().and_then(|cpus| cpus.quota),
            cores: cores(),
            caches: caches(),
            numa_nodes: read("/sys/devices/system/node/online").map(|list| count(&list)),
            memory_bytes: procfs::Meminfo::current().ok().map(|info| info.mem_total),
            kernel: uname().ok().map(|name| {
                format!(
                    "{} {}",
                    name.sysname().to_string_lossy(),
                    name.release().to_string_lossy()
                )
            }),
            huge_pages: read("/sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|text| chosen(&text)),
        }
    }

    /// Reads the link anew: an idle one may have been slowed down.
    pub fn look_at_link(&mut self) {
        let folder = Path::new("/sys/bus/pci/devices").join(self.pci_bus_id.to_lowercase());
        let file = |name: &str| read(folder.join(name));
        self.link = file("current_link_speed")
            .zip(file("current_link_width"))
            .and_then(|(speed, width)| Link::parse(speed, &width));
    }

    /// Lines for people: what, and what it is.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut gpu = self.gpu.clone();
        if let Some(driver) = &self.driver {
            gpu += &format!(", driver {driver}");
        }
        gpu += &format!(", CUDA {}", self.cuda);
        let link = match &self.link {
            Some(link) => {
                let generation = link
                    .generation
                    .map(|number| format!("PCIe {number}, "))
                    .unwrap_or_default();
                format!("{generation}x{} ({})", link.width, link.speed)
            }
            None => "not known".to_owned(),
        };
        let mut cpu = self.cpu.clone().unwrap_or_else(|| "not known".to_owned());
        cpu += &format!("; {} CPUs", self.cpus);
        if let Some(cores) = self.cores {
            cpu += &format!(" on {cores} cores");
        }
        cpu += &format!(", {} allowed", self.cpus_allowed);
        if let Some(quota) = self.cpu_quota {
            cpu += &format!(", quota {quota:.1}");
        }
        let mut memory = Vec::new();
        if let Some(bytes) = self.memory_bytes {
            memory.push(format!("{:.0} GiB", bytes as f64 / (1u64 << 30) as f64));
        }
        if let Some(nodes) = self.numa_nodes {
            memory.push(format!(
                "{nodes} NUMA node{}",
                if nodes == 1 { "" } else { "s" }
            ));
        }
        if let Some(pages) = &self.huge_pages {
            memory.push(format!("transparent huge pages: {pages}"));
        }
        let mut lines = vec![("GPU", gpu), ("link", link), ("CPU", cpu)];
        if !self.caches.is_empty() {
            lines.push(("caches", self.caches.join(", ")));
        }
        lines.push(("memory", memory.join(", ")));
        if let Some(kernel) = &self.kernel {
            lines.push(("kernel", kernel.clone()));
        }
        lines
    }
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// The word in brackets.
fn chosen(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// How many numbers a list such as `0-3,8` names.
fn count(list: &str) -> usize {
    list.split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (usize, usize) =
                (first.trim().parse().ok()?, last.trim().parse().ok()?);
            Some(last.saturating_sub(first) + 1)
        })
        .sum()
}

/// Physical cores: sets of processors that share one.
fn cores() -> Option<usize> {
    let mut siblings = std::collections::BTreeSet::new();
    for entry in fs::read_dir("/sys/devices/system/cpu").ok()?.flatten() {
        siblings.extend(read(entry.path().join("topology/core_cpus_list")));
    }
    (!siblings.is_empty()).then_some(siblings.len())
}

fn caches() -> Vec<String> {
    let Ok(entries) = fs::read_dir("/sys/devices/system/cpu/cpu0/cache") else {
        return Vec::new();
    };
    let mut caches = BTreeMap::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        let file = |name: &str| read(path.join(name));
        if let (Some(level), Some(kind), Some(size)) = (file("level"), file("type"), file("size")) {
            let letter = match kind.as_str() {
                "Data" => "d",
                "Instruction" => "i",
                _ => "",
            };
            caches.insert((level.clone(), letter), format!("L{level}{letter} {size}"));
        }
    }
    caches.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_counted_and_choices_found() {
        assert_eq!((count("0"), count("0-3,8")), (1, 5));
        assert_eq!(chosen("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(chosen("always"), None);
    }
}
