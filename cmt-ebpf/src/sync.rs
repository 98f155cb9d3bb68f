//! Probes on waiting functions: an asynchronous copy costs its caller the wait that follows, too.
//!
//! A wait belongs to the last copy that the thread made, if no other copy came in between: with several before one wait,
//! the last bears it for all.

use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::macros::{uprobe, uretprobe};
use aya_ebpf::programs::{ProbeContext, RetProbeContext};

use crate::call::{Arguments, cookie, now_ns};
use crate::maps::{PENDING, count_pair, foreign, record_wait};

/// Entry of every waiting function.
#[uprobe]
pub fn sync_enter(context: ProbeContext) -> u32 {
    let pid_tgid = bpf_get_current_pid_tgid();
    if foreign(pid_tgid) {
        return 0;
    }
    count_pair();
    let Some(pending) = PENDING.get_ptr_mut(pid_tgid) else {
        return 0;
    };
    // SAFETY: only this thread uses this entry; an LRU map may give its room away, which only mixes up one statistic.
    let pending = unsafe { &mut *pending };
    let stream_only = cookie(&context) != 0;
    let waits_for_it =
        !stream_only || Arguments::read(&context).get(0) == Some(pending.stream);
    // The runtime's wait calls the driver's: the outer one began first.
    if waits_for_it && pending.wait_start_ns == 0 {
        pending.wait_start_ns = now_ns();
    }
    0
}

/// Return of every waiting function.
#[uretprobe]
pub fn sync_leave(context: RetProbeContext) -> u32 {
    let now_ns = now_ns();
    let pid_tgid = bpf_get_current_pid_tgid();
    // SAFETY: only this thread uses this entry, and it is copied at once.
    let Some(pending) = (unsafe { PENDING.get(pid_tgid) }).copied() else {
        return 0;
    };
    if pending.wait_start_ns == 0 {
        return 0;
    }
    let _ = PENDING.remove(pid_tgid);
    if context.ret::<u32>() == 0 {
        record_wait(
            &pending.key,
            now_ns.saturating_sub(pending.wait_start_ns),
            now_ns.saturating_sub(pending.start_ns),
        );
    }
    0
}
