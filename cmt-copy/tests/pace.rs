//! Short copies to the device: those that come one at a time are stock's, those in a row are staged.
#![expect(unsafe_code, reason = "the mock driver moves bytes between addresses")]

mod mock;

use std::thread;
use std::time::Duration;

use cmt_copy::{Engine, Outcome, PassReason};
use mock::{Context, Kind, Memory, within_30_s};

const STAGED: Outcome = Outcome::Staged(0);
const ALONE: Outcome = Outcome::Pass(PassReason::Alone);
const SAMPLED: Outcome = Outcome::Pass(PassReason::Sampled);
const MIB: usize = 1 << 20;

/// Host and device memory of so many bytes, and a guarded engine that would stage all of it.
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
    let outcome = mock::call(engine, function, to, from, bytes, 0);
    match outcome {
        ALONE => cmt_copy::note_alone(),
        SAMPLED => {
            engine.note_stock(false, bytes, Duration::from_millis(1));
        }
        _ => {}
    }
    outcome
}

#[test]
fn in_a_row_the_fifth_is_staged_and_after_a_pause_none() {
    let context = Context::new();
    // By a function that says where it copies to, and by one that leaves it to the addresses.
    for function in [mock::HTOD, mock::ANY] {
        let (engine, mut host, mut device) = rig(&context, MIB);
        let (from, to) = (host.address(), device.address());
        within_30_s(|| {
            context.make_current();
            let mut in_a_row = 0;
            // The scheduler may come between two of them.
            loop {
                match copy(&engine, function, to, from, MIB) {
                    STAGED => break,
                    outcome => assert!([ALONE, SAMPLED].contains(&outcome), "{outcome:?}"),
                }
                in_a_row += 1;
            }
            assert!(in_a_row >= 4, "{in_a_row}");
            thread::sleep(Duration::from_millis(1));
            assert_eq!(copy(&engine, function, to, from, MIB), ALONE);
        });
        assert_eq!(device.wrong(7), None);
        engine.shutdown();
    }
}

#[test]
fn another_threads_copies_are_not_taken_for_ones_own() {
    let context = Context::new();
    let (engine, mut host, mut device) = rig(&context, MIB);
    let (from, to) = (host.address(), device.address());
    for _ in 0..16 {
        thread::scope(|scope| {
            scope.spawn(|| {
                context.make_current();
                assert_eq!(copy(&engine, mock::HTOD, to, from, MIB), ALONE);
            });
        });
    }
    engine.shutdown();
}

#[test]
fn longer_ones_and_those_to_the_host_need_no_pace() {
    let context = Context::new();
    let (engine, mut host, mut device) = rig(&context, 2 * MIB);
    let (host, device) = (host.address(), device.address());
    within_30_s(|| {
        context.make_current();
        for (function, to, from, bytes) in [
            (mock::HTOD, device, host, 2 * MIB),
            (mock::DTOH, host, device, 64 << 10),
            (mock::ANY, host, device, 64 << 10),
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
