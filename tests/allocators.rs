//! Programs on another allocator than libc's: a thread that is in it holds its locks, and the payload allocates from it.

use std::process::Command;

use cmt_tests::{Rung, Victim, attach, cycles, detach, require, require_packages};

/// Two threads copy and two allocate all the time.
const STORM: [&str; 6] = [
    "--threads",
    "2",
    "--bytes",
    "64K,1M,2M",
    "--malloc-storm",
    "2",
];

/// A victim of that kind, while cmt attaches and detaches 30 times.
#[track_caller]
fn survives_a_storm(mut command: Command, allocator: &str) {
    command.args(STORM);
    let mut victim = Victim::spawn(command);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", victim.pid)).expect("maps");
    assert!(maps.contains(allocator), "{allocator} is not in use");
    cycles(&mut victim, 30);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[track_caller]
fn preloaded(library: &str, package: &str) {
    let library = format!("/usr/lib/x86_64-linux-gnu/{library}");
    let Some(_turn) = require_packages(Rung::StandIn, &[(&library, package)]) else {
        return;
    };
    let mut command = Victim::command("victim-drv");
    command.env("LD_PRELOAD", &library);
    let name = library.rsplit('/').next().unwrap_or_default();
    survives_a_storm(command, name.split(".so").next().unwrap_or_default());
}

#[test]
fn jemalloc() {
    preloaded("libjemalloc.so.2", "libjemalloc2");
}

#[test]
fn mimalloc() {
    preloaded("libmimalloc.so.2.0", "libmimalloc2.0");
}

#[test]
fn tcmalloc() {
    preloaded("libtcmalloc_minimal.so.4", "libtcmalloc-minimal4");
}

/// Code near such a `malloc` counts as part of it. This program is so small that all its code is near: mostly no thread is
/// found for the detour, which must be all that happens.
#[test]
fn one_of_the_programs_own() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut command = Victim::command("victim-own-malloc");
    command.args(STORM);
    let victim = Victim::spawn(command);
    for _ in 0..3 {
        let attached = attach(&victim);
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
    assert_eq!(victim.stop()["mismatches"], 0);
}
