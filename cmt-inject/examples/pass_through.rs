//! Calls a copy function many times, alone or by way of its replacement below the cut-over. `cargo xtask instructions`
//! counts what that takes.
#![expect(unsafe_code, reason = "calls functions by address")]

use std::hint::black_box;

use cmt_common::api::HOOKED;
use cmt_common::control::Control;
use cmt_inject::route;

type SyncCopy = extern "C" fn(u64, u64, usize) -> i32;

/// Stands for the driver's function.
#[inline(never)]
extern "C" fn original(dst: u64, _src: u64, _bytes: usize) -> i32 {
    black_box(dst) as i32
}

fn main() {
    let mut args = std::env::args().skip(1);
    let (Some(way), Some(calls)) = (args.next(), args.next().and_then(|n| n.parse::<u64>().ok()))
    else {
        eprintln!("usage: pass_through alone|replaced CALLS");
        std::process::exit(2);
    };
    let address = original as *const () as u64;
    let layout = std::alloc::Layout::new::<Control>();
    // SAFETY: a control block is plain numbers, for which zeros are valid; it is never freed.
    let control: &'static Control = unsafe { &*std::alloc::alloc_zeroed(layout).cast() };
    for function in &control.driver {
        function.store(address, std::sync::atomic::Ordering::Relaxed);
    }
    (0..HOOKED).for_each(|index| route::set_original(index, address));
    route::enable(control, cmt_copy::plan::estimate(4)).expect("every function is there");
    let function = match way.as_str() {
        "replaced" => route::replacement(0),
        _ => address,
    };
    // SAFETY: both are functions of this signature.
    let function: SyncCopy = unsafe { std::mem::transmute(function as *const ()) };
    for call in 0..calls {
        black_box(black_box(function)(call, 2, 4096));
    }
    let passed: u64 = control
        .counters
        .passed
        .iter()
        .map(|count| count.load(std::sync::atomic::Ordering::Relaxed))
        .sum();
    assert_eq!(passed, if way == "replaced" { calls } else { 0 });
}
