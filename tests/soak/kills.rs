//! `cmt` and its keeper killed 500 times, at random and where it hurts most.
//!
//! The keeper is frozen before it or its `cmt` is killed, so that it can be said for sure in which phase that was.
#![expect(unsafe_code, reason = "sends signals")]

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use cmt_tests::{Victim, attach, cmt, detach, spawn_cmt, wait_until_staged};

use crate::figures::{self, Checked};

const KILLS: u32 = 500;
/// The payload is loaded once in the life of a program, so several are needed.
const KILLS_A_VICTIM: u32 = 25;
/// Whatever takes longer hangs. A bootstrap thread whose keeper is gone waits for 10 s.
const PATIENCE: Duration = Duration::from_secs(30);

const VICTIM: [&str; 8] = [
    "--threads",
    "2",
    "--bytes",
    "256K,4M",
    // In epoll_wait, futex, read, nanosleep, poll and timed recv. The victim ends if one of them returns.
    "--idle-threads",
    "12",
    "--malloc-storm",
    "1",
];

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Whom {
    Command,
    Keeper,
    Both,
}

/// When.
#[derive(Clone, Copy, Debug)]
enum When {
    /// At any time from the start to the end.
    AnyTime,
    /// At any time from the keeper's start.
    Keeper,
    /// While a thread of the victim is stopped.
    Stopped,
}

/// What the keeper was at when it was frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    NoKeeper,
    Looking,
    OneStopped,
    Loading,
    Preparing,
    SomeStopped,
    AllStopped,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::NoKeeper => "before or after the keeper",
            Self::Looking => "the keeper looks around",
            Self::OneStopped => "one thread is stopped",
            Self::Loading => "the bootstrap thread runs",
            Self::Preparing => "the control thread works",
            Self::SomeStopped => "some threads are stopped",
            Self::AllStopped => "all threads are stopped",
        }
    }
}

/// Everything that is counted.
#[derive(Default)]
struct Score {
    kills: BTreeMap<(Phase, Whom), u32>,
    /// Attaches and detaches that ended before they were killed.
    ended: [u32; 2],
    /// Attaches that were killed and then completed by the keeper.
    completed: u32,
    /// Calls that returned EINTR after the death of a keeper.
    interrupted: u64,
    checked: Checked,
}

/// Runs it and prints its figures.
pub fn run(seed: u64) {
    println!("seed {seed}: CMT_SOAK_SEED={seed} does the same again, but for the scheduler");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut score = Score::default();
    let mut kills = 0;
    let started = Instant::now();
    while kills < KILLS {
        let wanted = KILLS_A_VICTIM.min(KILLS - kills);
        kills += one_victim(
            kills / KILLS_A_VICTIM % 2 == 1,
            &mut rng,
            wanted,
            &mut score,
        );
        eprintln!(
            "{kills} kills after {:.0} s",
            started.elapsed().as_secs_f64()
        );
    }
    print(&score, started.elapsed());
}

/// Kills again and again while one victim lives; returns how often.
fn one_victim(of_keeper: bool, rng: &mut fastrand::Rng, wanted: u32, score: &mut Score) -> u32 {
    let mut args = VICTIM.to_vec();
    let mut whom_to_kill = &[Whom::Command][..];
    if of_keeper {
        // No other process can finish what the keeper was at, so these calls may return EINTR: see docs/safety.md.
        args.push("--count-interrupted");
        whom_to_kill = &[Whom::Keeper, Whom::Both];
    }
    let mut victim = Victim::start("victim-drv", args);
    victim.next_line().expect("it copies");
    let start = Snapshot::of(&victim);
    let mut codes = Vec::new();
    let mut kills = 0;
    while kills < wanted {
        let attached = is_attached(&victim);
        let whom = *rng.choice(whom_to_kill).expect("one");
        let when = *rng
            .choice(&[When::AnyTime, When::Keeper, When::Stopped])
            .expect("one");
        let what = if attached { "detach" } else { "attach" };
        let phase = strike(&mut victim, what, whom, when, rng);
        assert!(
            victim.is_alive(),
            "{what}, {whom:?}, {phase:?}: it has ended"
        );
        assert_stopped_nowhere(&victim, &format!("{what}, {whom:?}, {phase:?}"));
        let Some(phase) = phase else {
            score.ended[usize::from(attached)] += 1;
            continue;
        };
        kills += 1;
        *score.kills.entry((phase, whom)).or_default() += 1;
        score.completed += u32::from(!attached && is_attached(&victim));
        codes.push((victim.code("libcuda.so"), phase, whom));
    }
    let patched = clean_up(&mut victim, &start);
    for (code, phase, whom) in codes {
        assert_whole(
            &code,
            &start.cuda,
            &patched,
            &format!("{whom:?}, {phase:?}"),
        );
    }
    victim.signal(libc::SIGTERM);
    let account = victim.finish();
    assert_eq!(account["mismatches"], 0, "{account}");
    score.interrupted += account["interrupted"].as_u64().unwrap_or(0);
    score.checked.add(&account);
    kills
}

/// What a victim is like before anything is done to it.
struct Snapshot {
    cuda: Vec<u8>,
    code: Vec<u8>,
    threads: Vec<String>,
    descriptors: usize,
}

impl Snapshot {
    fn of(victim: &Victim) -> Self {
        Self {
            cuda: victim.code("libcuda.so"),
            code: victim.code("lib"),
            threads: victim.threads(),
            descriptors: descriptors(victim),
        }
    }
}

fn descriptors(victim: &Victim) -> usize {
    let path = format!("/proc/{}/fd", victim.pid);
    fs::read_dir(path).expect("descriptors").count()
}

/// Whether the payload is at work, or left half done.
fn is_attached(victim: &Victim) -> bool {
    victim.has_thread("cmt-control")
}

/// Starts `what` and kills; `None` if it ended first.
fn strike(
    victim: &mut Victim,
    what: &str,
    whom: Whom,
    when: When,
    rng: &mut fastrand::Rng,
) -> Option<Phase> {
    /// About as long as an attach takes here, and its keeper.
    const ATTACH_US: u64 = 40_000;
    let pid = victim.pid.to_string();
    let mut args = vec![what, &pid];
    if what == "attach" {
        args.extend(["--before", "0s", "--after", "0s"]);
    }
    let running = spawn_cmt(args);
    let command = running.pid();
    let pause = match when {
        When::AnyTime if whom == Whom::Command => rng.u64(0..ATTACH_US),
        When::AnyTime | When::Keeper => {
            wait_until(|| running.keeper().is_some() || has_ended(command));
            rng.u64(0..ATTACH_US)
        }
        When::Stopped => {
            // The main thread is not the one that takes the detour; it is only held by the commit.
            let all = what == "detach" || rng.bool();
            let threads = if all { vec![victim.pid] } else { tasks(victim) };
            wait_until(|| threads.iter().any(|&tid| is_traced(tid)) || has_ended(command));
            rng.u64(0..300)
        }
    };
    let strike_at = Instant::now() + Duration::from_micros(pause);
    while Instant::now() < strike_at && !has_ended(command) {
        thread::sleep(Duration::from_micros(20).min(strike_at - Instant::now()));
    }
    let keeper = running.keeper();
    if let Some(keeper) = keeper {
        freeze(keeper);
    }
    let phase = keeper.map_or(Phase::NoKeeper, |_| phase(victim));
    let victims = match (whom, keeper) {
        _ if has_ended(command) => vec![],
        (Whom::Keeper, None) => vec![],
        (Whom::Command, _) | (Whom::Both, None) => vec![command],
        (Whom::Keeper, Some(keeper)) => vec![keeper],
        (Whom::Both, Some(keeper)) => vec![command, keeper],
    };
    for &pid in &victims {
        signal(pid, libc::SIGKILL);
    }
    if let Some(keeper) = keeper {
        signal(keeper, libc::SIGCONT);
    }
    let finished = running.finish_within(PATIENCE);
    if let Some(keeper) = keeper {
        wait_until(|| has_ended(keeper));
    }
    if finished.code == Some(0) {
        return None;
    }
    // What a killed one had begun may be completed only after we looked.
    if finished.code == Some(1) && finished.refusal().contains("attached") {
        return None;
    }
    assert!(!victims.is_empty(), "{what}: {finished:#?}");
    match whom {
        Whom::Keeper => {
            let sentence = finished.refusal();
            assert!(sentence.contains("no answer"), "{sentence}");
        }
        Whom::Command | Whom::Both => assert_eq!(finished.code, None, "{finished:#?}"),
    }
    Some(phase)
}

/// What is going on in the victim, whose keeper is frozen.
fn phase(victim: &Victim) -> Phase {
    let tasks = tasks(victim);
    let traced = tasks.iter().filter(|&&tid| is_traced(tid)).count();
    match traced {
        1 => Phase::OneStopped,
        _ if traced == tasks.len() => Phase::AllStopped,
        2.. => Phase::SomeStopped,
        _ if victim.has_thread("cmt-boot") => Phase::Loading,
        _ if victim.has_thread("cmt-control") => Phase::Preparing,
        _ => Phase::Looking,
    }
}

/// Takes everything out, within the time that a bootstrap thread waits for a host that is gone. Returns libcuda's code
/// as it was in between, patched.
#[track_caller]
fn clean_up(victim: &mut Victim, start: &Snapshot) -> Vec<u8> {
    // Whatever the last kill has left.
    let _ = cmt(["detach", &victim.pid.to_string()]);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let attached = attach(victim);
        assert_eq!(attached.code, Some(0), "{attached:#?}");
        wait_until_staged(victim);
        let patched = victim.code("libcuda.so");
        assert!(patched != start.cuda, "nothing was patched");
        detach(victim);
        // A thread that has ended may still be listed for a moment.
        let ended = Instant::now() + Duration::from_secs(1);
        while victim.threads() != start.threads && Instant::now() < ended {
            thread::sleep(Duration::from_millis(5));
        }
        if victim.threads() == start.threads && victim.code("lib") == start.code {
            // The payload and its control block, once.
            assert_eq!(descriptors(victim), start.descriptors + 2);
            return patched;
        }
        assert!(
            Instant::now() < deadline,
            "threads {:?}, code as it was: {}",
            victim.threads(),
            victim.code("lib") == start.code
        );
        thread::sleep(Duration::from_millis(500));
    }
}

/// Every window holds what it held at the start, or the whole patch.
#[track_caller]
fn assert_whole(code: &[u8], original: &[u8], patched: &[u8], what: &str) {
    let differs: Vec<usize> = (0..original.len())
        .filter(|&at| original[at] != patched[at])
        .collect();
    // Windows are at most five bytes long, and lie further apart than that.
    for window in differs.chunk_by(|&at, &next| next - at < 5) {
        let is = |wanted: &[u8]| window.iter().all(|&at| code[at] == wanted[at]);
        assert!(
            is(original) || is(patched),
            "{what}: half a patch at {window:x?}"
        );
    }
}

/// No thread stays in a ptrace stop. Those that the kernel has just let go may be seen in one for a moment.
#[track_caller]
fn assert_stopped_nowhere(victim: &Victim, what: &str) {
    let stopped = || {
        tasks(victim)
            .into_iter()
            .filter(|&tid| matches!(state(tid), Some('t' | 'T')) || is_traced(tid))
            .collect::<Vec<_>>()
    };
    let deadline = Instant::now() + Duration::from_secs(2);
    while !stopped().is_empty() {
        assert!(
            Instant::now() < deadline,
            "{what}: {:?} are stopped",
            stopped()
        );
        thread::sleep(Duration::from_millis(1));
    }
}

fn tasks(victim: &Victim) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{}/task", victim.pid)).expect("threads");
    tasks
        .filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok())
        .collect()
}

fn is_traced(tid: u32) -> bool {
    // Only the thread group's own entry is listed under /proc, but every thread's can be opened.
    fs::read_to_string(format!("/proc/{tid}/status")).is_ok_and(|status| {
        let tracer = status
            .lines()
            .find_map(|line| line.strip_prefix("TracerPid:"));
        tracer.is_some_and(|tracer| tracer.trim() != "0")
    })
}

/// The kernel's letter for what a thread does; `None` if there is no such thread.
fn state(tid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{tid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

fn has_ended(pid: u32) -> bool {
    matches!(state(pid), None | Some('Z' | 'X'))
}

/// Stops a process, and waits until it is, or has ended.
fn freeze(pid: u32) {
    signal(pid, libc::SIGSTOP);
    wait_until(|| matches!(state(pid), Some('T')) || has_ended(pid));
}

fn signal(pid: u32, number: i32) {
    // SAFETY: no memory is touched. A command of ours is not waited for yet. A keeper that has ended in this moment
    // leaves its number to nobody so soon: the kernel gives them out in order.
    unsafe { libc::kill(pid as i32, number) };
}

#[track_caller]
fn wait_until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "it hangs");
    }
}

fn print(score: &Score, took: Duration) {
    let sum = |wanted: &dyn Fn(Phase, Whom) -> bool| -> u32 {
        let kills = score.kills.iter();
        kills
            .filter(|((phase, whom), _)| wanted(*phase, *whom))
            .map(|(_, count)| count)
            .sum()
    };
    figures::row("kills", sum(&|_, _| true));
    figures::row("time, all in all", format!("{:.0} s", took.as_secs_f64()));
    figures::row(
        "of the command / its keeper / both",
        [Whom::Command, Whom::Keeper, Whom::Both]
            .map(|one| sum(&|_, whom| whom == one).to_string())
            .join(" / "),
    );
    let mut phases: Vec<Phase> = score.kills.keys().map(|&(phase, _)| phase).collect();
    phases.dedup();
    for one in phases {
        figures::row(
            format!("of them while {}", one.name()),
            sum(&|phase, _| phase == one),
        );
    }
    figures::row("attaches that were completed all the same", score.completed);
    figures::row(
        "attaches and detaches that ended before they could be killed",
        format!("{} and {}", score.ended[0], score.ended[1]),
    );
    figures::row(
        "calls of epoll_wait and timed recv that a keeper's death interrupted",
        score.interrupted,
    );
    figures::row("copies meanwhile, every byte right", score.checked);
}
