//! What a plan for this machine depends on, by what the kernel says: nothing here asks CUDA.

use std::fs;
use std::path::Path;

use crate::link::{self, Link};
use crate::profile::Machine;
use crate::target::text::printable;
use crate::topology::{Topology, word};

/// Names of GPUs that share their memory with the processor, or are tied to it so closely that they read it at its own
/// speed.
const UNIFIED: [&str; 9] = [
    "GH200", "GB200", "GB300", "GB10", "Grace", "Orin", "Xavier", "Thor", "Jetson",
];

/// What the name of a GPU begins with that only the bus tells of.
pub const UNNAMED: &str = "PCI 10de:";

/// This machine.
#[derive(Clone, Debug)]
pub struct Host {
    /// What profiles are compared by.
    pub machine: Machine,
    /// Its processors.
    pub topology: Topology,
    /// Why copies here are not as elsewhere: host and device memory are one, or nearly so.
    pub unified: Option<String>,
}

impl Host {
    /// The machine below `root`.
    pub fn under(root: &Path) -> Self {
        let topology = Topology::under(root);
        let file = |name: &str| word(&root.join(name));
        let mut names = names(root);
        let named = !names.is_empty();
        if !named {
            names = link::gpus(root).iter().filter_map(|gpu| id(gpu)).collect();
        }
        names.sort();
        names.dedup();
        let unified = names
            .iter()
            .filter(|_| named)
            .chain(&file("proc/device-tree/model"))
            .chain(&file("sys/class/dmi/id/product_name"))
            .find(|name| UNIFIED.iter().any(|unified| is_word_of(unified, name)))
            .map(|name| printable(name.trim_end_matches('\0')));
        let machine = Machine {
            gpu: (!names.is_empty()).then(|| names.join(", ")),
            driver: file("sys/module/nvidia/version").map(|version| printable(&version)),
            link: match root == Path::new("/") {
                true => Link::best(),
                false => Link::best_under(root),
            },
            cpu: processor(root),
            cpus: topology.allowed().count() as u32,
            quota: topology.quota,
            kernel: file("proc/sys/kernel/osrelease").map(|release| {
                let parts: Vec<&str> = release.split('.').take(2).collect();
                printable(&parts.join("."))
            }),
        };
        Self {
            machine,
            topology,
            unified,
        }
    }
}

/// Whether `part` stands in `name`, and no longer number or word does.
fn is_word_of(part: &str, name: &str) -> bool {
    name.match_indices(part).any(|(at, _)| {
        let before = name[..at].chars().next_back();
        let after = name[at + part.len()..].chars().next();
        let ends = |c: Option<char>| !c.is_some_and(char::is_alphanumeric);
        ends(before) && ends(after)
    })
}

/// What the driver calls its GPUs.
fn names(root: &Path) -> Vec<String> {
    let folders = fs::read_dir(root.join("proc/driver/nvidia/gpus"));
    let texts = folders
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|gpu| fs::read_to_string(gpu.path().join("information")).ok());
    texts
        .filter_map(|text| {
            let name = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
            Some(printable(name.trim()))
        })
        .collect()
}

/// What the bus calls one.
fn id(gpu: &Path) -> Option<String> {
    let device = word(&gpu.join("device"))?;
    Some(printable(&format!(
        "{UNNAMED}{}",
        device.trim_start_matches("0x")
    )))
}

fn processor(root: &Path) -> Option<String> {
    let text = fs::read_to_string(root.join("proc/cpuinfo")).ok()?;
    let field = |name: &str| {
        text.lines().find_map(|line| {
            let (field, value) = line.split_once(':')?;
            (field.trim() == name).then(|| printable(value.trim()))
        })
    };
    field("model name").or_else(|| {
        // ARM says who has made it, and which one.
        let (by, part) = (field("CPU implementer")?, field("CPU part")?);
        Some(format!("ARM implementer {by}, part {part}"))
    })
}
