//! The control block: the memory that the payload in a target and `cmt` share (a memfd mapped by both).
//!
//! The host must treat every field as written by somebody hostile: indices, lengths and texts are checked on reading.
//! All structures are `repr(C)` and valid for any bytes.

use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::api::{DRIVER_FNS, HOOKED};

/// First eight bytes of a control block.
pub const MAGIC: u64 = u64::from_le_bytes(*b"cmt-ctl\0");
/// Changes whenever the layout or the meaning of a field does.
pub const VERSION: u32 = 6;
/// Bytes of the memfd that holds a [`Control`].
pub const CONTROL_BYTES: usize = 32 << 10;
/// The control block's memfd carries this name, so that a later `cmt` finds it in `/proc/PID/maps`.
pub const CONTROL_NAME: &str = "cmt-control";
/// The payload's memfd carries this name.
pub const PAYLOAD_NAME: &str = "cmt-payload";
/// Symbol of the payload that the bootstrap calls: `extern "C" fn(*mut Control) -> u32`.
pub const PAYLOAD_ENTRY: &str = "cmt_payload_main";

/// Steps of the bootstrap, in [`Boot::state`].
pub mod boot {
    /// Nothing has happened.
    pub const NONE: u32 = 0;
    /// Target: the block is mapped, the payload's memfd is open; waiting for the host to fill it.
    pub const READY: u32 = 1;
    /// Host: the payload's memfd holds the library.
    pub const LOAD: u32 = 2;
    /// Target: the payload's entry has returned 0; its control thread serves commands.
    pub const RUNNING: u32 = 3;
    /// Target: a step failed; [`super::Boot::message`] says which.
    pub const FAILED: u32 = 4;
    /// Host: gives up; the bootstrap thread ends.
    pub const ABORT: u32 = 5;
}

/// What the bootstrap thread needs before the payload is there. Assembly reads it: see `OFFSET_` constants.
#[repr(C)]
pub struct Boot {
    /// One of [`boot`]; a futex.
    pub state: AtomicU32,
    /// Descriptor of the payload's memfd in the target.
    pub payload_fd: AtomicU32,
    /// Descriptor of the control block's memfd in the target.
    pub control_fd: AtomicU32,
    /// Thread id of the bootstrap thread as the target's pid namespace counts.
    pub tid: AtomicU32,
    /// Target without `/proc`: a pair of connected sockets; the host sends descriptors into the second.
    pub sockets: [AtomicU32; 2],
    /// The same: descriptor of the target's own memory map, plus 1; 0 if it reads `/proc/self/maps`.
    pub maps_fd: AtomicU32,
    /// The same: how the bootstrap is to receive them.
    pub message_header: MessageHeader,
    /// Address of `dlopen` in the target.
    pub dlopen: AtomicU64,
    /// Address of `dlsym` in the target.
    pub dlsym: AtomicU64,
    /// Address of `dlerror` in the target.
    pub dlerror: AtomicU64,
    /// Path for `dlopen`, NUL-terminated.
    pub path: [u8; 64],
    /// Symbol for `dlsym`, NUL-terminated.
    pub symbol: [u8; 32],
    /// What `dlerror` said, NUL-terminated.
    pub message: [u8; 256],
}

/// A `struct msghdr` (x86-64) with all that it points to, as the host fills it in for two descriptors: a directory to load
/// the payload from, and the memory map.
#[repr(C)]
pub struct MessageHeader {
    /// No sender's address wanted.
    pub name: [AtomicU64; 2],
    /// Address in the target of `buffer`, and 1.
    pub parts: [AtomicU64; 2],
    /// Address in the target of `rights`, its length, and flags.
    pub control: [AtomicU64; 3],
    /// Address in the target of the byte that has to come along (`tail`), and its length: a `struct iovec`.
    pub buffer: [AtomicU64; 2],
    /// A `struct cmsghdr` (two words) and the two descriptors.
    pub rights: [AtomicU32; 6],
    /// The byte.
    pub tail: AtomicU64,
}

/// Commands of the host, in [`Control::command`].
pub mod command {
    /// Nothing to do.
    pub const NONE: u32 = 0;
    /// Find room near the functions, build trampolines and thunks, fill the hook slots. Patches nothing.
    pub const PREPARE: u32 = 1;
    /// Start the engine with [`super::Control::plan`]; hooks stage from now on.
    pub const ENABLE: u32 = 2;
    /// Hooks pass everything through from now on; returns once no call is inside the engine.
    pub const DISABLE: u32 = 3;
    /// Stop the helpers, free pinned memory, end the control thread.
    pub const STOP: u32 = 4;
    /// Use [`super::Control::plan`] from the next copy on.
    pub const SET_PLAN: u32 = 5;
}

/// States of the payload, in [`Control::state`].
pub mod state {
    /// Loaded; no hook is ready.
    pub const LOADED: u32 = 0;
    /// Hook slots are filled.
    pub const PREPARED: u32 = 1;
    /// The engine is running and hooks stage.
    pub const ENABLED: u32 = 2;
    /// Hooks pass through.
    pub const DISABLED: u32 = 3;
    /// Control thread and helpers are gone, pinned memory is freed; only the inert library is left.
    pub const STOPPED: u32 = 4;
}

/// Longest window that a hook may replace, in bytes.
pub const WINDOW_MAX: usize = 16;
/// Most instructions that a window can hold.
pub const RELOCATED_MAX: usize = 8;

/// Results of preparing one hook, in [`HookSlot::status`].
pub mod hook {
    /// The driver does not export the function.
    pub const ABSENT: u32 = 0;
    /// Ready to be committed.
    pub const PREPARED: u32 = 1;
    /// Cannot be patched; [`super::HookSlot::reason`] says why.
    pub const REFUSED: u32 = 2;
}

/// One instruction of a window and where its copy stands in the trampoline.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Relocated {
    /// Address in the function.
    pub from: u64,
    /// Address of the copy; a thread that stands at `from` goes on at `to`.
    pub to: u64,
}

/// One function that the payload can replace; slot `i` is `COPY_FNS[i]`.
#[repr(C)]
pub struct HookSlot {
    /// Host: address of the function's first byte, 0 if the driver does not export it.
    pub address: AtomicU64,
    /// Host: bytes of the function by its symbol's size, 0 if unknown.
    pub size: AtomicU64,
    /// Payload: one of [`hook`].
    pub status: AtomicU32,
    /// Payload: length of the window in bytes.
    pub window_len: AtomicU32,
    /// Payload: address of the window: behind the first instruction, which stays.
    pub window: AtomicU64,
    /// Payload: address of the way to the original function.
    pub trampoline: AtomicU64,
    /// Payload: the window as it was.
    pub original: [u8; WINDOW_MAX],
    /// Payload: the window as it will be.
    pub patched: [u8; WINDOW_MAX],
    /// Payload: number of entries in `relocated`.
    pub relocated_len: AtomicU32,
    /// Host: 1 while the window holds `patched`.
    pub committed: AtomicU32,
    /// Payload: instructions of the window, in order.
    pub relocated: [Relocated; RELOCATED_MAX],
    /// Payload: why it was refused, NUL-terminated.
    pub reason: [u8; 96],
}

/// Flags of the host, in [`Control::flags`].
pub mod flag {
    /// Every copy that the plan stages is staged: the guard, which hands classes that lose back, is not there. For
    /// measuring plans.
    pub const UNGUARDED: u32 = 1;
}

/// Words of a set of CPUs: 1024 of them, as many as a `cpu_set_t` holds.
pub const CPU_WORDS: usize = 16;

/// Which of its CPUs the helpers of a process run on, in [`Plan::cores`].
pub mod cores {
    /// All.
    pub const ALL: u32 = 0;
    /// Those of the fastest kind, where there are several.
    pub const PERFORMANCE: u32 = 1;
    /// Those of the NUMA node that the GPU is at.
    pub const GPU_NODE: u32 = 2;
    /// One of those that share a core.
    pub const ONE_PER_CORE: u32 = 3;
}

/// Most rows of a plan for one direction.
pub const PLAN_ROWS: usize = 16;

/// How bytes are stored by the CPU.
pub mod store {
    /// Ordinary stores (`memcpy`).
    pub const ORDINARY: u32 = 0;
    /// Non-temporal stores, the widest that the CPU has.
    pub const NON_TEMPORAL: u32 = 1;
    /// `rep movsb`.
    pub const REP_MOVSB: u32 = 2;
}

/// The plan for copies of one direction up to a size. Rows are sorted by `up_to_bytes`; the first that fits counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PlanRow {
    /// Largest copy that this row is for, in bytes; 0 marks an unused row.
    pub up_to_bytes: u64,
    /// Unit of DMA, in bytes.
    pub slot_bytes: u64,
    /// Unit of CPU work, in bytes.
    pub slice_bytes: u64,
    /// Pinned bytes that one copy may have in flight.
    pub ring_bytes: u64,
    /// Threads that move bytes, the caller included; 0 hands the copy to the original function.
    pub threads: u32,
    /// One of [`store`].
    pub store: u32,
}

/// The plan for both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Plan {
    /// Rows for HtoD.
    pub htod: [PlanRow; PLAN_ROWS],
    /// Rows for DtoH.
    pub dtoh: [PlanRow; PLAN_ROWS],
    /// One of [`cores`]. The host looks up which CPUs these are ([`Control::helper_cpus`]).
    pub cores: u32,
    /// Zero.
    pub _pad: u32,
}

impl Plan {
    /// A plan that stages nothing.
    pub const NONE: Self = {
        let row = PlanRow {
            up_to_bytes: 0,
            slot_bytes: 0,
            slice_bytes: 0,
            ring_bytes: 0,
            threads: 0,
            store: 0,
        };
        Self {
            htod: [row; PLAN_ROWS],
            dtoh: [row; PLAN_ROWS],
            cores: cores::ALL,
            _pad: 0,
        }
    };
}

impl Plan {
    /// The same plan, but copies of a size class (`class_bytes` up to twice that, exclusive) in one direction go to the
    /// original function. Where the rows do not suffice to cut the class out, its whole row does.
    pub fn without(&self, dtoh: bool, class_bytes: u64) -> Self {
        let mut plan = *self;
        let rows = if dtoh { &mut plan.dtoh } else { &mut plan.htod };
        let last = class_bytes.saturating_mul(2).saturating_sub(1);
        let mut cut = [PlanRow::default(); PLAN_ROWS + 2];
        let mut len = 0;
        let mut below = 0;
        for row in rows.iter().filter(|row| row.up_to_bytes > 0) {
            let within = class_bytes <= row.up_to_bytes && last >= below;
            let pieces = [
                (
                    class_bytes.saturating_sub(1).min(row.up_to_bytes),
                    row.threads,
                ),
                (
                    last.min(row.up_to_bytes),
                    if within { 0 } else { row.threads },
                ),
                (row.up_to_bytes, row.threads),
            ];
            for (up_to_bytes, threads) in pieces {
                if up_to_bytes >= below && up_to_bytes > 0 && len < cut.len() {
                    cut[len] = PlanRow {
                        up_to_bytes,
                        threads,
                        ..*row
                    };
                    len += 1;
                    below = up_to_bytes.saturating_add(1);
                }
            }
        }
        if len <= PLAN_ROWS {
            rows.copy_from_slice(&cut[..PLAN_ROWS]);
        } else {
            let mut below = 0;
            for row in rows.iter_mut().filter(|row| row.up_to_bytes > 0) {
                if class_bytes <= row.up_to_bytes && last >= below {
                    row.threads = 0;
                }
                below = row.up_to_bytes.saturating_add(1);
            }
        }
        plan
    }
}

/// Why a copy went to the original function, as a position in [`Counters::passed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum PassReason {
    /// Smaller than the cut-over, or its size class is handed to stock.
    BelowCutOver,
    /// The host side is pinned, managed, mapped or otherwise known to the driver.
    NotPageable,
    /// Device to device, host to host, or a device side that is no plain device memory of this context.
    NotHostToDevice,
    /// The range leaves its allocation: stock says which error that is.
    OutOfRange,
    /// The stream is capturing, or its state cannot be asked.
    Capturing,
    /// Every lane is busy with other copies.
    Busy,
    /// No pinned memory could be had.
    NoPinnedMemory,
    /// The driver lacks something that staging needs.
    Unsupported,
    /// Hooks are disabled, or the call comes from a forked child.
    Disabled,
    /// Stock's turn, to see how long it takes.
    Sampled,
    /// Stock was faster with its size class a while ago.
    Slower,
    /// Short, and not soon after others: nothing is gained by staging it.
    Alone,
}

/// Number of [`PassReason`]s.
pub const PASS_REASONS: usize = PassReason::Alone as usize + 1;

/// Names of [`PassReason`]s, as `cmt status` prints them.
pub const PASS_REASON_NAMES: [&str; PASS_REASONS] = [
    "below the cut-over",
    "host memory not pageable",
    "not between host and device",
    "out of range",
    "stream capturing",
    "all lanes busy",
    "no pinned memory",
    "not supported by the driver",
    "disabled or forked",
    "timed for comparison",
    "faster, by comparison",
    "short, one at a time",
];

/// Size classes that staged copies are counted by: class `i` holds copies of `1 << i` bytes up to twice that, exclusive; the
/// last one all that are larger.
pub const SIZE_CLASSES: usize = 48;

/// The size class of a copy.
pub const fn size_class(bytes: u64) -> usize {
    let class = (bytes | 1).ilog2() as usize;
    if class < SIZE_CLASSES {
        class
    } else {
        SIZE_CLASSES - 1
    }
}

/// Staged copies of one direction and size class.
#[derive(Debug, Default)]
#[repr(C)]
pub struct ClassCounters {
    /// Bytes of those that returned 0.
    pub bytes: AtomicU64,
    /// Median time of the last copies that stock had to make for comparison, in nanoseconds for a MiB; 0 before there are
    /// enough of them.
    pub stock_ns_per_mib: AtomicU64,
    /// The same of staged copies of the same while.
    pub staged_ns_per_mib: AtomicU64,
}

/// What the payload counts since it was attached. Written with relaxed atomics; each value is exact, sets of them are not.
#[repr(C)]
pub struct Counters {
    /// Staged copies that returned 0: HtoD, DtoH.
    pub staged_calls: [AtomicU64; 2],
    /// Bytes of those.
    pub staged_bytes: [AtomicU64; 2],
    /// Staged copies that returned an error of the driver.
    pub staged_errors: [AtomicU64; 2],
    /// Copies handed to the original function, by [`PassReason`].
    pub passed: [AtomicU64; PASS_REASONS],
    /// Panics that were caught in a hook; the copy went to the original function.
    pub panics: AtomicU64,
    /// Pinned bytes that the payload holds now.
    pub pinned_bytes: AtomicU64,
    /// Helper threads that live now.
    pub helpers: AtomicU32,
    /// Zero.
    pub _pad: u32,
    /// Staged copies by size class: HtoD, DtoH.
    pub classes: [[ClassCounters; SIZE_CLASSES]; 2],
}

impl Counters {
    /// Begins anew: nothing counts meanwhile.
    pub fn clear(&self) {
        let pairs = [&self.staged_calls, &self.staged_bytes, &self.staged_errors];
        let classes = self.classes.iter().flatten();
        pairs
            .into_iter()
            .flatten()
            .chain(&self.passed)
            .chain([&self.panics])
            .chain(classes.flat_map(|class| {
                [
                    &class.bytes,
                    &class.stock_ns_per_mib,
                    &class.staged_ns_per_mib,
                ]
            }))
            .for_each(|counter| counter.store(0, core::sync::atomic::Ordering::Relaxed));
    }
}

/// The whole block.
#[repr(C)]
pub struct Control {
    /// Bootstrap; must come first, since assembly addresses it.
    pub boot: Boot,
    /// [`MAGIC`], written by the host before [`boot::LOAD`].
    pub magic: AtomicU64,
    /// [`VERSION`] of the host that filled the block.
    pub version: AtomicU32,
    /// Host: one of [`command`].
    pub command: AtomicU32,
    /// Host: counts commands; a futex.
    pub command_seq: AtomicU32,
    /// Payload: the last `command_seq` that was carried out; a futex.
    pub done_seq: AtomicU32,
    /// Payload: 0, or 1 if the last command failed ([`Control::message`] says why).
    pub result: AtomicU32,
    /// Payload: one of [`state`].
    pub state: AtomicU32,
    /// Payload: process id as its own pid namespace counts; a forked child differs.
    pub pid: AtomicU32,
    /// Payload: thread id of the control thread, 0 when it has ended.
    pub control_tid: AtomicU32,
    /// Payload: nanoseconds of CLOCK_REALTIME at the last [`command::ENABLE`].
    pub enabled_at_ns: AtomicU64,
    /// Payload: address of [`PAYLOAD_ENTRY`], for attaching again.
    pub entry: AtomicU64,
    /// Payload: name of the hook engine, NUL-terminated.
    pub engine: [u8; 16],
    /// Payload: why the last command failed, NUL-terminated.
    pub message: [u8; 256],
    /// Host: most threads that may move bytes at once, by the host's view of affinity and cgroup; 0 leaves it to the payload.
    pub max_threads: AtomicU32,
    /// Host: [`flag`]s, for the next ENABLE.
    pub flags: AtomicU32,
    /// Host: addresses by [`crate::api::DriverFn`].
    pub driver: [AtomicU64; DRIVER_FNS.len()],
    /// Hooks by position in `COPY_FNS`.
    pub hooks: [HookSlot; HOOKED],
    /// Host: the plan that the next ENABLE or SET_PLAN reads.
    pub plan: Plan,
    /// Host: CPUs that helpers run on as far as the process may use them, a bit each, for the next ENABLE or SET_PLAN;
    /// all zero for any.
    pub helper_cpus: [AtomicU64; CPU_WORDS],
    /// Payload: what happened.
    pub counters: Counters,
}

const _: () = assert!(size_of::<Control>() <= CONTROL_BYTES);
const _: () = assert!(core::mem::offset_of!(Control, boot) == 0);

#[cfg(test)]
mod tests {
    use super::*;

    fn threads(rows: &[PlanRow], bytes: u64) -> u32 {
        rows.iter()
            .find(|row| bytes <= row.up_to_bytes)
            .map_or(0, |row| row.threads)
    }

    fn plan(rows: &[(u64, u32)]) -> Plan {
        let mut plan = Plan::NONE;
        for (row, &(up_to_bytes, threads)) in plan.htod.iter_mut().zip(rows) {
            *row = PlanRow {
                up_to_bytes,
                threads,
                ..PlanRow::default()
            };
        }
        plan
    }

    #[test]
    fn one_class_is_cut_out_and_the_rest_stays() {
        let whole = plan(&[(65_535, 0), (u64::MAX, 8)]);
        let cut = whole.without(false, 1 << 20);
        for (bytes, wanted) in [
            (4096, 0),
            (1 << 19, 8),
            ((1 << 20) - 1, 8),
            (1 << 20, 0),
            ((2 << 20) - 1, 0),
            (2 << 20, 8),
            (1 << 30, 8),
        ] {
            assert_eq!(threads(&cut.htod, bytes), wanted, "{bytes}");
        }
        assert_eq!(cut.dtoh, whole.dtoh);
        let both = cut.without(false, 2 << 20);
        assert_eq!(
            (threads(&both.htod, 3 << 20), threads(&both.htod, 4 << 20)),
            (0, 8)
        );
    }

    #[test]
    fn a_full_plan_gives_the_whole_row_back() {
        let rows: [(u64, u32); PLAN_ROWS] = core::array::from_fn(|i| ((i as u64 + 1) << 30, 4));
        let cut = plan(&rows).without(false, 1 << 20);
        assert_eq!(
            (
                threads(&cut.htod, 1 << 20),
                threads(&cut.htod, 1 << 29),
                threads(&cut.htod, 2 << 30)
            ),
            (0, 0, 4)
        );
    }
}
