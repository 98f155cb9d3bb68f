//! Targets in containers: other namespaces, another root, read-only, with and without `/proc`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cmt_tests::{Finished, Rung, Victim, attach, built, cmt_command, cycles, require};

/// A folder that holds a copying program, what it needs to run, and nothing else.
struct Root {
    folder: tempfile::TempDir,
}

impl Root {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["proc", "lib64", "lib"] {
            fs::create_dir(folder.path().join(name)).expect("create a folder");
        }
        let root = Self { folder };
        let program = built().victim("victim-drv");
        root.put(&program, "victim-drv");
        root.put(&built().folder.join("libcuda.so.1"), "lib/libcuda.so.1");
        let mut ldd = Command::new("ldd");
        ldd.arg(program).env("LD_LIBRARY_PATH", &built().folder);
        let ldd = ldd.output().expect("run ldd");
        for word in String::from_utf8_lossy(&ldd.stdout).split_whitespace() {
            let name = Path::new(word)
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if word.starts_with("/lib64/ld-") {
                root.put(Path::new(word), word.trim_start_matches('/'));
            } else if word.starts_with('/') {
                root.put(Path::new(word), &format!("lib/{name}"));
            }
        }
        root
    }

    fn put(&self, from: &Path, to: &str) {
        fs::copy(from, self.path().join(to)).unwrap_or_else(|error| panic!("{from:?}: {error}"));
    }

    fn path(&self) -> PathBuf {
        self.folder.path().to_path_buf()
    }

    /// Starts the program in namespaces and on a root as `victim-contain` makes them.
    fn start(&self, how: &str) -> Victim {
        let mut command = Command::new(built().victim("victim-contain"));
        command.arg(how).arg(self.path());
        command.args(["/victim-drv", "--threads", "2", "--bytes", "64K,4M"]);
        command.env("LD_LIBRARY_PATH", "/lib");
        if how.contains("pid") {
            Victim::spawn_in_pid_namespace(command)
        } else {
            Victim::spawn(command)
        }
    }
}

/// Attach and detach work five times, and the container's files are what they were.
#[track_caller]
fn works(how: &str) {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let root = Root::new();
    let before = files(&root.path());
    let mut victim = root.start(how);
    let folder = working_folder(&victim);
    cycles(&mut victim, 5);
    assert_eq!(working_folder(&victim), folder);
    let left = open_files(&victim);
    assert!(left.len() <= 2, "more than the two memfds stay: {left:?}");
    assert_eq!(victim.stop()["mismatches"], 0);
    assert_eq!(files(&root.path()), before);
}

/// Its device and inode: the path of another root's folder says nothing.
fn working_folder(victim: &Victim) -> (u64, u64) {
    let path = format!("/proc/{}/cwd", victim.pid);
    let folder = fs::metadata(path).expect("its working folder");
    (folder.dev(), folder.ino())
}

/// What attaching left open.
fn open_files(victim: &Victim) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{}/fd", victim.pid)).expect("its descriptors");
    entries
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .filter(|file| {
            let name = file.to_string_lossy();
            ["cmt", "socket:", "/maps", "/fd"]
                .iter()
                .any(|ours| name.contains(ours))
        })
        .collect()
}

/// All files below a folder, with their sizes.
fn files(folder: &Path) -> Vec<(PathBuf, u64)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).expect("read a folder") {
        let path = entry.expect("read an entry").path();
        let metadata = fs::symlink_metadata(&path).expect("look at a file");
        if metadata.is_dir() {
            all.extend(files(&path));
        }
        all.push((path, metadata.len()));
    }
    all.sort();
    all
}

#[test]
fn another_root() {
    works("proc");
}

#[test]
fn a_read_only_root() {
    works("proc,ro");
}

#[test]
fn no_proc_inside() {
    works("none");
}

#[test]
fn a_pid_namespace() {
    works("pid,proc");
}

#[test]
fn a_user_namespace() {
    works("user,pid,proc");
}

#[test]
fn all_namespaces_a_read_only_root_and_no_proc() {
    works("user,pid,net,uts,ipc,cgroup,ro");
}

#[test]
fn all_namespaces_and_a_read_only_root() {
    works("user,pid,net,uts,ipc,cgroup,proc,ro");
}

#[test]
fn no_proc_inside_and_no_more_descriptors_allowed() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let root = Root::new();
    let mut victim = root.start("none");
    victim.next_line().expect("all its descriptors are open");
    let standard_files = |victim: &Victim| {
        [0, 1, 2].map(|fd| fs::read_link(format!("/proc/{}/fd/{fd}", victim.pid)).ok())
    };
    let limit = |victim: &Victim, most: usize| {
        let mut prlimit = Command::new("prlimit");
        prlimit.arg(format!("--nofile={most}:"));
        let pid = victim.pid.to_string();
        let status = prlimit.args(["--pid", &pid]).status();
        assert!(status.expect("prlimit runs").success());
    };
    let before = standard_files(&victim);
    let folder = format!("/proc/{}/fd", victim.pid);
    let open = || fs::read_dir(&folder).expect("its descriptors").count();
    // Too few for: the control block, the payload, one socket, two, the folder, the memory map.
    let mut refused = 0;
    for more in 0..6 {
        limit(&victim, open() + more);
        let attached = attach(&victim);
        assert!(victim.is_alive(), "{more}: {attached:#?}");
        assert_eq!(standard_files(&victim), before, "{more} descriptors left");
        if attached.code == Some(0) {
            break;
        }
        refused += 1;
        let clear = ["descriptor", "open files"];
        assert!(
            clear.iter().any(|word| attached.stderr.contains(word)),
            "{more}: {attached:#?}"
        );
    }
    assert!(refused > 3, "{refused}");
    assert_eq!(victim.stop()["mismatches"], 0);
}

/// As in pods: `cmt` is in a cgroup namespace, from which the target's cgroup cannot be seen but from within.
#[test]
fn a_quota_beyond_our_cgroup_namespace_counts() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let limited = "mount -t tmpfs tmpfs /sys/fs/cgroup && echo 100000 100000 > /sys/fs/cgroup/cpu.max && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", limited, "sh"]);
    command.arg(built().victim("victim-drv"));
    command.env("LD_LIBRARY_PATH", &built().folder);
    let mut victim = Victim::spawn(command);
    let before = victim.settled();

    let elsewhere = "root=/sys/fs/cgroup && mount -t cgroup2 cgroup2 $root && group=$root/cmt-tests-$$ && mkdir $group || exit 9
        echo $$ > $group/cgroup.procs && unshare --cgroup \"$@\"
        code=$?
        echo $$ > $root/cgroup.procs && rmdir $group
        exit $code";
    let pid = victim.pid.to_string();
    let cmt = cmt_command(["attach", &pid, "--before", "0s", "--after", "0s"]);
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", elsewhere, "sh"]);
    command.arg(cmt.get_program()).args(cmt.get_args());
    let refused = Finished::from(command.output().expect("run unshare"));
    let sentence = refused.refusal();
    assert!(sentence.contains("may use 1 CPUs"), "{sentence}");
    victim.assert_untouched(&before);
    assert_eq!(victim.stop()["mismatches"], 0);
}
