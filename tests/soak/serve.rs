//! `cmt serve` for as long as is asked for, while processes come and go: what it holds stays, and what it counts is what they count.
//!
//! `CMT_SOAK_MINUTES` sets the length; without it the run takes three minutes.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use cmt_tests::{Named, Samples, Serve, Victim, account_of, built};
use fastrand::Rng;

use crate::figures;

const MINUTES: &str = "CMT_SOAK_MINUTES";
const DEFAULT_MINUTES: f64 = 3.0;
/// By then everything that comes once is there, among it the probes of as many libraries as it keeps.
const WARM_UP_SHARE: f64 = 0.34;
/// More libraries than it keeps probes on once nobody maps them.
const LIBRARIES: usize = 40;
/// Processes of a crowd, each of which makes one copy each way.
const CROWD: u64 = 200;
/// Counts of one process that stayed would be 2.5 KB; tens of thousands come and go.
const RSS_NOISE_KIB: u64 = 8 * 1024;
/// A library takes some; other programs of the machine may come with a few.
const DESCRIPTOR_NOISE: usize = 32;

/// What victims did is counted within this time.
const PATIENCE: Duration = Duration::from_secs(30);

/// What `cmt serve` holds.
#[derive(Clone, Copy, Debug)]
struct Holdings {
    rss_kib: u64,
    descriptors: usize,
}

impl Holdings {
    #[track_caller]
    fn of(pid: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|rest| rest.split_ascii_whitespace().next());
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors");
        Self {
            rss_kib: kib.and_then(|text| text.parse().ok()).expect("KiB"),
            descriptors: descriptors.count(),
        }
    }
}

/// Workloads whose processes' own accounts are added up.
struct Steady {
    named: Named,
    args: &'static [&'static str],
    own: [u64; 3],
}

/// Runs it and prints its figures.
pub fn run(seed: u64) {
    println!("seed {seed}");
    let mut random = Rng::with_seed(seed);
    let minutes = std::env::var(MINUTES).map_or(DEFAULT_MINUTES, |text| {
        text.parse().expect("CMT_SOAK_MINUTES is a number")
    });
    let length = Duration::from_secs_f64(minutes * 60.0);
    // It makes both libraries known before others start: those then are traced from their first call on.
    let idle = [
        Victim::start("victim-rt", ["--hold"]),
        Victim::start("victim-crowd", ["1"]),
    ];
    // Names of killed processes and crowds come and go; those that are looked at copy in every round.
    let kept = format!("{}s", (length.as_secs() / 4).max(20));
    let serve = Serve::start(
        &[],
        &[
            "--by-pid",
            "--max-workloads",
            "48",
            "--keep-workloads",
            &kept,
        ],
    );
    let mut steady = [
        (
            "so-a",
            "victim-rt",
            &["--bytes", "4K,64", "--threads", "2"][..],
        ),
        ("so-b", "victim-drv", &["--bytes", "16K", "--async"]),
        (
            "so-c",
            "victim-rt",
            &["--bytes", "16K", "--fail-every", "5", "--exact"],
        ),
        ("so-d", "victim-rt", &["--bytes", "64K", "--pinned"]),
    ]
    .map(|(name, victim, args)| Steady {
        named: Named::new(name, victim),
        args,
        own: [0; 3],
    });
    let mut crowds = 0u64;
    let (mut processes, mut killed, mut scrapes) = (0u64, 0u64, 0u64);

    let begun = Instant::now();
    let mut warm = None;
    let mut round = 0;
    while begun.elapsed() < length {
        round += 1;
        // All at once, each some calls.
        let victims: Vec<(usize, Victim)> = steady
            .iter()
            .enumerate()
            .map(|(index, one)| {
                let calls = random.u32(20..400).to_string();
                let args = [one.args, &["--calls", &calls]].concat();
                (index, one.named.start(&args))
            })
            .collect();
        let brief = Named::new(&format!("so-{round}"), "victim-drv");
        let mut doomed = brief.start(&["--bytes", "4K", "--pause-ms", "1"]);
        thread::sleep(Duration::from_millis(random.u64(0..300)));
        doomed.signal(libc::SIGKILL);
        doomed.wait();
        killed += 1;
        for (index, victim) in victims {
            let counted = account_of(&victim.finish());
            let own = &mut steady[index].own;
            *own = std::array::from_fn(|at| own[at] + counted[at]);
        }
        let gathered = Victim::start("victim-crowd", [CROWD.to_string()]);
        gathered.signal(libc::SIGUSR1);
        gathered.finish();
        crowds += 1;
        processes += 5 + CROWD;
        // First more than it keeps probes on.
        let libraries = if round == 1 { LIBRARIES } else { 1 };
        for _ in 0..libraries {
            with_a_library_of_its_own();
            processes += 1;
        }
        serve.scrape();
        serve.scrape_protobuf();
        scrapes += 2;
        if warm.is_none() && begun.elapsed() > length.mul_f64(WARM_UP_SHARE) {
            warm = Some(settled(&serve));
        }
    }
    let took = begun.elapsed();
    let warm = warm.expect("there were more rounds");
    let last = settled(&serve);

    let crowd = |samples: &Samples| {
        let label = "function=\"cuMemcpyHtoA_v2\"";
        samples.sum("cmt_copy_function_calls_total", &[label]) as u64
    };
    // It tells what it found also where that is too little.
    let deadline = Instant::now() + PATIENCE;
    let counted = |samples: &Samples| {
        let of = |one: &Steady| samples.of_workload(&one.named.workload());
        steady.iter().all(|one| of(one) == one.own) && crowd(samples) == CROWD * crowds
    };
    while !counted(&serve.scrape()) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(100));
    }
    let samples = serve.scrape();
    let lost = samples.sum("cmt_lost_total", &[]);
    let calls: u64 = steady.iter().map(|one| one.own[0]).sum();
    let minutes = took.as_secs_f64() / 60.0;
    let former = samples.sum("cmt_copy_calls_total", &["workload=\"former\""]);
    figures::row(
        "cmt serve with processes coming and going",
        format!(
            "{minutes:.1} min, {scrapes} scrapes, {} series",
            samples.0.len()
        ),
    );
    figures::row(
        "processes that came and went",
        format!("{processes}, of which {killed} were killed"),
    );
    figures::row(
        "calls by their own accounts; lost",
        format!("{}; {lost}", calls + 2 * CROWD * crowds),
    );
    figures::row("calls of workloads whose names were given up", former);
    figures::row(
        "its RSS after the warm-up and at the end",
        format!("{} and {} KiB", warm.rss_kib, last.rss_kib),
    );
    figures::row(
        "its descriptors after the warm-up and at the end",
        format!("{} and {}", warm.descriptors, last.descriptors),
    );
    for one in &steady {
        let workload = one.named.workload();
        assert_eq!(samples.of_workload(&workload), one.own, "{workload}");
    }
    assert_eq!(crowd(&samples), CROWD * crowds);
    assert_eq!(lost, 0.0);
    assert!(
        last.rss_kib <= warm.rss_kib + RSS_NOISE_KIB,
        "{warm:?} {last:?}"
    );
    assert!(
        last.descriptors <= warm.descriptors + DESCRIPTOR_NOISE,
        "{warm:?} {last:?}"
    );
    drop(idle);
}

/// What it holds once all that came has gone.
fn settled(serve: &Serve) -> Holdings {
    // It sweeps every other second.
    thread::sleep(Duration::from_secs(5));
    let mut least = Holdings::of(serve.pid());
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(100));
        let now = Holdings::of(serve.pid());
        least.rss_kib = least.rss_kib.min(now.rss_kib);
        least.descriptors = least.descriptors.min(now.descriptors);
    }
    least
}

/// A process as in a container of its own, that copies a moment after its library was found.
fn with_a_library_of_its_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let library = "libcuda.so.1";
    fs::copy(built().folder.join(library), folder.path().join(library)).expect("copy");
    let mut command = Command::new(built().victim("victim-drv"));
    command.args(["--hold", "--calls", "4", "--bytes", "4K"]);
    command.env("LD_LIBRARY_PATH", folder.path());
    let victim = Victim::spawn(command);
    // It looks for new libraries every 250 ms.
    thread::sleep(Duration::from_millis(600));
    victim.signal(libc::SIGUSR1);
    victim.finish();
}
