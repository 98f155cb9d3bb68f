//! Victims of any user, and `cmt` with any capabilities.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cmt_tests::{Finished, Trace, Victim, built, cmt_command};

/// Runs `cmt`, and owns what it looks at.
pub const USER: u32 = 61_001;
/// Owns what is another user's.
pub const OTHER: u32 = 61_002;
pub const ROOT: u32 = 0;

pub const LIBRARY: &str = "libcuda.so.1";
pub const BYTES: [&str; 4] = ["--bytes", "128K", "--pause-ms", "1"];

/// A folder in which any user may run `cmt` and a victim.
pub struct Place {
    pub folder: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        let place = Self {
            folder: tempfile::tempdir().expect("a folder"),
        };
        open_to_all(place.folder.path());
        place.put(Path::new(cmt_command([""; 0]).get_program()), "cmt");
        for file in ["victim-drv", "libconfine.so", LIBRARY] {
            place.put(&built().folder.join(file), file);
        }
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn put(&self, from: &Path, to: &str) {
        fs::copy(from, self.path(to)).unwrap_or_else(|error| panic!("{from:?}: {error}"));
        open_to_all(&self.path(to));
    }

    /// A command line of a victim of `user`, with what stands before it, such as `unshare`.
    pub fn command(&self, user: u32, before: &[&str], libraries: &Path) -> Command {
        let mut command = as_user(user, before);
        command.arg(self.path("victim-drv")).args(BYTES);
        command.env("LD_LIBRARY_PATH", libraries);
        command
    }

    /// A victim that allows nobody to look into it, though it is this user's.
    pub fn undumpable(&self, user: u32) -> Command {
        let mut command = self.command(user, &[], self.folder.path());
        command.env("LD_PRELOAD", self.path("libconfine.so"));
        command.env("CONFINE", "undumpable");
        command
    }

    pub fn victim(&self, user: u32) -> Victim {
        Victim::spawn(self.command(user, &[], self.folder.path()))
    }

    /// `cmt` as [`USER`] with these capabilities and no others, nor any chance of more.
    pub fn cmt(&self, capabilities: &[&str], args: &[&str]) -> Command {
        let sets = capabilities
            .iter()
            .fold("-all".to_owned(), |sets, one| format!("{sets},+{one}"));
        let mut command = Command::new("setpriv");
        for set in ["--inh-caps", "--ambient-caps", "--bounding-set"] {
            command.arg(format!("{set}={sets}"));
        }
        command.args(["--reuid", &USER.to_string(), "--regid", &USER.to_string()]);
        command.arg("--clear-groups").arg(self.path("cmt"));
        command.args(args).env_remove("RUST_LOG");
        command
    }

    /// Without each single one of `capabilities` the command is refused for want of just that, and the victim is as it was.
    #[track_caller]
    pub fn each_is_needed(&self, victim: &mut Victim, capabilities: &[&str], args: &[&str]) {
        let before = victim.settled();
        for lacking in capabilities {
            let others: Vec<&str> = capabilities
                .iter()
                .copied()
                .filter(|one| one != lacking)
                .collect();
            let refused = run(self.cmt(&others, args));
            let name = lacking.to_uppercase();
            let sentence = refused.refusal();
            assert!(
                sentence.contains(&format!(": CAP_{name} missing; run it as root"))
                    && sentence.contains(&format!("--cap-add {name} "))
                    && sentence.contains(&format!("{{add: [{name}]}}")),
                "{args:?} without {lacking}: {sentence}"
            );
        }
        victim.assert_untouched(&before);
    }

    /// The same for a trace; with all of them it counts what the victim counts.
    #[track_caller]
    pub fn traces_with(&self, mut victim: Victim, capabilities: &[&str], whom: &str) {
        let pid = victim.pid.to_string();
        let whom = if whom == "--all" { whom } else { &pid };
        self.each_is_needed(&mut victim, capabilities, &["trace", whom, "--for", "1s"]);
        let trace = Trace::spawn(self.cmt(capabilities, &["trace", "--json", whom]));
        let shown = victim.pid;
        counts_right(trace, victim, shown, whom == "--all");
    }
}

pub fn open_to_all(path: &Path) {
    fs::set_permissions(path, Permissions::from_mode(0o755)).expect("open it to all");
}

pub fn as_user(user: u32, program: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    if user != ROOT {
        let user = user.to_string();
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
    } else {
        command.args(["--reuid", "0"]);
    }
    command.args(program);
    command
}

pub fn run(mut command: Command) -> Finished {
    command.output().expect("run setpriv").into()
}

/// The same command, ended if it goes on where it ought to refuse.
pub fn limited(command: &Command) -> Command {
    let mut limited = Command::new("timeout");
    limited.arg("20").arg(command.get_program());
    limited.args(command.get_args()).env_remove("RUST_LOG");
    limited
}

/// Lets a held victim go, and compares what the trace counted with what it counted itself. The report has it under `pid`.
#[track_caller]
pub fn counts_right(trace: Trace, victim: Victim, pid: u32, all: bool) {
    victim.signal(libc::SIGUSR1);
    let account = victim.finish();
    let report = match all {
        true => trace.interrupt(),
        false => trace.finish().0,
    };
    let copies = report["processes"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|process| process["pid"] == pid)
        .and_then(|process| process["copies"].as_array())
        .unwrap_or_else(|| panic!("no copies of {pid}: {report}"));
    let functions = account["functions"].as_object().expect("functions");
    assert!(!functions.is_empty(), "{account}");
    for (name, own) in functions {
        let calls: u64 = copies
            .iter()
            .filter(|copy| copy["function"] == **name)
            .filter_map(|copy| copy["calls"].as_u64())
            .sum();
        assert_eq!(Some(calls), own["calls"].as_u64(), "{name}: {report}");
    }
}

/// A victim that waits for its trace, makes a hundred calls, and ends.
pub fn held(mut command: Command) -> Command {
    command.args(["--hold", "--calls", "100"]);
    command
}
