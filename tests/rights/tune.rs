//! `cmt tune`.

use std::fs;
use std::os::unix::fs::chown;

use cmt_tests::{Finished, Rung, require};
use serde_json::Value;

use crate::place::{Place, USER, run};
use crate::with_others;

const COMMAND: [&str; 5] = ["--bytes", "1M", "--exact", "--calls", "20"];

/// Runs `cmt tune` as a user with these capabilities and a folder of his own; what it has kept of the run, if anything.
fn tune(place: &Place, capabilities: &[&str], args: &[&str]) -> (Finished, Option<Value>) {
    let home = place.path("home");
    if !home.exists() {
        fs::create_dir(&home).expect("a folder");
        chown(&home, Some(USER), Some(USER)).expect("given away");
    }
    let kept = home.join("run.json");
    let _ = fs::remove_file(&kept);
    let mut command = place.cmt(capabilities, &["tune"]);
    command
        .args(args)
        .env("HOME", &home)
        .env_remove("XDG_CACHE_HOME")
        .env("LD_LIBRARY_PATH", place.folder.path())
        .env("STANDIN_MEMORY_MIB", "64");
    let finished = run(command);
    let kept = fs::read_to_string(kept).ok();
    (
        finished,
        kept.and_then(|text| serde_json::from_str(&text).ok()),
    )
}

#[test]
fn a_program_is_started_without_any_rights() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    let victim = place.path("victim-drv").display().to_string();
    let kept = place.path("home/run.json").display().to_string();
    // Where it cannot be measured the estimate does, and that is said.
    for (search, lines) in [("instant", 1), ("fast", 2)] {
        let mut args = vec!["--search", search, "--json", &kept, "--", &victim];
        args.extend(COMMAND);
        let (finished, run) = tune(&place, &[], &args);
        assert_eq!(finished.code, Some(0), "{finished:#?}");
        let run = run.expect("kept");
        let staged = [0, 1].map(|way| run["staged"][way]["calls"].as_u64().expect("calls"));
        assert!(!staged.contains(&0), "{run:#}");
        assert_eq!(finished.stderr.lines().count(), lines, "{finished:#?}");
        assert_eq!(
            lines == 2,
            finished.stderr.contains("CAP_CHECKPOINT_RESTORE missing")
        );
    }
}

#[test]
fn a_search_takes_what_attaching_to_a_process_of_ones_own_takes() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _others = with_others();
    let place = Place::new();
    let (refused, _) = tune(&place, &[], &["--quiet"]);
    let sentence = refused.refusal();
    assert!(
        sentence.contains("CAP_CHECKPOINT_RESTORE missing"),
        "{sentence}"
    );
    let (found, _) = tune(&place, &["checkpoint_restore"], &["--quiet"]);
    assert_eq!(found.code, Some(0), "{found:#?}");
    assert!(found.stdout.contains("measured"), "{found:#?}");
}
