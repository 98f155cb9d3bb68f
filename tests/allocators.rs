//! Programs on another allocator than libc's: a thread that is in it holds its locks, and the payload allocates from it.

use cmt_tests::{Rung, Victim, cycles, require_packages};

/// Two threads copy and two allocate all the time, while cmt attaches and detaches 30 times.
#[track_caller]
fn survives_a_storm(library: &str, package: &str) {
    let library = format!("/usr/lib/x86_64-linux-gnu/{library}");
    let Some(_turn) = require_packages(Rung::StandIn, &[(&library, package)]) else {
        return;
    };
    let mut command = Victim::command("victim-drv");
    command.env("LD_PRELOAD", &library);
    command.args(["--threads", "2", "--bytes", "64K,1M", "--malloc-storm", "2"]);
    let mut victim = Victim::spawn(command);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", victim.pid)).expect("maps");
    let name = library.rsplit('/').next().unwrap_or_default();
    let stem = name.split(".so").next().unwrap_or_default();
    assert!(maps.contains(stem), "{stem} is not in use");
    cycles(&mut victim, 30);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn jemalloc() {
    survives_a_storm("libjemalloc.so.2", "libjemalloc2");
}

#[test]
fn mimalloc() {
    survives_a_storm("libmimalloc.so.2.0", "libmimalloc2.0");
}

#[test]
fn tcmalloc() {
    survives_a_storm("libtcmalloc_minimal.so.4", "libtcmalloc-minimal4");
}
