//! Programs that mean harm to whoever attaches to them or traces them. They can have `cmt` refuse them, and no more: it
//! neither crashes nor hangs, writes to no file that they could not write, and serves the others as ever.
#![expect(unsafe_code, reason = "asks how much memory cmt has used")]

use std::fs;
use std::time::Duration;

use cmt_tests::{
    Finished, Rung, Victim, attach, cmt, cmt_command, cycles, detach, require, spawn_cmt,
    wait_until_staged,
};

/// Longer takes no attach, detach or look at a process, however much there is to look at.
const PATIENCE: Duration = Duration::from_secs(60);

/// Attaches while the program works against it: either that works and can be undone, or it is refused with one sentence.
#[track_caller]
fn is_served_or_refused(victim: &mut Victim) -> Finished {
    let pid = victim.pid.to_string();
    let args = ["attach", &pid, "--before", "0s", "--after", "0s"];
    let attached = spawn_cmt(args).finish_within(PATIENCE);
    if attached.code == Some(0) {
        detach(victim);
    } else {
        attached.refusal();
    }
    assert!(victim.is_alive(), "{attached:#?}");
    attached
}

/// What is not theirs stays as it was, whatever they name it.
#[track_caller]
fn writes_no_foreign_file(what: &str) -> Finished {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("precious");
    // Nothing about the file says that it is not the payload's, but that it may only be read.
    fs::write(&path, "").expect("a file");
    let file = fs::File::open(&path).expect("the file");
    let mut victim = Victim::start("victim-hostile", [what, path.to_str().expect("a path")]);
    fs::remove_file(&path).expect("remove the file");
    let attached = is_served_or_refused(&mut victim);
    assert_eq!(file.metadata().expect("the file").len(), 0, "{attached:#?}");
    attached
}

#[test]
fn a_block_that_names_a_file_as_the_payloads() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // It is not always the first to write to the block.
    let refused = (0..10)
        .filter(|_| writes_no_foreign_file("names-a-file").code != Some(0))
        .count();
    assert!(refused > 0, "it was never quick enough");
}

#[test]
fn a_block_of_the_targets_own() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let refused = writes_no_foreign_file("own-block");
    assert!(
        refused.refusal().contains("writing its memory"),
        "{refused:#?}"
    );
}

#[test]
fn a_block_that_is_cut_off() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    for _ in 0..20 {
        let mut victim = Victim::start("victim-hostile", ["truncates"]);
        let attached = attach(&victim);
        // Where the program was quicker, its own thread dies of it. We do not.
        assert!(!attached.stderr.contains("no answer"), "{attached:#?}");
        match attached.code {
            Some(0) => assert!(victim.is_alive(), "{attached:#?}"),
            _ => assert!(!attached.refusal().is_empty()),
        }
    }
}

#[test]
fn names_that_are_no_text() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let root = tempfile::tempdir().expect("a folder");
    let root = root.path().to_str().expect("a path");
    let mut victim = Victim::start("victim-hostile", ["odd-names", root]);
    let pid = victim.pid.to_string();
    cycles(&mut victim, 3);
    let attached = attach(&victim);
    assert!(attached.stdout.contains("a) Z ?[31m?"), "{attached:#?}");
    let said = [
        attached,
        cmt(["status"]),
        cmt(["status", "--json"]),
        cmt(["doctor"]),
        cmt(["trace", "--all", "--for", "1s"]),
        cmt(["trace", &pid, "--for", "1s"]),
        cmt(["trace", &pid, "--for", "1s", "--json"]),
    ];
    detach(&victim);
    for finished in said {
        assert_eq!(finished.code, Some(0), "{finished:#?}");
        assert!(finished.stdout.contains(&pid), "{finished:#?}");
        let text = finished.stdout.clone() + &finished.stderr;
        let moves = |c: char| c.is_control() && c != '\n';
        assert!(!text.contains(moves), "{finished:#?}");
    }
    victim.stop();
}

#[test]
fn more_blocks_than_can_be_looked_at() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-hostile", ["many-blocks"]);
    let status = spawn_cmt(["status"]).finish_within(PATIENCE);
    assert_eq!(status.code, Some(0), "{status:#?}");
    is_served_or_refused(&mut victim);
    victim.stop();
}

#[test]
fn a_library_with_huge_tables() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-hostile", ["huge-library"]);
    let mut command = cmt_command([""; 0]);
    command.args(["trace", &victim.pid.to_string(), "--for", "1s", "--json"]);
    let traced = Finished::from(command.output().expect("start cmt")).json();
    // The real one is traced all the same.
    let calls = &traced["processes"][0]["copies"][0]["calls"];
    assert!(calls.as_u64() > Some(0), "{traced}");
    assert!(most_memory_of_children() < 1 << 30);
    victim.stop();
}

/// The most memory that a process had for which we have waited, in bytes.
fn most_memory_of_children() -> u64 {
    // SAFETY: all zeros are a value of this structure of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `rusage`.
    let result = unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    usage.ru_maxrss as u64 * 1024
}

#[test]
fn threads_that_start_others_faster_than_they_stop() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-hostile", ["relay"]);
    for _ in 0..5 {
        is_served_or_refused(&mut victim);
    }
    victim.stop();
}

#[test]
fn a_handler_on_a_stack_of_its_own() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let mut victim = Victim::start("victim-hostile", ["own-stack"]);
    let mut served = 0;
    for _ in 0..10 {
        served += u32::from(is_served_or_refused(&mut victim).code == Some(0));
    }
    assert!(served > 0, "it was refused each time");
    let attached = attach(&victim);
    assert_eq!(attached.code, Some(0), "{attached:#?}");
    wait_until_staged(&victim);
    victim.stop();
}
