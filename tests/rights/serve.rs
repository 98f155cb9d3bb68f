//! `cmt serve`.

use std::fs;

use cmt_tests::{
    Rung, Samples, Serve, Victim, account_of, attach, built, cmt, detach, require, until, workspace,
};

use crate::alone;
use crate::place::{BYTES, OTHER, Place, as_user, limited, open_to_all, run};

const TRACING: [&str; 3] = ["bpf", "perfmon", "sys_ptrace"];
const LISTEN: [&str; 3] = ["serve", "--listen", "127.0.0.1:0"];

fn serve(place: &Place, capabilities: &[&str], args: &[&str]) -> Serve {
    let mut command = place.cmt(capabilities, &[&LISTEN, args].concat());
    command.env("CMT_PRETEND_LINK", "32.0 GT/s PCIe x16");
    Serve::spawn(command).ready()
}

/// A victim of another user, under a name that no other has.
pub fn named(place: &Place, name: &str, args: &[&str]) -> (Victim, String) {
    let name = format!("{name}-{}", std::process::id());
    place.put(&built().victim("victim-drv"), &name);
    let mut command = as_user(OTHER, &[]);
    command.arg(place.path(&name)).args(BYTES).args(args);
    command.env("LD_LIBRARY_PATH", place.folder.path());
    (Victim::spawn(command), format!("comm/{name}"))
}

/// Without any one of `capabilities` it ends, and says which it lacks.
#[track_caller]
fn each_is_needed(place: &Place, capabilities: &[&str], args: &[&str]) {
    for lacking in capabilities {
        let others: Vec<&str> = capabilities
            .iter()
            .copied()
            .filter(|one| one != lacking)
            .collect();
        let refused = run(limited(&place.cmt(&others, &[&LISTEN, args].concat())));
        let said = format!(": CAP_{} missing; run it as root", lacking.to_uppercase());
        assert_eq!(refused.code, Some(1), "without {lacking}: {refused:#?}");
        assert!(
            refused.stderr.contains(&said),
            "without {lacking}: {refused:#?}"
        );
    }
}

fn attached(samples: &Samples) -> Option<&f64> {
    samples.0.get("cmt_attached_processes")
}

#[test]
fn counts_and_looks_with_no_more_than_is_listed() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _alone = alone();
    let place = Place::new();
    let (mut victim, workload) = named(&place, "ri-see", &["--hold", "--calls", "100"]);
    let before = victim.settled();
    each_is_needed(&place, &TRACING, &[]);
    victim.assert_untouched(&before);

    assert_eq!(attach(&victim).code, Some(0));
    let looking = [&TRACING[..], &["checkpoint_restore", "dac_read_search"]].concat();
    for lacking in &looking[3..] {
        let less: Vec<&str> = looking
            .iter()
            .copied()
            .filter(|one| one != lacking)
            .collect();
        let serve = serve(&place, &less, &[]);
        assert_eq!(attached(&serve.scrape()), None, "without {lacking}");
    }
    let seen = serve(&place, &looking, &[]).scrape();
    assert!(attached(&seen).is_some_and(|count| *count >= 1.0));
    detach(&victim);

    let serve = serve(&place, &TRACING, &[]);
    victim.signal(libc::SIGUSR1);
    let own = account_of(&victim.finish());
    until("it counts what the victim counts", || {
        serve.scrape().of_workload(&workload) == own
    });
}

/// With just what the example for Kubernetes asks for.
#[test]
fn attaches_by_a_policy_with_no_more_than_is_listed() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _alone = alone();
    let place = Place::new();
    let (mut victim, workload) = named(&place, "ri-act", &[]);
    let policy = place.path("policy.yml");
    let rule = format!("{{workload: {workload}, min_gain: 0, observe: 1s}}");
    let rules = format!("mode: attach\nrules: [{rule}]\n");
    fs::write(&policy, rules).expect("write");
    open_to_all(&policy);
    let args = ["--policy", policy.to_str().expect("text")];
    let patch = workspace().join("examples/kubernetes/policy-patch.yaml");
    let patch = fs::read_to_string(patch).expect("the patch").to_lowercase();
    let (_, added) = patch.split_once("add: [").expect("capabilities");
    let (added, _) = added.split_once(']').expect("the end of a list");
    let needed: Vec<&str> = added.split(", ").collect();
    let before = victim.settled();
    each_is_needed(&place, &needed, &args);
    victim.assert_untouched(&before);

    let serve = serve(&place, &needed, &args);
    let actions = |action: &str| {
        let label = format!("action=\"{action}\"");
        serve.scrape().sum("cmt_policy_actions_total", &[&label])
    };
    until("it is attached", || actions("attach") > 0.0);
    assert_eq!(actions("attach_failed"), 0.0);
    let status = cmt(["status", &victim.pid.to_string(), "--json"]).json();
    assert_eq!(status["processes"][0]["state"], "attached", "{status}");
    drop(serve);
    assert_eq!(victim.stop()["mismatches"], 0);
}
