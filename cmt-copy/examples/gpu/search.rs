//! Looks for the best row of a plan by size and direction: successive halving over a grid.

use std::time::Instant;

use cmt_copy::{Plan, PlanRow};

use crate::Gpu;

/// One candidate and its times in seconds.
struct Candidate {
    row: PlanRow,
    times: Vec<f64>,
}

impl Candidate {
    fn median(&mut self) -> f64 {
        self.times.sort_by(f64::total_cmp);
        self.times[self.times.len() / 2]
    }
}

fn grid(bytes: usize, threads: &[u32]) -> Vec<Candidate> {
    let mut all = Vec::new();
    let kib = 1u64 << 10;
    for &threads in threads {
        for slot in [64, 128, 256, 512, 1024, 2048, 4096] {
            for slice in [16, 32, 64, 128, 256, 512] {
                for ring in [1024, 4096, 16384, 65536] {
                    for store in 0..3 {
                        let small = (bytes as u64) < 8 << 20;
                        let makes_sense = slice <= slot
                            && slot / slice <= 16
                            && 2 * slot <= ring
                            && slot <= (bytes as u64 / kib).max(64)
                            && (slot >= 512 || small)
                            && (slice >= 64 || small)
                            && (ring > 1024 || small)
                            && (ring <= 4096 || !small)
                            && (store != 2 || bytes >= 64 << 20);
                        if makes_sense {
                            let row = PlanRow {
                                up_to_bytes: u64::MAX,
                                slot_bytes: slot * kib,
                                slice_bytes: slice * kib,
                                ring_bytes: ring * kib,
                                threads,
                                store,
                            };
                            all.push(Candidate {
                                row,
                                times: Vec::new(),
                            });
                        }
                    }
                }
            }
        }
    }
    all
}

/// Prints the best rows for each size, beside stock and pinned.
pub fn print(gpu: &Gpu, cpus: u32, largest: usize, buffers: [*mut u8; 2]) {
    let engine = gpu.engine(Plan::NONE);
    let threads: Vec<u32> = [2, 3, 4, 6, 8, 10, 12, 14]
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
            let started = Instant::now();
            let mut candidates = grid(bytes, &threads);
            let all = candidates.len();
            // About as long for every size: few looks at large copies.
            let mut looks = ((8 << 20) / bytes).clamp(1, 16);
            let time = |copy: &mut dyn FnMut()| {
                let start = Instant::now();
                copy();
                start.elapsed().as_secs_f64()
            };
            let (mut stock, mut pinned) = (Vec::new(), Vec::new());
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
                    for look in 0..=looks {
                        let took = time(&mut || gpu.staged(&engine, to_host, false, buffer, bytes));
                        // The first warms the helpers up.
                        if look > 0 {
                            candidate.times.push(took);
                        }
                    }
                }
                for _ in 0..=looks {
                    stock.push(time(&mut || gpu.stock(to_host, buffer, bytes)));
                    pinned.push(time(&mut || gpu.stock(to_host, gpu.pinned, bytes)));
                }
                candidates.sort_by_cached_key(|candidate| {
                    let mut times = candidate.times.clone();
                    times.sort_by(f64::total_cmp);
                    (times[times.len() / 2] * 1e12) as u64
                });
                if candidates.len() <= 6 {
                    break;
                }
                candidates.truncate((candidates.len() / 4).max(6));
                looks = (looks * 3).min(301);
            }
            let median = |times: &mut Vec<f64>| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2]
            };
            let (stock, pinned) = (median(&mut stock), median(&mut pinned));
            let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
            println!(
                "search {} {:>8} KiB: stock {:.2} pinned {:.2} GB/s, {all} rows in {:.1} s",
                if to_host { "DtoH" } else { "HtoD" },
                bytes >> 10,
                rate(stock),
                rate(pinned),
                started.elapsed().as_secs_f64()
            );
            for candidate in candidates.iter_mut().take(4) {
                let seconds = candidate.median();
                let row = candidate.row;
                println!(
                    "    {:>6.2} GB/s {:.2} of pinned: threads {:>2} slot {:>4} slice {:>3} ring {:>5} store {}",
                    rate(seconds),
                    pinned / seconds,
                    row.threads,
                    row.slot_bytes >> 10,
                    row.slice_bytes >> 10,
                    row.ring_bytes >> 10,
                    row.store
                );
            }
        }
    }
    engine.shutdown();
}
