//! What the BPF programs log reaches stderr where RUST_LOG asks for it, and nowhere else.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use cmt_tests::{Rung, Victim, cmt_command, require};

/// What `cmt trace` says on stderr, of a program that leaves copies by longjmp.
fn said(level: Option<&str>) -> Vec<String> {
    const BEGUN: &str = "tracing; Ctrl-C ends it";
    let victim = Victim::start("victim-jumper", [""; 0]);
    let mut command = cmt_command(["trace", "--json", &victim.pid.to_string()]);
    command.envs(level.map(|level| ("RUST_LOG", level)));
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut trace = child.expect("start cmt");
    let stderr = BufReader::new(trace.stderr.take().expect("piped"));
    let mut lines = stderr.lines().map(|line| line.expect("text"));
    let mut all: Vec<String> = lines.by_ref().take_while(|line| line != BEGUN).collect();
    victim.signal(libc::SIGUSR1);
    victim.finish();
    all.extend(lines);
    assert!(trace.wait().expect("wait for cmt").success(), "{all:?}");
    all
}

#[test]
fn lines_of_the_bpf_programs_are_shown_where_they_are_asked_for() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let is_from_bpf = |line: &String| {
        line.contains(" DEBUG cmt::copy] a copy call of thread ")
            && line.ends_with(" never returned")
    };
    for level in ["debug", "cmt::copy=debug"] {
        let lines = said(Some(level));
        assert!(lines.iter().any(is_from_bpf), "{level}: {lines:?}");
    }
    assert!(!said(Some("info")).iter().any(is_from_bpf));
    assert_eq!(said(None), [""; 0]);
}
