//! Signals at a high rate: none is lost, and no system call fails that would not have failed without us.

use cmt_tests::{Rung, Victim, cycles, require};

#[test]
fn none_is_lost_and_no_call_is_interrupted_by_us() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // It ends with another code when a queued signal is not handled, or when a call fails without a handler having run.
    let mut victim = Victim::start("victim-signals", [""; 0]);
    cycles(&mut victim, 60);
    let account = victim.stop();
    let count = |name: &str| account[name].as_u64().expect("a count");
    assert_eq!(count("queued"), count("handled"), "{account}");
    for name in ["handled", "alarms", "interrupted"] {
        assert!(count(name) > 100, "{account}");
    }
    assert_eq!(account["mismatches"], 0, "{account}");
}

#[test]
fn real_time_signals_reach_threads_that_are_being_stopped() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // Two at once: their threads wait for processors, so that signals come while a stop is under way.
    let mut victims = [(); 2].map(|()| Victim::start("victim-signals", [""; 0]));
    for _ in 0..10 {
        for victim in &mut victims {
            cycles(victim, 2);
        }
    }
    for victim in victims {
        // It waits until its last signal is handled.
        let account = victim.stop();
        assert_eq!(account["queued"], account["handled"], "{account}");
        assert_eq!(account["mismatches"], 0, "{account}");
    }
}
