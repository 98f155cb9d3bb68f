//! `cmt serve --policy`: attaches to what the file names and to nothing else, tries some first, and takes back what does not help.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cmt_tests::{Named, Rung, Serve, Victim, attach, cmt, cmt_command, detach, require, until};
use serde_json::Value;

use crate::shared;

/// Estimates need a link; the stand-in has none that sysfs knows.
const LINK: [(&str, &str); 1] = [("CMT_PRETEND_LINK", "32.0 GT/s PCIe x16")];

/// A file with these rules.
fn policy(mode: &str, rules: &[String]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let text = format!("mode: {mode}\nrules:\n- {}\n", rules.join("\n- "));
    fs::write(file.path(), text).expect("write");
    file
}

fn rule(named: &Named, more: &str) -> String {
    let workload = named.workload();
    format!("{{workload: '{workload}', min_gain: 0.2, observe: 2s{more}}}")
}

fn serve(policy: &tempfile::NamedTempFile) -> Serve {
    let path = policy.path().to_str().expect("text");
    Serve::start(&LINK, &["--by-pid", "--policy", path])
}

/// A victim whose pageable copies are so slow that attaching always pays.
fn slow(named: &Named) -> Victim {
    let mut command = named.command(&["--bytes", "4M", "--exact"]);
    command.env("STANDIN_PAGEABLE_GBPS", "0.1");
    Victim::spawn(command)
}

fn actions(serve: &Serve, named: &Named, action: &str) -> u64 {
    let labels = [
        format!("action=\"{action}\""),
        format!("workload=\"{}\"", named.workload()),
    ];
    let labels = labels.each_ref().map(String::as_str);
    serve.scrape().sum("cmt_policy_actions_total", &labels) as u64
}

#[track_caller]
fn until_action(serve: &Serve, named: &Named, action: &str, times: u64) {
    let begun = Instant::now();
    while actions(serve, named, action) < times {
        let all = || {
            let samples = serve.scrape().0.into_iter();
            let actions = samples.filter(|(series, _)| series.starts_with("cmt_policy_"));
            actions.collect::<Vec<_>>()
        };
        let waited = begun.elapsed();
        assert!(
            waited.as_secs() < 60,
            "no {times} {action} but {:#?}",
            all()
        );
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(actions(serve, named, action), times, "{action}");
}

fn state(victim: &Victim) -> Value {
    let finished = cmt(["status", &victim.pid.to_string(), "--json"]);
    if finished.stdout.is_empty() {
        return Value::Null;
    }
    finished.parse()["processes"][0]["state"].clone()
}

/// Bytes by the time in the calls of a victim, in GB/s, from here on for a while.
fn rate(serve: &Serve, victim: &Victim) -> f64 {
    let pid = format!("pid=\"{}\"", victim.pid);
    let counted = || {
        let samples = serve.scrape();
        let sum = |what: &str| samples.sum(&format!("cmt_process_copy_{what}_total"), &[&pid]);
        (sum("bytes"), sum("seconds"))
    };
    let before = counted();
    thread::sleep(Duration::from_secs(2));
    let after = counted();
    (after.0 - before.0) / (after.1 - before.1) / 1e9
}

#[test]
fn what_a_policy_names_is_attached_and_all_else_is_left_alone() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let (yes, no) = (
        Named::new("sv-yes", "victim-drv"),
        Named::new("sv-no", "victim-drv"),
    );
    let policy = policy(
        "attach",
        &[rule(&yes, ", rollback: {after: 3s, min_gain: 0.1}")],
    );
    let serving = serve(&policy);
    let (victim, mut other) = (slow(&yes), slow(&no));
    let stock = rate(&serving, &victim);
    until_action(&serving, &yes, "attach", 1);
    assert_eq!(state(&victim), "attached");
    until_action(&serving, &yes, "keep", 1);
    let staged = rate(&serving, &victim);
    assert!(staged > 2.0 * stock, "{stock} GB/s, then {staged}");
    assert!(other.is_alive());
    assert_eq!(state(&other), Value::Null, "not named, but attached");
    assert_eq!(serving.scrape().sum("cmt_policy_actions_total", &[]), 2.0);

    // Its end leaves processes as they are, and the next one takes them over.
    let (status, said, _) = serving.end(libc::SIGTERM);
    assert_eq!(status.code(), Some(0), "{said}");
    let told = format!(
        "cmt: policy: process {} ({}): attach: ",
        victim.pid,
        yes.workload()
    );
    assert!(said.contains(&told), "{said}");
    assert_eq!(state(&victim), "attached");
    let serving = serve(&policy);
    until_action(&serving, &yes, "adopt", 1);
    until_action(&serving, &yes, "keep", 1);

    // What somebody has detached by hand stays so, also for the next one.
    detach(&victim);
    until_action(&serving, &yes, "leave", 1);
    drop(serving);
    let serving = serve(&policy);
    until_action(&serving, &yes, "leave", 1);
    thread::sleep(Duration::from_secs(5));
    assert_eq!(state(&victim), "detached");
    assert_eq!(actions(&serving, &yes, "attach"), 0);
    // Until it is started again.
    assert_eq!(victim.stop()["mismatches"], 0);
    let victim = slow(&yes);
    until_action(&serving, &yes, "attach", 1);
    drop(serving);
    for victim in [victim, other] {
        assert_eq!(victim.stop()["mismatches"], 0);
    }
}

#[test]
fn without_a_policy_or_by_one_that_observes_nothing_is_done() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let named = Named::new("sv-see", "victim-drv");
    let victim = slow(&named);
    let attached = slow(&named);
    assert_eq!(attach(&attached).code, Some(0));
    let without = Serve::start(&LINK, &[]);
    let serving = serve(&policy("observe", &[rule(&named, "")]));
    until_action(&serving, &named, "would_attach", 1);
    thread::sleep(Duration::from_secs(4));
    assert_eq!(actions(&serving, &named, "would_attach"), 1);
    assert_eq!(state(&victim), Value::Null);
    let families = String::from_utf8(without.get("/metrics", "").2).expect("text");
    assert!(!families.contains("cmt_policy"), "{families}");
    victim.stop();
    attached.stop();
}

#[test]
fn without_a_link_a_policy_says_that_it_can_estimate_nothing() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let named = Named::new("sv-link", "victim-drv");
    let policy = policy("observe", &[rule(&named, "")]);
    let path = policy.path().to_str().expect("text");
    for (link, is_known) in [("none", false), (LINK[0].1, true)] {
        let mut command = cmt_command(["serve", "--listen", "127.0.0.1:0", "--policy", path]);
        command.env(LINK[0].0, link).stderr(Stdio::piped());
        let mut serving = command.spawn().expect("start cmt");
        let mut line = String::new();
        let mut stderr = BufReader::new(serving.stderr.take().expect("piped"));
        stderr.read_line(&mut line).expect("read what cmt says");
        serving.kill().expect("kill");
        serving.wait().expect("wait");
        assert_eq!(line.contains("no GPU's link is known"), !is_known, "{line}");
    }
}

#[test]
fn some_are_tried_first() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let named = Named::new("sv-can", "victim-drv");
    let victims: Vec<Victim> = (0..3).map(|_| slow(&named)).collect();
    // A third of three, and no more.
    let serving = serve(&policy(
        "attach",
        &[rule(&named, ", canary: 30%, rollback: {after: 6s}")],
    ));
    until_action(&serving, &named, "attach", 1);
    until_action(&serving, &named, "canary_wait", 2);
    let attached = || -> Vec<bool> { victims.iter().map(|one| state(one) == "attached").collect() };
    assert_eq!(attached(), [true, false, false], "the oldest comes first");
    until_action(&serving, &named, "keep", 1);
    until_action(&serving, &named, "attach", 3);
    assert_eq!(attached(), [true; 3]);
    until_action(&serving, &named, "keep", 3);
    assert_eq!(actions(&serving, &named, "canary_wait"), 2);
    drop(serving);
    for victim in victims {
        assert_eq!(victim.stop()["mismatches"], 0);
    }
}

#[test]
fn a_first_one_that_gains_too_little_is_taken_back_and_no_other_follows() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let named = Named::new("sv-lit", "victim-drv");
    let victims = [slow(&named), slow(&named)];
    // More than any thread can gain.
    let rollback = ", canary: 50%, rollback: {after: 3s, min_gain: 61}";
    let serving = serve(&policy("attach", &[rule(&named, rollback)]));
    until_action(&serving, &named, "attach", 1);
    until_action(&serving, &named, "rollback", 1);
    until_action(&serving, &named, "stop", 1);
    assert_eq!(state(&victims[0]), "detached");
    thread::sleep(Duration::from_secs(5));
    assert_eq!(state(&victims[1]), Value::Null);
    assert_eq!(actions(&serving, &named, "attach"), 1);
    let (status, said, _) = serving.end(libc::SIGTERM);
    assert_eq!(status.code(), Some(0), "{said}");
    assert!(said.contains("less than 61"), "{said}");
    for victim in victims {
        assert_eq!(victim.stop()["mismatches"], 0);
    }
}

#[test]
fn copies_that_begin_to_fail_are_taken_back() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let named = Named::new("sv-bad", "victim-drv");
    // Stock makes one call of the driver for a copy, the new copier 16: only then is the 600th reached.
    let mut command = named.command(&["--bytes", "32M", "--exact", "--allow-errors"]);
    command.env("STANDIN_FAIL_COPY_EVERY", "600");
    let victim = Victim::spawn(command);
    let serving = serve(&policy(
        "attach",
        &[rule(&named, ", rollback: {after: 1h}")],
    ));
    until_action(&serving, &named, "attach", 1);
    until_action(&serving, &named, "rollback", 1);
    assert_eq!(state(&victim), "detached");
    thread::sleep(Duration::from_secs(4));
    assert_eq!(actions(&serving, &named, "attach"), 1);
    let (_, said, _) = serving.end(libc::SIGTERM);
    assert!(said.contains("copies began to fail: "), "{said}");
    victim.stop();
}

#[test]
fn an_end_in_the_middle_of_an_attach_harms_nobody() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let named = Named::new("sv-mid", "victim-drv");
    let policy = policy("attach", &[rule(&named, "")]);
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        let victim = slow(&named);
        let serving = serve(&policy);
        // The payload is inside, and nothing is patched yet, or has just been.
        let begun = Instant::now();
        while !victim.has_thread("cmt-control") {
            assert!(begun.elapsed() < Duration::from_secs(60), "no attach");
            thread::sleep(Duration::from_millis(1));
        }
        let (status, said, took) = serving.end(signal);
        if signal == libc::SIGTERM {
            assert_eq!(status.code(), Some(0), "{said}");
            assert!(took < Duration::from_secs(2), "{took:?}");
        }
        // What was begun is finished without it.
        until("it is attached", || state(&victim) == "attached");
        let serving = serve(&policy);
        until_action(&serving, &named, "adopt", 1);
        drop(serving);
        detach(&victim);
        assert_eq!(victim.stop()["mismatches"], 0);
    }
}

#[test]
fn a_policy_that_cannot_be_carried_out_is_an_error() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().to_str().expect("text");
    let args = ["serve", "--listen", "127.0.0.1:0", "--policy", path];
    for (text, word) in [
        ("", "no policy"),
        ("mode: attach\nrules: []", "no rules"),
        ("mode: maybe\nrules: []", "maybe"),
        ("mode: attach\nrules: [{workload: 'a*'}]", "min_gain"),
        (
            "mode: attach\nrules: [{workload: 'a*', min_gain: 1, every: 2s}]",
            "every",
        ),
        (
            "mode: attach\nrules: [{workload: 'a*', min_gain: 1, canary: 3}]",
            "10%",
        ),
    ] {
        fs::write(path, text).expect("write");
        let refused = cmt(args);
        let sentence = refused.refusal();
        assert!(
            sentence.contains(word) && sentence.ends_with("nothing was traced"),
            "{text}: {sentence}"
        );
    }
    let missing = cmt(["serve", "--policy", "/nowhere/policy.yml"]);
    assert!(
        missing.refusal().contains("/nowhere/policy.yml"),
        "{missing:?}"
    );
    let none = cmt(["serve", "--max-workloads", "0"]);
    assert_eq!(none.code, Some(2), "{none:?}");
    // What it may not do it does not begin.
    fs::write(path, "mode: attach\nrules: [{workload: 'a*', min_gain: 1}]").expect("write");
    let mut command = Command::new("setpriv");
    let less = "-checkpoint_restore,-sys_admin";
    command.arg(format!("--bounding-set={less}"));
    command.arg(format!("--inh-caps={less}"));
    let cmt = cmt_command(args);
    command.arg(cmt.get_program()).args(cmt.get_args());
    let refused = command.output().expect("run setpriv");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("CAP_CHECKPOINT_RESTORE missing"), "{said}");
}
