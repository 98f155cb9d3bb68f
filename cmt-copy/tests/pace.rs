//! Short copies: those that come one at a time are stock's, those in a row are staged.
#![expect(unsafe_code, reason = "the mock driver moves bytes between addresses")]

mod mock;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use cmt_copy::{Engine, Memcpy2D, Outcome, PassReason, Request, Side2D};
use mock::{Context, Kind, Memory, within_30_s};

const STAGED: Outcome = Outcome::Staged(0);
const ALONE: Outcome = Outcome::Pass(PassReason::Alone);
const SAMPLED: Outcome = Outcome::Pass(PassReason::Sampled);
const MIB: usize = 1 << 20;
/// Downloads of this length need a pace.
const SHORT_DOWN: usize = 64 << 10;

/// A guarded engine that would stage all of it, and host and device memory of so many bytes.
fn rig(context: &Context, bytes: usize) -> (Engine, Memory, Memory) {
    let row = mock::one_row(1 << 20, 64 << 10, 4 << 20, 2, 0);
    (
        mock::engine(row, 2).guarded(),
        Memory::host(bytes, 3, 7),
        Memory::known(context, Kind::Device, bytes, 0, 0),
    )
}

/// As a hook does it.
fn copy(engine: &Engine, function: usize, to: u64, from: u64, bytes: usize) -> Outcome {
    let request = Request {
        function,
        dst: to,
        src: from,
        bytes,
        stream: 0,
    };
    // SAFETY: the tests pass memory of their own that outlives the call.
    let told = unsafe { engine.copy_and_tell(&request) };
    if told.outcome == SAMPLED {
        engine.note_stock(told.to_host, bytes, Duration::from_millis(1));
    }
    if told.outcome != STAGED && told.is_paced {
        cmt_copy::note_paced(told.to_host);
    }
    told.outcome
}

/// Copies until one is staged: the scheduler may come between two of them.
fn copy_in_a_row(engine: &Engine, function: usize, to: u64, from: u64, bytes: usize) {
    while copy(engine, function, to, from, bytes) != STAGED {}
}

#[test]
fn in_a_row_they_are_staged_and_after_a_pause_none_is() {
    let context = Context::new();
    // By functions that say where they copy to, and by one that leaves it to the addresses.
    for (function, bytes, to_host) in [
        (mock::HTOD, MIB, false),
        (mock::ANY, MIB, false),
        (mock::DTOH, SHORT_DOWN, true),
        (mock::ANY, SHORT_DOWN, true),
    ] {
        let (engine, mut host, mut device) = rig(&context, bytes);
        let (mut from, mut to) = (host.address(), device.address());
        if to_host {
            (from, to) = (to, from);
        }
        within_30_s(|| {
            context.make_current();
            assert_eq!(copy(&engine, function, to, from, bytes), ALONE, "the first");
            copy_in_a_row(&engine, function, to, from, bytes);
            thread::sleep(Duration::from_millis(1));
            assert_eq!(copy(&engine, function, to, from, bytes), ALONE);
        });
        context.legacy.finish();
        let (copied, seed) = match to_host {
            true => (&host, 0),
            false => (&device, 7),
        };
        assert_eq!(copied.wrong(seed), None);
        engine.shutdown();
    }
}

#[test]
fn each_direction_has_a_pace_of_its_own() {
    let context = Context::new();
    let (engine, mut host, mut device) = rig(&context, MIB);
    let (host, device) = (host.address(), device.address());
    let download = (mock::DTOH, host, device, SHORT_DOWN);
    let upload = (mock::HTOD, device, host, MIB);
    within_30_s(|| {
        context.make_current();
        for (first, then) in [(download, upload), (upload, download)] {
            copy_in_a_row(&engine, first.0, first.1, first.2, first.3);
            assert_eq!(copy(&engine, then.0, then.1, then.2, then.3), ALONE);
        }
    });
    engine.shutdown();
}

#[test]
fn another_threads_copies_are_not_taken_for_ones_own() {
    const THREADS: usize = 16;
    let context = Context::new();
    let (engine, mut host, mut device) = rig(&context, MIB);
    let (from, to) = (host.address(), device.address());
    let (engine, context, turn) = (&engine, &context, &AtomicUsize::new(0));
    thread::scope(|scope| {
        for number in 0..THREADS {
            scope.spawn(move || {
                context.make_current();
                // One after the other, and none ends before all have had their turn.
                while turn.load(Ordering::SeqCst) < number {
                    thread::yield_now();
                }
                let outcome = copy(engine, mock::HTOD, to, from, MIB);
                turn.fetch_add(1, Ordering::SeqCst);
                while turn.load(Ordering::SeqCst) < THREADS {
                    thread::yield_now();
                }
                assert_eq!(outcome, ALONE, "thread {number}");
            });
        }
    });
    engine.shutdown();
}

/// 300 KiB up and 90 KiB down, with a gap after each row.
#[test]
fn short_rectangles_need_a_pace_too() {
    let context = Context::new();
    let (engine, mut host, mut device) = rig(&context, MIB);
    let (width, pitch) = (3 << 10, 4 << 10);
    let side = |memory_type, address: u64| Side2D {
        memory_type,
        host: address,
        device: address,
        pitch,
        x_bytes: 0,
        y: 0,
        array: 0,
    };
    let (host, device) = (side(1, host.address()), side(2, device.address()));
    within_30_s(|| {
        context.make_current();
        for (src, dst, height) in [(host, device, 100), (device, host, 30)] {
            let copy = Memcpy2D {
                src,
                dst,
                width_bytes: width,
                height,
            };
            for _ in 0..20 {
                thread::sleep(Duration::from_millis(1));
                // SAFETY: both sides are as long as the rectangle.
                assert_eq!(unsafe { engine.copy_2d(mock::ROWS, &copy, 0) }, ALONE);
            }
        }
    });
    engine.shutdown();
}

#[test]
fn longer_ones_need_no_pace() {
    let context = Context::new();
    let (engine, mut host, mut device) = rig(&context, 2 * MIB);
    let (host, device) = (host.address(), device.address());
    within_30_s(|| {
        context.make_current();
        for (function, to, from, bytes) in [
            (mock::HTOD, device, host, 2 * MIB),
            (mock::DTOH, host, device, 128 << 10),
            (mock::ANY, host, device, 128 << 10),
        ] {
            let outcomes = [(); 4].map(|()| {
                thread::sleep(Duration::from_millis(1));
                copy(&engine, function, to, from, bytes)
            });
            assert!(!outcomes.contains(&ALONE), "{outcomes:?}");
            assert!(outcomes.contains(&STAGED), "{outcomes:?}");
        }
    });
    engine.shutdown();
}

#[test]
fn an_engine_without_a_guard_stages_each() {
    let context = Context::new();
    let (_, mut host, mut device) = rig(&context, MIB);
    let engine = mock::engine(mock::one_row(1 << 20, 64 << 10, 4 << 20, 2, 0), 2);
    let (from, to) = (host.address(), device.address());
    for _ in 0..3 {
        assert_eq!(copy(&engine, mock::HTOD, to, from, MIB), STAGED);
    }
    engine.shutdown();
}
