//! Fresh destinations, CPU time, and many threads at once.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use cmt_copy::plan::estimate;

use crate::Gpu;

/// CPU seconds that this process has used.
fn cpu_seconds() -> f64 {
    // SAFETY: fills a local of the right type.
    let time = unsafe {
        let mut time = std::mem::zeroed::<libc::timespec>();
        libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time);
        time
    };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

pub fn map(bytes: usize) -> *mut u8 {
    let (prot, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new mapping.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    start.cast()
}

pub fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Prints everything.
pub fn print(gpu: &Gpu, cpus: u32, largest: usize, buffers: [*mut u8; 2]) {
    let engine = gpu.engine(estimate(cpus));
    for bytes in [16 << 20, 64 << 20, 256 << 20] {
        let mut rates = [(0.0, 0.0); 2];
        for (staged, rate) in rates.iter_mut().enumerate() {
            let (mut seconds, mut cpu) = (Vec::new(), 0.0);
            for _ in 0..7 {
                let fresh = map(bytes);
                let (before, start) = (cpu_seconds(), Instant::now());
                if staged == 1 {
                    gpu.staged(&engine, true, false, fresh, bytes);
                } else {
                    gpu.stock(true, fresh, bytes);
                }
                seconds.push(start.elapsed().as_secs_f64());
                cpu += cpu_seconds() - before;
                // SAFETY: our own mapping.
                unsafe { libc::munmap(fresh.cast(), bytes) };
            }
            *rate = (
                bytes as f64 / median(&mut seconds) / 1e9,
                cpu / 7.0 / bytes as f64 * (1u64 << 30) as f64,
            );
        }
        println!(
            "fresh DtoH {:>4} MiB: stock {:.2} GB/s {:.2} CPU-s/GiB, staged {:.2} GB/s {:.2} CPU-s/GiB, {:.1} times",
            bytes >> 20,
            rates[0].0,
            rates[0].1,
            rates[1].0,
            rates[1].1,
            rates[1].0 / rates[0].0
        );
    }
    for (to_host, name) in [(false, "HtoD"), (true, "DtoH")] {
        for staged in [false, true] {
            let (cpu, start) = (cpu_seconds(), Instant::now());
            for _ in 0..5 {
                let buffer = buffers[usize::from(to_host)];
                if staged {
                    gpu.staged(&engine, to_host, false, buffer, largest);
                } else {
                    gpu.stock(to_host, buffer, largest);
                }
                gpu.wait();
            }
            let gib = 5.0 * largest as f64 / (1u64 << 30) as f64;
            println!(
                "CPU {name} {} MiB, {}: {:.3} CPU-s/GiB at {:.2} GB/s",
                largest >> 20,
                if staged { "staged" } else { "stock" },
                (cpu_seconds() - cpu) / gib,
                gib * 1.073_741_824 / start.elapsed().as_secs_f64()
            );
        }
    }
    let before = cpu_seconds();
    std::thread::sleep(std::time::Duration::from_millis(500));
    println!(
        "CPU in half a second after the last copy: {:.4} s",
        cpu_seconds() - before
    );

    engine.shutdown();
    let engine = gpu.engine(estimate(cpus)).guarded();
    for bytes in [256usize << 10, 1 << 20, 64 << 20] {
        for to_host in [false, true] {
            for threads in [1usize, 2, 4, 8, 16] {
                let mut rates = [0.0; 2];
                let mut fairness = [1.0; 2];
                for (staged, rate) in rates.iter_mut().enumerate() {
                    let (barrier, stop) = (Barrier::new(threads + 1), AtomicBool::new(false));
                    let (engine, barrier, stop) = (&engine, &barrier, &stop);
                    let (mut counts, mut seconds) = (Vec::new(), 0.0);
                    std::thread::scope(|scope| {
                        let all: Vec<_> = (0..threads)
                            .map(|thread| {
                                // Both lie within buffers of `largest` bytes, apart for each thread.
                                let offset = thread * bytes % largest;
                                let host = buffers[usize::from(to_host)] as usize + offset;
                                scope.spawn(move || {
                                    gpu.bind();
                                    barrier.wait();
                                    let mut count = 0u64;
                                    while !stop.load(Ordering::Relaxed) {
                                        if staged == 1 {
                                            gpu.maybe_staged(
                                                engine,
                                                to_host,
                                                host as *mut u8,
                                                bytes,
                                                offset,
                                            );
                                        } else {
                                            gpu.stock_at(to_host, host as *mut u8, bytes, offset);
                                        }
                                        count += 1;
                                    }
                                    count
                                })
                            })
                            .collect();
                        barrier.wait();
                        let start = Instant::now();
                        std::thread::sleep(std::time::Duration::from_millis(if bytes > 1 << 20 {
                            1000
                        } else {
                            300
                        }));
                        stop.store(true, Ordering::Relaxed);
                        counts = all
                            .into_iter()
                            .map(|thread| thread.join().expect("no panic"))
                            .collect();
                        gpu.wait();
                        seconds = start.elapsed().as_secs_f64();
                    });
                    let sum: u64 = counts.iter().sum();
                    *rate = sum as f64 * bytes as f64 / seconds / 1e9;
                    let (least, most) = (counts.iter().min(), counts.iter().max());
                    fairness[staged] =
                        *least.unwrap_or(&0) as f64 / *most.unwrap_or(&1).max(&1) as f64;
                }
                println!(
                    "threads {} {:>5} KiB: {threads:>2} at once: stock {:>6.2} staged {:>6.2} GB/s in all, least/most {:.2} and {:.2}",
                    if to_host { "DtoH" } else { "HtoD" },
                    bytes >> 10,
                    rates[0],
                    rates[1],
                    fairness[0],
                    fairness[1]
                );
            }
        }
    }
    engine.shutdown();
}
