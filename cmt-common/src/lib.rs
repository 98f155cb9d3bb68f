//! Plain data shared by the three places where cmt's code runs: the kernel (BPF), the target (payload) and the host.
//!
//! `no_std`, no allocation, no dependencies: whatever stands here must compile for `bpfel-unknown-none` too.
#![no_std]

pub mod api;
// The BPF side shares no control block, and its target lacks the atomics.
#[cfg(not(target_arch = "bpf"))]
pub mod control;
pub mod event;
pub mod histogram;
pub mod kernel;
pub mod launch;
pub mod range;
