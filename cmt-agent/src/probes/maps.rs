//! The maps that the programs share with the host: what was counted, and what the programs have to know.
#![expect(
    unsafe_code,
    reason = "map keys and values are passed to the kernel as bytes"
)]

use std::collections::HashSet;
use std::path::Path;

use aya::maps::{
    Array, HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, PerCpuValues, RingBuf, lpm_trie,
};
use aya::{Ebpf, Pod};
use cmt_common::api::MemoryKind;
use cmt_common::event::{Call, CopyEvent, CopyKey, CopyStat, LOST_REASONS, Lost, MOST_NESTED};
use cmt_common::kernel::{Layout, Survey};
use cmt_common::range::{PID_BITS, RESERVED, RangeKey, RangePrefix, RangeValue, next_part};

use super::ProbeError;
use crate::target::text::printable;

macro_rules! pod {
    ($($name:ident($inner:ty)),*) => {$(
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        struct $name($inner);
        // SAFETY: a repr(C) structure of integers without padding: any bytes are a value, and all bytes are initialised.
        unsafe impl Pod for $name {}
    )*};
}
pod!(
    CallPod(Call),
    LayoutPod(Layout),
    SurveyPod(Survey),
    KeyPod(CopyKey),
    StatPod(CopyStat),
    RangeKeyPod(RangeKey),
    RangeValuePod(RangeValue),
    PrefixPod(RangePrefix)
);

/// What the kernel has counted so far.
pub type CopyStats = Vec<(CopyKey, CopyStat)>;

/// The maps of one tracer's programs.
pub struct Maps {
    chosen: HashMap<MapData, u32, u8>,
    copies: HashMap<MapData, KeyPod, StatPod>,
    calls: HashMap<MapData, u64, CallPod>,
    comms: HashMap<MapData, u32, [u8; 16]>,
    pairs: PerCpuArray<MapData, u64>,
    phase: Array<MapData, u32>,
    lost: Array<MapData, u64>,
    layout: Array<MapData, LayoutPod>,
    survey: Array<MapData, SurveyPod>,
    earlier: HashMap<MapData, u32, u8>,
    targets: Array<MapData, u32>,
    prefixes: LpmTrie<MapData, PrefixPod, u32>,
    ranges: HashMap<MapData, RangeKeyPod, RangeValuePod>,
}

impl Maps {
    /// Takes them from a loaded object.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, ProbeError> {
        Ok(Self {
            chosen: take(ebpf, "CHOSEN")?,
            copies: take(ebpf, "COPIES")?,
            calls: take(ebpf, "CALLS")?,
            comms: take(ebpf, "COMMS")?,
            pairs: take(ebpf, "PAIRS")?,
            phase: take(ebpf, "PHASE")?,
            lost: take(ebpf, "LOST")?,
            layout: take(ebpf, "LAYOUT")?,
            survey: take(ebpf, "SURVEY")?,
            earlier: take(ebpf, "EARLIER")?,
            targets: take(ebpf, "TARGETS")?,
            prefixes: take(ebpf, "PREFIXES")?,
            ranges: take(ebpf, "RANGES")?,
        })
    }

    /// Makes the programs see process `pid`, where they pick.
    pub fn choose(&mut self, pid: u32) -> Result<(), ProbeError> {
        self.chosen
            .insert(pid, 1, 0)
            .map_err(|error| map_error("CHOSEN", error))
    }

    /// Everything counted so far. Single values are exact; values that change while they are read may be of different
    /// moments.
    pub fn copies(&self) -> Result<CopyStats, ProbeError> {
        let mut found = Vec::new();
        for entry in self.copies.iter() {
            let (key, stat) = entry.map_err(|error| map_error("COPIES", error))?;
            found.push((key.0, stat.0));
        }
        Ok(found)
    }

    /// What there are counts of.
    pub fn copy_keys(&self) -> Result<Vec<CopyKey>, ProbeError> {
        let keys = self.copies.keys().map(|key| Ok(key?.0));
        keys.collect::<Result<_, MapError>>()
            .map_err(|error| map_error("COPIES", error))
    }

    /// Removes what was counted under `key`.
    pub fn forget(&mut self, key: &CopyKey) {
        // It may have gone already; there is nothing else to do then.
        let _ = self.copies.remove(&KeyPod(*key));
    }

    /// Removes what was counted under `key`, and returns it as it was at the end.
    pub fn take_copy(&mut self, key: &CopyKey) -> Option<CopyStat> {
        let stat = self.copies.get(&KeyPod(*key), 0).ok()?;
        self.forget(key);
        Some(stat.0)
    }

    /// Times that a pair of probes has fired so far.
    pub fn pairs(&self) -> Result<u64, ProbeError> {
        let each = self
            .pairs
            .get(&0, 0)
            .map_err(|error| map_error("PAIRS", error))?;
        Ok(each.iter().sum())
    }

    /// Makes [`Maps::pairs`] start from 0 again.
    pub(super) fn reset_pairs(&mut self) -> Result<(), ProbeError> {
        let cpus = aya::util::nr_cpus()
            .map_err(|(path, error)| map_error("PAIRS", format!("{path}: {error}")))?;
        let zeros =
            PerCpuValues::try_from(vec![0; cpus]).map_err(|error| map_error("PAIRS", error))?;
        self.pairs
            .set(0, zeros, 0)
            .map_err(|error| map_error("PAIRS", error))
    }

    /// The name under which the kernel knew process `pid` when it made its first copy.
    pub fn comm(&self, pid: u32) -> Option<String> {
        let comm = self.comms.get(&pid, 0).ok()?;
        let end = comm
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(comm.len());
        Some(printable(&String::from_utf8_lossy(&comm[..end])))
    }

    /// Makes room that threads hold which ended within a copy.
    pub fn drop_dead_calls(&mut self) {
        let threads: Vec<u64> = self.calls.keys().filter_map(Result::ok).collect();
        for thread in threads {
            let (pid, tid) = (thread >> 32, thread as u32);
            if !Path::new(&format!("/proc/{pid}/task/{tid}")).exists() {
                // It may have gone already.
                let _ = self.calls.remove(&thread);
            }
        }
    }

    /// What could not be recorded so far, by [`Lost`].
    pub fn lost(&self) -> Result<[u64; LOST_REASONS], ProbeError> {
        let mut lost = [0; LOST_REASONS];
        for (index, count) in lost.iter_mut().enumerate() {
            *count = self
                .lost
                .get(&(index as u32), 0)
                .map_err(|error| map_error("LOST", error))?;
        }
        // Calls that were taken for nested ones in a call that nobody is in any more; no later call has told so yet.
        for entry in self.calls.iter() {
            let (_, call) = entry.map_err(|error| map_error("CALLS", error))?;
            if call.0.nested > MOST_NESTED {
                lost[Lost::NoReturn as usize] += u64::from(call.0.nested);
            }
        }
        Ok(lost)
    }

    /// Tells the programs which part of a trace this is: one of [`cmt_common::event::phase`].
    pub fn enter_phase(&mut self, phase: u32) -> Result<(), ProbeError> {
        self.phase
            .set(0, phase, 0)
            .map_err(|error| map_error("PHASE", error))
    }

    /// Tells the programs how this kernel lays out what they read of it.
    pub(super) fn set_layout(&mut self, layout: &Layout) -> Result<(), ProbeError> {
        self.layout
            .set(0, LayoutPod(*layout), 0)
            .map_err(|error| map_error("LAYOUT", error))
    }

    /// What the surveying program found last.
    pub(super) fn survey(&self) -> Result<Survey, ProbeError> {
        let found = self
            .survey
            .get(&0, 0)
            .map_err(|error| map_error("SURVEY", error))?;
        Ok(found.0)
    }

    /// Tells the programs that memory of process `pid` may have been registered before anybody looked.
    pub fn mark_earlier(&mut self, pid: u32) -> Result<(), ProbeError> {
        self.earlier
            .insert(pid, 1, 0)
            .map_err(|error| map_error("EARLIER", error))
    }

    /// Makes target `number` count under `pid`.
    pub fn name_target(&mut self, number: u16, pid: u32) -> Result<(), ProbeError> {
        self.targets
            .set(number as u32, pid, 0)
            .map_err(|error| map_error("TARGETS", error))
    }

    /// Tells the programs what a range of a process's memory is.
    pub fn remember(
        &mut self,
        pid: u32,
        start: u64,
        bytes: u64,
        kind: MemoryKind,
    ) -> Result<(), ProbeError> {
        let value = RangeValue {
            bytes,
            kind: kind as u32,
            _pad: 0,
        };
        self.ranges
            .insert(
                RangeKeyPod(RangeKey::new(pid, start)),
                RangeValuePod(value),
                0,
            )
            .map_err(|error| map_error("RANGES", error))?;
        let mut at = start;
        while let Some((bits, next)) = next_part(at, start + bytes) {
            self.prefixes
                .insert(&prefix(pid, at, bits), kind as u32, 0)
                .map_err(|error| map_error("PREFIXES", error))?;
            at = next;
        }
        Ok(())
    }

    /// Undoes [`Maps::remember`], whatever has become of the range since.
    pub fn forget_range(&mut self, pid: u32, start: u64) {
        let key = RangeKeyPod(RangeKey::new(pid, start));
        let Ok(value) = self.ranges.get(&key, 0) else {
            return;
        };
        // Each may have gone already.
        let _ = self.ranges.remove(&key);
        let mut at = start;
        while let Some((bits, next)) = next_part(at, start + value.0.bytes) {
            let _ = self.prefixes.remove(&prefix(pid, at, bits));
            at = next;
        }
    }

    /// Tells the programs that a range is out of the processor's reach, as far as nothing better is known of it.
    pub fn reserve(&mut self, pid: u32, start: u64, bytes: u64) -> Result<(), ProbeError> {
        const NO_EXIST: u64 = 1;
        let mut at = start;
        while let Some((bits, next)) = next_part(at, start + bytes) {
            match self
                .prefixes
                .insert(&prefix(pid, at, bits), RESERVED, NO_EXIST)
            {
                Ok(()) => {}
                Err(MapError::SyscallError(error))
                    if error.io_error.raw_os_error() == Some(libc::EEXIST) => {}
                Err(error) => return Err(map_error("PREFIXES", error)),
            }
            at = next;
        }
        Ok(())
    }

    /// Undoes [`Maps::reserve`].
    pub fn release(&mut self, pid: u32, start: u64, bytes: u64) {
        let mut at = start;
        while let Some((bits, next)) = next_part(at, start + bytes) {
            let key = prefix(pid, at, bits);
            // A map of prefixes finds the longest that fits: at its own first address, this one or something better.
            if self
                .prefixes
                .get(&key, 0)
                .is_ok_and(|kind| kind == RESERVED)
            {
                // It may have gone already.
                let _ = self.prefixes.remove(&key);
            }
            at = next;
        }
    }

    /// Forgets all ranges of a process.
    pub fn forget_process(&mut self, pid: u32) {
        self.forget_processes(&[pid].into());
    }

    /// The same for several.
    pub fn forget_processes(&mut self, pids: &HashSet<u32>) {
        if pids.is_empty() {
            return;
        }
        for pid in pids {
            // Most processes are not in it.
            let _ = self.earlier.remove(pid);
        }
        let starts: Vec<(u32, u64)> = self
            .ranges
            .keys()
            .filter_map(Result::ok)
            .map(|key| (key.0.pid, key.0.start))
            .filter(|(pid, _)| pids.contains(pid))
            .collect();
        for (pid, start) in starts {
            self.forget_range(pid, start);
        }
    }

    /// Processes of which something is known that they might have left behind.
    pub fn owners(&self) -> HashSet<u32> {
        let earlier = self.earlier.keys().filter_map(Result::ok);
        let ranges = self.ranges.keys().filter_map(Result::ok);
        earlier.chain(ranges.map(|key| key.0.pid)).collect()
    }
}

/// The ring of single copies.
pub struct Events {
    ring: RingBuf<MapData>,
    dropped: Array<MapData, u64>,
}

impl Events {
    /// Takes it from a loaded object.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, ProbeError> {
        Ok(Self {
            ring: take(ebpf, "EVENTS")?,
            dropped: take(ebpf, "DROPPED")?,
        })
    }

    /// The next copy, oldest first; `None` where there is none for now.
    pub fn take_next(&mut self) -> Option<CopyEvent> {
        let item = self.ring.next()?;
        // SAFETY: a repr(C) structure of integers: any bytes are a value. The ring aligns to 8 bytes, and nothing here
        // depends on it.
        (item.len() >= size_of::<CopyEvent>())
            .then(|| unsafe { item.as_ptr().cast::<CopyEvent>().read_unaligned() })
    }

    /// Copies that found no room in the ring so far.
    pub fn dropped(&self) -> Result<u64, ProbeError> {
        self.dropped
            .get(&0, 0)
            .map_err(|error| map_error("DROPPED", error))
    }
}

fn prefix(pid: u32, at: u64, bits: u32) -> lpm_trie::Key<PrefixPod> {
    lpm_trie::Key::new(PID_BITS + bits, PrefixPod(RangePrefix::new(pid, at)))
}

fn take<M: TryFrom<Map>>(ebpf: &mut Ebpf, name: &'static str) -> Result<M, ProbeError> {
    ebpf.take_map(name)
        .and_then(|map| map.try_into().ok())
        .ok_or_else(|| ProbeError::Object(format!("no map {name} of the expected type")))
}

fn map_error(map: &'static str, error: impl std::fmt::Display) -> ProbeError {
    ProbeError::Map {
        map,
        reason: error.to_string(),
    }
}
