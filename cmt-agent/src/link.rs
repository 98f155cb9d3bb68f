//! The link between host and GPU, as sysfs tells of it.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::topology;

/// Where the kernel lists what is on the bus, below the root.
const DEVICES: &str = "sys/bus/pci/devices";
const NVIDIA: &str = "0x10de";
/// Base class of display controllers, 3D accelerators among them.
const DISPLAY: &str = "0x03";
/// Bytes per second of a pinned copy by transfers per second, lane and bit: 55.3 GB/s at 32 GT/s and 16 lanes (H200, driver
/// 580, `docs/benchmarks.md`).
const PINNED_SHARE: f64 = 55.3e9 / (32e9 * 16.0 / 8.0);
/// Takes the place of what sysfs says, for tests: `32.0 GT/s PCIe x16`.
const PRETEND: &str = "CMT_PRETEND_LINK";

/// A PCIe link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// As in `32.0 GT/s PCIe`.
    pub speed: String,
    /// Generation by that speed.
    pub generation: Option<u32>,
    /// Lanes.
    pub width: u32,
}

impl Link {
    /// By the words of sysfs: `32.0 GT/s PCIe` and `16`.
    pub fn parse(speed: String, width: &str) -> Option<Self> {
        // PCI Express Base Specification 6.0: transfers per second and lane by generation.
        let generation = match speed.split_whitespace().next()? {
            "2.5" => Some(1),
            "5.0" | "5" => Some(2),
            "8.0" | "8" => Some(3),
            "16.0" | "16" => Some(4),
            "32.0" | "32" => Some(5),
            "64.0" | "64" => Some(6),
            _ => None,
        };
        let width = width.parse().ok().filter(|&width| width > 0)?;
        Some(Self {
            speed,
            generation,
            width,
        })
    }

    /// The widest link that an NVIDIA GPU of this machine can have. One that is idle may be slowed down for now.
    pub fn best() -> Option<Self> {
        if let Ok(pretended) = std::env::var(PRETEND) {
            let (speed, width) = pretended.rsplit_once(" x")?;
            return Self::parse(speed.to_owned(), width);
        }
        Self::best_under(&topology::root())
    }

    /// The same below `root`.
    pub fn best_under(root: &Path) -> Option<Self> {
        gpus(root)
            .iter()
            .filter_map(|device| Self::of(device))
            .max_by(|one, other| one.pinned_gb_per_s().total_cmp(&other.pinned_gb_per_s()))
    }

    fn of(device: &Path) -> Option<Self> {
        let file = |name: &str| {
            let text = fs::read_to_string(device.join(name)).ok()?;
            Some(text.trim().to_owned())
        };
        let able = Self::ability(device)?;
        // A fast card in a slow slot is as fast as the slot. A virtual machine's slots say nothing true, but less than what
        // the link runs at now it is not.
        let slot = fs::canonicalize(device)
            .ok()
            .and_then(|device| Self::ability(device.parent()?));
        let now = Self::parse(file("current_link_speed")?, &file("current_link_width")?);
        let slower = match slot {
            Some(slot) if slot.pinned_gb_per_s() < able.pinned_gb_per_s() => slot,
            _ => able,
        };
        Some(match now {
            Some(now) if now.pinned_gb_per_s() > slower.pinned_gb_per_s() => now,
            _ => slower,
        })
    }

    /// What a device or a slot can do at most.
    fn ability(device: &Path) -> Option<Self> {
        let file = |name: &str| fs::read_to_string(device.join(name)).ok();
        Self::parse(
            file("max_link_speed")?.trim().to_owned(),
            file("max_link_width")?.trim(),
        )
    }

    /// What a large pinned copy reaches, in GB/s, scaled from a measured link.
    pub fn pinned_gb_per_s(&self) -> f64 {
        let transfers: f64 = self
            .speed
            .split_whitespace()
            .next()
            .and_then(|word| word.parse().ok())
            .unwrap_or(0.0);
        transfers * f64::from(self.width) / 8.0 * PINNED_SHARE
    }
}

/// The folders of all NVIDIA GPUs on the bus, below `root`.
pub fn gpus(root: &Path) -> Vec<PathBuf> {
    let is_gpu = |device: &Path| {
        let says = |name: &str, start: &str| {
            topology::word(&device.join(name)).is_some_and(|text| text.starts_with(start))
        };
        says("vendor", NVIDIA) && says("class", DISPLAY)
    };
    let devices = fs::read_dir(root.join(DEVICES));
    let mut gpus: Vec<PathBuf> = devices
        .into_iter()
        .flatten()
        .flatten()
        .map(|device| device.path())
        .filter(|device| is_gpu(device))
        .collect();
    gpus.sort();
    gpus
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_slot_makes_a_fast_card_slow() {
        let folder = tempfile::tempdir().expect("a folder");
        let make = |at: &Path, max: (&str, &str), current: (&str, &str)| {
            fs::create_dir_all(at).expect("a folder");
            for (name, text) in [
                ("vendor", NVIDIA),
                ("class", "0x030200"),
                ("max_link_speed", max.0),
                ("max_link_width", max.1),
                ("current_link_speed", current.0),
                ("current_link_width", current.1),
            ] {
                fs::write(at.join(name), format!("{text}\n")).expect("a file");
            }
        };
        const SLOW: (&str, &str) = ("16.0 GT/s PCIe", "8");
        const FAST: (&str, &str) = ("32.0 GT/s PCIe", "16");
        const IDLE: (&str, &str) = ("2.5 GT/s PCIe", "8");
        for (slot, card, now, speed) in [
            (SLOW, FAST, IDLE, SLOW),
            (FAST, FAST, IDLE, FAST),
            // A virtual slot.
            (("2.5 GT/s PCIe", "1"), FAST, FAST, FAST),
            (("Unknown", "0"), FAST, IDLE, FAST),
        ] {
            let slot_at = folder.path().join("slot");
            let card_at = slot_at.join("card");
            make(&card_at, card, now);
            make(&slot_at, slot, now);
            let link = Link::of(&card_at).expect("a link");
            assert_eq!((&*link.speed, &*link.width.to_string()), speed, "{slot:?}");
        }
    }

    #[test]
    fn a_link_is_read_and_nonsense_is_none() {
        let link = Link::parse("32.0 GT/s PCIe".to_owned(), "16").expect("a link");
        assert_eq!((link.generation, link.width), (Some(5), 16));
        assert!((link.pinned_gb_per_s() - 55.3).abs() < 0.01);
        assert_eq!(Link::parse("Unknown".to_owned(), "0"), None);
    }
}
