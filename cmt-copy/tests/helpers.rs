//! When a download wakes helpers that sleep. One test, since it counts what all helpers of the process do.
#![expect(unsafe_code, reason = "the mock driver moves bytes between addresses")]

mod mock;

use std::fs;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use cmt_copy::Outcome;
use mock::{Context, Kind, Memory, within_30_s};

/// One slice, so that nothing is offered before all is there.
const BYTES: usize = 128 << 10;

/// How often helpers have gone to sleep.
fn sleeps() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").expect("Linux");
    let of_helper = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let name = status.lines().next()?.strip_prefix("Name:\t")?;
        let count = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        name.starts_with("cmt-copy-")
            .then(|| count.trim().parse::<u64>().ok())?
    };
    tasks.filter_map(|task| of_helper(task.ok()?)).sum()
}

fn rest() {
    thread::sleep(Duration::from_millis(30));
}

#[test]
fn a_download_wakes_helpers_while_its_bytes_are_on_their_way_but_not_behind_a_kernel() {
    let context = Context::new();
    let engine = mock::engine(mock::one_row(1 << 20, BYTES as u64, 4 << 20, 3, 0), 3);
    let stream = context.stream();
    let mut host = Memory::host(BYTES, 3, 1);
    let mut device = Memory::known(&context, Kind::Device, BYTES, 0, 7);
    let (to, from) = (host.address(), device.address());
    // Begins and ends with helpers asleep.
    let beside_a_download = |meanwhile: &mut dyn FnMut()| {
        thread::scope(|scope| {
            let download = scope.spawn(|| {
                context.make_current();
                mock::call(&engine, mock::DTOH_ASYNC, to, from, BYTES, stream.handle)
            });
            meanwhile();
            assert_eq!(download.join().expect("no panic"), Outcome::Staged(0));
        });
        rest();
    };
    within_30_s(|| {
        beside_a_download(&mut || {});
        let gate = stream.block();
        let before = sleeps();
        beside_a_download(&mut || {
            rest();
            assert_eq!(sleeps(), before, "behind a kernel");
            gate.open();
        });
        // Only some dawdle.
        stream.dawdle_us.store(20_000, Ordering::Relaxed);
        let is_woken_early = (0..100).any(|_| {
            let (before, mut is_early) = (sleeps(), false);
            beside_a_download(&mut || {
                while sleeps() == before {
                    thread::sleep(Duration::from_micros(100));
                }
                is_early = !stream.is_idle();
            });
            is_early
        });
        assert!(is_woken_early);
    });
    assert_eq!(host.wrong(7), None);
    engine.shutdown();
}
