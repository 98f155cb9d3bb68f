//! Profiles that were measured on machines of the field, which `cmt` brings along.

use std::path::Path;

use cmt_common::control::Plan;

use super::{File, Machine};

/// Names and texts: `("gpu-cpus", include_str!("../../profiles/gpu-cpus.json"))`. Only what was really measured comes in, as
/// `cmt tune --search full --save` has written it.
const KNOWN: &[(&str, &str)] = &[(
    "nvidia-h200-16",
    include_str!("../../profiles/nvidia-h200-16.json"),
)];

/// Links whose rates differ by less are alike.
const SAME_RATE: f64 = 0.1;

/// All of them.
pub fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    KNOWN.iter().copied()
}

/// The one of the machine most like `here`: of the same link, and of the same GPU or the same processor. None if no
/// machine is like it.
pub fn nearest(here: &Machine) -> Option<(String, File, Plan)> {
    nearest_of(KNOWN, here)
}

fn nearest_of(known: &[(&str, &str)], here: &Machine) -> Option<(String, File, Plan)> {
    known
        .iter()
        .filter_map(|(name, text)| {
            let (file, plan) = super::parse_file(text, Path::new(name)).ok()?;
            let distance = distance(file.machine.as_ref()?, here)?;
            Some((distance, ((*name).to_owned(), file, plan)))
        })
        .min_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, found)| found)
}

/// How far apart two machines are; none if one says nothing of the other.
fn distance(of: &Machine, here: &Machine) -> Option<f64> {
    let rate = |machine: &Machine| Some(machine.link.as_ref()?.pinned_gb_per_s());
    let (known, own) = (rate(of)?, rate(here)?);
    let same_link = (known / own - 1.0).abs() < SAME_RATE;
    let same_gpu = of.gpu.is_some() && of.gpu == here.gpu;
    let same_cpu = of.cpu.is_some() && of.cpu == here.cpu;
    if !same_link || !(same_gpu || same_cpu) {
        return None;
    }
    let sizes = (f64::from(of.cpus.max(1)) / f64::from(here.cpus.max(1))).log2();
    let differs = |same: bool, by: f64| if same { 0.0 } else { by };
    Some(differs(same_gpu, 4.0) + differs(same_cpu, 2.0) + sizes.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Link;

    fn machine(gpu: &str, link: &str, cpu: &str, cpus: u32) -> Machine {
        Machine {
            gpu: Some(gpu.to_owned()),
            link: Link::parse(link.to_owned(), "16"),
            cpu: Some(cpu.to_owned()),
            cpus,
            ..Machine::default()
        }
    }

    #[test]
    fn every_profile_that_is_brought_along_is_sound_and_was_measured() {
        for (name, text) in all() {
            let (file, plan) = super::super::parse_file(text, Path::new(name))
                .unwrap_or_else(|why| panic!("{why}"));
            let measured = file.measured.expect("measured");
            assert!(
                !measured.interrupted && !measured.classes.is_empty(),
                "{name}"
            );
            assert!(
                file.machine.is_some_and(|machine| machine.gpu.is_some()),
                "{name}"
            );
            assert_ne!(plan, Plan::NONE, "{name}");
        }
    }

    #[test]
    fn the_nearest_has_the_same_link_and_gpu_or_processor_and_most_alike_size() {
        const FAST: &str = "32.0 GT/s PCIe";
        const SLOW: &str = "16.0 GT/s PCIe";
        let known = [
            ("h200-16", machine("H200", FAST, "Xeon", 16)),
            ("h200-64", machine("H200", FAST, "Xeon", 64)),
            ("a100", machine("A100", SLOW, "EPYC", 64)),
        ]
        .map(|(name, machine)| {
            let file = File {
                machine: Some(machine),
                ..File::of(&cmt_copy::plan::estimate(8))
            };
            (name, file.to_text())
        });
        let known: Vec<(&str, &str)> = known.iter().map(|(name, text)| (*name, &**text)).collect();
        let nearest = |here: Machine| nearest_of(&known, &here).map(|(name, ..)| name);
        for (here, wanted) in [
            (machine("H200", FAST, "Xeon", 12), Some("h200-16")),
            (machine("H200", FAST, "EPYC", 96), Some("h200-64")),
            (machine("H100", FAST, "Xeon", 16), Some("h200-16")),
            (machine("H100", FAST, "EPYC", 16), None),
            (machine("H200", SLOW, "Xeon", 16), None),
            (machine("A100", SLOW, "Xeon", 2), Some("a100")),
            (Machine::default(), None),
        ] {
            assert_eq!(nearest(here.clone()).as_deref(), wanted, "{here:?}");
        }
        assert!(nearest_of(&[], &machine("H200", FAST, "Xeon", 16)).is_none());
    }
}
