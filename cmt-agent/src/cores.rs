//! Which of its CPUs the helpers of a process run on: a choice that means the same on every machine, and the CPUs that it
//! means on this one.

use std::sync::OnceLock;

use cmt_common::control::{CPU_WORDS, cores};
use serde::{Deserialize, Serialize};

use crate::topology::{Cpu, Topology};

/// The choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cores {
    /// All that the process may use.
    #[default]
    All,
    /// Those of the fastest kind.
    Performance,
    /// Those of the NUMA node that the GPU is at.
    GpuNode,
    /// One of those that share a core.
    OnePerCore,
}

impl Cores {
    /// All choices.
    pub const EVERY: [Self; 4] = [
        Self::All,
        Self::Performance,
        Self::GpuNode,
        Self::OnePerCore,
    ];

    /// As a plan has it.
    pub fn number(self) -> u32 {
        match self {
            Self::All => cores::ALL,
            Self::Performance => cores::PERFORMANCE,
            Self::GpuNode => cores::GPU_NODE,
            Self::OnePerCore => cores::ONE_PER_CORE,
        }
    }

    /// By the number in a plan; what is unknown leaves all.
    pub fn of(number: u32) -> Self {
        let known = Self::EVERY.into_iter();
        known
            .clone()
            .find(|choice| choice.number() == number)
            .unwrap_or_default()
    }

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Performance => "performance",
            Self::GpuNode => "GPU's node",
            Self::OnePerCore => "one per core",
        }
    }

    /// Whether it names a processor of a machine.
    pub fn has(self, cpu: &Cpu, of: &Topology) -> bool {
        match self {
            Self::All => true,
            Self::Performance => cpu.is_fast,
            Self::GpuNode => of.gpu_node.is_none() || cpu.node == of.gpu_node,
            Self::OnePerCore => cpu.core == cpu.id,
        }
    }

    /// The choices that differ for this process on a machine, all first. One that leaves nothing is none.
    pub fn different(topology: &Topology) -> Vec<Self> {
        let of = |choice: Self| -> Vec<u32> {
            let cpus = topology.allowed().filter(|cpu| choice.has(cpu, topology));
            cpus.map(|cpu| cpu.id).collect()
        };
        let mut found: Vec<(Self, Vec<u32>)> = Vec::new();
        for choice in Self::EVERY {
            let cpus = of(choice);
            if !cpus.is_empty() && found.iter().all(|(_, other)| *other != cpus) {
                found.push((choice, cpus));
            }
        }
        found.into_iter().map(|(choice, _)| choice).collect()
    }
}

/// The CPUs that a plan's number means on this machine, as it was first read; all zero for any.
pub fn mask_of(number: u32) -> [u64; CPU_WORDS] {
    match Cores::of(number) {
        Cores::All => [0; CPU_WORDS],
        choice => {
            // A search sets plans all the time, and reading hundreds of files takes longer than a copy.
            static HERE: OnceLock<Topology> = OnceLock::new();
            mask(choice, HERE.get_or_init(Topology::here))
        }
    }
}

fn mask(choice: Cores, topology: &Topology) -> [u64; CPU_WORDS] {
    let mut mask = [0; CPU_WORDS];
    for cpu in topology.cpus.iter().filter(|cpu| choice.has(cpu, topology)) {
        if let Some(word) = mask.get_mut(cpu.id as usize / 64) {
            *word |= 1 << (cpu.id % 64);
        }
    }
    mask
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes with two cores of two threads each, the GPU at the second, the last core slow.
    fn machine() -> Topology {
        let cpus = (0..8).map(|id| Cpu {
            id,
            core: id % 4,
            is_fast: id % 4 != 3,
            node: Some(id % 4 / 2),
            is_allowed: id != 5,
        });
        Topology {
            cpus: cpus.collect(),
            quota: None,
            gpu_node: Some(1),
        }
    }

    #[test]
    fn each_choice_names_its_cpus() {
        for (choice, cpus) in [
            (Cores::All, 0xFF),
            (Cores::Performance, 0x77),
            (Cores::GpuNode, 0xCC),
            (Cores::OnePerCore, 0x0F),
        ] {
            assert_eq!(mask(choice, &machine())[0], cpus, "{choice:?}");
            assert_eq!(Cores::of(choice.number()), choice);
        }
        assert_eq!(mask_of(cores::ALL), [0; CPU_WORDS]);
        assert_eq!(Cores::of(99), Cores::All);
    }

    #[test]
    fn choices_that_make_no_difference_are_not_offered() {
        assert_eq!(Cores::different(&machine()), Cores::EVERY);
        let mut plain = machine();
        for cpu in &mut plain.cpus {
            (cpu.core, cpu.is_fast, cpu.node) = (cpu.id, true, Some(0));
        }
        plain.gpu_node = Some(0);
        assert_eq!(Cores::different(&plain), [Cores::All]);
        // The GPU's node is not ours to use.
        plain.gpu_node = Some(7);
        assert_eq!(Cores::different(&plain), [Cores::All]);
    }
}
