//! Every byte of every copy, in all shapes and at once from many threads.
#![expect(unsafe_code, reason = "the mock driver moves bytes between addresses")]

mod mock;

use std::sync::atomic::{AtomicBool, Ordering};

use cmt_copy::{Engine, Memcpy2D, Outcome, PassReason, Plan, Side2D};
use mock::{Context, Kind, Memory};
use proptest::prelude::*;

const STAGED: Outcome = Outcome::Staged(0);
const MIB: u64 = 1 << 20;

/// Copies to the device and back through `stream`, overwriting the source in between, and says what is wrong.
fn round_trip(
    engine: &Engine,
    context: &Context,
    functions: (usize, usize),
    stream: usize,
    bytes: usize,
    offsets: (usize, usize, usize),
    seed: u64,
) -> Result<(), String> {
    let mut source = Memory::host(bytes, offsets.0, seed);
    let mut device = Memory::known(context, Kind::Device, bytes, offsets.1, !seed);
    let mut back = Memory::host(bytes, offsets.2, !seed);
    let (to_device, to_host) = functions;
    let outcome = mock::call(
        engine,
        to_device,
        device.address(),
        source.address(),
        bytes,
        stream,
    );
    // From here on the source is the application's again.
    mock::fill(source.data(), seed ^ 0xFFFF);
    if outcome != STAGED {
        return Err(format!("to the device: {outcome:?}"));
    }
    let outcome = mock::call(
        engine,
        to_host,
        back.address(),
        device.address(),
        bytes,
        stream,
    );
    if outcome != STAGED {
        return Err(format!("to the host: {outcome:?}"));
    }
    for (name, memory) in [("device", &device), ("destination", &back)] {
        if let Some(wrong) = memory.wrong(seed) {
            return Err(format!("{name}: {wrong}"));
        }
    }
    match source.wrong(seed ^ 0xFFFF) {
        Some(wrong) => Err(format!("source: {wrong}")),
        None => Ok(()),
    }
}

fn any_plan() -> impl Strategy<Value = Plan> {
    (14u32..21, 14u32..24, 20u32..25, 1u32..7, 0u32..3).prop_map(
        |(slice, slot, ring, threads, store)| {
            mock::one_row(1 << slot, 1 << slice, 1 << ring, threads, store)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_size_offset_and_plan_moves_every_byte_and_no_other(
        plan in any_plan(),
        sizes in prop::collection::vec((1usize..5_000_000, 0usize..64, 0usize..64, 0usize..64), 1..5),
        kind in 0usize..5,
        seed: u64,
    ) {
        let context = Context::new();
        let engine = mock::engine(plan, 6);
        let (functions, stream) = match kind {
            0 => ((mock::HTOD, mock::DTOH), 0),
            1 => ((mock::HTOD_ASYNC, mock::DTOH_ASYNC), context.stream().handle),
            2 => ((mock::HTOD_ASYNC_PTSZ, mock::DTOH_ASYNC_PTSZ), 0),
            3 => ((mock::ANY, mock::ANY), 0),
            _ => ((mock::ANY_ASYNC, mock::ANY_ASYNC), context.stream().handle),
        };
        for (index, (bytes, a, b, c)) in sizes.into_iter().enumerate() {
            let seed = seed.wrapping_add(index as u64);
            let result = round_trip(&engine, &context, functions, stream, bytes, (a, b, c), seed);
            prop_assert_eq!(result, Ok(()));
        }
        engine.shutdown();
        if [0, 3].contains(&kind) {
            // An asynchronous HtoD that finds its stream stuck may hand its rest to stock; a synchronous one never does.
            prop_assert_eq!(context.stock_copies.load(Ordering::Relaxed), 0);
        }
        prop_assert_eq!(context.pinned_bytes(), 0);
        prop_assert_eq!(context.unrelaxed.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn sixteen_threads_copy_at_once_through_one_engine() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(4), 4);
    std::thread::scope(|scope| {
        for thread in 0..16u64 {
            let (engine, context) = (&engine, &context);
            scope.spawn(move || {
                context.make_current();
                let own = context.stream();
                for round in 0..40u64 {
                    let seed = thread << 32 | round;
                    let bytes = 65_536 + (seed.wrapping_mul(0x9E37_79B9) % 3_000_000) as usize;
                    let functions = (mock::HTOD_ASYNC, mock::DTOH_ASYNC);
                    let offsets = (round as usize % 7, 0, thread as usize);
                    match round_trip(engine, context, functions, own.handle, bytes, offsets, seed) {
                        Ok(()) => {}
                        // More copies than lanes: the original's turn.
                        Err(why) => assert!(why.contains("Pass(Busy)"), "{thread} {round}: {why}"),
                    }
                }
            });
        }
    });
    assert!(engine.helpers() <= 3);
    engine.shutdown();
    assert_eq!((engine.pinned_bytes(), context.pinned_bytes()), (0, 0));
}

#[test]
fn many_threads_share_the_legacy_stream() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(3), 3);
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let (engine, context) = (&engine, &context);
            scope.spawn(move || {
                context.make_current();
                for round in 0..20u64 {
                    let functions = (mock::HTOD, mock::DTOH);
                    let bytes = 200_000 + (thread * 100_003 + round * 7919) as usize;
                    let result = round_trip(engine, context, functions, 0, bytes, (1, 2, 3), round);
                    assert_eq!(result, Ok(()), "{thread} {round}");
                }
            });
        }
    });
    engine.shutdown();
}

#[test]
fn the_plan_changes_while_copies_run() {
    let context = Context::new();
    let plans = [
        mock::one_row(MIB, 64 << 10, 8 * MIB, 4, 1),
        mock::one_row(4 * MIB, 256 << 10, 32 * MIB, 2, 0),
        mock::one_row(128 << 10, 16 << 10, MIB, 3, 2),
        mock::one_row(1, 1, 1, 1, 99),
    ];
    let engine = mock::engine(plans[0], 4);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0.. {
                engine.set_plan(plans[round % plans.len()]);
                std::thread::yield_now();
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let workers: Vec<_> = (0..3u64)
            .map(|thread| {
                let (engine, context) = (&engine, &context);
                scope.spawn(move || {
                    context.make_current();
                    let own = context.stream();
                    for round in 0..40u64 {
                        let bytes = 1 + (round * 131_071) as usize;
                        let functions = (mock::HTOD_ASYNC, mock::DTOH_ASYNC);
                        let seed = thread << 32 | round;
                        let result = round_trip(
                            engine,
                            context,
                            functions,
                            own.handle,
                            bytes,
                            (0, 5, 1),
                            seed,
                        );
                        assert_eq!(result, Ok(()), "{thread} {round}");
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().expect("every copy is right");
        }
        stop.store(true, Ordering::Relaxed);
    });
    engine.shutdown();
}

#[test]
fn nothing_is_started_or_pinned_before_the_first_copy_and_nothing_is_left_after_the_end() {
    let context = Context::new();
    let engine = mock::engine(mock::plan(4), 4);
    assert_eq!(engine.cut_over(mock::HTOD), 65_536);
    assert_eq!(engine.cut_over(usize::MAX), usize::MAX);
    assert_eq!((engine.helpers(), engine.pinned_bytes()), (0, 0));
    let functions = (mock::HTOD, mock::DTOH);
    let result = round_trip(&engine, &context, functions, 0, 3_000_000, (0, 0, 0), 1);
    assert_eq!(result, Ok(()));
    assert_eq!(engine.helpers(), 3);
    assert!(engine.pinned_bytes() >= MIB);
    assert!(named_threads() >= 3);
    // Who shuts down has no context of its own.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            engine.shutdown();
            assert_eq!(mock::CURRENT.get(), 0);
        });
    });
    assert_eq!((engine.helpers(), engine.pinned_bytes()), (0, 0));
    assert_eq!(context.pinned_bytes(), 0);
    let mut device = Memory::known(&context, Kind::Device, 1 << 20, 0, 0);
    let mut host = Memory::host(1 << 20, 0, 0);
    let after = mock::call(
        &engine,
        mock::HTOD,
        device.address(),
        host.address(),
        1 << 20,
        0,
    );
    assert_eq!(after, Outcome::Pass(PassReason::Disabled));
}

/// Threads of this process whose name is that of a helper.
fn named_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("cmt-copy-"))
        .count()
}

/// A rectangle and where it lies.
#[derive(Clone, Copy, Debug)]
struct Shape {
    width: u64,
    height: u64,
    /// Behind each row, and in front of the first: on the host, on the device.
    gaps: [u64; 2],
    offsets: [u64; 2],
}

impl Shape {
    fn pitch(&self, side: usize) -> u64 {
        self.offsets[side] + self.width + self.gaps[side]
    }

    /// Length of the memory that holds it, with a row in front of it and nothing behind the last byte.
    fn extent(&self, side: usize) -> usize {
        (self.pitch(side) * self.height + self.offsets[side] + self.width) as usize
    }

    fn side(&self, side: usize, memory_type: u32, address: u64) -> Side2D {
        Side2D {
            x_bytes: self.offsets[side],
            y: 1,
            memory_type,
            host: if memory_type == 1 { address } else { 0 },
            device: if memory_type == 1 { 0 } else { address },
            array: 0,
            pitch: self.pitch(side),
        }
    }

    /// What a copy from `from` to `to` makes of `to`.
    fn apply(&self, from: (&[u8], usize), to: (&mut [u8], usize)) {
        for row in 1..=self.height {
            let place = |side: usize| (row * self.pitch(side) + self.offsets[side]) as usize;
            let (a, b, width) = (place(from.1), place(to.1), self.width as usize);
            to.0[b..b + width].copy_from_slice(&from.0[a..a + width]);
        }
    }
}

/// Copies a rectangle to the device and back into other memory, and compares every byte of all three.
fn rows_there_and_back(
    engine: &Engine,
    context: &Context,
    (function, stream): (usize, usize),
    shape: Shape,
    unified: bool,
    seed: u64,
) -> Result<(), String> {
    const HOST: usize = 0;
    const DEVICE: usize = 1;
    let mut source = Memory::host(shape.extent(HOST), 3, seed);
    let mut device = Memory::known(context, Kind::Device, shape.extent(DEVICE), 0, !seed);
    let mut back = Memory::host(shape.extent(HOST), 5, seed ^ 0xABC);
    let (mut on_device, mut at_home) = (device.data().to_vec(), back.data().to_vec());
    shape.apply((source.data(), HOST), (&mut on_device, DEVICE));
    shape.apply((&on_device, DEVICE), (&mut at_home, HOST));
    let kinds = if unified { [4, 4] } else { [1, 2] };
    let [host, away, home] = [
        shape.side(HOST, kinds[0], source.address()),
        shape.side(DEVICE, kinds[1], device.address()),
        shape.side(HOST, kinds[0], back.address()),
    ];
    for (src, dst) in [(host, away), (away, home)] {
        let copy = Memcpy2D {
            src,
            dst,
            width_bytes: shape.width,
            height: shape.height,
        };
        // SAFETY: the memory above, which outlives the call.
        let outcome = unsafe { engine.copy_2d(function, &copy, stream) };
        // From here on the source is the application's again.
        mock::fill(source.data(), seed ^ 0xFFFF);
        if outcome == Outcome::Pass(PassReason::BelowCutOver) && shape.height < 3 {
            return Ok(()); // Its rows are longer than a slice.
        }
        if outcome != STAGED {
            return Err(format!("{outcome:?}"));
        }
    }
    if device.data() != on_device {
        return Err("device".to_owned());
    }
    if back.data() != at_home {
        return Err("destination".to_owned());
    }
    match source.wrong(seed ^ 0xFFFF) {
        Some(wrong) => Err(format!("source: {wrong}")),
        None => Ok(()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_rectangle_moves_every_byte_of_its_rows_and_no_other(
        plan in any_plan(),
        width in prop_oneof![16u64..300, 300u64..20_000, 100_000u64..=1 << 20, (4u32..=20).prop_map(|n| 1 << n)],
        bytes in 1u64..4_000_000,
        gaps in prop_oneof![Just([0; 2]), [0u64..2000, 0u64..2000]],
        offsets in prop_oneof![Just([0; 2]), [0u64..70, 0u64..70]],
        kind in 0usize..3,
        unified: bool,
        seed: u64,
    ) {
        let context = Context::new();
        let engine = mock::engine(plan, 6);
        let way = match kind {
            0 => (mock::ROWS, 0),
            1 => (mock::ROWS_ASYNC, context.stream().handle),
            _ => (mock::ROWS_ASYNC_PTSZ, 0),
        };
        let shape = Shape { width, height: (bytes / width).max(1), gaps, offsets };
        let result = rows_there_and_back(&engine, &context, way, shape, unified, seed);
        prop_assert_eq!(result, Ok(()), "{:?}", shape);
        engine.shutdown();
        if kind == 0 {
            prop_assert_eq!(context.stock_copies.load(Ordering::Relaxed), 0);
        }
        prop_assert_eq!(context.pinned_bytes(), 0);
    }
}

#[test]
fn a_rectangle_that_does_not_fit_hands_its_last_rows_to_stock() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(256 << 10, 64 << 10, MIB, 2, 0), 2);
    let stream = context.stream();
    let shape = Shape {
        width: 3000,
        height: 5000,
        gaps: [100, 72],
        offsets: [8, 0],
    };
    let mut source = Memory::host(shape.extent(0), 3, 1);
    let mut device = Memory::known(&context, Kind::Device, shape.extent(1), 0, 2);
    let mut expected = device.data().to_vec();
    shape.apply((source.data(), 0), (&mut expected, 1));
    let copy = Memcpy2D {
        src: shape.side(0, 1, source.address()),
        dst: shape.side(1, 2, device.address()),
        width_bytes: shape.width,
        height: shape.height,
    };
    let gate = stream.block();
    let outcome = mock::within_30_s(|| {
        // SAFETY: the memory above, which outlives the copy.
        unsafe { engine.copy_2d(mock::ROWS_ASYNC, &copy, stream.handle) }
    });
    assert_eq!(outcome, STAGED);
    mock::fill(source.data(), 3);
    let by_stock = context.stock_bytes.load(Ordering::Relaxed);
    assert!(by_stock > 0 && by_stock < shape.width * shape.height);
    gate.open();
    stream.finish();
    assert!(device.data() == expected);
    engine.shutdown();
}

/// 1 host, 2 device, 4 whichever the address is of.
#[test]
fn a_memory_type_that_contradicts_its_address_goes_to_stock() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(256 << 10, 64 << 10, MIB, 2, 0), 2);
    let (width, height) = (4096, 512);
    let mut host = Memory::host((width * height) as usize, 0, 1);
    let mut device = Memory::known(&context, Kind::Device, (width * height) as usize, 0, 2);
    let (host, device) = (host.address(), device.address());
    for (types, from, to) in [
        ((2, 4), host, device),
        ((4, 1), host, device),
        ((1, 4), device, host),
        ((4, 2), device, host),
    ] {
        let copy = Memcpy2D {
            src: Side2D::at(types.0, from, width),
            dst: Side2D::at(types.1, to, width),
            width_bytes: width,
            height,
        };
        // SAFETY: the memory above.
        let outcome = unsafe { engine.copy_2d(mock::ROWS, &copy, 0) };
        assert!(
            matches!(outcome, Outcome::Pass(_)),
            "{types:?}: {outcome:?}"
        );
    }
    engine.shutdown();
}

#[test]
fn long_rows_get_a_larger_ring_than_the_plan_has() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(256 << 10, 64 << 10, MIB, 2, 0), 2);
    let way = (mock::ROWS, 0);
    for width in [600_000, 1 << 20] {
        let shape = Shape {
            width,
            height: 4,
            gaps: [100; 2],
            offsets: [0; 2],
        };
        let result = rows_there_and_back(&engine, &context, way, shape, false, 9);
        assert_eq!(result, Ok(()));
    }
    engine.shutdown();
}

fn odd_number() -> impl Strategy<Value = u64> {
    let near = |exponent: u32| {
        (0u64..3).prop_map(move |n| (1u64 << exponent).wrapping_add(n).wrapping_sub(1))
    };
    prop_oneof![
        Just(0),
        Just(u64::MAX),
        0u64..5000,
        (0u32..64).prop_flat_map(near),
        any::<u64>()
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    /// No address among them is the driver's, so that nothing may be staged, whatever the numbers are.
    #[test]
    fn whatever_stands_in_a_rectangle_nothing_panics(
        numbers in prop::collection::vec(odd_number(), 10),
        types in (0u32..7, 0u32..7),
    ) {
        thread_local!(static ENGINE: (std::sync::Arc<Context>, Engine) =
            (Context::new(), mock::engine(mock::one_row(256 << 10, 64 << 10, MIB, 2, 0), 2)));
        let side = |memory_type, of: &[u64]| Side2D {
            x_bytes: of[0],
            y: of[1],
            memory_type,
            host: of[2],
            device: of[2],
            array: 0,
            pitch: of[3],
        };
        let copy = Memcpy2D {
            src: side(types.0, &numbers[..4]),
            dst: side(types.1, &numbers[4..8]),
            width_bytes: numbers[8],
            height: numbers[9],
        };
        // SAFETY: nothing is copied.
        let outcome = ENGINE.with(|(_, engine)| unsafe { engine.copy_2d(mock::ROWS, &copy, 0) });
        prop_assert!(matches!(outcome, Outcome::Pass(_)), "{outcome:?}");
    }
}
