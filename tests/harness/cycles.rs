//! Attaching and detaching, again and again, where only the target's welfare is of interest.

use std::thread;
use std::time::{Duration, Instant};

use crate::{Finished, Running, Victim, cmt, spawn_cmt};

/// Attaches without looking at what the program does before and after.
pub fn attach(victim: &Victim) -> Finished {
    let pid = victim.pid.to_string();
    cmt(["attach", &pid, "--before", "0s", "--after", "0s"])
}

/// Starts an attach and waits until the payload is inside: that `cmt`, and its keeper unless that has finished already.
#[track_caller]
pub fn attach_halfway(victim: &Victim) -> (Running, Option<u32>) {
    let pid = victim.pid.to_string();
    let attaching = spawn_cmt(["attach", &pid, "--before", "0s", "--after", "0s"]);
    let deadline = Instant::now() + Duration::from_secs(30);
    while !victim.has_thread("cmt-control") {
        assert!(Instant::now() < deadline, "no control thread");
    }
    let keeper = attaching.keeper();
    (attaching, keeper)
}

/// Detaches; that must work.
#[track_caller]
pub fn detach(victim: &Victim) {
    let detached = cmt(["detach", &victim.pid.to_string()]);
    assert_eq!(detached.code, Some(0), "{detached:#?}");
}

/// Attach refuses with one sentence that holds all of `words`, and leaves threads and code as they were.
#[track_caller]
pub fn refusal(victim: &mut Victim, words: &[&str]) {
    let before = victim.footprint();
    let refused = attach(victim);
    let sentence = refused.refusal();
    for word in words {
        assert!(sentence.contains(word), "no {word:?} in {sentence:?}");
    }
    victim.assert_untouched(&before);
}

/// Attaches and detaches `count` times; both must work each time, and libcuda's code must be as it was after each. In the
/// first cycle a copy is seen to be staged.
#[track_caller]
pub fn cycles(victim: &mut Victim, count: u32) {
    let code = victim.code("libcuda.so");
    for cycle in 0..count {
        let attached = attach(victim);
        assert_eq!(attached.code, Some(0), "cycle {cycle}: {attached:#?}");
        if cycle == 0 {
            assert!(victim.code("libcuda.so") != code, "nothing was patched");
            wait_until_staged(victim);
        }
        detach(victim);
        assert!(victim.is_alive(), "cycle {cycle}: it has ended");
        assert!(
            victim.code("libcuda.so") == code,
            "cycle {cycle}: libcuda's code differs"
        );
    }
}

/// Waits until a copy of an attached victim, which copies all the time, has been staged.
#[track_caller]
pub fn wait_until_staged(victim: &Victim) {
    for _ in 0..600 {
        let report = cmt(["status", &victim.pid.to_string(), "--json"]).json();
        let staged = &report["processes"][0]["staged"];
        if [0, 1]
            .iter()
            .any(|&index| staged[index]["calls"].as_u64() > Some(0))
        {
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
    panic!("victim {}: nothing is staged", victim.pid);
}
