//! `cmt tune`.

use std::fs;
use std::os::unix::fs::chown;

use cmt_tests::{Finished, Rung, require};
use serde_json::Value;

use crate::place::{Place, USER, run};
use crate::with_others;

const COMMAND: [&str; 5] = ["--bytes", "2M", "--exact", "--calls", "20"];

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
    for search in ["instant", "fast"] {
        let mut args = vec![
            "--search", search, "--quiet", "--json", &kept, "--", &victim,
        ];
        args.extend(COMMAND);
        let (finished, run) = tune(&place, &[], &args);
        assert_eq!(
            (finished.code, &*finished.stderr),
            (Some(0), ""),
            "{finished:#?}"
        );
        // What a search finds to be worth staging depends on what else the machine does.
        assert_eq!(run.expect("kept")["processes"], 1, "{search}");
    }
    // Measured once, and kept.
    let (again, _) = tune(&place, &[], &[]);
    assert!(
        again.stdout.contains("measured by --search fast"),
        "{again:#?}"
    );
}
