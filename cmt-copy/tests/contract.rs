//! What a caller may rely on: never blocked longer than by stock, and whatever is unclear handed back untouched.
#![expect(unsafe_code, reason = "the mock driver moves bytes between addresses")]

mod mock;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cmt_copy::{Engine, Outcome, PassReason};
use mock::{Context, Kind, Memory, within_30_s};

const STAGED: Outcome = Outcome::Staged(0);
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn passed(reason: PassReason) -> Outcome {
    Outcome::Pass(reason)
}

/// An asynchronous HtoD whose source is overwritten as soon as it returns.
fn upload(engine: &Engine, device: &mut Memory, bytes: usize, stream: usize, seed: u64) -> Outcome {
    let mut source = Memory::host(bytes, 3, seed);
    let (to, from) = (device.address(), source.address());
    let outcome = mock::call(engine, mock::HTOD_ASYNC, to, from, bytes, stream);
    mock::fill(source.data(), !seed);
    outcome
}

fn device(context: &Context, bytes: usize) -> Memory {
    Memory::known(context, Kind::Device, bytes, 0, 0)
}

#[test]
fn an_upload_that_fits_does_not_wait_for_a_busy_stream() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(2), 2);
    let stream = context.stream();
    for bytes in [65_536, 300_001, 1 << 20, 3 << 20] {
        let mut target = device(&context, bytes);
        let gate = stream.block();
        let outcome = within_30_s(|| upload(&engine, &mut target, bytes, stream.handle, 7));
        assert_eq!(outcome, STAGED);
        gate.open();
        stream.finish();
        assert_eq!(target.wrong(7), None, "{bytes}");
    }
    assert_eq!(context.stock_copies.load(Ordering::Relaxed), 0);
    engine.shutdown();
}

#[test]
fn behind_other_work_an_upload_is_not_sent_in_pieces() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(MIB, 64 * KIB, 8 * MIB, 2, 0), 2);
    let stream = context.stream();
    let bytes = MIB as usize;
    let mut target = device(&context, bytes);
    for seed in 0..20 {
        let gate = stream.block();
        let before = context.dma_calls.load(Ordering::Relaxed);
        let outcome = within_30_s(|| upload(&engine, &mut target, bytes, stream.handle, seed));
        assert_eq!(outcome, STAGED);
        let calls = context.dma_calls.load(Ordering::Relaxed) - before;
        assert_eq!(calls, 1, "copy {seed}");
        gate.open();
        stream.finish();
        assert_eq!(target.wrong(seed), None);
    }
    engine.shutdown();
}

#[test]
fn an_upload_that_does_not_fit_hands_its_rest_to_stock_and_does_not_wait() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(256 * KIB, 64 * KIB, MIB, 2, 0), 2);
    let stream = context.stream();
    let bytes = 20_000_001;
    let mut target = device(&context, bytes);
    let gate = stream.block();
    let outcome = within_30_s(|| upload(&engine, &mut target, bytes, stream.handle, 8));
    assert_eq!(outcome, STAGED);
    let by_stock = context.stock_bytes.load(Ordering::Relaxed);
    assert!(by_stock > 0 && by_stock < bytes as u64);
    gate.open();
    stream.finish();
    assert_eq!(target.wrong(8), None);
    engine.shutdown();
}

#[test]
fn an_upload_for_which_stock_waits_too_goes_on_when_the_stream_does() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(MIB, 256 * KIB, 8 * MIB, 2, 0), 2);
    let stream = context.stream();
    stream.dawdle_us.store(0, Ordering::Relaxed);
    let bytes = 64 << 20;
    let mut target = device(&context, bytes);
    let gate = stream.block();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while context.dma_calls.load(Ordering::Relaxed) < 4 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(30));
            gate.open();
        });
        let outcome = within_30_s(|| upload(&engine, &mut target, bytes, stream.handle, 9));
        assert_eq!(outcome, STAGED);
    });
    stream.finish();
    assert_eq!(target.wrong(9), None);
    assert_eq!(context.stock_copies.load(Ordering::Relaxed), 0);
    engine.shutdown();
}

#[test]
fn of_two_uploads_the_second_has_less_in_flight_than_a_ring() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(256 * KIB, 256 * KIB, 64 * MIB, 2, 0), 2);
    let bytes = 80 << 20;
    let in_flight = || context.dma_calls.load(Ordering::Relaxed);
    let settled = |more_than: u32| {
        let mut last = in_flight();
        loop {
            std::thread::sleep(Duration::from_millis(100));
            match in_flight() {
                now if now == last && now > more_than => return now,
                now => last = now,
            }
        }
    };
    let mut streams = [context.stream(), context.stream()].map(|stream| {
        stream.dawdle_us.store(0, Ordering::Relaxed);
        (stream.block(), device(&context, bytes), stream)
    });
    let (engine, context) = (&engine, &context);
    let [alone, both] = within_30_s(|| {
        std::thread::scope(|scope| {
            let mut gates = Vec::new();
            let mut calls = Vec::new();
            for (gate, target, stream) in &mut streams {
                scope.spawn(move || {
                    context.make_current();
                    assert_eq!(upload(engine, target, bytes, stream.handle, 3), STAGED);
                });
                calls.push(settled(calls.last().copied().unwrap_or(0)));
                gates.push(gate);
            }
            gates.into_iter().for_each(|gate| gate.open());
            [calls[0], calls[1]]
        })
    });
    assert!(
        both - alone < alone / 2,
        "{alone} alone, {both} with the second"
    );
    for (_, target, stream) in &streams {
        stream.finish();
        assert_eq!(target.wrong(3), None);
    }
    engine.shutdown();
}

/// Alone it has 64 MiB in flight, of which the last 15 are not announced yet when it may have 16 only.
#[test]
fn an_upload_that_another_joins_goes_on() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(4 * MIB, 64 * KIB, 64 * MIB, 1, 0), 1);
    let streams = [context.stream(), context.stream()];
    for stream in &streams {
        stream.dawdle_us.store(0, Ordering::Relaxed);
    }
    let bytes = 100 << 20;
    let mut targets = [device(&context, bytes), device(&context, bytes)];
    // The ring is as long as it gets.
    let outcome = upload(&engine, &mut targets[0], 1 << 20, streams[0].handle, 0);
    assert_eq!(outcome, STAGED);
    streams[0].finish();
    let gates = streams.each_ref().map(|stream| stream.block());
    let is_over = AtomicBool::new(false);
    let (context, engine) = (&context, &engine);
    let [first, second] = &mut targets;
    let start = |target: &mut Memory, stream: usize| {
        context.make_current();
        assert_eq!(upload(engine, target, bytes, stream, 5), STAGED);
    };
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| start(first, streams[0].handle));
        std::thread::sleep(Duration::from_millis(500));
        scope.spawn(|| start(second, streams[1].handle));
        std::thread::sleep(Duration::from_millis(300));
        // Somebody keeps its stream busy, which never says that all is done, though it gets on.
        scope.spawn(|| {
            let mut queued = std::collections::VecDeque::from([streams[0].block()]);
            while !is_over.load(Ordering::Relaxed) {
                queued.push_back(streams[0].block());
                std::thread::sleep(Duration::from_millis(2));
                queued.pop_front().expect("one is queued").open();
            }
            queued.iter().for_each(|gate| gate.open());
        });
        std::thread::sleep(Duration::from_millis(20));
        gates[0].open();
        within_30_s(|| {
            while !joined.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        is_over.store(true, Ordering::Relaxed);
        gates[1].open();
    });
    for (target, stream) in targets.iter().zip(&streams) {
        stream.finish();
        assert_eq!(target.wrong(5), None);
    }
    engine.shutdown();
}

#[test]
fn a_busy_stream_fills_its_lane_and_holds_up_nobody_else() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(2), 2);
    let (busy, other) = (context.stream(), context.stream());
    let gate = busy.block();
    let bytes = 400_000;
    let mut targets = Vec::new();
    within_30_s(|| {
        for seed in 0..400 {
            let mut target = device(&context, bytes);
            let outcome = upload(&engine, &mut target, bytes, busy.handle, seed);
            if outcome != STAGED {
                assert_eq!(outcome, passed(PassReason::Busy));
                break;
            }
            targets.push(target);
        }
        assert!(targets.len() > 5, "stock would queue these too");
        assert!(targets.len() < 400, "pinned memory has a bound");
        // Refused at once from now on, without trying again.
        for _ in 0..100 {
            let outcome = upload(&engine, &mut device(&context, bytes), bytes, busy.handle, 0);
            assert_eq!(outcome, passed(PassReason::Busy));
        }
        let mut target = device(&context, 5_000_000);
        for seed in 0..10 {
            let outcome = upload(&engine, &mut target, 5_000_000, other.handle, seed);
            assert_eq!(outcome, STAGED);
            other.finish();
            assert_eq!(target.wrong(seed), None);
        }
    });
    assert!(engine.pinned_bytes() <= 36 * MIB, "two lanes");
    gate.open();
    busy.finish();
    for (seed, target) in (0..).zip(&targets) {
        assert_eq!(target.wrong(seed), None, "{seed}");
    }
    let mut target = device(&context, bytes);
    let outcome = upload(&engine, &mut target, bytes, busy.handle, 0);
    assert_eq!(outcome, STAGED, "the stream is free again");
    busy.finish();
    engine.shutdown();
}

#[test]
fn uploads_and_downloads_queue_up_in_order_on_one_stream() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(MIB, 64 * KIB, 8 * MIB, 2, 1), 2);
    let stream = context.stream();
    let mut target = device(&context, 1_500_000);
    for seed in 0..60 {
        let outcome = upload(&engine, &mut target, 1_500_000, stream.handle, seed);
        assert_eq!(outcome, STAGED);
        if seed % 3 == 0 {
            let mut back = Memory::host(1_500_000, 1, !seed);
            let (to, from) = (back.address(), target.address());
            let outcome = mock::call(
                &engine,
                mock::DTOH_ASYNC,
                to,
                from,
                1_500_000,
                stream.handle,
            );
            assert_eq!(outcome, STAGED);
            assert_eq!(back.wrong(seed), None, "{seed}");
        }
    }
    engine.shutdown();
    assert_eq!(context.pinned_bytes(), 0);
}

#[test]
fn a_download_waits_for_the_work_before_it() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(2), 2);
    let stream = context.stream();
    for function in [mock::DTOH_ASYNC, mock::ANY_ASYNC] {
        let gate = stream.block();
        let mut source = device(&context, 700_000);
        let mut target = Memory::host(700_000, 9, 1);
        let (to, from) = (target.address(), source.address());
        let kernel = source.data().as_mut_ptr() as usize;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                // The kernel writes its result, then ends.
                // SAFETY: the copy may read the memory only after the gate is open.
                let data = unsafe { std::slice::from_raw_parts_mut(kernel as *mut u8, 700_000) };
                mock::fill(data, 5);
                gate.open();
            });
            let outcome =
                within_30_s(|| mock::call(&engine, function, to, from, 700_000, stream.handle));
            assert_eq!(outcome, STAGED);
        });
        assert_eq!(target.wrong(5), None);
    }
    engine.shutdown();
}

#[test]
fn a_new_stream_at_an_old_address_does_not_continue_the_old_ones_lane() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(2), 2);
    let old = context.stream();
    let gate = old.block();
    let mut first = device(&context, 1 << 20);
    assert_eq!(upload(&engine, &mut first, 1 << 20, old.handle, 1), STAGED);
    let new = mock::Stream::new();
    mock::books().streams.insert(old.handle, Arc::clone(&new));
    let mut second = device(&context, 1 << 20);
    for seed in 2..40 {
        let outcome = upload(&engine, &mut second, 1 << 20, old.handle, seed);
        assert_eq!(outcome, STAGED);
        new.finish();
        assert_eq!(second.wrong(seed), None);
    }
    gate.open();
    old.finish();
    assert_eq!(first.wrong(1), None);
    engine.shutdown();
}

#[test]
fn a_threads_default_stream_does_not_continue_another_threads_lane() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(2), 2);
    let own = mock::per_thread_stream().expect("a context is current");
    let gate = own.block();
    let mut first = device(&context, 1 << 20);
    let on_default_stream = |target: &mut Memory, seed| {
        let mut source = Memory::host(1 << 20, 3, seed);
        let (to, from) = (target.address(), source.address());
        mock::call(&engine, mock::HTOD_ASYNC_PTSZ, to, from, 1 << 20, 0)
    };
    assert_eq!(on_default_stream(&mut first, 1), STAGED);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            context.make_current();
            let own = mock::per_thread_stream().expect("a context is current");
            let mut second = device(&context, 1 << 20);
            for seed in 2..40 {
                assert_eq!(on_default_stream(&mut second, seed), STAGED);
                own.finish();
                assert_eq!(second.wrong(seed), None);
            }
        });
    });
    // The same stream by its other name.
    let mut third = device(&context, 1 << 20);
    let mut source = Memory::host(1 << 20, 0, 50);
    let (to, from) = (third.address(), source.address());
    let pinned = engine.pinned_bytes();
    let outcome = mock::call(&engine, mock::HTOD_ASYNC, to, from, 1 << 20, 2);
    assert_eq!((outcome, engine.pinned_bytes()), (STAGED, pinned));
    gate.open();
    own.finish();
    assert_eq!((first.wrong(1), third.wrong(50)), (None, None));
    engine.shutdown();
}

#[test]
fn a_long_wait_sleeps_and_disturbs_no_capture() {
    let context = Context::new();
    let mut source = device(&context, 700_000);
    let mut target = Memory::host(700_000, 9, 1);
    let (to, from) = (target.address(), source.address());
    // With completion words, with events, with neither.
    for (write_value_code, event_code) in [(0, 0), (801, 0), (801, 2)] {
        let engine = mock::engine(mock::plan(2), 2);
        let write_code = &context.write_value_code;
        write_code.store(write_value_code, Ordering::Relaxed);
        context.event_code.store(event_code, Ordering::Relaxed);
        let gate = context.legacy.block();
        let before = voluntary_switches();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                gate.open();
            });
            let outcome = within_30_s(|| mock::call(&engine, mock::DTOH, to, from, 700_000, 0));
            assert_eq!(outcome, STAGED);
        });
        assert!(event_code != 0 || voluntary_switches() - before > 20);
        engine.shutdown();
        assert_eq!(context.unrelaxed.load(Ordering::Relaxed), 0);
    }
}

/// How often the calling thread has slept.
fn voluntary_switches() -> i64 {
    // SAFETY: fills a local of the right type.
    unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage.ru_nvcsw
    }
}

#[test]
fn quiet_lanes_of_one_context_make_room_for_another() {
    // With small rings, and with rings that are more than all lanes may have.
    for ring in [4 * MIB, 64 * MIB] {
        let busy = Context::new();
        let engine = mock::engine(mock::one_row(MIB, 64 * KIB, ring, 2, 0), 2);
        let mut target = device(&busy, 1 << 20);
        let streams: Vec<_> = (0..8).map(|_| busy.stream()).collect();
        let gates: Vec<_> = streams.iter().map(|stream| stream.block()).collect();
        for stream in &streams {
            let outcome = upload(&engine, &mut target, 1 << 20, stream.handle, 1);
            assert_eq!(outcome, STAGED);
        }
        let other = Context::new();
        let mut second = device(&other, 1 << 20);
        let outcome = upload(&engine, &mut second, 1 << 20, 0, 2);
        assert_eq!(outcome, passed(PassReason::Busy), "all lanes are in flight");
        gates.iter().for_each(|gate| gate.open());
        streams.iter().for_each(|stream| _ = stream.finish());
        let outcome = upload(&engine, &mut second, 1 << 20, 0, 3);
        assert_eq!(outcome, STAGED, "rings of {ring}");
        assert!(engine.pinned_bytes() <= 256 * MIB);
        assert_eq!(mock::CURRENT.get(), other.handle);
        other.legacy.finish();
        assert_eq!(second.wrong(3), None);
        engine.shutdown();
        assert_eq!((busy.pinned_bytes(), other.pinned_bytes()), (0, 0));
    }
}

#[test]
fn a_capturing_stream_is_left_alone() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(2), 2);
    let stream = context.stream();
    let mut target = device(&context, 1 << 20);
    let mut source = Memory::host(1 << 20, 0, 1);
    let (to, from) = (target.address(), source.address());
    stream.capturing.store(true, Ordering::Relaxed);
    let outcome = mock::call(&engine, mock::HTOD_ASYNC, to, from, 1 << 20, stream.handle);
    assert_eq!(outcome, passed(PassReason::Capturing));
    context.legacy_captures.store(true, Ordering::Relaxed);
    let outcome = mock::call(&engine, mock::HTOD, to, from, 1 << 20, 0);
    assert_eq!(outcome, passed(PassReason::Capturing));
    assert_eq!(engine.pinned_bytes(), 0);
    let per_thread = mock::call(&engine, mock::HTOD_PTDS, to, from, 1 << 20, 0);
    assert_eq!(per_thread, STAGED, "the per-thread stream is not involved");
    engine.shutdown();
}

#[test]
fn copies_that_are_not_between_pageable_and_device_memory_pass() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(2), 2);
    let bytes = 256 << 10;
    let mut host = Memory::host(bytes, 0, 1);
    let mut target = device(&context, bytes);
    let mut pinned = Memory::known(&context, Kind::Pinned, bytes, 0, 1);
    let mut managed = Memory::known(&context, Kind::Managed, bytes, 0, 1);
    let (h, d, p, m) = (
        host.address(),
        target.address(),
        pinned.address(),
        managed.address(),
    );
    let ask = |function, dst, src, bytes| mock::call(&engine, function, dst, src, bytes, 0);
    use PassReason::{BelowCutOver, NotHostToDevice, NotPageable, OutOfRange};
    for (function, dst, src, reason) in [
        (mock::HTOD, d, p, NotPageable),
        (mock::HTOD, d, m, NotPageable),
        (mock::DTOH, p, d, NotPageable),
        (mock::HTOD, m, h, NotHostToDevice),
        (mock::HTOD, h, h, NotHostToDevice),
        (mock::ANY, d, p, NotPageable),
        (mock::ANY, d, d, NotPageable),
        (mock::ANY, h, h, NotHostToDevice),
        (mock::ANY_ASYNC, h, m, NotHostToDevice),
        (mock::HTOD, d + 1, h, OutOfRange),
        (mock::DTOH, h, d + 1, OutOfRange),
        (mock::HTOD, d, 0, OutOfRange),
        (mock::HTOD, d, u64::MAX - 10, OutOfRange),
    ] {
        let outcome = ask(function, dst, src, bytes);
        assert_eq!(outcome, passed(reason), "{function} {dst:x} {src:x}");
    }
    assert_eq!(ask(mock::HTOD, d, h, 65_535), passed(BelowCutOver));
    assert_eq!(ask(mock::HTOD, d, h, 0), passed(BelowCutOver));
    assert_eq!(
        ask(cmt_common::api::HOOKED, d, h, bytes),
        passed(BelowCutOver),
        "not a hooked function"
    );
    // The end of the source lies in registered memory.
    let tail = mock::Range {
        bytes: 4096,
        kind: Kind::Pinned,
        context: context.handle,
    };
    let tail_start = h + bytes as u64 - 4096;
    mock::books().ranges.insert(tail_start, tail);
    assert_eq!(ask(mock::HTOD, d, h, bytes), passed(NotPageable));
    mock::books().ranges.remove(&tail_start);
    mock::CURRENT.set(0);
    assert_eq!(ask(mock::HTOD, d, h, bytes), passed(NotHostToDevice));
    context.make_current();
    assert_eq!((engine.pinned_bytes(), engine.helpers()), (0, 0));
    assert_eq!(ask(mock::HTOD, d, h, bytes), STAGED);
    context.legacy.finish();
    assert_eq!(target.wrong(1), None);
    engine.shutdown();
}

#[test]
fn a_device_that_reads_pageable_memory_itself_is_left_to_stock() {
    let context = Context::new();
    context.host_page_tables.store(1, Ordering::Relaxed);
    let engine = mock::engine(mock::plan(2), 2);
    let mut target = device(&context, 1 << 20);
    for _ in 0..2 {
        let outcome = upload(&engine, &mut target, 1 << 20, 0, 1);
        assert_eq!(outcome, passed(PassReason::Unsupported));
    }
    assert_eq!(engine.pinned_bytes(), 0);
}

#[test]
fn lanes_of_destroyed_contexts_serve_new_ones() {
    let engine = mock::engine(mock::plan(2), 2);
    for seed in 0..20 {
        let context = Context::new();
        let mut target = device(&context, 1 << 20);
        let mut source = Memory::host(1 << 20, 0, seed);
        let (to, from) = (target.address(), source.address());
        let outcome = mock::call(&engine, mock::HTOD, to, from, 1 << 20, 0);
        assert_eq!(outcome, STAGED, "{seed}");
        context.legacy.finish();
        assert_eq!(target.wrong(seed), None);
        context.destroy();
    }
    assert!(engine.pinned_bytes() <= 8 * 16 * MIB);
    mock::CURRENT.set(0);
    engine.shutdown();
    assert_eq!(engine.pinned_bytes(), 0);
}

#[test]
fn the_end_waits_for_uploads_in_flight_and_leaks_what_stays_in_flight() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(2), 2);
    let (slow, stuck) = (context.stream(), context.stream());
    let (slow_gate, stuck_gate) = (slow.block(), stuck.block());
    let (mut first, mut second) = (device(&context, 1 << 20), device(&context, 1 << 20));
    assert_eq!(upload(&engine, &mut first, 1 << 20, slow.handle, 1), STAGED);
    assert_eq!(
        upload(&engine, &mut second, 1 << 20, stuck.handle, 2),
        STAGED
    );
    let before = engine.pinned_bytes();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            slow_gate.open();
        });
        within_30_s(|| engine.shutdown());
    });
    assert_eq!(engine.pinned_bytes(), before / 2);
    assert!(context.pinned_bytes() > 0, "still read by the stuck stream");
    stuck_gate.open();
    stuck.finish();
    slow.finish();
    assert_eq!((first.wrong(1), second.wrong(2)), (None, None));
}

#[test]
fn twice_as_many_copies_as_lanes_at_once_are_staged_or_passed_and_right() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(2), 2);
    let staged = std::sync::atomic::AtomicU32::new(0);
    // On a slow machine some wait for a lane in vain.
    let is_staged = |outcome| {
        assert!(outcome == STAGED || outcome == passed(PassReason::Busy));
        staged.fetch_add(u32::from(outcome == STAGED), Ordering::Relaxed);
        outcome == STAGED
    };
    std::thread::scope(|scope| {
        for thread in 0..16 {
            let (engine, context, is_staged) = (&engine, &context, &is_staged);
            scope.spawn(move || {
                context.make_current();
                let mut target = device(context, 1 << 20);
                let stream = context.stream();
                for round in 0..8 {
                    let mut back = Memory::host(1 << 20, 1, 0);
                    let seed = thread * 100 + round;
                    if !is_staged(upload(engine, &mut target, 1 << 20, 0, seed)) {
                        continue;
                    }
                    context.legacy.finish();
                    let (to, from) = (back.address(), target.address());
                    let handle = stream.handle;
                    if is_staged(mock::call(
                        engine,
                        mock::DTOH_ASYNC,
                        to,
                        from,
                        1 << 20,
                        handle,
                    )) {
                        assert_eq!(back.wrong(seed), None);
                    }
                }
            });
        }
    });
    assert!(staged.load(Ordering::Relaxed) > 16);
    engine.shutdown();
    assert_eq!(context.pinned_bytes(), 0);
}

#[test]
fn nobody_waits_for_copies_that_wait_for_a_busy_stream() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(2), 2);
    let streams: Vec<_> = (0..8).map(|_| context.stream()).collect();
    let gates: Vec<_> = streams.iter().map(|stream| stream.block()).collect();
    std::thread::scope(|scope| {
        for stream in &streams {
            let (engine, context) = (&engine, &context);
            scope.spawn(move || {
                context.make_current();
                let mut source = device(context, 1 << 20);
                let mut back = Memory::host(1 << 20, 0, 0);
                let (to, from) = (back.address(), source.address());
                let outcome =
                    mock::call(engine, mock::DTOH_ASYNC, to, from, 1 << 20, stream.handle);
                assert_eq!(outcome, STAGED);
            });
        }
        std::thread::sleep(Duration::from_millis(100));
        let mut target = device(&context, 64 << 20);
        let outcome = upload(&engine, &mut target, 64 << 20, 0, 1);
        assert_eq!(
            outcome,
            passed(PassReason::Busy),
            "its limit is far longer than this test's"
        );
        gates.iter().for_each(|gate| gate.open());
    });
    engine.shutdown();
}

#[test]
fn a_synchronous_upload_of_any_size_waits_for_the_work_before_it() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(2), 2);
    let legacy = &context.legacy;
    for (round, bytes) in [64 << 10, 300_001, 1 << 20, (1 << 20) + 1, 5 << 20]
        .into_iter()
        .cycle()
        .take(15)
        .enumerate()
    {
        // With completion words, with events, with neither.
        let code = if round < 5 { 0 } else { 801 };
        context.write_value_code.store(code, Ordering::Relaxed);
        context
            .event_code
            .store(if round < 10 { 0 } else { 2 }, Ordering::Relaxed);
        let mut target = device(&context, bytes);
        let mut source = Memory::host(bytes, 1, 4);
        let (to, from) = (target.address(), source.address());
        let gate = legacy.block();
        let is_open = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                is_open.store(true, Ordering::SeqCst);
                gate.open();
            });
            let outcome = within_30_s(|| mock::call(&engine, mock::HTOD, to, from, bytes, 0));
            assert_eq!(outcome, STAGED);
            assert!(is_open.load(Ordering::SeqCst), "{bytes} bytes");
        });
        legacy.finish();
        assert_eq!(target.wrong(4), None, "{bytes}");
    }
    engine.shutdown();
}

#[test]
fn a_synchronous_upload_is_complete_where_the_application_asked_for_that() {
    let (context, other) = (Context::new(), Context::new());
    context.make_current();
    let engine = mock::engine(mock::plan(2), 2);
    let mut in_flight = 0;
    for round in 0..24u64 {
        let bytes = [64 << 10, 1 << 20, 3_000_001][round as usize % 3];
        let mut target = device(if round % 4 == 3 { &other } else { &context }, bytes);
        let mut source = Memory::host(bytes, 1, round);
        let (to, from) = (target.address(), source.address());
        if round % 4 == 1 {
            mock::books().sync_memops.insert(to);
        }
        // CU_CTX_SYNC_MEMOPS; the flag beside it says nothing.
        let flags = if round % 4 == 2 { 0x88 } else { 0x8 };
        context.flags.store(flags, Ordering::Relaxed);
        context.legacy.dawdle_us.store(20_000, Ordering::Relaxed);
        let outcome = within_30_s(|| mock::call(&engine, mock::HTOD, to, from, bytes, 0));
        assert_eq!(outcome, STAGED);
        if round % 4 != 0 {
            assert_eq!(target.wrong(round), None, "{round}");
        } else {
            in_flight += u32::from(!context.legacy.is_idle());
        }
        context.legacy.finish();
        mock::books().sync_memops.remove(&to);
        assert_eq!(target.wrong(round), None);
    }
    assert!(in_flight > 0, "else this shows nothing");
    engine.shutdown();
}
