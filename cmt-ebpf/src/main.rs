//! The BPF programs of cmt: what the kernel does at the start and at the end of every CUDA copy and allocation.
//!
//! One pair of programs serves all copy functions and one pair all allocation functions; the attach cookie tells a
//! program which function it is on (`cmt_common::event`). A third pair is on the functions that wait. Nothing here wakes the host: copies are counted into maps that
//! the host reads when it likes. Whatever cannot be counted is counted as lost.
//!
//! All code is x86-64: argument registers, stack layout and the uretprobe trampoline are those of that architecture.
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![expect(
    internal_features,
    reason = "the BPF target has atomic instructions, but core::sync::atomic does not offer them there"
)]

mod alloc;
mod atomic;
mod call;
mod copy;
mod maps;
mod memory;
mod page;
mod sync;

/// Most kernel helpers are for GPL-compatible programs only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}
