//! Threads that cannot be used, or not at this moment: attach finds another, or says so; and targets that leave meanwhile.

use std::time::Duration;

use cmt_tests::{Rung, Victim, attach, cycles, detach, refusal, require, spawn_cmt};

#[test]
fn a_fibre_on_a_small_stack_is_left_alone() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // All bytes around the stack are checked by the copying threads. Bound early, since its stack is too small for the
    // loader to look a function up.
    let mut command = Victim::command("victim-odd");
    command.arg("fibre").env("LD_BIND_NOW", "1");
    let mut victim = Victim::spawn(command);
    cycles(&mut victim, 30);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn a_thread_that_waits_for_its_vfork_child() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-odd", ["vfork", "1000"]);
    cycles(&mut victim, 20);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn a_vfork_child_that_takes_its_time() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // The parent cannot be stopped for 20 s.
    let mut victim = Victim::start("victim-odd", ["vfork", "20000000"]);
    refusal(&mut victim, &["did not stop", "nothing was changed"]);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn a_main_thread_that_has_ended() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-odd", ["main-exits"]);
    while !is_zombie(victim.pid) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let refused = attach(&victim);
    let sentence = refused.refusal();
    assert!(sentence.contains("main thread"), "{sentence}");
    assert!(victim.is_alive());
    assert_eq!(victim.stop()["mismatches"], 0);
}

fn is_zombie(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    status.lines().any(|line| line.starts_with("State:\tZ"))
}

#[test]
fn changes_of_the_user_id_go_on() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // glibc signals every thread and waits for all. The victim ends with another code if that hangs.
    let mut victim = Victim::start("victim-odd", ["setresuid"]);
    cycles(&mut victim, 40);
    let account = victim.stop();
    assert!(account["changes"].as_u64() > Some(1000), "{account}");
    assert_eq!(account["mismatches"], 0);
}

#[test]
fn libc_is_mapped_as_data_too() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-odd", ["libc-as-data"]);
    cycles(&mut victim, 3);
    assert_eq!(victim.stop()["mismatches"], 0);
}

/// Attaches and detaches again and again; the victim copies nothing.
#[track_caller]
fn comes_and_goes(mut victim: Victim) {
    let code = victim.code("libcuda.so");
    for cycle in 0..60 {
        let attached = attach(&victim);
        assert!(victim.is_alive(), "cycle {cycle}: {attached:#?}");
        assert_eq!(attached.code, Some(0), "cycle {cycle}: {attached:#?}");
        detach(&victim);
        assert!(victim.is_alive(), "cycle {cycle}: it has ended");
        let now = victim.code("libcuda.so");
        let differs = (0..code.len()).find(|&at| now[at] != code[at]);
        assert_eq!(
            differs, None,
            "cycle {cycle}: libcuda's code at this offset"
        );
    }
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn threads_that_stand_in_the_code_to_patch() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // They do nothing but enter a function that is patched.
    comes_and_goes(Victim::start("victim-prologue", [""; 0]));
}

#[test]
fn signal_handlers_that_return_into_the_code_to_patch() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    comes_and_goes(Victim::start("victim-prologue", ["lingers"]));
}

/// Attaches once to each of many programs that only allocate: once a thread has ended, the next one needs no memory.
#[track_caller]
fn allocates_meanwhile(args: &[&str]) {
    for _ in 0..20 {
        let mut victim = Victim::start("victim-mallocs", args);
        let attached = attach(&victim);
        assert!(victim.is_alive(), "{attached:#?}");
        assert_eq!(attached.code, Some(0), "{attached:#?}");
        detach(&victim);
        // It ends with another code if one of its threads is stuck.
        assert_eq!(victim.stop()["mismatches"], 0);
    }
}

#[test]
fn all_threads_are_in_malloc() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    allocates_meanwhile(&[]);
}

#[test]
fn handlers_have_interrupted_malloc() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    allocates_meanwhile(&["handlers"]);
}

#[test]
fn all_threads_are_in_an_allocator_of_the_programs_own() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // They are in or near it all the time, so that attach may find no place for its detour.
    let mut victim = Victim::start("victim-own-mallocs", [""; 0]);
    for _ in 0..3 {
        let attached = attach(&victim);
        assert!(victim.is_alive(), "{attached:#?}");
        if attached.code == Some(0) {
            detach(&victim);
        } else {
            let sentence = attached.refusal();
            assert!(
                sentence.contains("no thread was found in a safe place"),
                "{sentence}"
            );
        }
    }
    // It ends with another code if one of them is stuck.
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn a_target_that_ends_during_attach() {
    leaves_during_attach("exit", 43);
}

#[test]
fn a_target_that_becomes_another_program_during_attach() {
    leaves_during_attach("exec", 42);
}

/// Whenever the target leaves, it leaves as it would have, and cmt succeeds or says in one sentence why not.
#[track_caller]
fn leaves_during_attach(how: &str, code: i32) {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut succeeded = 0;
    for round in 0..20 {
        let victim = Victim::start("victim-odd", [how]);
        let pid = victim.pid.to_string();
        let attaching = spawn_cmt(["attach", &pid, "--before", "0s", "--after", "0s"]);
        // An attach takes some 15 ms.
        std::thread::sleep(Duration::from_micros(round * 1200));
        victim.signal(libc::SIGUSR1);
        let finished = attaching.finish_within(Duration::from_secs(30));
        if finished.code == Some(0) {
            succeeded += 1;
        } else {
            finished.refusal();
        }
        let (_, status) = victim.transcript(|_| ());
        assert_eq!(
            status.code(),
            Some(code),
            "round {round}: {status}; {finished:#?}"
        );
    }
    assert!(succeeded < 20, "it never left in time");
}
