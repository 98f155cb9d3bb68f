//! One call of a probed function: its arguments and its place on the stack.

use aya_ebpf::helpers::{bpf_ktime_get_ns, bpf_probe_read_user};
use aya_ebpf::programs::ProbeContext;
use cmt_common::event::Call;

/// True while the frame of `call` is on the stack above `sp`: what happens at `sp` happens inside the call.
///
/// A frame at or below `sp` has gone (a longjmp, an exception, an exec). One that stands above is alive if its return
/// address still is the kernel's trampoline, which fills the first slot of its own page.
#[inline(always)]
pub fn encloses(call: &Call, sp: u64) -> bool {
    const PAGE_MASK: u64 = 4095;
    if call.sp <= sp {
        return false;
    }
    match user::<u64>(call.sp) {
        Some(return_address) => return_address != 0 && return_address & PAGE_MASK == 0,
        None => false,
    }
}

/// Arguments of a call, read at its entry.
pub struct Arguments {
    registers: [u64; 8],
    /// Stack pointer at the entry.
    pub sp: u64,
}

impl Arguments {
    /// Reads the registers.
    #[inline(always)]
    pub fn read(context: &ProbeContext) -> Self {
        let regs = context.regs;
        // The verifier wants constant offsets into the context: volatile reads keep the compiler from selecting a pointer.
        // SAFETY: the kernel passes pt_regs to programs of this type.
        unsafe {
            Self {
                registers: [
                    (&raw const (*regs).rdi).read_volatile(),
                    (&raw const (*regs).rsi).read_volatile(),
                    (&raw const (*regs).rdx).read_volatile(),
                    (&raw const (*regs).rcx).read_volatile(),
                    (&raw const (*regs).r8).read_volatile(),
                    (&raw const (*regs).r9).read_volatile(),
                    0,
                    0,
                ],
                sp: (&raw const (*regs).rsp).read_volatile(),
            }
        }
    }

    /// Argument `index`: 0 to 5 from registers, higher ones from the stack above the return address.
    #[inline(always)]
    pub fn get(&self, index: u8) -> Option<u64> {
        if index < 6 {
            return Some(self.registers[(index & 7) as usize]);
        }
        user(self.sp + 8 + (index as u64 - 6) * 8)
    }
}

/// The attach cookie of the probe that fired.
#[inline(always)]
pub fn cookie<C: aya_ebpf::EbpfContext>(context: &C) -> u64 {
    // SAFETY: the helper takes the program's own context.
    unsafe { aya_ebpf::helpers::generated::bpf_get_attach_cookie(context.as_ptr()) }
}

/// Reads a value of the target. `None` where the page is not there.
#[inline(always)]
pub fn user<T>(address: u64) -> Option<T> {
    // SAFETY: the helper checks the address; the types read here are integers.
    unsafe { bpf_probe_read_user(address as *const T).ok() }
}

/// CLOCK_MONOTONIC, nanoseconds.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_ktime_get_ns() }
}
