//! Targets with few rights and little room: attach works, or says what is missing, and the target goes on as before.
#![expect(unsafe_code, reason = "sets limits of another process")]

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use cmt_tests::{Rung, Victim, attach, built, cycles, detach, refusal, require, wait_until_staged};

/// A user without processes of its own: `RLIMIT_NPROC` counts per user, and root has none.
const USER: u32 = 61_234;

/// Sets the soft limit of a running process; the hard one stays, so that it can be raised again.
#[track_caller]
fn limit(victim: &Victim, resource: libc::__rlimit_resource_t, value: u64) {
    let pid = victim.pid as i32;
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel writes one `rlimit`.
    let read = unsafe { libc::prlimit(pid, resource, std::ptr::null(), &raw mut limit) };
    limit.rlim_cur = value;
    // SAFETY: the kernel reads one `rlimit`; nothing is written.
    let set = unsafe { libc::prlimit(pid, resource, &raw const limit, std::ptr::null_mut()) };
    assert_eq!((read, set), (0, 0), "{}", std::io::Error::last_os_error());
}

/// Attaches within the limit; on success also detaches. Either way the target copies on.
#[track_caller]
fn works_or_refuses(victim: &mut Victim) -> Option<String> {
    let code = victim.code("libcuda.so");
    let attached = attach(victim);
    let refused = if attached.code == Some(0) {
        wait_until_staged(victim);
        detach(victim);
        None
    } else {
        Some(attached.refusal().to_string())
    };
    assert!(victim.is_alive(), "{attached:#?}");
    assert!(victim.code("libcuda.so") == code, "libcuda's code differs");
    refused
}

/// A copying program of a user who may have `threads` threads.
fn of_a_user_with(threads: u64) -> Victim {
    let mut program = Victim::command("victim-drv");
    program.args(["--bytes", "1M,2M"]);
    let mut command = Command::new("prlimit");
    command.arg(format!("--nproc={threads}:{threads}"));
    command.arg(program.get_program()).args(program.get_args());
    command.env("LD_LIBRARY_PATH", &built().folder).uid(USER);
    let victim = Victim::spawn(command);
    victim.next_line().expect("all its threads are there");
    victim
}

#[test]
fn no_more_threads_allowed() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = of_a_user_with(1000);
    let threads = victim.threads().len() as u64;
    victim.stop();
    let mut victim = of_a_user_with(threads);
    refusal(&mut victim, &["did not start a thread", "limit"]);
    assert_eq!(victim.stop()["mismatches"], 0);
    // One for the bootstrap, whose place the control thread takes; helpers that cannot be had are done without.
    for more in 1..4 {
        let mut victim = of_a_user_with(threads + more);
        if let Some(sentence) = works_or_refuses(&mut victim) {
            assert!(sentence.contains("thread"), "{more}: {sentence}");
        }
        assert_eq!(victim.stop()["mismatches"], 0);
    }
}

#[test]
fn thread_local_variables_that_fill_small_stacks() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut command = Victim::command("victim-drv");
    command.args(["--threads", "2", "--bytes", "64K,4M"]);
    command.env("LD_PRELOAD", built().folder.join("libvariables.so"));
    let mut victim = Victim::spawn(command);
    cycles(&mut victim, 5);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn no_more_descriptors_allowed() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-drv", ["--bytes", "1M,2M"]);
    victim.next_line().expect("all its descriptors are open");
    let open = fs::read_dir(format!("/proc/{}/fd", victim.pid)).expect("descriptors");
    let open = open.count() as u64;
    for more in 0..3 {
        limit(&victim, libc::RLIMIT_NOFILE, open + more);
        if let Some(sentence) = works_or_refuses(&mut victim) {
            let clear = ["descriptor", "open files"];
            assert!(
                clear.iter().any(|word| sentence.contains(word)),
                "{more}: {sentence}"
            );
        }
    }
    limit(&victim, libc::RLIMIT_NOFILE, open + 8);
    cycles(&mut victim, 1);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn little_address_space_left() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut refusals = 0;
    for more_mib in [1, 8, 9, 10, 12, 16, 24, 40, 80, 160] {
        let mut victim = Victim::start("victim-drv", ["--bytes", "4M"]);
        victim.next_line().expect("all its memory is there");
        let statm = fs::read_to_string(format!("/proc/{}/statm", victim.pid)).expect("its size");
        let pages: u64 = statm
            .split(' ')
            .next()
            .and_then(|word| word.parse().ok())
            .expect("pages");
        limit(&victim, libc::RLIMIT_AS, pages * 4096 + (more_mib << 20));
        let code = victim.code("libcuda.so");
        let attached = attach(&victim);
        assert!(victim.is_alive(), "{more_mib} MiB: {attached:#?}");
        if attached.code == Some(0) {
            // Copies that cannot be staged are the driver's.
            for _ in 0..2 {
                victim.next_line().expect("it copies");
            }
            detach(&victim);
        } else {
            refusals += 1;
            let sentence = attached.refusal();
            let clear = ["limit", "memory", "allocate"];
            assert!(
                clear.iter().any(|word| sentence.contains(word)),
                "{more_mib}: {sentence}"
            );
        }
        assert!(victim.is_alive(), "{more_mib} MiB: {attached:#?}");
        assert!(
            victim.code("libcuda.so") == code,
            "{more_mib} MiB: libcuda's code differs"
        );
        assert_eq!(victim.stop()["mismatches"], 0, "{more_mib} MiB");
    }
    assert!(refusals > 0, "1 MiB was enough for a thread");
}

/// A copying program that loses rights before its main().
fn confined(how: &str) -> Victim {
    let mut command = Victim::command("victim-drv");
    command.env("LD_PRELOAD", built().victim("libconfine.so"));
    command
        .env("CONFINE", how)
        .args(["--threads", "2", "--bytes", "1M,2M"]);
    let victim = Victim::spawn(command);
    victim.next_line().expect("all its threads are there");
    victim
}

#[test]
fn a_filter_that_forbids_memfd_create() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = confined("no-memfd");
    refusal(
        &mut victim,
        &["seccomp", "memfd_create", "nothing was changed"],
    );
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn a_filter_that_forbids_executable_memory() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = confined("no-exec-gain");
    if let Some(sentence) = works_or_refuses(&mut victim) {
        assert!(
            sentence.contains("seccomp") && sentence.contains("mprotect"),
            "{sentence}"
        );
    }
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn a_filter_as_containers_have_it() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = confined("container");
    cycles(&mut victim, 3);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn memory_deny_write_execute() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = confined("mdwe");
    if let Some(sentence) = works_or_refuses(&mut victim) {
        let named = ["MDWE", "MemoryDenyWriteExecute"];
        assert!(
            named.iter().any(|word| sentence.contains(word)),
            "{sentence}"
        );
    }
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn a_process_that_is_not_dumpable() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = confined("undumpable");
    if let Some(sentence) = works_or_refuses(&mut victim) {
        assert!(sentence.contains("dumpable"), "{sentence}");
    }
    assert_eq!(victim.stop()["mismatches"], 0);
}
