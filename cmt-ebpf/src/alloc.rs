//! Probes on allocation functions: which memory is pinned, managed or the device's.
//!
//! A range counts from the return of a successful call on. It ends when a release begins, since another thread may get
//! the same addresses before that release returns; a release that fails brings it back.

use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::macros::{uprobe, uretprobe};
use aya_ebpf::programs::{ProbeContext, RetProbeContext};
use cmt_common::event::{ALLOC_ALLOCATE, ALLOC_RELEASE, AllocCookie, Lost};
use cmt_common::range::RangeValue;

use crate::call::{Arguments, cookie, user};
use crate::maps::{ALLOCS, count_pair, foreign, lost, process};
use crate::memory::{forget, remember};

/// Which call: the thread and its stack pointer at the entry.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct AllocFrame {
    pid_tgid: u64,
    sp: u64,
}

/// An allocation or release that has begun.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct AllocCall {
    /// Argument 0: the range's start, or where the function writes it.
    argument: u64,
    /// Size and kind of the range, if the call succeeds; of a release: of what it ends.
    range: RangeValue,
    cookie: u64,
}

/// Entry of every allocation function.
#[uprobe]
pub fn alloc_enter(context: ProbeContext) -> u32 {
    let pid_tgid = bpf_get_current_pid_tgid();
    if foreign(pid_tgid) {
        return 0;
    }
    count_pair();
    let arguments = Arguments::read(&context);
    let cookie = AllocCookie(cookie(&context));
    let argument = arguments.get(0).unwrap_or(0);
    let range = if cookie.effect() == ALLOC_RELEASE {
        match forget(process(cookie.target(), pid_tgid), argument) {
            Some(range) => range,
            None => return 0,
        }
    } else {
        RangeValue {
            bytes: arguments.get(1).unwrap_or(0),
            kind: cookie.kind() as u32,
            _pad: 0,
        }
    };
    let frame = AllocFrame {
        pid_tgid,
        sp: arguments.sp,
    };
    let call = AllocCall {
        argument,
        range,
        cookie: cookie.0,
    };
    if ALLOCS.insert(frame, call, 0).is_err() {
        lost(Lost::RangesFull);
    }
    0
}

/// Return of every allocation function.
#[uretprobe]
pub fn alloc_leave(context: RetProbeContext) -> u32 {
    let pid_tgid = bpf_get_current_pid_tgid();
    // SAFETY: the kernel passes pt_regs to programs of this type.
    let sp = unsafe { (*context.regs).rsp } - 8;
    let frame = AllocFrame { pid_tgid, sp };
    // SAFETY: only this thread uses this key, and the value is copied at once.
    let Some(call) = (unsafe { ALLOCS.get(frame) }).copied() else {
        return 0;
    };
    let _ = ALLOCS.remove(frame);
    let failed = context.ret::<u32>() != 0;
    let cookie = AllocCookie(call.cookie);
    if failed != (cookie.effect() == ALLOC_RELEASE) {
        return 0;
    }
    let start = if cookie.effect() == ALLOC_ALLOCATE {
        match user(call.argument) {
            Some(start) => start,
            None => {
                lost(Lost::Unreadable);
                return 0;
            }
        }
    } else {
        call.argument
    };
    remember(process(cookie.target(), pid_tgid), start, call.range);
    0
}
