//! What single calls of the driver cost, and what the engine asks before it stages a copy.

use std::ffi::c_void;
use std::time::Instant;

use cmt_copy::{Outcome, PassReason, Plan, PlanRow, Request};

use crate::{DTOH, Gpu, HTOD, symbol};

/// Median nanoseconds of one call, over batches.
fn nanoseconds(mut call: impl FnMut()) -> f64 {
    const BATCH: u32 = 64;
    let mut batches: Vec<f64> = (0..101)
        .map(|_| {
            let start = Instant::now();
            (0..BATCH).for_each(|_| call());
            start.elapsed().as_nanos() as f64 / f64::from(BATCH)
        })
        .collect();
    batches.sort_by(f64::total_cmp);
    batches[batches.len() / 2]
}

/// Prints a line for each call.
pub fn print(gpu: &Gpu, host: *mut u8) {
    let library = gpu.library;
    let say = |what: &str, ns: f64| println!("call {what:40} {ns:>8.0} ns");
    macro_rules! timed {
        ($what:expr, $name:literal $(, $argument:expr => $type:ty)*) => {{
            let address = symbol(library, $name);
            // SAFETY: the types are those that cuda.h gives this function.
            let function = unsafe {
                core::mem::transmute::<u64, unsafe extern "C" fn($($type),*) -> i32>(address)
            };
            // SAFETY: as above; pointers lead to locals that outlive the call.
            say(concat!($name, " ", $what), nanoseconds(|| { unsafe { function($($argument),*) }; }));
        }};
    }
    let (mut handle, mut id, mut number) = (0usize, 0u64, 0i32);
    timed!("", "cuCtxGetCurrent", &raw mut handle => *mut usize);
    timed!("", "cuCtxGetId", handle => usize, &raw mut id => *mut u64);
    timed!("", "cuCtxGetDevice", &raw mut number => *mut i32);
    timed!("", "cuStreamGetId", gpu.stream => usize, &raw mut id => *mut u64);
    timed!("legacy", "cuStreamGetId", 0 => usize, &raw mut id => *mut u64);
    timed!("", "cuStreamIsCapturing", gpu.stream => usize, &raw mut number => *mut i32);
    timed!("", "cuStreamQuery", gpu.stream => usize);
    let mut values = [0u64; 8];
    let mut data: Vec<*mut c_void> = values
        .iter_mut()
        .map(|value| (&raw mut *value).cast())
        .collect();
    let data = data.as_mut_ptr();
    let mut kinds = [2, 8, 9, 11, 12];
    let kinds = kinds.as_mut_ptr();
    timed!("host, type", "cuPointerGetAttributes", 1 => u32, kinds => *mut i32, data => *mut *mut c_void, host as u64 => u64);
    timed!("device, type", "cuPointerGetAttributes", 1 => u32, kinds => *mut i32, data => *mut *mut c_void, gpu.device => u64);
    timed!("device, 5", "cuPointerGetAttributes", 5 => u32, kinds => *mut i32, data => *mut *mut c_void, gpu.device => u64);
    timed!("host, type", "cuPointerGetAttribute", data.cast() => *mut c_void, 2 => i32, host as u64 => u64);
    timed!("device, type", "cuPointerGetAttribute", data.cast() => *mut c_void, 2 => i32, gpu.device => u64);
    timed!("device", "cuMemGetAddressRange_v2", data.cast() => *mut c_void, data.cast() => *mut c_void, gpu.device => u64);
    // Enqueueing, with an idle stream each time.
    for bytes in [64usize << 10, 1 << 20] {
        for (name, to_host) in [
            ("cuMemcpyHtoDAsync_v2", false),
            ("cuMemcpyDtoHAsync_v2", true),
        ] {
            let copy = symbol(library, name);
            let write = symbol(library, "cuStreamWriteValue32_v2");
            let (mut copying, mut writing, mut whole) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..301 {
                let start = Instant::now();
                let (first, second) = if to_host {
                    (gpu.pinned as u64, gpu.device)
                } else {
                    (gpu.device, gpu.pinned as u64)
                };
                // SAFETY: cuda.h's signatures; both ranges are as long as the largest copy.
                let enqueued = unsafe {
                    core::mem::transmute::<u64, unsafe extern "C" fn(u64, u64, usize, usize) -> i32>(
                        copy,
                    )(first, second, bytes, gpu.stream);
                    let enqueued = start.elapsed();
                    core::mem::transmute::<u64, unsafe extern "C" fn(usize, u64, u32, u32) -> i32>(
                        write,
                    )(gpu.stream, gpu.pinned as u64 + (8 << 20), 1, 0);
                    enqueued
                };
                let written = start.elapsed();
                gpu.synchronize();
                copying.push(enqueued.as_nanos() as f64);
                writing.push((written - enqueued).as_nanos() as f64);
                whole.push(start.elapsed().as_nanos() as f64);
            }
            for (what, times) in [
                ("enqueue", &mut copying),
                ("write value", &mut writing),
                ("until done", &mut whole),
            ] {
                times.sort_by(f64::total_cmp);
                say(&format!("{name} {} KiB, {what}", bytes >> 10), times[150]);
            }
        }
    }
    // A plan with a hole: the engine asks everything, then passes.
    let row = |up_to_bytes, threads| PlanRow {
        up_to_bytes,
        slot_bytes: 1 << 20,
        slice_bytes: 1 << 16,
        ring_bytes: 4 << 20,
        threads,
        store: 0,
    };
    let mut plan = Plan::NONE;
    for rows in [&mut plan.htod, &mut plan.dtoh] {
        rows[..3].copy_from_slice(&[row(1000, 2), row(1 << 20, 0), row(u64::MAX, 2)]);
    }
    let engine = gpu.engine(plan);
    for (what, function, dst, src) in [
        (
            "engine: asks and passes, HtoD",
            HTOD,
            gpu.device,
            host as u64,
        ),
        (
            "engine: asks and passes, DtoH",
            DTOH,
            host as u64,
            gpu.device,
        ),
        (
            "engine: asks and passes, pinned HtoD",
            HTOD,
            gpu.device,
            gpu.pinned as u64,
        ),
    ] {
        let request = Request {
            function,
            dst,
            src,
            bytes: 65536,
            stream: 0,
        };
        let ns = nanoseconds(|| {
            // SAFETY: both ranges are as long as the largest copy.
            let outcome = unsafe { engine.copy(&request) };
            assert!(matches!(
                outcome,
                Outcome::Pass(PassReason::BelowCutOver | PassReason::NotPageable)
            ));
        });
        say(what, ns);
    }
    engine.shutdown();
}
