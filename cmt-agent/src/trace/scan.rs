//! Looks again and again at what the targets map: places probes on new libraries, tells the BPF side of memory that was
//! pinned before the trace, and notices processes that end.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::mem;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use cmt_common::event::{CopyKey, MAX_TARGETS, phase};

use super::life::{self, Life, read_maps};
use super::memory;
use super::shared::Shared;
use super::snapshot::{Drained, Process, Snapshot};
use super::watched::Watched;
use super::{Targets, TraceError};
use crate::cpus::Cpus;
use crate::histogram::Stat;
use crate::probes::rights::Deed;
use crate::probes::{
    self, Library, Links, Mapped, ProbeError, Probes, Whose, in_first_pid_namespace, rights,
};
use crate::target::maps::{FileId, Mapping};
use crate::workload::Workload;

/// In a trace of all processes, a known one is looked at again once in so many scans.
const KNOWN_EVERY: u32 = 4;
/// Maps are read once in so many looks though the address space has kept its size.
const LOOK_ANYWAY: u32 = 32;
/// In a trace of all processes, what ended ones counted leaves the kernel once in so many scans.
const HARVEST_EVERY: u32 = 8;

/// Libraries of one process that get probes. Each takes descriptors of ours, and no program has that many libcudart.
const MOST_LIBRARIES: usize = 32;
/// Files that are remembered, so that none is read again, and warnings that are kept.
const MOST_FILES: usize = 1 << 16;
const MOST_WARNINGS: usize = 100;
/// Classes of copies of ended processes that are kept by process, 2.5 KB each.
const MOST_FINISHED: usize = 4096;
/// Processes of a trace of all that have ended and are remembered by more than their counts.
const MOST_GONE: usize = 4096;

/// What the tracer knows of its targets.
pub(super) struct Scanner {
    /// `None` traces all processes.
    named: Option<Vec<u32>>,
    /// A named process goes on without its first thread.
    lost_first: bool,
    processes: BTreeMap<u32, Watched>,
    /// Mapped files that were read already.
    files: HashMap<(FileId, PathBuf), Option<Arc<Library>>>,
    /// Probes that fire for all processes, by file.
    shared: Shared,
    /// Counts of processes that have ended.
    finished: BTreeMap<CopyKey, Stat>,
    /// Somebody takes them away now and then.
    drained: bool,
    /// Those processes.
    gone: BTreeMap<u32, Process>,
    warnings: Vec<String>,
    /// Some probed functions begin with an instruction that the kernel has to single-step.
    single_stepped: bool,
    /// Probes on this process, which have done their work.
    own: Vec<Links>,
    /// Why the programs cannot read page tables, where they cannot.
    blind: Option<String>,
    started: Instant,
    ended_at: Option<Instant>,
    scans: u32,
}

impl Scanner {
    /// Checks that the targets can be traced; places nothing yet.
    pub fn new(targets: &Targets) -> Result<Self, TraceError> {
        let named = match targets {
            Targets::Pids(pids) => Some(pids.clone()),
            Targets::All => None,
        };
        let mut processes = BTreeMap::new();
        let mut lost_first = false;
        let foreign_ids = !in_first_pid_namespace();
        match &named {
            Some(pids) => {
                if foreign_ids && pids.len() >= MAX_TARGETS {
                    return Err(TraceError::TooMany {
                        most: MAX_TARGETS - 1,
                    });
                }
                for (index, pid) in pids.iter().enumerate() {
                    let number = if foreign_ids { index as u16 + 1 } else { 0 };
                    let alive = life::named(*pid)?;
                    lost_first |= alive.tid != *pid;
                    processes.insert(*pid, Watched::new(*pid, number, &alive));
                }
            }
            None if foreign_ids => return Err(TraceError::PidNamespace),
            None if !rights::may(Deed::InspectAll) => {
                let (what, reason) = ("a look at all processes", rights::refusal(Deed::InspectAll));
                return Err(ProbeError::Denied { what, reason }.into());
            }
            None => {}
        }
        Ok(Self {
            named,
            lost_first,
            processes,
            files: HashMap::new(),
            shared: Shared::default(),
            finished: BTreeMap::new(),
            drained: false,
            gone: BTreeMap::new(),
            warnings: Vec::new(),
            single_stepped: false,
            own: Vec::new(),
            blind: None,
            started: Instant::now(),
            ended_at: None,
            scans: 0,
        })
    }

    /// Whether a named process goes on without its first thread.
    pub fn has_lost_a_first_thread(&self) -> bool {
        self.lost_first
    }

    /// The first scan; the trace counts from its end on. `own` are probes on this process, taken away with the others;
    /// `blind` says why the programs cannot read page tables.
    pub fn begin(
        &mut self,
        probes: &mut Probes,
        own: Vec<Links>,
        blind: Option<String>,
    ) -> Result<(), TraceError> {
        self.own = own;
        if let Some(why) = &blind {
            self.warn(format!(
                "memory that was pinned by cudaHostRegister before the trace cannot be told from pageable memory here, \
                 so copies of processes that ran before it show as unknown ({why})"
            ));
        }
        self.blind = blind;
        for watched in self.processes.values() {
            if watched.target.number != 0 {
                probes
                    .maps
                    .name_target(watched.target.number, watched.target.pid)?;
            }
        }
        self.look_at_all(probes)?;
        probes.maps.enter_phase(phase::COUNTING)?;
        self.started = Instant::now();
        Ok(())
    }

    /// A later scan: what cannot be done becomes a warning.
    pub fn scan(&mut self, probes: &mut Probes) {
        self.scans += 1;
        if let Err(error) = self.look_at_all(probes) {
            self.warn(error.to_string());
        }
        if self.named.is_none() && self.scans.is_multiple_of(HARVEST_EVERY) {
            if !self.drained {
                self.harvest(probes);
            }
            self.sweep(probes);
        }
    }

    /// True once every named process has ended.
    pub fn ended(&self) -> bool {
        self.named.is_some() && self.processes.values().all(|watched| watched.ended)
    }

    /// Stops counting; returns all probes, to be taken away.
    pub fn end(&mut self, probes: &mut Probes) -> Vec<Links> {
        self.ended_at.get_or_insert_with(Instant::now);
        if let Err(error) = probes.maps.enter_phase(phase::ENDING) {
            self.warn(error.to_string());
        }
        let shared = self.shared.take();
        let own = self
            .processes
            .values_mut()
            .flat_map(|watched| mem::take(&mut watched.links));
        let measuring = mem::take(&mut self.own);
        shared.chain(own).chain(measuring).collect()
    }

    /// What the kernel has counted, with what ended processes counted.
    pub fn snapshot(&self, probes: &Probes) -> Result<Snapshot, TraceError> {
        let mut rows = self.finished.clone();
        for (key, stat) in probes.maps.copies()? {
            rows.entry(key).or_default().merge(&Stat::from(&stat));
        }
        // A class appears in the map an instant before its first call is counted.
        rows.retain(|_, stat| stat.calls > 0);
        let mut processes = self.known();
        self.name(&mut processes, rows.keys(), probes);
        let at = self.ended_at.unwrap_or_else(Instant::now);
        Ok(Snapshot {
            at,
            duration: at.duration_since(self.started),
            rows,
            lost: probes.maps.lost()?,
            probe_pairs: probes.maps.pairs()?,
            single_stepped: self.single_stepped,
            processes,
            warnings: self.warnings.clone(),
        })
    }

    /// What processes counted that have ended since the last drain, apart from what the others have counted since the
    /// trace began. The former is forgotten here.
    pub fn drain(&mut self, probes: &mut Probes) -> Result<Drained, TraceError> {
        self.drained = true;
        self.harvest(probes);
        let ended = mem::take(&mut self.finished);
        let mut whole = match self.snapshot(probes) {
            Ok(whole) => whole,
            Err(error) => {
                self.finished = ended;
                return Err(error);
            }
        };
        self.name(&mut whole.processes, ended.keys(), probes);
        self.gone.clear();
        Ok(Drained { ended, live: whole })
    }

    /// The processes that are looked at.
    fn known(&self) -> BTreeMap<u32, Process> {
        self.processes
            .iter()
            .map(|(pid, watched)| (*pid, watched.process(self.named.is_some())))
            .collect()
    }

    /// Adds those of `keys`, as far as anything is known of them.
    fn name<'a>(
        &self,
        processes: &mut BTreeMap<u32, Process>,
        keys: impl Iterator<Item = &'a CopyKey>,
        probes: &Probes,
    ) {
        for pid in keys.map(|key| key.pid) {
            processes.entry(pid).or_insert_with(|| {
                let comm = match pid {
                    0 => "(others, ended)".to_owned(),
                    pid => probes.maps.comm(pid).unwrap_or_default(),
                };
                self.gone.get(&pid).cloned().unwrap_or_else(|| Process {
                    comm,
                    ..Process::default()
                })
            });
        }
    }

    fn look_at_all(&mut self, probes: &mut Probes) -> Result<(), TraceError> {
        if self.named.is_none() {
            self.find_processes();
        }
        let pids: Vec<u32> = self
            .processes
            .iter()
            .filter(|(_, watched)| !watched.ended && self.due(watched))
            .map(|(pid, _)| *pid)
            .collect();
        for pid in pids {
            match self.look_at(pid, probes) {
                // One process must not keep the others from being traced.
                Err(error) if self.named.is_none() => self.warn(error.to_string()),
                result => result?,
            }
        }
        if self.named.is_none() {
            let gone = &mut self.gone;
            self.processes.retain(|pid, watched| {
                if watched.ended && !watched.libraries.is_empty() && gone.len() < MOST_GONE {
                    gone.insert(*pid, watched.process(false));
                }
                !watched.ended
            });
        }
        Ok(())
    }

    /// Reading maps costs time: with all processes of a machine as targets, those already known wait for their turn.
    fn due(&self, watched: &Watched) -> bool {
        self.named.is_some()
            || !watched.looked_at
            || self
                .scans
                .wrapping_add(watched.target.pid)
                .is_multiple_of(KNOWN_EVERY)
    }

    fn find_processes(&mut self) {
        let Ok(all) = fs::read_dir("/proc") else {
            return;
        };
        let own = std::process::id();
        let mut unclear = None;
        let pids = all
            .filter_map(Result::ok)
            .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        for pid in pids.filter(|pid| *pid != own) {
            // Whether a known id is another process by now is seen when its turn comes.
            if self.processes.contains_key(&pid) {
                continue;
            }
            match Life::of(pid) {
                Life::Alive(alive) => {
                    self.processes.insert(pid, Watched::new(pid, 0, &alive));
                }
                Life::Ended => {}
                Life::Unclear(why) => unclear = Some(why),
            }
        }
        if let Some(why) = unclear {
            self.warn(format!("some processes could not be looked at: {why}"));
        }
    }

    /// Reads the maps of one process and acts on what is new.
    fn look_at(&mut self, pid: u32, probes: &mut Probes) -> Result<(), TraceError> {
        let Some(watched) = self.processes.get_mut(&pid) else {
            return Ok(());
        };
        let alive = match Life::of(pid) {
            Life::Alive(alive) if alive.start_time == watched.start_time => Some(alive),
            Life::Unclear(why) => {
                self.warn(format!("process {pid} could not be looked at: {why}"));
                return Ok(());
            }
            _ => None,
        };
        let tid = alive.as_ref().map_or(pid, |alive| alive.tid);
        watched.looks = watched.looks.wrapping_add(1);
        if let Some(alive) = &alive
            && (alive.size, &alive.name) == (watched.size, &watched.name)
            && !watched.looks.is_multiple_of(LOOK_ANYWAY)
        {
            return Ok(());
        }
        let maps = read_maps(tid);
        let Some(alive) = alive.filter(|_| !maps.as_ref().is_ok_and(Vec::is_empty)) else {
            watched.ended = true;
            watched.forget_memory(probes);
            return Ok(());
        };
        watched.comm = life::comm(pid).unwrap_or_else(|| mem::take(&mut watched.comm));
        // Remembered at the end only, so that what fails on the way is tried again.
        watched.size = 0;
        let program = life::program(tid);
        if mem::replace(&mut watched.program, program) != program {
            watched.forget_memory(probes);
            watched.memory_known = false;
        }
        let maps = match maps {
            Ok(maps) => maps,
            Err(_) if self.named.is_none() => return Ok(()),
            Err(reason) => return Err(TraceError::Inspect { pid, reason }),
        };
        let mut seen = HashSet::new();
        let mut all_seen = true;
        for mapped in maps.iter().filter_map(|map| Mapped::executable(tid, map)) {
            if seen.insert(mapped.id) {
                all_seen &= self.look_at_file(pid, &mapped, probes)?;
            }
        }
        self.look_at_memory(pid, tid, &maps, probes)?;
        if all_seen && let Some(watched) = self.processes.get_mut(&pid) {
            watched.size = alive.size;
            watched.name = alive.name;
        }
        Ok(())
    }

    fn look_at_file(
        &mut self,
        pid: u32,
        mapped: &Mapped,
        probes: &mut Probes,
    ) -> Result<bool, TraceError> {
        let Some(watched) = self.processes.get_mut(&pid) else {
            return Ok(true);
        };
        if watched.libraries.contains_key(&mapped.id) || watched.libraries.len() >= MOST_LIBRARIES {
            return Ok(true);
        }
        let key = (mapped.id, mapped.path.clone());
        let library = match self.files.get(&key) {
            Some(known) => known.clone(),
            None => match Library::read(mapped) {
                Ok(library) => {
                    let library = library.map(Arc::new);
                    if self.files.len() >= MOST_FILES {
                        self.files.clear();
                    }
                    self.files.insert(key, library.clone());
                    library
                }
                Err(error) if error.is_denied() && mapped.name().starts_with("libcuda") => {
                    let own = rights::is_own(pid);
                    let deed = match mapped.name().ends_with(" (deleted)") {
                        true => Deed::ReadDeleted { own },
                        false => Deed::ReadLibrary,
                    };
                    let reason = format!(
                        "its {} cannot be read: {}",
                        mapped.name(),
                        rights::refusal(deed)
                    );
                    let error = TraceError::Inspect { pid, reason };
                    // What else it maps may be open to us.
                    return match self.named {
                        Some(_) => Err(error),
                        None => {
                            self.warn(error.to_string());
                            Ok(true)
                        }
                    };
                }
                // The mapping may have gone since; else the next scan meets it again.
                Err(error) => {
                    log::debug!("process {pid}: {error}");
                    if error.is_exhaustion() {
                        self.warn(error.to_string());
                    }
                    return Ok(false);
                }
            },
        };
        let Some(library) = library else {
            return Ok(true);
        };
        // The same file may be open to us only through this process.
        let library = library.through(mapped);
        let shared = self.named.is_none() || probes.picks();
        if self.named.is_some() && shared {
            probes.maps.choose(pid)?;
        }
        let unseen = !(shared && self.shared.has(mapped.id));
        if self.blind.is_some() && (unseen || self.scans == 0) {
            probes.maps.mark_earlier(pid)?;
        }
        if unseen {
            let reach = match shared {
                true => Whose::All {
                    number: self.shared.next_number(),
                },
                false => Whose::One(watched.target),
            };
            match probes.attach(&library, reach) {
                Ok(links) if shared => {
                    self.shared.insert(mapped.id, links, self.scans);
                }
                Ok(links) => watched.links.push(links),
                // The process has just ended, or unmapped the file.
                Err(ProbeError::Attach { source, .. })
                    if matches!(source.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) =>
                {
                    return Ok(false);
                }
                Err(error) if self.named.is_none() => {
                    self.warn(error.to_string());
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.single_stepped |= library.single_stepped;
        log::info!(
            "process {pid}: {} has {} functions to probe",
            mapped.shown(),
            library.functions()
        );
        if watched.libraries.is_empty() {
            watched.workload = Workload::of(pid);
            watched.threads = Cpus::of(pid).map_or(0, |cpus| cpus.threads());
        }
        watched.libraries.insert(mapped.id, mapped.name());
        Ok(true)
    }

    /// Tells the programs what the maps say of memory. Ranges that come later and that a probe sees are the probes' matter.
    fn look_at_memory(
        &mut self,
        pid: u32,
        tid: u32,
        maps: &[Mapping],
        probes: &mut Probes,
    ) -> Result<(), TraceError> {
        let Some(watched) = self.processes.get_mut(&pid) else {
            return Ok(());
        };
        if watched.libraries.is_empty() {
            watched.looked_at = true;
            return Ok(());
        }
        watched.looked_at = true;
        let first_look = !mem::replace(&mut watched.memory_known, true);
        let now = if first_look {
            // As of now, with the probes in place: what was pinned since `maps` was read is in neither otherwise.
            memory::ranges(&read_maps(tid).unwrap_or_default())
        } else {
            memory::ranges(maps)
        };
        watched.ranges.retain(|start, range| {
            let stays = now.get(start) == Some(range);
            if !stays {
                match range.kind {
                    None => probes.maps.release(pid, *start, range.bytes),
                    Some(_) => probes.maps.forget_range(pid, *start),
                }
            }
            stays
        });
        for (start, range) in now {
            match range.kind {
                None if !watched.ranges.contains_key(&start) => {
                    probes.maps.reserve(pid, start, range.bytes)?;
                    watched.ranges.insert(start, range);
                }
                Some(kind) if first_look => {
                    probes.maps.remember(pid, start, range.bytes, kind)?;
                    watched.ranges.insert(start, range);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Moves the counts of processes that have ended out of the kernel's map, whose room is bounded.
    fn harvest(&mut self, probes: &mut Probes) {
        let Ok(keys) = probes.maps.copy_keys() else {
            return;
        };
        let mut ended: HashMap<u32, bool> = HashMap::new();
        for key in keys {
            // Read only now: its last calls may have come just before its end.
            if *ended
                .entry(key.pid)
                .or_insert_with(|| Life::of(key.pid).has_ended())
                && let Some(stat) = probes.maps.take_copy(&key)
            {
                // When there are too many, those of all further processes go under one name. Who drains them takes them all, and
                // knows by the name what of them was there before.
                let key = match self.drained || self.finished.len() < MOST_FINISHED {
                    true => key,
                    false => CopyKey { pid: 0, ..key },
                };
                self.finished
                    .entry(key)
                    .or_default()
                    .merge(&Stat::from(&stat));
            }
        }
    }

    /// Makes room that is held for processes that have ended, and for libraries that nobody maps any more.
    fn sweep(&mut self, probes: &mut Probes) {
        let mut owners = probes.maps.owners();
        owners.retain(|pid| Life::of(*pid).has_ended());
        probes.maps.forget_processes(&owners);
        probes.maps.drop_dead_calls();
        let in_use: HashSet<FileId> = self
            .processes
            .values()
            .flat_map(|watched| watched.libraries.keys().copied())
            .collect();
        let unused = self.shared.take_unused(&in_use, self.scans);
        // Another file may get the same number.
        self.files
            .retain(|(id, _), _| unused.iter().all(|(unused, _)| unused != id));
        probes::detach(unused.into_iter().map(|(_, links)| links));
        if self.files.len() > MOST_FILES {
            self.files.clear();
        }
    }

    fn warn(&mut self, warning: String) {
        if self.warnings.len() < MOST_WARNINGS && !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
    }
}
