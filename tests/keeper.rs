//! The process that stops and patches the target finishes what it has begun; what it left behind when it was killed, the
//! next `cmt` takes out.
#![expect(unsafe_code, reason = "sends signals")]

use cmt_tests::{Rung, Victim, attach, attach_halfway, cmt, cycles, detach, require};

fn signal(pid: u32, number: i32) {
    // SAFETY: no memory is touched; the process was there a moment ago, and ids are given out in order.
    unsafe { libc::kill(pid as i32, number) };
}

#[test]
fn it_finishes_when_it_is_told_to_end() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // As service managers do with every process of a unit that is stopped.
    let mut victim = Victim::start("victim-drv", ["--bytes", "1M,2M", "--idle-threads", "6"]);
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
    let mut victim = Victim::start("victim-drv", ["--bytes", "1M,2M"]);
    cycles(&mut victim, 1);
    let code = victim.code("libcuda.so");
    let mut left = 0;
    for _ in 0..30 {
        let (attaching, keeper) = attach_halfway(&victim);
        if let Some(keeper) = keeper {
            signal(keeper, libc::SIGKILL);
        }
        attaching.finish();
        left += u32::from(victim.has_thread("cmt-control") && victim.code("libcuda.so") == code);
        detach(&victim);
        assert!(!victim.has_thread("cmt-control"), "a thread is left over");
        assert!(victim.code("libcuda.so") == code, "libcuda's code differs");
    }
    assert!(left > 0, "it was always too late");
    cycles(&mut victim, 1);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn another_cmt_waits_its_turn() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-drv", ["--bytes", "1M,2M"]);
    let pid = victim.pid.to_string();
    cycles(&mut victim, 1);
    let mut met = 0;
    for _ in 0..10 {
        let (attaching, keeper) = attach_halfway(&victim);
        if let Some(keeper) = keeper {
            signal(keeper, libc::SIGSTOP);
            let others = [attach(&victim), cmt(["detach", &pid])];
            signal(keeper, libc::SIGCONT);
            // The last word may have been said before it was stopped.
            if others
                .iter()
                .all(|other| other.stderr.contains("another cmt is at work"))
            {
                met += 1;
            }
        }
        let attached = attaching.finish();
        assert_eq!(attached.code, Some(0), "{attached:#?}");
        let _ = cmt(["detach", &pid]);
    }
    assert!(met > 0, "no second cmt met the first");
    assert!(victim.is_alive());
    assert_eq!(victim.stop()["mismatches"], 0);
}
