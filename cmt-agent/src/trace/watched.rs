//! What the tracer knows of one process.

use std::collections::HashMap;

use super::life::{self, Alive};
use super::memory::Range;
use super::snapshot::Process;
use crate::probes::{Links, Probes, Target};
use crate::target::maps::FileId;
use crate::workload::Workload;

/// A process that is looked at.
pub(super) struct Watched {
    pub comm: String,
    /// Start time in clock ticks: tells a process from a later one with the same id.
    pub start_time: u64,
    pub ended: bool,
    pub target: Target,
    pub libraries: HashMap<FileId, String>,
    pub workload: Workload,
    pub threads: u32,
    /// Probes that fire for this process only.
    pub links: Vec<Links>,
    pub looked_at: bool,
    /// Size of its address space and its name when its maps were last read: without a change in either nothing was mapped.
    pub size: u64,
    pub name: String,
    /// The program that it runs.
    pub program: Option<(u64, u64)>,
    /// Times that it was looked at.
    pub looks: u32,
    /// Its maps were searched for memory that was there before the probes.
    pub memory_known: bool,
    /// Ranges taken from its maps, by start.
    pub ranges: HashMap<u64, Range>,
}

impl Watched {
    /// Of a process that has just been found.
    pub fn new(pid: u32, number: u16, alive: &Alive) -> Self {
        Self {
            comm: life::comm(pid).unwrap_or_default(),
            start_time: alive.start_time,
            ended: false,
            target: Target { pid, number },
            libraries: HashMap::new(),
            workload: Workload::default(),
            threads: 0,
            links: Vec::new(),
            looked_at: false,
            size: 0,
            name: String::new(),
            program: life::program(alive.tid),
            looks: 0,
            memory_known: false,
            ranges: HashMap::new(),
        }
    }

    /// What was known of its memory is no longer true.
    pub fn forget_memory(&mut self, probes: &mut Probes) {
        let pid = self.target.pid;
        probes.maps.forget_process(pid);
        for (start, range) in self.ranges.drain() {
            probes.maps.release(pid, start, range.bytes);
        }
    }

    /// What a snapshot tells of it.
    pub fn process(&self, named: bool) -> Process {
        let mut libraries: Vec<String> = self.libraries.values().cloned().collect();
        libraries.sort();
        Process {
            comm: self.comm.clone(),
            started: self.start_time,
            ended: self.ended,
            named,
            libraries,
            workload: self.workload.clone(),
            threads: self.threads,
        }
    }
}
