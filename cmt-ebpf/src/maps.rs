//! The maps: what the programs share with the host and with each other.

use aya_ebpf::Global;
use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::helpers::bpf_get_current_comm;
use aya_ebpf::macros::map;
use aya_ebpf::maps::lpm_trie::Key;
use aya_ebpf::maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf};
use cmt_common::event::{
    Call, CopyEvent, CopyKey, CopyStat, LOST_REASONS, Lost, MAX_TARGETS, Pending, phase,
};
use cmt_common::histogram::BUCKETS;
use cmt_common::kernel::{Layout, Survey};
use cmt_common::range::{PID_BITS, RangeKey, RangePrefix, RangeValue};

use crate::alloc::{AllocCall, AllocFrame};
use crate::atomic;

/// Histograms. Values are allocated when first needed: 2.5 KB each.
#[map]
pub static COPIES: HashMap<CopyKey, CopyStat> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);

/// One zeroed value, since a fresh one does not fit on a BPF stack.
#[map]
static TEMPLATE: Array<CopyStat> = Array::with_max_entries(1, 0);

/// The outermost copy call of each thread that is in one, by pid_tgid as the kernel counts. Not an LRU map: a call that
/// finds no room is counted as lost when it begins, and none is dropped later.
#[map]
pub static CALLS: HashMap<u64, Call> = HashMap::with_max_entries(16384, 0);

/// The last asynchronous copy of each thread, while nothing came after it. A thread that is pushed out by others only loses
/// the time of one wait.
#[map]
pub static PENDING: LruHashMap<u64, Pending> = LruHashMap::with_max_entries(16384, 0);

/// Single copies, where they are wanted. The host makes it larger then.
#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(4096, 0);

/// Events that found no room.
#[map]
static DROPPED: Array<u64> = Array::with_max_entries(1, 0);

/// 1 where single copies are wanted; set before the programs are loaded.
#[unsafe(no_mangle)]
static TELLING: Global<u8> = Global::new(0);

/// 1 where the kernel lets programs read its memory; set before they are loaded. Under lockdown it refuses those that would.
#[unsafe(no_mangle)]
static SEEING: Global<u8> = Global::new(0);

/// How this kernel lays out what is read of it, by the host.
#[map]
static LAYOUT: Array<Layout> = Array::with_max_entries(1, 0);

/// What the surveying program found last.
#[map]
static SURVEY: Array<Survey> = Array::with_max_entries(1, 0);

/// Processes of which memory may have been registered before the trace, while page tables cannot be read.
#[map]
static EARLIER: HashMap<u32, u8> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);

/// Allocation calls that have begun.
#[map]
pub static ALLOCS: LruHashMap<AllocFrame, AllocCall> = LruHashMap::with_max_entries(4096, 0);

/// Known memory, as prefixes of addresses, for "which kind is this address".
#[map]
pub static PREFIXES: LpmTrie<RangePrefix, u32> = LpmTrie::with_max_entries(262_144, 0);

/// Known memory by its start, for "how long is what ends here".
#[map]
pub static RANGES: HashMap<RangeKey, RangeValue> =
    HashMap::with_max_entries(65536, BPF_F_NO_PREALLOC);

/// Process ids by the target number in a cookie, where the host's own ids are not the kernel's.
#[map]
static TARGETS: Array<u32> = Array::with_max_entries(MAX_TARGETS as u32, 0);

/// Names of processes that copied: some end before the host has seen them.
#[map]
static COMMS: LruHashMap<u32, [u8; 16]> = LruHashMap::with_max_entries(16384, 0);

/// Times that a pair of probes fired, for the report of cmt's own cost.
#[map]
static PAIRS: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// 1 where the probes fire for all processes and only those in [`CHOSEN`] are wanted; set before the programs are loaded.
#[unsafe(no_mangle)]
static PICKING: Global<u8> = Global::new(0);

/// The wanted processes, by their ids as the kernel counts.
#[map]
static CHOSEN: HashMap<u32, u8> = HashMap::with_max_entries(1024, 0);

/// True for a process that nobody asked for.
#[inline(always)]
pub fn foreign(pid_tgid: u64) -> bool {
    PICKING.load() != 0 && CHOSEN.get_ptr((pid_tgid >> 32) as u32).is_none()
}

/// One of [`phase`], by the host.
#[map]
static PHASE: Array<u32> = Array::with_max_entries(1, 0);

/// What could not be recorded, by [`Lost`].
#[map]
static LOST: Array<u64> = Array::with_max_entries(LOST_REASONS as u32, 0);

/// One of [`phase`].
#[inline(always)]
pub fn phase() -> u32 {
    PHASE.get(0).map_or(phase::ENDING, |phase| *phase)
}

/// The layout of this kernel, as far as the host knows it by now.
#[inline(always)]
pub fn layout() -> Option<&'static Layout> {
    if SEEING.load() == 0 {
        return None;
    }
    LAYOUT.get(0)
}

/// Answers the host's survey.
#[inline(always)]
pub fn survey_found(found: &Survey) {
    if let Some(to) = SURVEY.get_ptr_mut(0) {
        // SAFETY: the map holds the value as long as the program runs; the host reads it after this call has returned.
        unsafe { to.write(*found) };
    }
}

/// True where memory of process `pid` that no probe saw being registered may be registered all the same.
#[inline(always)]
pub fn is_earlier(pid: u32) -> bool {
    EARLIER.get_ptr(pid).is_some()
}

/// Tells the host of one copy, where it wants to know; without waking it up.
#[inline(always)]
pub fn tell(event: impl FnOnce() -> CopyEvent) {
    const NO_WAKEUP: u64 = 1;
    if TELLING.load() == 0 {
        return;
    }
    if let Some(mut room) = EVENTS.reserve::<CopyEvent>(0) {
        room.write(event());
        room.submit(NO_WAKEUP);
    } else if let Some(count) = DROPPED.get_ptr_mut(0) {
        // SAFETY: the map holds the value as long as the program runs.
        unsafe { atomic::add(count, 1) };
    }
}

/// Counts a pair of probes that has fired.
#[inline(always)]
pub fn count_pair() {
    if let Some(count) = PAIRS.get_ptr_mut(0) {
        // SAFETY: the value is this processor's own. A probe that interrupts this one could lose one count of a statistic.
        unsafe { *count += 1 };
    }
}

/// Counts something that could not be recorded.
#[inline(always)]
pub fn lost(reason: Lost) {
    lost_many(reason, 1);
}

/// Counts several things that could not be recorded.
#[inline(always)]
pub fn lost_many(reason: Lost, how_many: u64) {
    if let Some(count) = LOST.get_ptr_mut(reason as u32) {
        // SAFETY: the map holds the value as long as the program runs.
        unsafe { atomic::add(count, how_many) };
    }
}

/// The id under which the host knows the current process.
#[inline(always)]
pub fn process(target: u16, pid_tgid: u64) -> u32 {
    if target != 0
        && let Some(pid) = TARGETS.get(target as u32)
        && *pid != 0
    {
        return *pid;
    }
    (pid_tgid >> 32) as u32
}

/// Counts one finished call that returned `result`; `elapsed_ns` of a failed one is not used.
#[inline(always)]
pub fn record(key: &CopyKey, bytes: u64, elapsed_ns: u64, result: u32) {
    let Some(stat) = stat(key) else {
        lost(Lost::CopiesFull);
        return;
    };
    // SAFETY: `stat` is a value of COPIES, whose memory the kernel keeps until the program ends, and the bucket index is
    // below BUCKETS.
    unsafe {
        atomic::add(&raw mut (*stat).calls, 1);
        if result != 0 {
            atomic::add(&raw mut (*stat).errors, 1);
            (&raw mut (*stat).last_error).write_volatile(result as u64);
            return;
        }
        atomic::add(&raw mut (*stat).bytes, bytes);
        atomic::add(&raw mut (*stat).total_ns, elapsed_ns);
        atomic::raise(&raw mut (*stat).max_ns, elapsed_ns);
        let bucket = cmt_common::histogram::bucket_of(elapsed_ns);
        if bucket < BUCKETS {
            atomic::add((&raw mut (*stat).buckets).cast::<u64>().add(bucket), 1);
        }
    }
}

/// Counts a wait of `wait_ns` that ended `until_ns` after the copy before it had begun.
#[inline(always)]
pub fn record_wait(key: &CopyKey, wait_ns: u64, until_ns: u64) {
    if let Some(stat) = COPIES.get_ptr_mut(key) {
        // SAFETY: as in `record`.
        unsafe {
            atomic::add(&raw mut (*stat).waited, 1);
            atomic::add(&raw mut (*stat).wait_ns, wait_ns);
            atomic::add(&raw mut (*stat).until_ns, until_ns);
        }
    }
}

#[inline(always)]
fn stat(key: &CopyKey) -> Option<*mut CopyStat> {
    if let Some(stat) = COPIES.get_ptr_mut(key) {
        return Some(stat);
    }
    const NO_EXIST: u64 = 1;
    if let Ok(comm) = bpf_get_current_comm() {
        // Only a name: without it the report shows the process by its id.
        let _ = COMMS.insert(key.pid, comm, 0);
    }
    let template = TEMPLATE.get(0)?;
    // Fails where another processor was faster: then its entry is there.
    let _ = COPIES.insert(key, template, NO_EXIST);
    COPIES.get_ptr_mut(key)
}

/// A key of [`PREFIXES`].
#[inline(always)]
pub fn prefix(pid: u32, address: u64, length_bits: u32) -> Key<RangePrefix> {
    Key::new(PID_BITS + length_bits, RangePrefix::new(pid, address))
}
