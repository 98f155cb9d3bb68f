//! The payload: what cmt loads into a target.
//!
//! It lives in a foreign process and must never harm it: no output, no signal handlers, no panic that leaves it, and
//! whatever is unclear goes to the original function. It knows nothing of ptrace or BPF; the host patches the code and
//! gives commands through the control block.
#![expect(
    unsafe_code,
    reason = "the entry point takes a raw pointer from the bootstrap"
)]

pub mod hook;
mod launch;
mod name;
mod reserve;
#[doc(hidden)]
pub mod route;
mod service;

use std::sync::atomic::Ordering;

use cmt_common::control::{Control, MAGIC, VERSION};

/// Entry point: starts the control thread. Called by the bootstrap thread, with all signals blocked.
///
/// Returns 0, or 1 if the block is not ours or no thread can be had.
///
/// # Safety
/// `control` points to a [`Control`] that stays mapped until the process ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cmt_payload_main(control: *mut Control) -> u32 {
    let started = std::panic::catch_unwind(|| {
        // This library has its own copy of std, so the hook is ours alone: a panic here must not print.
        std::panic::set_hook(Box::new(|_| {}));
        // SAFETY: the caller vouches for the pointer; nothing but atomics is borrowed through the reference.
        let control: &'static Control = unsafe { &*control };
        if control.magic.load(Ordering::Acquire) != MAGIC
            || control.version.load(Ordering::Acquire) != VERSION
        {
            return false;
        }
        name::change(cmt_payload_main as *const () as u64);
        control
            .entry
            .store(cmt_payload_main as *const () as u64, Ordering::Release);
        service::start(control)
    });
    u32::from(!started.unwrap_or(false))
}
