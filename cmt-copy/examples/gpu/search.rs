//! Looks for the best row of a plan by size and direction: successive halving over a grid.

use std::time::Instant;

use cmt_common::control::store;
use cmt_copy::{Engine, Plan, PlanRow};

use crate::Gpu;

/// One candidate and its times in seconds: until the device was idle, and of the call alone.
struct Candidate {
    row: PlanRow,
    times: Vec<f64>,
    calls: Vec<f64>,
}

fn grid(bytes: u64, ring: u64, threads: &[u32], to_host: bool) -> Vec<Candidate> {
    let kib = 1u64 << 10;
    let large = bytes >= 64 << 20;
    let mut all = Vec::new();
    for &threads in threads {
        for slot in [64, 128, 256, 512, 1024, 2048, 4096].map(|n| n * kib) {
            for slice in [16, 32, 64, 128, 256].map(|n| n * kib) {
                for store in [store::ORDINARY, store::NON_TEMPORAL] {
                    let makes_sense = slice <= slot
                        && slot / slice <= 32
                        && 2 * slot <= ring
                        && slot <= bytes.max(64 * kib)
                        && slot >= (bytes / 64).min(2048 * kib)
                        && slice >= (bytes / 512).min(128 * kib)
                        && slice * 2 <= bytes.max(64 * kib)
                        && (!large || threads >= 6)
                        && (to_host || store == store::NON_TEMPORAL || large);
                    if makes_sense {
                        let row = PlanRow {
                            up_to_bytes: u64::MAX,
                            slot_bytes: slot,
                            slice_bytes: slice,
                            ring_bytes: ring,
                            threads,
                            store,
                        };
                        all.push(Candidate {
                            row,
                            times: Vec::new(),
                            calls: Vec::new(),
                        });
                    }
                }
            }
        }
    }
    all
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Seconds that a copy took to return, and until the device was idle.
fn time(gpu: &Gpu, copy: impl FnOnce()) -> (f64, f64) {
    gpu.wait();
    let start = Instant::now();
    copy();
    let call = start.elapsed().as_secs_f64();
    gpu.wait();
    (call, start.elapsed().as_secs_f64())
}

/// Prints the best rows for each size and ring, beside stock and pinned; the time until the device is idle decides.
pub fn print(gpu: &Gpu, cpus: u32, largest: usize, buffers: [*mut u8; 2]) {
    let threads: Vec<u32> = [2, 4, 6, 8, 10, 12, 14]
        .into_iter()
        .filter(|&n| n <= cpus)
        .collect();
    for to_host in [false, true] {
        let buffer = buffers[usize::from(to_host)];
        for shift in [14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 26, 28, 30] {
            let bytes = 1usize << shift;
            if bytes > largest {
                break;
            }
            let (mut stock, mut stock_calls, mut pinned) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..((64 << 20) / bytes).clamp(3, 101) {
                let (call, done) = time(gpu, || gpu.stock(to_host, buffer, bytes));
                stock.push(done);
                stock_calls.push(call);
                pinned.push(time(gpu, || gpu.stock(to_host, gpu.pinned, bytes)).1);
            }
            let pinned = median(&mut pinned);
            let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
            println!(
                "search {} {:>8} KiB: stock {:.2} (call {:.2}) pinned {:.2} GB/s",
                if to_host { "DtoH" } else { "HtoD" },
                bytes >> 10,
                rate(median(&mut stock)),
                rate(median(&mut stock_calls)),
                rate(pinned)
            );
            for ring in [4 << 20, 16 << 20, 64 << 20] {
                let engine = gpu.engine(Plan::NONE);
                for candidate in halve(
                    gpu,
                    &engine,
                    grid(bytes as u64, ring, &threads, to_host),
                    to_host,
                    buffer,
                    bytes,
                )
                .iter_mut()
                .take(2)
                {
                    let (row, done) = (candidate.row, median(&mut candidate.times));
                    println!(
                        "    {:>6.2} GB/s {:.2} of pinned, call {:>6.2}: threads {:>2} slot {:>4} slice {:>3} ring {:>2} store {}",
                        rate(done),
                        pinned / done,
                        rate(median(&mut candidate.calls)),
                        row.threads,
                        row.slot_bytes >> 10,
                        row.slice_bytes >> 10,
                        row.ring_bytes >> 20,
                        row.store
                    );
                }
                engine.shutdown();
            }
        }
    }
}

/// Times all, keeps the better quarter, looks longer, and so on; the best come first.
fn halve(
    gpu: &Gpu,
    engine: &Engine,
    mut candidates: Vec<Candidate>,
    to_host: bool,
    buffer: *mut u8,
    bytes: usize,
) -> Vec<Candidate> {
    let mut looks = ((16 << 20) / bytes).clamp(1, 12);
    loop {
        for candidate in &mut candidates {
            let mut plan = Plan::NONE;
            let rows = if to_host {
                &mut plan.dtoh
            } else {
                &mut plan.htod
            };
            rows[0] = candidate.row;
            engine.set_plan(plan);
            // The first wakes the helpers.
            gpu.staged(engine, to_host, false, buffer, bytes);
            for _ in 0..looks {
                let (call, done) = time(gpu, || gpu.staged(engine, to_host, false, buffer, bytes));
                candidate.times.push(done);
                candidate.calls.push(call);
            }
        }
        candidates
            .sort_by_cached_key(|candidate| (median(&mut candidate.times.clone()) * 1e12) as u64);
        if candidates.len() <= 3 {
            return candidates;
        }
        candidates.truncate((candidates.len() / 4).max(3));
        looks = (looks * 3).min(201).min(((4usize << 30) / bytes).max(3));
    }
}
