//! `cmt attach`, `cmt detach`, `cmt status`.

use cmt_tests::{Rung, Victim, attach, detach, require};
use serde_json::Value;

use crate::place::{OTHER, Place, ROOT, USER, run};
use crate::with_others;

/// Attaches, reads the status and detaches with these capabilities; detaching and looking take `less`.
#[track_caller]
fn attaches_with(place: &Place, mut victim: Victim, sets: [&[&str]; 3]) {
    let [attaching, detaching, looking] = sets;
    let pid = victim.pid.to_string();
    let windows = ["--before", "100ms", "--after", "100ms"];
    let traced = [&["attach", &pid][..], &windows].concat();
    let bare = ["attach", &pid, "--before", "0s", "--after", "0s"];
    let probing = [attaching, &["bpf", "perfmon"]].concat();

    place.each_is_needed(&mut victim, attaching, &bare);
    place.each_is_needed(&mut victim, &probing, &traced);
    for (capabilities, args) in [(attaching, &bare[..]), (&probing, &traced)] {
        let attached = run(place.cmt(capabilities, args));
        assert_eq!(attached.code, Some(0), "{attached:#?}");
        place.each_is_needed(&mut victim, looking, &["status", &pid]);
        let status = run(place.cmt(looking, &["status", &pid, "--json"])).json();
        assert_eq!(status["processes"][0]["state"], "attached", "{status}");
        let all = run(place.cmt(looking, &["status", "--json"])).json();
        assert!(has_process(&all, victim.pid), "{all}");
        place.each_is_needed(&mut victim, detaching, &["detach", &pid]);
        let detached = run(place.cmt(detaching, &["detach", &pid]));
        assert_eq!(detached.code, Some(0), "{detached:#?}");
    }
    assert_eq!(victim.stop()["mismatches"], 0);
}

fn has_process(report: &Value, pid: u32) -> bool {
    let mut processes = report["processes"].as_array().into_iter().flatten();
    processes.any(|process| process["pid"] == pid)
}

#[test]
fn to_an_own_process() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    attaches_with(&place, place.victim(USER), [&["checkpoint_restore"]; 3]);
}

#[test]
fn to_another_users_process_or_one_that_is_not_dumpable() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    let patching: &[&str] = &["checkpoint_restore", "sys_ptrace", "dac_override"];
    let looking: &[&str] = &["checkpoint_restore", "sys_ptrace", "dac_read_search"];
    for victim in [place.victim(OTHER), Victim::spawn(place.undumpable(USER))] {
        attaches_with(&place, victim, [patching, patching, looking]);
    }
}

#[test]
fn to_a_process_that_sees_no_proc() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    let script = "umount --lazy /proc && exec \"$0\" \"$@\"";
    let hiding = ["unshare", "--mount", "sh", "-c", script];
    let mut victim = Victim::spawn(place.command(ROOT, &hiding, place.folder.path()));
    let pid = victim.pid.to_string();
    let bare = ["attach", &pid, "--before", "0s", "--after", "0s"];
    let needed = ["sys_ptrace", "dac_override", "sys_admin"];
    place.each_is_needed(&mut victim, &needed, &bare);
    // What is narrower does not do.
    let before = victim.settled();
    let refused = run(place.cmt(&["sys_ptrace", "dac_override", "checkpoint_restore"], &bare));
    assert!(
        refused.refusal().contains("CAP_SYS_ADMIN missing"),
        "{refused:?}"
    );
    victim.assert_untouched(&before);
    assert_eq!(run(place.cmt(&needed, &bare)).code, Some(0));
    detach(&victim);
    assert_eq!(victim.stop()["mismatches"], 0);
}

#[test]
fn status_of_all_says_what_it_may_not_see() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    let victim = place.victim(OTHER);
    assert_eq!(attach(&victim).code, Some(0));
    let needed = ["checkpoint_restore", "sys_ptrace", "dac_read_search"];
    for lacking in needed {
        let others: Vec<&str> = needed.into_iter().filter(|one| *one != lacking).collect();
        let status = run(place.cmt(&others, &["status", "--json"]));
        assert!(!has_process(&status.json(), victim.pid), "{status:#?}");
        let name = lacking.to_uppercase();
        let said = format!("may not be inspected, and may be attached too: CAP_{name} missing;");
        assert!(status.stderr.contains(&said), "{}", status.stderr);
    }
    detach(&victim);
    victim.stop();
}
