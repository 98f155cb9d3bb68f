//! `cmt serve` as systemd starts it by the files in `examples/systemd`, with all that they take away from it.
//!
//! A manager of its own reads them, with a `/run`, a `/tmp` and a cgroup that are gone with it, so it does not matter what started this
//! machine. Process ids are the machine's. `MemoryMax=` and `TasksMax=` have an effect only where the cgroup has these controllers.

use std::fs;
use std::process::Command;

use cmt_tests::{
    Rung, Serve, account_of, cmt, require_packages, until, wait_until_staged, workspace,
};

use crate::alone;
use crate::place::{Place, limited, open_to_all, run};
use crate::serve::named;

const NEEDED: [(&str, &str); 1] = [("/lib/systemd/systemd", "systemd")];

/// Runs the unit in `$1`, which becomes `/run/cmt`, and tells on stderr what it says. Both end together, however they do.
const START: &str = r#"
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/cmt /run/user /run/systemd/system /run/systemd/inaccessible/dir
# What is to be inaccessible is covered by these.
touch /run/systemd/inaccessible/reg
mknod /run/systemd/inaccessible/chr c 0 0
mount --bind "$1" /run/cmt
# Where it makes those for PrivateTmp=.
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /var/tmp
# For the manager's last step, too, when the folder may be gone.
cp -r /run/cmt/units /run/units
mkfifo /run/said
mount -t cgroup2 cgroup2 /sys/fs/cgroup
group=/sys/fs/cgroup/cmt-tests-$$
mkdir $group
set +e
sh -c 'echo $$ > $0/cgroup.procs && exec env -i "$@"' $group \
    XDG_RUNTIME_DIR=/run/user SYSTEMD_UNIT_PATH=/run/units SYSTEMD_LOG_TARGET=null \
    SYSTEMD_GENERATOR_PATH=/nowhere SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/nowhere \
    /lib/systemd/systemd --user --unit=cmt-serve.service > /dev/null 2>&1 &
manager=$!
end() {
    [ -d $group ] && kill $manager 2> /dev/null
    tail --pid=$manager --sleep-interval=0.02 --follow /dev/null
    find $group -depth -type d -exec rmdir {} +
}
{ tail --pid=$$ --sleep-interval=0.05 --follow /dev/null; end; } > /dev/null 2>&1 &
{ cat /run/said >&2; kill $manager 2> /dev/null; } &
trap 'kill $manager' TERM
wait $manager
wait $manager
end
# Where nothing was ever said.
: <> /run/said
"#;

fn example(name: &str) -> String {
    let path = workspace().join("examples/systemd").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

/// A command line that runs the unit, with these drop-ins, on a port of its own; what it says is on stderr.
fn unit(place: &Place, drop_ins: &[&str]) -> Command {
    let units = place.path("units");
    let folder = units.join("cmt-serve.service.d");
    let _ = fs::remove_dir_all(&units);
    fs::create_dir_all(&folder).expect("a folder");
    let put = |name: &str, text: &str| fs::write(units.join(name), text).expect("write");
    let of_test = "[Service]\nStandardError=file:/run/said\n\
                   Environment=\"CMT_PRETEND_LINK=32.0 GT/s PCIe x16\"\n";
    put("cmt-serve.service", &here(&example("cmt-serve.service")));
    for (index, text) in drop_ins.iter().chain([&of_test]).enumerate() {
        put(&format!("cmt-serve.service.d/{index}.conf"), &here(text));
    }
    // What every unit is ordered by, and what ends a manager.
    put("basic.target", "[Unit]\n");
    for name in ["shutdown.target", "exit.target", "systemd-exit.service"] {
        let from = format!("/usr/lib/systemd/user/{name}");
        put(name, &fs::read_to_string(from).expect("a unit of systemd"));
    }
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", START]);
    command.arg("sh").arg(place.folder.path());
    command
}

/// The paths and the port of the examples, as they are here.
fn here(text: &str) -> String {
    text.replace("/usr/local/bin/cmt", "/run/cmt/cmt")
        .replace("/etc/cmt/", "/run/cmt/")
        .replace("127.0.0.1:9469", "127.0.0.1:0")
}

#[test]
fn the_unit_counts() {
    let Some(_turn) = require_packages(Rung::StandIn, &NEEDED) else {
        return;
    };
    let _alone = alone();
    let place = Place::new();
    let (victim, workload) = named(&place, "un-see", &["--hold", "--calls", "100"]);
    let serve = Serve::spawn(unit(&place, &[])).ready();
    victim.signal(libc::SIGUSR1);
    let own = account_of(&victim.finish());
    until("it counts what the victim counts", || {
        serve.scrape().of_workload(&workload) == own
    });
}

#[test]
fn the_unit_attaches_with_what_the_drop_in_adds_and_with_no_less() {
    let Some(_turn) = require_packages(Rung::StandIn, &NEEDED) else {
        return;
    };
    let _alone = alone();
    let place = Place::new();
    let (mut victim, workload) = named(&place, "un-act", &[]);
    let policy = place.path("policy.yml");
    // More than any thread can gain, so that it is taken back, too.
    let rollback = "rollback: {after: 5s, min_gain: 61}";
    let rule = format!("{{workload: {workload}, min_gain: 0, observe: 1s, {rollback}}}");
    fs::write(&policy, format!("mode: attach\nrules: [{rule}]\n")).expect("write");
    open_to_all(&policy);
    let before = victim.settled();

    let drop_in = example("cmt-serve.service.d/policy.conf");
    let added = |key: &str| -> Vec<&str> {
        let values = drop_in.lines().filter_map(|line| line.strip_prefix(key));
        values.flat_map(str::split_whitespace).collect()
    };
    for capability in added("CapabilityBoundingSet=") {
        // Which the unit has anyway: nothing at all would take that away, too.
        let less = drop_in.replace(capability, "CAP_BPF");
        let refused = run(limited(&unit(&place, &[&less])));
        let said = format!(": {capability} missing;");
        assert!(refused.stderr.contains(&said), "{refused:#?}");
        victim.assert_untouched(&before);
    }
    for call in added("SystemCallFilter=") {
        let less = drop_in.replace(call, "bpf");
        let serve = Serve::spawn(unit(&place, &[&less])).ready();
        let done = || serve.scrape().sum("cmt_policy_actions_total", &[]);
        until("something is done", || done() > 0.0);
        let (_, said, _) = serve.end(libc::SIGTERM);
        let refused = said.contains(": attach_failed: ") && said.contains("not permitted");
        assert!(refused, "without {call}: {said}");
        victim.assert_untouched(&before);
    }

    let serve = Serve::spawn(unit(&place, &[&drop_in])).ready();
    let actions = |action: &str| {
        let label = format!("action=\"{action}\"");
        serve.scrape().sum("cmt_policy_actions_total", &[&label])
    };
    until("it is attached", || {
        assert_eq!(actions("attach_failed"), 0.0);
        actions("attach") > 0.0
    });
    let state = || {
        let status = cmt(["status", &victim.pid.to_string(), "--json"]).json();
        status["processes"][0]["state"].clone()
    };
    assert_eq!(state(), "attached");
    wait_until_staged(&victim);
    until("it is detached", || actions("rollback") > 0.0);
    assert_eq!(state(), "detached");
    drop(serve);
    assert_eq!(victim.stop()["mismatches"], 0);
}
