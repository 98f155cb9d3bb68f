//! How fast this machine's CPUs move bytes from memory to memory, by method and by number of threads.
#![expect(unsafe_code, reason = "copies with the engine's own routines")]

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cmt_copy::Store;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::mapping::Mapping;
use super::report::Quantiles;

/// Sizes for one core: within most L1 and L2 caches, within L3, beyond.
const SIZES: [usize; 5] = [16 << 10, 256 << 10, 2 << 20, 16 << 20, 128 << 20];
/// All threads together copy so much in a round.
const SCALING_BYTES: usize = 128 << 20;
/// Bytes that one sample copies at least: small blocks are copied several times.
const SAMPLE_BYTES: usize = 1 << 20;
/// One that is not counted, and three.
const LEAST_ROUNDS: usize = 4;

/// Both parts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CpuCopies {
    /// One thread on one CPU, by size.
    pub one_core: Vec<Rate>,
    /// The largest size, by number of threads, each on a CPU of its own.
    pub scaling: Vec<Rate>,
}

/// How fast one way of copying is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Rate {
    /// `memcpy`, `avx512`, …
    pub method: String,
    /// Threads that copied at once.
    pub threads: usize,
    /// Bytes of the block that was copied, all threads together.
    pub bytes: usize,
    /// Rounds timed.
    pub samples: usize,
    /// Copied bytes by the median time, in 1e9 bytes a second.
    pub gbps: f64,
    /// The same by the 90th percentile of the time.
    pub gbps_p10: f64,
    /// The same by the 10th percentile.
    pub gbps_p90: f64,
}

/// How many measurements [`measure`] makes.
pub fn steps(threads: usize) -> u64 {
    (Store::all().len() * (SIZES.len() + counts(threads).len())) as u64
}

/// Measures, calling `go_on` before each step; ends early when it says no.
pub fn measure(
    threads: usize,
    budget: Duration,
    mut go_on: impl FnMut(&str) -> bool,
) -> anyhow::Result<CpuCopies> {
    let mut copies = CpuCopies::default();
    let mut source = Mapping::new(SCALING_BYTES)?;
    let mut target = Mapping::new(SCALING_BYTES)?;
    source.fill(0x5A);
    target.fill(0);
    for store in Store::all() {
        for bytes in SIZES {
            if !go_on(&format!("CPU {}", store.name())) {
                return Ok(copies);
            }
            let rate = rate(store, 1, &source[..bytes], &mut target[..bytes], budget)?;
            copies.one_core.push(rate);
        }
    }
    for store in Store::all() {
        for threads in counts(threads) {
            if !go_on(&format!("CPU {} x{threads}", store.name())) {
                return Ok(copies);
            }
            let rate = rate(store, threads, &source, &mut target, budget)?;
            copies.scaling.push(rate);
        }
    }
    Ok(copies)
}

/// 1, 2, 4 … and `threads`.
fn counts(threads: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1), |count| Some(count * 2));
    let mut counts: Vec<usize> = powers.take_while(|&count| count < threads).collect();
    counts.push(threads.max(1));
    counts
}

/// Copies `source` to `target` until `budget` is used up, and three times at least. Each thread has its part and its CPU.
fn rate(
    store: Store,
    threads: usize,
    source: &[u8],
    target: &mut [u8],
    budget: Duration,
) -> anyhow::Result<Rate> {
    let bytes = source.len();
    let part = bytes.div_ceil(threads);
    let rounds = SAMPLE_BYTES.div_ceil(bytes);
    let cpus = allowed_cpus()?;
    let parts = bytes.div_ceil(part);
    let gate = Barrier::new(parts + 1);
    let done = AtomicBool::new(false);
    let times: Vec<Vec<(Instant, Instant)>> = thread::scope(|scope| {
        let copiers: Vec<_> = source
            .chunks(part)
            .zip(target.chunks_mut(part))
            .enumerate()
            .map(|(index, (from, to))| {
                let (gate, done) = (&gate, &done);
                let cpu = cpus.get(index % cpus.len().max(1)).copied();
                scope.spawn(move || {
                    bind_to(cpu);
                    let mut times = Vec::new();
                    loop {
                        gate.wait();
                        if done.load(Ordering::Relaxed) {
                            return times;
                        }
                        let begun = Instant::now();
                        for _ in 0..rounds {
                            // SAFETY: two slices of one length that do not overlap, since one is borrowed mutably.
                            unsafe { store.copy(to.as_mut_ptr(), from.as_ptr(), from.len()) };
                            std::hint::black_box(to.as_mut_ptr());
                        }
                        times.push((begun, Instant::now()));
                        gate.wait();
                    }
                })
            })
            .collect();
        let started = Instant::now();
        let mut made = 0;
        while made < LEAST_ROUNDS || started.elapsed() < budget {
            gate.wait();
            gate.wait();
            made += 1;
        }
        done.store(true, Ordering::Relaxed);
        gate.wait();
        copiers
            .into_iter()
            .map(|copier| copier.join().expect("copying does not panic"))
            .collect()
    });
    // From the first thread's start to the last one's end. The first round only warms up.
    let times = (1..times[0].len()).map(|round| {
        let begun = times.iter().map(|times| times[round].0).min();
        let ended = times.iter().map(|times| times[round].1).max();
        ended.zip(begun).map_or(0, |(ended, begun)| {
            ended.duration_since(begun).as_nanos() as u64
        })
    });
    let samples = times.len();
    let quantiles = Quantiles::of(times).expect("three at least");
    let gbps = |ns: u64| (bytes * rounds) as f64 / ns.max(1) as f64;
    Ok(Rate {
        method: store.name().to_owned(),
        threads,
        bytes,
        samples,
        gbps: gbps(quantiles.p50),
        gbps_p10: gbps(quantiles.p90),
        gbps_p90: gbps(quantiles.p10),
    })
}

/// Keeps this thread on a CPU. One that cannot be bound copies where the scheduler puts it.
pub fn bind_to(cpu: Option<usize>) {
    let mut set = CpuSet::new();
    if cpu.is_some_and(|cpu| set.set(cpu).is_ok()) {
        let _ = sched_setaffinity(Pid::from_raw(0), &set);
    }
}

fn allowed_cpus() -> nix::Result<Vec<usize>> {
    let set = sched_getaffinity(Pid::from_raw(0))?;
    Ok((0..CpuSet::count())
        .filter(|&cpu| set.is_set(cpu).unwrap_or(false))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_counts_are_powers_of_two_and_all() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(2), [1, 2]);
        assert_eq!(counts(12), [1, 2, 4, 8, 12]);
    }

    #[test]
    fn every_byte_is_copied_by_every_thread_count() {
        let source: Vec<u8> = (0..100_003u32)
            .map(|i| (i.wrapping_mul(0x9E37_79B9) >> 13) as u8)
            .collect();
        for store in Store::all() {
            for threads in [1, 2, 3] {
                let mut target = vec![0; source.len()];
                let rate =
                    rate(store, threads, &source, &mut target, Duration::ZERO).expect("copied");
                assert_eq!(target, source, "{store:?} {threads}");
                assert!(rate.samples >= 3 && rate.gbps > 0.0);
            }
        }
    }
}
