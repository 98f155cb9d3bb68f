//! Probes on copy functions: what is copied which way, how long it took, and how it ended.

use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::macros::{uprobe, uretprobe};
use aya_ebpf::programs::{ProbeContext, RetProbeContext};
use aya_log_ebpf::debug;
use cmt_common::api::{Direction, MemoryKind, ON_DEVICE};
use cmt_common::event::{
    Call, CopyCookie, CopyEvent, CopyKey, DIRECTION_ADDRESSES, DIRECTION_KIND, Lost, MOST_IN_BATCH,
    MOST_IN_BATCH_3D, NO_ARG, Pending, SHAPE_BATCH, SHAPE_BATCH_3D, SHAPE_DRIVER_2D,
    SHAPE_DRIVER_3D, SHAPE_LINEAR, SHAPE_ONE_3D, SHAPE_PITCHED, SHAPE_RUNTIME_3D,
    SHAPE_RUNTIME_PEER_3D, phase, place,
};
use cmt_common::kernel::page;
use cmt_common::histogram::size_class_of;

use crate::call::{Arguments, cookie, encloses, now_ns, user};
use crate::maps::{
    CALLS, PENDING, count_pair, foreign, lost, lost_many, phase, process, record, tell,
};
use crate::memory::{host_kind, kind_of};
use crate::page::look;

/// `cudaMemcpyDefault`.
const KIND_DEFAULT: u32 = 4;

/// Entry of every copy function.
#[uprobe]
pub fn copy_enter(context: ProbeContext) -> u32 {
    let phase = phase();
    let pid_tgid = bpf_get_current_pid_tgid();
    if phase == phase::ENDING || foreign(pid_tgid) {
        return 0;
    }
    count_pair();
    let cookie = CopyCookie(cookie(&context));
    let arguments = Arguments::read(&context);
    if let Some(outer) = CALLS.get_ptr_mut(pid_tgid) {
        // SAFETY: only this thread uses this entry, and it removes it in no other place at the same time.
        let outer = unsafe { &mut *outer };
        if outer.sp == arguments.sp
            && outer.function == cookie.function()
            && outer.target != cookie.target()
        {
            // The same call by another probe on the same function.
            return 0;
        }
        if encloses(outer, arguments.sp) {
            outer.nested += 1;
            fill_gap(outer, cookie, &arguments);
            return 0;
        }
        let nested = outer.nested;
        debug!(
            &context,
            "a copy call of thread {} never returned", pid_tgid as u32
        );
        lost_many(Lost::NoReturn, 1 + nested as u64);
    }
    // What this call waits for in itself is not behind the one before.
    let _ = PENDING.remove(pid_tgid);
    let pid = process(cookie.target(), pid_tgid);
    let Some(copied) = Copied::read(cookie, &arguments) else {
        // Counting it under invented figures would be worse.
        let _ = CALLS.remove(pid_tgid);
        lost(Lost::Unreadable);
        return 0;
    };
    let (asynchronous, stream) = match cookie.stream_arg() {
        NO_ARG => (0, 0),
        position => (1, arguments.get(position).unwrap_or(0)),
    };
    let call = Call {
        sp: arguments.sp,
        start_ns: now_ns(),
        bytes: copied.bytes,
        dst: copied.dst.address,
        src: copied.src.address,
        stream,
        pid,
        function: cookie.function(),
        dst_place: copied.dst.place,
        src_place: copied.src.place,
        bytes_missing: copied.bytes_missing as u32,
        counts: (phase == phase::COUNTING) as u32,
        nested: 0,
        target: cookie.target(),
        asynchronous,
        dst_page: copied.dst.page(copied.first_bytes),
        src_page: copied.src.page(copied.first_bytes),
        _pad: [0; 7],
    };
    if CALLS.insert(pid_tgid, call, 0).is_err() {
        lost(Lost::CallsFull);
    }
    0
}

/// Return of every copy function.
#[uretprobe]
pub fn copy_leave(context: RetProbeContext) -> u32 {
    let now_ns = now_ns();
    let pid_tgid = bpf_get_current_pid_tgid();
    // SAFETY: only this thread uses this entry.
    let Some(call) = (unsafe { CALLS.get(pid_tgid) }) else {
        // It began before the probes were there.
        return 0;
    };
    // SAFETY: the kernel passes pt_regs to programs of this type. The return has popped one word.
    let sp = unsafe { (*context.regs).rsp } - 8;
    if sp < call.sp {
        // A nested call: the outermost one counts.
        return 0;
    }
    let call = *call;
    let _ = CALLS.remove(pid_tgid);
    if sp > call.sp {
        lost_many(Lost::NoReturn, 1 + call.nested as u64);
        return 0;
    }
    if call.counts == 0 {
        return 0;
    }
    let result = context.ret::<u32>();
    let settled = settle(&call, result != 0);
    let key = CopyKey {
        pid: call.pid,
        function: call.function,
        direction: settled.direction as u8,
        memory: settled.memory as u8,
        size_class: size_class_of(call.bytes),
        backing: settled.backing,
        _pad: [0; 6],
    };
    let elapsed_ns = now_ns.saturating_sub(call.start_ns);
    record(&key, call.bytes, elapsed_ns, result);
    if call.asynchronous != 0 && result == 0 {
        let pending = Pending {
            key,
            start_ns: call.start_ns,
            stream: call.stream,
            wait_start_ns: 0,
        };
        // Without room the wait that may follow is not counted.
        let _ = PENDING.insert(pid_tgid, pending, 0);
    }
    tell(|| CopyEvent {
        key,
        start_ns: call.start_ns,
        elapsed_ns,
        bytes: call.bytes,
        host: settled.host,
        stream: call.stream,
        tid: pid_tgid as u32,
        result,
    });
    0
}

/// What is known of a call when it ends.
struct Settled {
    direction: Direction,
    /// Of the host side.
    memory: MemoryKind,
    /// A `Backing` as a number.
    backing: u8,
    /// Address of the host side.
    host: u64,
}

#[inline(always)]
fn settle(call: &Call, failed: bool) -> Settled {
    let src = side(call.pid, call.src_place, call.src, call.src_page, failed);
    let dst = side(call.pid, call.dst_place, call.dst, call.dst_page, failed);
    let (direction, host) = match (src, dst) {
        (None, _) | (_, None) => (Direction::Unknown, None),
        (Some(MemoryKind::Device), Some(MemoryKind::Device)) => (Direction::DtoD, None),
        (Some(MemoryKind::Device), Some(kind)) => {
            (Direction::DtoH, Some((kind, call.dst_page, call.dst)))
        }
        (Some(kind), Some(MemoryKind::Device)) => {
            (Direction::HtoD, Some((kind, call.src_page, call.src)))
        }
        (Some(kind), Some(_)) => (Direction::HtoH, Some((kind, call.src_page, call.src))),
    };
    let Some((memory, page, host)) = host else {
        return Settled {
            direction,
            memory: MemoryKind::Unknown,
            backing: 0,
            host: 0,
        };
    };
    let backing = match memory {
        MemoryKind::Pageable => page & page::BACKING,
        _ => 0,
    };
    Settled {
        direction,
        memory,
        backing,
        host,
    }
}

/// The kind of one side of a copy; `None` where it cannot even be said whose memory it is.
#[inline(always)]
fn side(pid: u32, place: u8, address: u64, page: u8, failed: bool) -> Option<MemoryKind> {
    match place {
        place::DEVICE => Some(MemoryKind::Device),
        place::HOST => Some(host_kind(pid, address, page)),
        place::BY_ADDRESS => kind_of(pid, address, page, failed),
        _ => None,
    }
}

/// Takes from a nested driver call what the outer runtime call does not say.
#[inline(always)]
fn fill_gap(outer: &mut Call, cookie: CopyCookie, arguments: &Arguments) {
    if outer.bytes_missing != 0
        && !cookie.runtime()
        && let Some(inner) = Copied::read(cookie, arguments)
    {
        outer.bytes = inner.bytes;
        outer.bytes_missing = 0;
    }
}

/// One side of a copy.
struct Side {
    place: u8,
    address: u64,
}

impl Side {
    const ARRAY: Self = Self {
        place: place::DEVICE,
        address: 0,
    };

    /// What the page in the middle of `bytes` says (an allocator writes into the first one, the driver looks at it first):
    /// see [`look`]. 0 for device memory.
    #[inline(always)]
    fn page(&self, bytes: u64) -> u8 {
        match self.place {
            place::HOST | place::BY_ADDRESS => look(self.address.wrapping_add(bytes / 2)),
            _ => 0,
        }
    }

    /// From the fields of a driver structure: `CUmemorytype` (host 1, device 2, array 3, unified 4) and both addresses.
    #[inline(always)]
    fn from_driver(memory_type: u64, host: u64, device: u64) -> Self {
        let (place, address) = match memory_type as u32 {
            1 => (place::HOST, host),
            2 | 3 => (place::DEVICE, device),
            4 => (place::BY_ADDRESS, device),
            _ => (place::INVALID, 0),
        };
        Self { place, address }
    }
}

/// What the arguments of a call say.
struct Copied {
    dst: Side,
    src: Side,
    bytes: u64,
    /// Of a batch, those of the first copy, whose addresses these are.
    first_bytes: u64,
    bytes_missing: bool,
}

impl Copied {
    #[inline(always)]
    fn read(cookie: CopyCookie, arguments: &Arguments) -> Option<Self> {
        match cookie.shape() {
            SHAPE_LINEAR | SHAPE_PITCHED => Self::from_arguments(cookie, arguments),
            SHAPE_DRIVER_2D => Self::from_driver_2d(arguments.get(0)?),
            SHAPE_DRIVER_3D => Self::from_driver_3d(arguments.get(0)?),
            SHAPE_RUNTIME_3D => Self::from_runtime_3d(arguments.get(0)?),
            SHAPE_RUNTIME_PEER_3D => Self::from_runtime_peer_3d(arguments.get(0)?),
            SHAPE_BATCH => Self::from_batch(arguments),
            SHAPE_BATCH_3D => Self::from_batch_3d(arguments.get(1)?, arguments.get(0)?),
            SHAPE_ONE_3D => Self::from_batch_3d(arguments.get(0)?, 1),
            _ => None,
        }
    }

    #[inline(always)]
    fn from_arguments(cookie: CopyCookie, arguments: &Arguments) -> Option<Self> {
        let mut bytes = arguments.get(cookie.bytes_arg())?;
        if cookie.shape() == SHAPE_PITCHED {
            bytes = bytes.wrapping_mul(arguments.get(cookie.height_arg())?);
        }
        let kind = match cookie.direction() {
            DIRECTION_KIND => arguments.get(cookie.kind_arg())? as u32,
            DIRECTION_ADDRESSES => KIND_DEFAULT,
            fixed => fixed as u32,
        };
        let (dst, src) = (cookie.dst_arg(), cookie.src_arg());
        let address = |position| match position {
            ON_DEVICE => Some(0),
            position => arguments.get(position),
        };
        let mut copied = Self::with_kind(address(dst)?, address(src)?, kind, bytes);
        if dst == ON_DEVICE {
            copied.dst = Side::ARRAY;
        }
        if src == ON_DEVICE {
            copied.src = Side::ARRAY;
        }
        Some(copied)
    }

    /// Arrays of addresses and byte counts. The first copy's addresses stand for all.
    #[inline(always)]
    fn from_batch(arguments: &Arguments) -> Option<Self> {
        let (sizes, count) = (arguments.get(2)?, arguments.get(3)?);
        if count == 0 || count > MOST_IN_BATCH {
            return None;
        }
        let mut bytes = 0u64;
        for index in 0..MOST_IN_BATCH {
            if index >= count {
                break;
            }
            bytes = bytes.wrapping_add(user(sizes.wrapping_add(index * 8))?);
        }
        let (dst, src) = (user(arguments.get(0)?)?, user(arguments.get(1)?)?);
        let mut copied = Self::with_kind(dst, src, KIND_DEFAULT, bytes);
        copied.first_bytes = user(sizes)?;
        Some(copied)
    }

    /// `CUDA_MEMCPY3D_BATCH_OP`: 14 words; source operand at 0 and destination at 40, whose first words are type (pointer 1,
    /// array 2) and address; extent at 80. With an array the extent counts elements, of a size that is not said.
    #[inline(always)]
    fn from_batch_3d(at: u64, count: u64) -> Option<Self> {
        const POINTER: u32 = 1;
        const OPERATION_BYTES: u64 = 112;
        if count == 0 || count > MOST_IN_BATCH_3D {
            return None;
        }
        let mut bytes = 0u64;
        for index in 0..MOST_IN_BATCH_3D {
            if index >= count {
                break;
            }
            let operation = at.wrapping_add(index * OPERATION_BYTES);
            let (src, dst): (u32, u32) = (user(operation)?, user(operation + 40)?);
            if src != POINTER || dst != POINTER {
                return None;
            }
            let [width, height, depth]: [u64; 3] = user(operation + 80)?;
            bytes = bytes.wrapping_add(width.wrapping_mul(height).wrapping_mul(depth));
        }
        let mut copied = Self::with_kind(user(at + 48)?, user(at + 8)?, KIND_DEFAULT, bytes);
        // One row: what lies between rows need not be the buffer's.
        copied.first_bytes = user(at + 80)?;
        Some(copied)
    }

    /// `cudaMemcpy3DPeerParms`: source array at 0, destination array at 72, extent at 144. With an array the width counts
    /// elements.
    #[inline(always)]
    fn from_runtime_peer_3d(at: u64) -> Option<Self> {
        let (src, dst): (u64, u64) = (user(at)?, user(at + 72)?);
        let [width, height, depth]: [u64; 3] = user(at + 144)?;
        let bytes_missing = src != 0 || dst != 0;
        Some(Self {
            dst: Side::ARRAY,
            src: Side::ARRAY,
            first_bytes: 0,
            bytes: if bytes_missing {
                0
            } else {
                width.wrapping_mul(height).wrapping_mul(depth)
            },
            bytes_missing,
        })
    }

    /// `CUDA_MEMCPY2D`: 16 words; source at 0, destination at 56, width at 112, height at 120.
    #[inline(always)]
    fn from_driver_2d(at: u64) -> Option<Self> {
        let words: [u64; 16] = user(at)?;
        Some(Self {
            src: Side::from_driver(words[2], words[3], words[4]),
            dst: Side::from_driver(words[9], words[10], words[11]),
            bytes: words[14].wrapping_mul(words[15]),
            first_bytes: words[14].wrapping_mul(words[15]),
            bytes_missing: false,
        })
    }

    /// `CUDA_MEMCPY3D`: 25 words; source at 0, destination at 88, width, height and depth from 176.
    #[inline(always)]
    fn from_driver_3d(at: u64) -> Option<Self> {
        let words: [u64; 25] = user(at)?;
        Some(Self {
            src: Side::from_driver(words[4], words[5], words[6]),
            dst: Side::from_driver(words[15], words[16], words[17]),
            bytes: words[22].wrapping_mul(words[23]).wrapping_mul(words[24]),
            first_bytes: words[22].wrapping_mul(words[23]).wrapping_mul(words[24]),
            bytes_missing: false,
        })
    }

    /// `cudaMemcpy3DParms`: 20 words; source array at 0 and pointer at 32, destination array at 64 and pointer at 96,
    /// extent at 128, kind at 152. With an array the width counts elements.
    #[inline(always)]
    fn from_runtime_3d(at: u64) -> Option<Self> {
        let words: [u64; 20] = user(at)?;
        let elements = words[16].wrapping_mul(words[17]).wrapping_mul(words[18]);
        let mut copied = Self::with_kind(words[12], words[4], words[19] as u32, elements);
        if words[0] != 0 {
            copied.src.place = place::DEVICE;
            copied.bytes_missing = true;
        }
        if words[8] != 0 {
            copied.dst.place = place::DEVICE;
            copied.bytes_missing = true;
        }
        if copied.bytes_missing {
            copied.bytes = 0;
            copied.first_bytes = 0;
        }
        Some(copied)
    }

    #[inline(always)]
    fn with_kind(dst: u64, src: u64, kind: u32, bytes: u64) -> Self {
        let (src_place, dst_place) = match kind {
            0 => (place::HOST, place::HOST),
            1 => (place::HOST, place::DEVICE),
            2 => (place::DEVICE, place::HOST),
            3 => (place::DEVICE, place::DEVICE),
            KIND_DEFAULT => (place::BY_ADDRESS, place::BY_ADDRESS),
            _ => (place::INVALID, place::INVALID),
        };
        Self {
            dst: Side {
                place: dst_place,
                address: dst,
            },
            src: Side {
                place: src_place,
                address: src,
            },
            bytes,
            first_bytes: bytes,
            bytes_missing: false,
        }
    }
}
