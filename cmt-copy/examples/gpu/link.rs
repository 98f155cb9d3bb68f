//! What the link is left of its speed while CPUs store into memory, and how fast it reads what CPUs have just stored.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cmt_copy::Store;

use crate::Gpu;
use crate::crowd::median;

const DMA_BYTES: usize = 16 << 20;
const RING_BYTES: usize = 64 << 20;
const PIECE_BYTES: usize = 64 << 10;

/// Prints GB/s of pinned HtoD copies: beside threads that copy from `host` to other pinned memory, and of memory that was
/// stored so long ago. Both buffers must be 128 MiB long at least.
pub fn print(gpu: &Gpu, host: *mut u8) {
    let dma = |from: *mut u8| {
        let start = Instant::now();
        gpu.stock(false, from, DMA_BYTES);
        gpu.wait();
        DMA_BYTES as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    let rate = |times: usize, from: *mut u8| {
        median(&mut (0..times).map(|_| dma(from)).collect::<Vec<f64>>())
    };
    println!("link alone: {:.1} GB/s", rate(31, gpu.pinned));
    let (from, ring) = (host as usize, gpu.pinned as usize + RING_BYTES);
    for store in Store::all() {
        for threads in [2usize, 4, 6, 8, 12] {
            let (stop, moved) = (&AtomicBool::new(false), &AtomicU64::new(0));
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    scope.spawn(move || {
                        let mut at = thread * PIECE_BYTES;
                        while !stop.load(Ordering::Relaxed) {
                            let place = at % RING_BYTES;
                            let (to, from) =
                                ((ring + place) as *mut u8, (from + place) as *const u8);
                            // SAFETY: within both buffers; what they hold does not matter.
                            unsafe { store.copy(to, from, PIECE_BYTES) };
                            moved.fetch_add(PIECE_BYTES as u64, Ordering::Relaxed);
                            at += threads * PIECE_BYTES;
                        }
                    });
                }
                std::thread::sleep(Duration::from_millis(5));
                let (before, start) = (moved.load(Ordering::Relaxed), Instant::now());
                let link = rate(31, gpu.pinned);
                let bytes = moved.load(Ordering::Relaxed) - before;
                let cpus = bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
                println!(
                    "link beside {threads:>2} threads, {:>9}: {link:.1} GB/s while they copy {cpus:.1} GB/s",
                    store.name()
                );
                stop.store(true, Ordering::Relaxed);
            });
        }
    }
    for store in Store::all() {
        for threads in [1usize, 6] {
            let part = DMA_BYTES / threads / 64 * 64;
            let by_age = [0u64, 100, 1000].map(|age| {
                let mut rates: Vec<f64> = (0..15)
                    .map(|round| {
                        let place = round % (RING_BYTES / DMA_BYTES) * DMA_BYTES;
                        std::thread::scope(|scope| {
                            for at in (0..threads).map(|thread| place + thread * part) {
                                // SAFETY: within both buffers; what they hold does not matter.
                                scope.spawn(move || unsafe {
                                    store.copy(
                                        (ring + at) as *mut u8,
                                        (from + at) as *const u8,
                                        part,
                                    );
                                });
                            }
                        });
                        let stored = Instant::now();
                        while stored.elapsed() < Duration::from_micros(age) {
                            std::hint::spin_loop();
                        }
                        dma((ring + place) as *mut u8)
                    })
                    .collect();
                median(&mut rates)
            });
            println!(
                "link of what {threads} threads stored, {:>9}: at once {:.1}, after 0.1 ms {:.1}, after 1 ms {:.1} GB/s",
                store.name(),
                by_age[0],
                by_age[1],
                by_age[2]
            );
        }
    }
}
