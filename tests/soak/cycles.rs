//! 500 times attach and detach on a program whose eight threads do nothing but malloc and free.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use cmt_tests::{Victim, attach, detach, wait_until_staged};

use crate::figures::{self, Checked};

const CYCLES: usize = 500;
/// By then everything that comes once is there: the payload, its trampolines, arenas of the allocator.
const SETTLED: usize = 50;
/// The victim's own malloc and free move its size by this much.
const NOISE_KIB: u64 = 1024;

const VICTIM: [&str; 8] = [
    "--threads",
    "2",
    "--bytes",
    "256K,4M",
    "--idle-threads",
    "6",
    "--malloc-storm",
    "8",
];

/// What a process holds.
#[derive(Clone, Copy, Debug)]
struct Holdings {
    rss_kib: u64,
    data_kib: u64,
    mappings: usize,
    descriptors: usize,
    threads: usize,
}

impl Holdings {
    #[track_caller]
    fn of(pid: u32) -> Self {
        let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).expect(name);
        let status = read("status");
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|rest| rest.split_ascii_whitespace().next());
            number.and_then(|text| text.parse().ok()).expect("KiB")
        };
        let count = |name: &str| {
            let entries = fs::read_dir(format!("/proc/{pid}/{name}"));
            entries.expect("entries").count()
        };
        Self {
            rss_kib: kib("VmRSS:"),
            data_kib: kib("VmData:"),
            mappings: read("maps").lines().count(),
            descriptors: count("fd"),
            threads: count("task"),
        }
    }

    /// The least of each within a second: the storm and the copies come on top.
    #[track_caller]
    fn least(pid: u32) -> Self {
        let mut least = Self::of(pid);
        for _ in 0..50 {
            thread::sleep(Duration::from_millis(20));
            let now = Self::of(pid);
            least.rss_kib = least.rss_kib.min(now.rss_kib);
            least.data_kib = least.data_kib.min(now.data_kib);
            least.mappings = least.mappings.min(now.mappings);
            least.descriptors = least.descriptors.min(now.descriptors);
            least.threads = least.threads.min(now.threads);
        }
        least
    }
}

/// Runs it and prints its figures.
pub fn run() {
    let mut victim = Victim::start("victim-drv", VICTIM);
    victim.next_line().expect("it copies");
    let code = victim.code("lib");
    let threads = victim.threads().len();
    let (mut attaches, mut detaches) = (Vec::new(), Vec::new());
    let mut settled = None;
    let started = Instant::now();
    for cycle in 1..=CYCLES {
        let start = Instant::now();
        let attached = attach(&victim);
        assert_eq!(attached.code, Some(0), "cycle {cycle}: {attached:#?}");
        attaches.push(start.elapsed());
        if cycle % SETTLED == 1 {
            wait_until_staged(&victim);
        }
        let start = Instant::now();
        detach(&victim);
        detaches.push(start.elapsed());
        assert!(victim.is_alive(), "cycle {cycle}: it has ended");
        assert!(
            victim.code("lib") == code,
            "cycle {cycle}: some code differs"
        );
        if cycle == SETTLED {
            settled = Some(Holdings::least(victim.pid));
        }
    }
    let settled = settled.expect("there are more cycles");
    let last = Holdings::least(victim.pid);
    figures::row(
        "attach/detach cycles under a malloc storm of 8 threads",
        CYCLES,
    );
    figures::row(
        "their time, all in all",
        format!("{:.0} s", started.elapsed().as_secs_f64()),
    );
    figures::row("an attach", figures::times(attaches));
    figures::row("a detach", figures::times(detaches));
    figures::row(
        format!("RSS after cycle {SETTLED} and {CYCLES}"),
        format!("{} and {} KiB", settled.rss_kib, last.rss_kib),
    );
    figures::row(
        format!("VmData after cycle {SETTLED} and {CYCLES}"),
        format!("{} and {} KiB", settled.data_kib, last.data_kib),
    );
    let counts = |one: &Holdings| (one.mappings, one.descriptors, one.threads);
    figures::row(
        format!("mappings, descriptors, threads after cycle {SETTLED} and {CYCLES}"),
        format!("{:?} and {:?}", counts(&settled), counts(&last)),
    );
    assert!(
        last.rss_kib <= settled.rss_kib + NOISE_KIB,
        "{settled:?} {last:?}"
    );
    assert!(
        last.data_kib <= settled.data_kib + NOISE_KIB,
        "{settled:?} {last:?}"
    );
    assert!(
        last.mappings <= settled.mappings + CYCLES / 20,
        "{settled:?} {last:?}"
    );
    assert_eq!(
        last.descriptors, settled.descriptors,
        "{settled:?} {last:?}"
    );
    assert_eq!((last.threads, settled.threads), (threads, threads));
    let account = victim.stop();
    assert_eq!(account["mismatches"], 0, "{account}");
    let mut checked = Checked::default();
    checked.add(&account);
    figures::row("copies meanwhile, every byte right", checked);
}
