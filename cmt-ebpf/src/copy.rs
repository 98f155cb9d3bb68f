//! Probes on copy functions: what is copied which way, how long it took, and how it ended.

use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::macros::{uprobe, uretprobe};
use aya_ebpf::programs::{ProbeContext, RetProbeContext};
use aya_log_ebpf::debug;
use cmt_common::api::{Direction, MemoryKind};
use cmt_common::event::{
    Call, CopyCookie, CopyKey, DIRECTION_ADDRESSES, DIRECTION_KIND, Lost, SHAPE_DRIVER_2D,
    SHAPE_DRIVER_3D, SHAPE_LINEAR, SHAPE_PITCHED, SHAPE_RUNTIME_3D, phase, place,
};
use cmt_common::histogram::size_class_of;

use crate::call::{Arguments, cookie, encloses, now_ns, user};
use crate::maps::{CALLS, count_pair, foreign, lost, lost_many, phase, process, record};
use crate::memory::{host_kind, kind_of};

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
    let pid = process(cookie.target(), pid_tgid);
    let Some(copied) = Copied::read(cookie, &arguments) else {
        // Counting it under invented figures would be worse.
        let _ = CALLS.remove(pid_tgid);
        lost(Lost::Unreadable);
        return 0;
    };
    let call = Call {
        sp: arguments.sp,
        start_ns: now_ns(),
        bytes: copied.bytes,
        dst: copied.dst.address,
        src: copied.src.address,
        pid,
        function: cookie.function(),
        dst_place: copied.dst.place,
        src_place: copied.src.place,
        bytes_missing: copied.bytes_missing as u32,
        counts: (phase == phase::COUNTING) as u32,
        nested: 0,
        _pad: 0,
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
    let failed = context.ret::<u32>() != 0;
    let (direction, memory) = settle(&call, failed);
    let key = CopyKey {
        pid: call.pid,
        function: call.function,
        direction: direction as u8,
        memory: memory as u8,
        size_class: size_class_of(call.bytes),
        _pad: [0; 7],
    };
    record(
        &key,
        call.bytes,
        now_ns.saturating_sub(call.start_ns),
        failed,
    );
    0
}

/// Direction and host memory kind of a call that ends now.
#[inline(always)]
fn settle(call: &Call, failed: bool) -> (Direction, MemoryKind) {
    let src = side(call.pid, call.src_place, call.src, failed);
    let dst = side(call.pid, call.dst_place, call.dst, failed);
    match (src, dst) {
        (MemoryKind::Unknown, _) | (_, MemoryKind::Unknown) => {
            (Direction::Unknown, MemoryKind::Unknown)
        }
        (MemoryKind::Device, MemoryKind::Device) => (Direction::DtoD, MemoryKind::Unknown),
        (MemoryKind::Device, host) => (Direction::DtoH, host),
        (host, MemoryKind::Device) => (Direction::HtoD, host),
        (host, _) => (Direction::HtoH, host),
    }
}

/// The kind of one side of a copy.
#[inline(always)]
fn side(pid: u32, place: u8, address: u64, failed: bool) -> MemoryKind {
    match place {
        place::DEVICE => MemoryKind::Device,
        place::HOST => host_kind(pid, address),
        place::BY_ADDRESS => kind_of(pid, address, failed),
        _ => MemoryKind::Unknown,
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
        Some(Self::with_kind(
            arguments.get(cookie.dst_arg())?,
            arguments.get(cookie.src_arg())?,
            kind,
            bytes,
        ))
    }

    /// `CUDA_MEMCPY2D`: 16 words; source at 0, destination at 56, width at 112, height at 120.
    #[inline(always)]
    fn from_driver_2d(at: u64) -> Option<Self> {
        let words: [u64; 16] = user(at)?;
        Some(Self {
            src: Side::from_driver(words[2], words[3], words[4]),
            dst: Side::from_driver(words[9], words[10], words[11]),
            bytes: words[14].wrapping_mul(words[15]),
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
            bytes_missing: false,
        }
    }
}
