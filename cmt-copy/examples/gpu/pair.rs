//! Two GPUs of one process: each alone, and both at once.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cmt_copy::plan::estimate;

use crate::{Gpu, crowd};

/// Prints GB/s of each of two devices, stock and staged, alone and together.
pub fn print(first: &Gpu, cpus: u32, largest: usize) {
    let Some(second) = Gpu::open_if_there(1, largest) else {
        return println!("pair: there is no second device");
    };
    let gpus = [first, &second];
    let engine = &first.engine(estimate(cpus));
    let hosts = [0; 2].map(|_| {
        let host = crowd::map(largest);
        // SAFETY: a mapping of that length.
        unsafe { host.write_bytes(1, largest) };
        host as usize
    });
    for bytes in [16usize << 20, 64 << 20, 256 << 20] {
        for to_host in [false, true] {
            for (staged, name) in [(false, "stock"), (true, "staged")] {
                let run = |which: &[usize]| {
                    let (barrier, stop) = (&Barrier::new(which.len() + 1), &AtomicBool::new(false));
                    std::thread::scope(|scope| {
                        let all: Vec<_> = which
                            .iter()
                            .map(|&index| {
                                let (gpu, host) = (gpus[index], hosts[index]);
                                scope.spawn(move || {
                                    gpu.bind();
                                    barrier.wait();
                                    let (start, mut count) = (Instant::now(), 0u64);
                                    while !stop.load(Ordering::Relaxed) {
                                        if staged {
                                            gpu.maybe_staged(
                                                engine,
                                                to_host,
                                                host as *mut u8,
                                                bytes,
                                                0,
                                            );
                                        } else {
                                            gpu.stock(to_host, host as *mut u8, bytes);
                                        }
                                        count += 1;
                                    }
                                    gpu.wait();
                                    count as f64 * bytes as f64
                                        / start.elapsed().as_secs_f64()
                                        / 1e9
                                })
                            })
                            .collect();
                        barrier.wait();
                        std::thread::sleep(Duration::from_millis(400));
                        stop.store(true, Ordering::Relaxed);
                        all.into_iter()
                            .map(|thread| thread.join().expect("no panic"))
                            .collect::<Vec<f64>>()
                    })
                };
                let (a, b, both) = (run(&[0])[0], run(&[1])[0], run(&[0, 1]));
                println!(
                    "pair {} {:>3} MiB, {name:>6}: alone {a:.2} and {b:.2}, together {:.2} and {:.2} GB/s: {:.2} and {:.2} of alone",
                    if to_host { "DtoH" } else { "HtoD" },
                    bytes >> 20,
                    both[0],
                    both[1],
                    both[0] / a,
                    both[1] / b
                );
            }
        }
    }
    engine.shutdown();
}
