//! The plan that takes no measurement: the engine's own rows, on as many threads and on those cores that suit the machine.

use cmt_common::control::Plan;

use super::host::Host;
use crate::cores::Cores;
use crate::topology::Topology;

/// Threads of a plan take two CPUs at least, the caller's among them.
const LEAST_CPUS: u32 = 2;

/// What can be said without measuring.
#[derive(Clone, Debug)]
pub struct Estimate {
    /// The plan.
    pub plan: Plan,
    /// Threads that it may use at most, the caller included.
    pub threads: u32,
    /// Why it stages nothing.
    pub declined: Option<String>,
}

/// Estimates.
pub fn estimate(host: &Host) -> Estimate {
    let topology = &host.topology;
    let cores = cores(topology);
    let threads = threads(topology, cores);
    let declined = match &host.unified {
        Some(name) => Some(format!(
            "{name} shares memory between host and GPU, where staging may only cost: it stages nothing until `cmt tune` has \
             measured (--search fast or full)"
        )),
        None if threads < LEAST_CPUS => Some(format!(
            "{threads} CPU may be used, and staging takes two: it stages nothing"
        )),
        None => None,
    };
    let plan = match declined {
        Some(_) => Plan::NONE,
        None => Plan {
            cores: cores.number(),
            ..cmt_copy::plan::estimate(threads)
        },
    };
    Estimate {
        plan,
        threads,
        declined,
    }
}

/// Helpers stay near the GPU on machines of several nodes, and off slow cores, where that leaves enough.
fn cores(topology: &Topology) -> Cores {
    let leaves = |choice: Cores| {
        let some = topology.allowed().any(|cpu| !choice.has(cpu, topology));
        let left = topology.allowed().filter(|cpu| choice.has(cpu, topology));
        some && left.count() >= LEAST_CPUS as usize
    };
    [Cores::GpuNode, Cores::Performance]
        .into_iter()
        .find(|&choice| leaves(choice))
        .unwrap_or_default()
}

/// Cores, and half of the processors that share one with another: a second thread on a core moves little more than one, but
/// it hides the first one's waits. Never more than affinity and quota grant.
fn threads(topology: &Topology, choice: Cores) -> u32 {
    let cpus: Vec<u32> = topology
        .allowed()
        .filter(|cpu| choice.has(cpu, topology))
        .map(|cpu| cpu.core)
        .collect();
    let mut cores = cpus.clone();
    cores.sort_unstable();
    cores.dedup();
    let siblings = cpus.len() - cores.len();
    let wanted = cores.len() + siblings.div_ceil(2);
    topology.threads().min(wanted.max(1) as u32)
}

#[cfg(test)]
mod tests;
