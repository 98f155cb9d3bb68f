//! `cmt trace`.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};

use cmt_tests::{Rung, Victim, built, require};

use crate::place::{LIBRARY, OTHER, Place, ROOT, USER, held, open_to_all};
use crate::{alone, with_others};

#[test]
fn of_an_own_process() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    let victim = Victim::spawn(held(place.command(USER, &[], place.folder.path())));
    place.traces_with(victim, &["bpf", "perfmon"], "it");

    let victim = Victim::spawn(held(place.undumpable(USER)));
    place.traces_with(victim, &["bpf", "perfmon", "sys_ptrace"], "it");
}

#[test]
fn of_another_users_process() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    for user in [OTHER, ROOT] {
        let victim = Victim::spawn(held(place.command(user, &[], place.folder.path())));
        place.traces_with(victim, &["bpf", "perfmon", "sys_ptrace"], "it");
    }
}

#[test]
fn of_containers() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    let folder = place.folder.path();
    let namespaces = ["unshare", "--user", "--map-root-user", "--mount", "--net"];
    let victim = Victim::spawn(held(place.command(ROOT, &namespaces, folder)));
    place.traces_with(victim, &["bpf", "perfmon", "sys_ptrace"], "it");

    let namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"];
    let command = held(place.command(ROOT, &namespaces, folder));
    let victim = Victim::spawn_in_pid_namespace(command);
    place.traces_with(victim, &["bpf", "perfmon", "sys_ptrace"], "it");
}

#[test]
fn where_the_library_is_hard_to_open() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    let private = place.path("private");
    fs::create_dir(&private).expect("a folder");
    place.put(&built().folder.join(LIBRARY), &format!("private/{LIBRARY}"));
    chown(&private, Some(OTHER), None).expect("give it away");
    fs::set_permissions(&private, Permissions::from_mode(0o700)).expect("close it");
    let start = || Victim::spawn(held(place.command(OTHER, &[], &private)));
    let closed = ["bpf", "perfmon", "sys_ptrace", "dac_read_search"];
    place.traces_with(start(), &closed, "it");

    let victim = start();
    fs::remove_dir_all(&private).expect("delete it");
    let deleted = [&closed[..], &["checkpoint_restore"]].concat();
    place.traces_with(victim, &deleted, "it");

    fs::create_dir(&private).expect("a folder");
    place.put(&built().folder.join(LIBRARY), &format!("private/{LIBRARY}"));
    open_to_all(&private);
    let victim = Victim::spawn(held(place.command(USER, &[], &private)));
    fs::remove_dir_all(&private).expect("delete it");
    place.traces_with(victim, &["bpf", "perfmon", "checkpoint_restore"], "it");
}

#[test]
fn of_all_processes() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _alone = alone();
    let place = Place::new();
    let victim = Victim::spawn(held(place.command(OTHER, &[], place.folder.path())));
    place.traces_with(victim, &["bpf", "perfmon", "sys_ptrace"], "--all");
}
