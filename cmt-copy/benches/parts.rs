//! The parts of a copy that need no GPU: moving slices, asking the plan, counting into a histogram.
#![expect(unsafe_code, reason = "copies with the engine's own routines")]

use std::hint::black_box;

use cmt_common::api::{DRIVER_FNS, HOOKED};
use cmt_common::histogram::bucket_of;
use cmt_copy::{Driver, Engine, Store, plan};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// One slice, by method and size: from a source larger than caches into a target that stays in them, as HtoD does it.
fn slices(criterion: &mut Criterion) {
    const SOURCE_BYTES: usize = 64 << 20;
    let source = vec![0x5A; SOURCE_BYTES];
    let mut target = vec![0; 1 << 20];
    let mut group = criterion.benchmark_group("slice");
    for bytes in [16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        group.throughput(Throughput::Bytes(bytes as u64));
        for store in Store::all() {
            let id = BenchmarkId::new(store.name(), bytes);
            let mut at = 0;
            group.bench_function(id, |bencher| {
                bencher.iter(|| {
                    let from = &source[at..at + bytes];
                    let to = &mut target[..bytes];
                    // SAFETY: two slices of one length in different allocations.
                    unsafe { store.copy(to.as_mut_ptr(), from.as_ptr(), bytes) };
                    black_box(to.as_mut_ptr());
                    at = (at + bytes) % SOURCE_BYTES;
                });
            });
        }
    }
    group.finish();
}

/// Stands for every function of the driver.
extern "C" fn unused() -> i32 {
    unreachable!("the plan is asked, and no copy made")
}

/// Finding the row of a copy: the first, and the last.
fn plan_rows(criterion: &mut Criterion) {
    let address = unused as *const () as u64;
    // SAFETY: no function is called, since no copy is made.
    let driver = unsafe { Driver::new(&[address; HOOKED], &[address; DRIVER_FNS.len()]) };
    let engine = Engine::new(driver.expect("all are there"), plan::estimate(16), 16);
    let mut group = criterion.benchmark_group("plan");
    for (name, bytes) in [("first row", 4096), ("last row", 1 << 30)] {
        group.bench_function(name, |bencher| {
            bencher.iter(|| engine.is_staged(black_box(0), black_box(bytes)));
        });
    }
    group.finish();
}

/// What a probe does with a latency.
fn histogram(criterion: &mut Criterion) {
    let mut counts = [0u64; cmt_common::histogram::BUCKETS];
    let mut ns = 1u64;
    criterion.bench_function("histogram", |bencher| {
        bencher.iter(|| {
            // Spread over all octaves, so that no branch is foreseen.
            ns = ns.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            counts[bucket_of(black_box(ns >> (ns >> 58)))] += 1;
        });
    });
    black_box(&counts);
}

criterion_group!(benches, slices, plan_rows, histogram);
criterion_main!(benches);
