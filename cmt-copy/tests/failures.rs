//! The driver refuses, fails or dies: the copy passes or returns the driver's code, and nobody touches memory that is
//! not the copy's any more.
#![expect(unsafe_code, reason = "the mock driver moves bytes between addresses")]

mod mock;

use std::sync::atomic::Ordering;

use cmt_copy::{DriverError, Engine, Outcome, PassReason, Plan};
use mock::{Context, Kind, Memory};

const STAGED: Outcome = Outcome::Staged(0);
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn small_plan() -> Plan {
    mock::one_row(256 * KIB, 64 * KIB, MIB, 3, 0)
}

/// Both ways on the legacy stream, every byte checked.
fn both_ways(engine: &Engine, context: &Context, bytes: usize, seed: u64) -> (Outcome, Outcome) {
    let mut source = Memory::host(bytes, 1, seed);
    let mut device = Memory::known(context, Kind::Device, bytes, 2, 0);
    let mut back = Memory::host(bytes, 3, 0);
    let (d, s, b) = (device.address(), source.address(), back.address());
    let there = mock::call(engine, mock::HTOD, d, s, bytes, 0);
    if there == STAGED {
        context.legacy.finish();
        assert_eq!(device.wrong(seed), None);
    }
    let and_back = mock::call(engine, mock::DTOH, b, d, bytes, 0);
    if (there, and_back) == (STAGED, STAGED) {
        assert_eq!(back.wrong(seed), None);
    }
    (there, and_back)
}

#[test]
fn a_dma_that_fails_midway_ends_the_copy_with_its_code_and_the_next_one_works() {
    let context = Context::new();
    let engine = mock::engine(small_plan(), 3);
    context.copy_code.store(7, Ordering::Relaxed);
    let bytes = 4_000_000;
    let mut host = Memory::host(bytes, 0, 1);
    let mut device = Memory::known(&context, Kind::Device, bytes, 0, 1);
    let (h, d) = (host.address(), device.address());
    let stream = context.stream();
    for succeed in [0, 1, 2, 5, 9] {
        for (function, dst, src) in [
            (mock::HTOD, d, h),
            (mock::DTOH, h, d),
            (mock::HTOD_ASYNC, d, h),
            (mock::DTOH_ASYNC, h, d),
        ] {
            context.copies_left.store(succeed, Ordering::Relaxed);
            let handle = if function < mock::HTOD_ASYNC {
                0
            } else {
                stream.handle
            };
            let outcome = mock::call(&engine, function, dst, src, bytes, handle);
            assert_eq!(outcome, Outcome::Staged(7), "{function} {succeed}");
            // Whoever still copied now would be seen here and in the guard bytes.
            let (a, b) = (host.data().to_vec(), device.data().to_vec());
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert!(a == host.data() && b == device.data());
            context.copies_left.store(i64::MAX, Ordering::Relaxed);
            assert_eq!(both_ways(&engine, &context, 500_000, 3), (STAGED, STAGED));
        }
    }
    assert_eq!((host.wrong(1), device.wrong(1)), (None, None));
    engine.shutdown();
    assert_eq!(context.pinned_bytes(), 0);
}

#[test]
fn a_kernel_that_faults_ends_waiting_copies_with_its_code() {
    for function in [mock::HTOD, mock::DTOH] {
        let context = Context::new();
        let engine = mock::engine(small_plan(), 3);
        let gate = context.legacy.block();
        context.legacy.push(mock::fault(mock::LAUNCH_FAILED));
        let mut host = Memory::host(2_000_000, 0, 1);
        let mut device = Memory::known(&context, Kind::Device, 2_000_000, 0, 1);
        let (dst, src) = if function == mock::HTOD {
            (device.address(), host.address())
        } else {
            (host.address(), device.address())
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(20));
                gate.open();
            });
            let outcome = mock::call(&engine, function, dst, src, 2_000_000, 0);
            assert_eq!(outcome, Outcome::Staged(mock::LAUNCH_FAILED));
        });
        let again = mock::call(&engine, function, dst, src, 2_000_000, 0);
        assert_eq!(again, Outcome::Staged(mock::LAUNCH_FAILED));
        engine.shutdown();
        assert!(
            engine.pinned_bytes() > 0,
            "what the device may still use is leaked"
        );
    }
}

/// A copy behind a kernel that faults, in a driver whose every function then says so, ends with that code.
#[test]
fn a_context_that_is_broken_ends_waiting_copies_too() {
    for function in [mock::HTOD, mock::DTOH] {
        let context = Context::new();
        context.says_what_broke_it.store(true, Ordering::Relaxed);
        let engine = mock::engine(small_plan(), 3);
        let gate = context.legacy.block();
        context.legacy.push(mock::fault(700));
        let mut host = Memory::host(2_000_000, 0, 1);
        let mut device = Memory::known(&context, Kind::Device, 2_000_000, 0, 1);
        let (dst, src) = if function == mock::HTOD {
            (device.address(), host.address())
        } else {
            (host.address(), device.address())
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(20));
                gate.open();
            });
            let outcome =
                mock::within_30_s(|| mock::call(&engine, function, dst, src, 2_000_000, 0));
            assert_eq!(outcome, Outcome::Staged(700));
        });
    }
}

#[test]
fn an_error_midway_does_not_wait_for_the_stream() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(128 * KIB, 32 * KIB, 4 * MIB, 2, 0), 2);
    let stream = context.stream();
    let gate = stream.block();
    context.copies_left.store(2, Ordering::Relaxed);
    context.copy_code.store(7, Ordering::Relaxed);
    let mut host = Memory::host(2_000_000, 0, 1);
    let mut device = Memory::known(&context, Kind::Device, 2_000_000, 0, 0);
    let (dst, src) = (device.address(), host.address());
    let outcome = mock::within_30_s(|| {
        mock::call(
            &engine,
            mock::HTOD_ASYNC,
            dst,
            src,
            2_000_000,
            stream.handle,
        )
    });
    assert_eq!(outcome, Outcome::Staged(7));
    // The slots in flight keep what they have, whatever comes next.
    context.copies_left.store(i64::MAX, Ordering::Relaxed);
    assert_eq!(both_ways(&engine, &context, 3_000_000, 3), (STAGED, STAGED));
    gate.open();
    stream.finish();
    assert!(device.data()[..128 << 10] == host.data()[..128 << 10]);
    engine.shutdown();
}

#[test]
fn a_slot_that_nothing_announces_keeps_its_lane() {
    let context = Context::new();
    context
        .write_value_code
        .store(mock::NOT_SUPPORTED, Ordering::Relaxed);
    let engine = mock::engine(mock::one_row(256 * KIB, 64 * KIB, MIB, 2, 0), 2);
    assert_eq!(both_ways(&engine, &context, 700_000, 1), (STAGED, STAGED));
    let stream = context.stream();
    let gate = stream.block();
    context.record_code.store(7, Ordering::Relaxed);
    context.synchronize_code.store(7, Ordering::Relaxed);
    let mut host = Memory::host(700_000, 0, 2);
    let mut device = Memory::known(&context, Kind::Device, 700_000, 0, 0);
    let (dst, src) = (device.address(), host.address());
    let outcome = mock::call(&engine, mock::HTOD_ASYNC, dst, src, 700_000, stream.handle);
    assert_eq!(outcome, Outcome::Staged(7));
    context.record_code.store(0, Ordering::Relaxed);
    context.synchronize_code.store(0, Ordering::Relaxed);
    assert_eq!(both_ways(&engine, &context, 700_000, 3), (STAGED, STAGED));
    gate.open();
    stream.finish();
    assert!(device.data()[..64 << 10] == host.data()[..64 << 10]);
    engine.shutdown();
    assert!(engine.pinned_bytes() > 0, "leaked");
}

#[test]
fn an_unclear_answer_about_a_context_does_not_make_it_dead() {
    let context = Context::new();
    let engine = mock::engine(small_plan(), 3);
    assert_eq!(both_ways(&engine, &context, 700_000, 1), (STAGED, STAGED));
    context.id_code.store(700, Ordering::Relaxed);
    engine.shutdown();
    assert_eq!(context.pinned_bytes(), 0, "unpinned, not only unmapped");
}

#[test]
fn memory_that_the_driver_still_knows_is_not_unmapped() {
    let context = Context::new();
    let engine = mock::engine(small_plan(), 3);
    assert_eq!(both_ways(&engine, &context, 700_000, 1), (STAGED, STAGED));
    context.keeps_pins.store(true, Ordering::Relaxed);
    context.destroy();
    engine.shutdown();
    let own = |range: &&mock::Range| range.kind == Kind::Pinned && range.context == context.handle;
    let books = mock::books();
    let (&start, _) = books
        .ranges
        .iter()
        .find(|(_, range)| own(range))
        .expect("still pinned");
    let mut resident = 0;
    // SAFETY: asks about one page, which may be unmapped.
    let result = unsafe { libc::mincore(start as *mut _, 1, &mut resident) };
    assert_eq!(result, 0, "the page is mapped");
}

#[test]
fn helpers_are_scheduled_as_the_program_not_as_the_thread_that_copies_first() {
    let context = Context::new();
    let engine = mock::engine(small_plan(), 3);
    // The thread that copies, first: not the main one.
    // SAFETY: numbers, and a structure of numbers.
    let own = unsafe {
        let parameters: libc::sched_param = std::mem::zeroed();
        assert_eq!(
            libc::sched_setscheduler(0, libc::SCHED_BATCH, &parameters),
            0
        );
        assert_eq!(libc::setpriority(libc::PRIO_PROCESS, 0, 15), 0);
        libc::gettid()
    };
    assert_eq!(both_ways(&engine, &context, 4_000_000, 1), (STAGED, STAGED));
    let spawned_by_us = |tid: &i32| {
        let comm = std::fs::read_to_string(format!("/proc/self/task/{tid}/comm"));
        *tid > own && comm.is_ok_and(|comm| comm.starts_with("cmt-copy-"))
    };
    let named = || -> Vec<i32> {
        let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
        tasks
            .filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok())
            .filter(spawned_by_us)
            .collect()
    };
    // SAFETY: asks for numbers.
    let is_right = |helper: &i32| unsafe {
        let (policy, id) = (libc::sched_getscheduler(*helper), helper.cast_unsigned());
        let may_raise = libc::geteuid() == 0;
        let programs = libc::getpriority(libc::PRIO_PROCESS, std::process::id());
        policy == libc::SCHED_OTHER
            && (!may_raise || libc::getpriority(libc::PRIO_PROCESS, id) == programs)
    };
    // They see to it themselves when they start.
    mock::within_30_s(|| {
        while named().len() < 2 || !named().iter().all(is_right) {
            std::thread::yield_now();
        }
    });
    engine.shutdown();
}

#[test]
fn without_pinned_memory_copies_pass_and_it_is_not_asked_for_again_at_once() {
    let context = Context::new();
    context.register_code.store(2, Ordering::Relaxed);
    let engine = mock::engine(mock::plan(2), 2);
    let none = Outcome::Pass(PassReason::NoPinnedMemory);
    assert_eq!(both_ways(&engine, &context, 1 << 20, 1), (none, none));
    let calls = context.register_calls.load(Ordering::Relaxed);
    assert!(calls > 0);
    assert_eq!(both_ways(&engine, &context, 1 << 20, 1), (none, none));
    assert_eq!(context.register_calls.load(Ordering::Relaxed), calls);
    assert_eq!((engine.pinned_bytes(), engine.helpers()), (0, 0));
    assert_eq!(context.unrelaxed.load(Ordering::Relaxed), 0);
    engine.shutdown();
}

#[test]
fn a_limit_on_pinned_memory_makes_the_ring_smaller() {
    let context = Context::new();
    context.register_most.store(MIB + 4096, Ordering::Relaxed);
    let engine = mock::engine(mock::one_row(4 * MIB, 512 * KIB, 16 * MIB, 3, 1), 3);
    for seed in 0..5 {
        let bytes = 3_000_000 + seed as usize;
        assert_eq!(both_ways(&engine, &context, bytes, seed), (STAGED, STAGED));
    }
    assert_eq!(engine.pinned_bytes(), MIB);
    engine.shutdown();
    assert_eq!(context.pinned_bytes(), 0);
}

#[test]
fn a_ring_grows_with_the_plan_and_every_piece_of_it_is_given_back() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(MIB, 128 * KIB, 4 * MIB, 3, 0), 3);
    assert_eq!(both_ways(&engine, &context, 9_000_001, 1), (STAGED, STAGED));
    assert_eq!(engine.pinned_bytes(), 4 * MIB);
    for (ring, bytes) in [(8, 17_000_001), (32, 40_000_003), (64, 70_000_001)] {
        engine.set_plan(mock::one_row(3 * MIB, 128 * KIB, ring * MIB, 3, 0));
        assert_eq!(both_ways(&engine, &context, bytes, ring), (STAGED, STAGED));
        assert_eq!(engine.pinned_bytes(), ring * MIB);
    }
    engine.shutdown();
    assert_eq!((engine.pinned_bytes(), context.pinned_bytes()), (0, 0));
}

#[test]
fn where_registering_is_not_supported_copies_pass() {
    let context = Context::new();
    context
        .register_code
        .store(mock::NOT_SUPPORTED, Ordering::Relaxed);
    let engine = mock::engine(small_plan(), 3);
    let none = Outcome::Pass(PassReason::NoPinnedMemory);
    assert_eq!(both_ways(&engine, &context, 3_000_001, 1), (none, none));
    assert_eq!(engine.pinned_bytes(), 0);
}

#[test]
fn without_completion_words_events_serve_and_without_events_the_stream_is_waited_for() {
    for event_code in [0, 2] {
        let context = Context::new();
        context
            .write_value_code
            .store(mock::NOT_SUPPORTED, Ordering::Relaxed);
        context.event_code.store(event_code, Ordering::Relaxed);
        let engine = mock::engine(mock::one_row(128 * KIB, 16 * KIB, 16 * MIB, 3, 1), 3);
        let events_before = mock::books().events.len();
        for seed in 0..4 {
            let outcomes = both_ways(&engine, &context, 6_000_001, seed);
            assert_eq!(outcomes, (STAGED, STAGED));
        }
        // More asynchronous copies than there are events.
        let stream = context.stream();
        let mut device = Memory::known(&context, Kind::Device, 100_000, 0, 0);
        for seed in 0..100 {
            let mut source = Memory::host(100_000, 0, seed);
            let (to, from) = (device.address(), source.address());
            let outcome = mock::call(&engine, mock::HTOD_ASYNC, to, from, 100_000, stream.handle);
            assert!(
                [STAGED, Outcome::Pass(PassReason::Busy)].contains(&outcome),
                "{outcome:?}"
            );
            mock::fill(source.data(), !seed);
            if outcome == STAGED && seed % 10 == 9 {
                stream.finish();
                assert_eq!(device.wrong(seed), None);
            }
        }
        engine.shutdown();
        assert_eq!(context.pinned_bytes(), 0);
        assert_eq!(context.unrelaxed.load(Ordering::Relaxed), 0);
        // Other tests of this program may have events of their own, but none of them is left.
        assert!(mock::books().events.len() <= events_before + 32);
    }
}

#[test]
fn completion_words_that_cease_midway_do_not_make_slots_look_complete() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(256 * KIB, 64 * KIB, MIB, 2, 0), 2);
    let stream = context.stream();
    let gate = stream.block();
    context
        .write_value_code
        .store(mock::NOT_SUPPORTED, Ordering::Relaxed);
    context.writes_left.store(4, Ordering::Relaxed);
    let bytes = 700_000;
    let mut targets: Vec<_> = (0..10)
        .map(|_| Memory::known(&context, Kind::Device, bytes, 0, 0))
        .collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            gate.open();
        });
        for (target, seed) in targets.iter_mut().zip(0..) {
            let mut source = Memory::host(bytes, 0, seed);
            let (to, from) = (target.address(), source.address());
            let outcome = mock::call(&engine, mock::HTOD_ASYNC, to, from, bytes, stream.handle);
            assert_eq!(outcome, STAGED);
            mock::fill(source.data(), !seed);
        }
    });
    stream.finish();
    for (target, seed) in targets.iter().zip(0..) {
        assert_eq!(target.wrong(seed), None, "{seed}");
    }
    engine.shutdown();
}

#[test]
fn a_completion_word_that_never_comes_is_not_waited_for_once_the_stream_is_idle() {
    let context = Context::new();
    let engine = mock::engine(small_plan(), 2);
    context.drop_writes.store(true, Ordering::Relaxed);
    assert_eq!(both_ways(&engine, &context, 800_000, 1), (STAGED, STAGED));
    context.drop_writes.store(false, Ordering::Relaxed);
    assert_eq!(both_ways(&engine, &context, 800_000, 2), (STAGED, STAGED));
    engine.shutdown();
    assert_eq!(context.pinned_bytes(), 0);
}

#[test]
fn a_driver_without_what_staging_needs_is_refused_by_name() {
    let (originals, mut driver) = mock::table();
    driver[cmt_common::api::DriverFn::MemHostRegister as usize] = 0;
    // SAFETY: the mock's functions, or 0.
    let error = unsafe { cmt_copy::Driver::new(&originals, &driver) }.err();
    assert_eq!(
        error,
        Some(DriverError::Missing {
            name: "cuMemHostRegister_v2"
        })
    );
}

/// Run by the test below in a process of its own: `exit` while copies run on other threads.
#[test]
fn exit_in_the_middle() {
    if std::env::var_os("EXIT_IN_THE_MIDDLE").is_none() {
        return;
    }
    let context = Context::new();
    let engine: &Engine = Box::leak(Box::new(mock::engine(small_plan(), 3)));
    for thread in 0..3 {
        let context = std::sync::Arc::clone(&context);
        std::thread::spawn(move || {
            context.make_current();
            loop {
                both_ways(engine, &context, 2_000_000, thread);
            }
        });
    }
    while context.dma_calls.load(Ordering::Relaxed) < 50 {
        std::thread::yield_now();
    }
    std::process::exit(42);
}

#[test]
fn exit_on_another_thread_is_neither_held_up_nor_loud() {
    let program = std::env::current_exe().expect("this test's program");
    for _ in 0..10 {
        let output = std::process::Command::new(&program)
            .args(["--exact", "exit_in_the_middle", "--nocapture"])
            .env("EXIT_IN_THE_MIDDLE", "1")
            .output()
            .expect("runs");
        assert_eq!(output.status.code(), Some(42));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}
