//! Atomic updates of map values.

use core::intrinsics::{AtomicOrdering::Relaxed, atomic_cxchg, atomic_xadd};

/// Attempts of [`raise`]; each failed one means that another processor has just raised the value.
const RAISE_ATTEMPTS: u32 = 16;

/// Adds `by` to `*value`.
///
/// # Safety
/// `value` points to a map value that is alive.
#[inline(always)]
pub unsafe fn add(value: *mut u64, by: u64) {
    unsafe { atomic_xadd::<u64, u64, { Relaxed }>(value, by) };
}

/// Raises `*value` to `to` where it is lower.
///
/// # Safety
/// `value` points to a map value that is alive.
#[inline(always)]
pub unsafe fn raise(value: *mut u64, to: u64) {
    let mut seen = unsafe { value.read_volatile() };
    for _ in 0..RAISE_ATTEMPTS {
        if seen >= to {
            return;
        }
        let (now, done) = unsafe { atomic_cxchg::<u64, { Relaxed }, { Relaxed }>(value, seen, to) };
        if done {
            return;
        }
        seen = now;
    }
}
