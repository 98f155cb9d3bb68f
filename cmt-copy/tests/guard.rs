//! Which copies the guard compares with stock.
#![expect(unsafe_code, reason = "the mock driver moves bytes between addresses")]

mod mock;

use std::thread;
use std::time::Duration;

use cmt_copy::{Engine, Outcome, PassReason};
use mock::{Context, Kind, Memory, Stream, within_30_s};

const BYTES: usize = 2 << 20;

fn engine() -> Engine {
    mock::engine(mock::one_row(1 << 20, 64 << 10, 4 << 20, 2, 0), 2).guarded()
}

/// How many of so many asynchronous copies to the device went to stock to be timed; each ends before the next begins.
fn sampled(engine: &Engine, context: &Context, stream: &Stream, copies: u32, busy: bool) -> u32 {
    let mut host = Memory::host(BYTES, 3, 1);
    let mut device = Memory::known(context, Kind::Device, BYTES, 0, 0);
    let (to, from) = (device.address(), host.address());
    let mut sampled = 0;
    for _ in 0..copies {
        let gate = busy.then(|| stream.block());
        let outcome = mock::call(engine, mock::HTOD_ASYNC, to, from, BYTES, stream.handle);
        sampled += u32::from(outcome == Outcome::Pass(PassReason::Sampled));
        gate.into_iter().for_each(|gate| gate.open());
        stream.finish();
    }
    sampled
}

#[test]
fn an_asynchronous_upload_is_compared_where_its_stream_is_idle() {
    let context = Context::new();
    let (engine, stream) = (engine(), context.stream());
    let count = |busy| within_30_s(|| sampled(&engine, &context, &stream, 1024, busy));
    assert_eq!(count(true), 0);
    assert!((1..=64).contains(&count(false)));
    engine.shutdown();
}

/// A thread that downloads behind a kernel, for as long as `meanwhile` takes.
fn beside_a_waiting_download<T>(
    engine: &Engine,
    context: &Context,
    meanwhile: impl FnOnce() -> T,
) -> T {
    let busy = context.stream();
    let gate = busy.block();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            context.make_current();
            let mut host = Memory::host(BYTES, 3, 1);
            let mut device = Memory::known(context, Kind::Device, BYTES, 0, 7);
            let (to, from) = (host.address(), device.address());
            let outcome = mock::call(engine, mock::DTOH_ASYNC, to, from, BYTES, busy.handle);
            assert_eq!(outcome, Outcome::Staged(0));
        });
        while engine.pinned_bytes() == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        let result = meanwhile();
        gate.open();
        waiting.join().expect("no panic");
        result
    })
}

#[test]
fn a_download_that_waits_for_its_kernel_keeps_no_other_from_being_compared() {
    let context = Context::new();
    let (engine, stream) = (engine(), context.stream());
    let sampled = beside_a_waiting_download(&engine, &context, || {
        thread::sleep(Duration::from_millis(20));
        within_30_s(|| sampled(&engine, &context, &stream, 1024, false))
    });
    assert!((1..=64).contains(&sampled), "{sampled}");
    engine.shutdown();
}
