//! The process that stops and patches the target finishes what it has begun; what it left behind when it was killed, the
//! next `cmt` takes out.
#![expect(unsafe_code, reason = "sends signals")]

use std::time::{Duration, Instant};

use cmt_tests::{Rung, Running, Victim, cycles, detach, require, spawn_cmt};

/// Starts an attach and waits until its keeper has brought the payload in, but has not finished yet; `None` if it has.
fn attach_halfway(victim: &Victim) -> (Running, Option<u32>) {
    let pid = victim.pid.to_string();
    let attaching = spawn_cmt(["attach", &pid, "--before", "0s", "--after", "0s"]);
    let deadline = Instant::now() + Duration::from_secs(30);
    while !has_control_thread(victim) {
        assert!(Instant::now() < deadline, "no control thread");
    }
    let keeper = attaching.keeper();
    (attaching, keeper)
}

fn has_control_thread(victim: &Victim) -> bool {
    victim.threads().iter().any(|name| name == "cmt-control")
}

fn signal(pid: u32, number: i32) {
    // SAFETY: no memory is touched; the process is a child of a child of ours and has just been seen.
    unsafe { libc::kill(pid as i32, number) };
}

#[test]
fn it_finishes_when_it_is_told_to_end() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // As service managers do with every process of a unit that is stopped.
    let mut victim = Victim::start("victim-drv", ["--bytes", "1M", "--idle-threads", "6"]);
    let mut told = 0;
    for number in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        for _ in 0..5 {
            let (attaching, keeper) = attach_halfway(&victim);
            if let Some(keeper) = keeper {
                signal(keeper, number);
                told += 1;
            }
            let attached = attaching.finish();
            assert_eq!(attached.code, Some(0), "signal {number}: {attached:#?}");
            detach(&victim);
        }
    }
    assert!(told > 0, "it was never caught at work");
    assert!(victim.is_alive());
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn a_payload_that_was_told_nothing_is_taken_out() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-drv", ["--bytes", "1M"]);
    cycles(&mut victim, 1);
    let code = victim.code("libcuda.so");
    let mut left = 0;
    for _ in 0..30 {
        let (attaching, keeper) = attach_halfway(&victim);
        if let Some(keeper) = keeper {
            signal(keeper, libc::SIGKILL);
        }
        attaching.finish();
        left += u32::from(has_control_thread(&victim) && victim.code("libcuda.so") == code);
        detach(&victim);
        assert!(!has_control_thread(&victim), "a thread is left over");
        assert!(victim.code("libcuda.so") == code, "libcuda's code differs");
    }
    assert!(left > 0, "it was always too late");
    cycles(&mut victim, 1);
    assert_eq!(victim.stop()["mismatches"], 0);
}
