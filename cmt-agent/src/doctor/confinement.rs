//! What surrounds this process: namespaces, `/proc`, filters, security modules.

use super::Need::{Attach, Trace};
use super::{Check, State};
use crate::probes::in_first_pid_namespace;
use crate::probes::rights::{Capability, Standing};
use crate::target::text;

pub(super) fn user_namespace() -> Check {
    const NAME: &str = "user namespace";
    if Standing::ours().first_user_namespace {
        return Check::ok(NAME, Trace, "the machine's");
    }
    Check::new(
        NAME,
        Trace,
        State::Failed,
        "one of its own (a rootless container)",
    )
    .but(
        "capabilities held in it do not count for BPF, nor for files that others map",
        "run cmt as root of the host, outside",
    )
}

pub(super) fn pid_namespace() -> Check {
    const NAME: &str = "pid namespace";
    if in_first_pid_namespace() {
        return Check::ok(NAME, Trace, "the machine's");
    }
    Check::new(NAME, Trace, State::Warning, "one of its own (a container)").but(
        "other containers' processes are not seen, and `cmt trace --all` is refused",
        "run cmt on the host, or with docker --pid=host, Kubernetes hostPID: true",
    )
}

pub(super) fn process_folder() -> Check {
    let mounts = text::read("/proc/self/mountinfo").unwrap_or_default();
    let capable = Capability::SysPtrace.is_granted_by(Standing::ours().effective);
    hidden(&mounts, capable)
}

/// Mount options of procfs, from Documentation/filesystems/proc.rst.
fn hidden(mounts: &str, capable: bool) -> Check {
    const NAME: &str = "/proc";
    // The mount point is the fifth field; options of the file system are the last one.
    let options = mounts
        .lines()
        .rfind(|line| line.split(' ').nth(4) == Some("/proc"))
        .and_then(|line| line.rsplit(' ').next())
        .unwrap_or_default();
    let hidden = options.split(',').find(|option| {
        option.starts_with("hidepid=") && !matches!(*option, "hidepid=0" | "hidepid=off")
    });
    match hidden {
        None => Check::ok(NAME, Trace, "shows all processes"),
        Some(option) if capable => Check::ok(
            NAME,
            Trace,
            format!("{option}, which CAP_SYS_PTRACE overrides"),
        ),
        Some(option) => Check::new(NAME, Trace, State::Warning, option).but(
            "processes of other users are not seen",
            "run it as root (sudo cmt …), or with CAP_SYS_PTRACE",
        ),
    }
}

pub(super) fn system_calls() -> Check {
    const NAME: &str = "system calls";
    let ours = Standing::ours();
    let filter = match ours.filtered {
        true => "a seccomp filter is in force",
        false => "not filtered",
    };
    let privileges = match ours.no_new_privileges {
        true => ", no_new_privs is set",
        false => "",
    };
    let found = format!("{filter}{privileges}");
    match (ours.filtered, ours.no_new_privileges) {
        (false, false) => Check::ok(NAME, Trace, found),
        (true, _) => Check::info(NAME, Trace, found).but(
            "what it forbids shows as failed above, with its capability held",
            "if so: docker --security-opt seccomp=unconfined, Kubernetes seccompProfile: {type: Unconfined}",
        ),
        (false, true) => Check::info(NAME, Trace, found).but(
            "sudo and setcap have no effect from here",
            "nothing, as long as no capability is missing",
        ),
    }
}

pub(super) fn security_module() -> Check {
    let read = |path: &str| text::read(path).unwrap_or_default();
    module(
        read("/proc/self/attr/current").trim_end_matches(['\0', '\n']),
        read("/sys/fs/selinux/enforce").trim(),
        read("/sys/fs/selinux/booleans/deny_ptrace").trim(),
    )
}

/// `label` is what the security module calls this process, `enforcing` and `deny_ptrace` are SELinux's own.
fn module(label: &str, enforcing: &str, deny_ptrace: &str) -> Check {
    const NAME: &str = "security module";
    if enforcing == "1" && deny_ptrace.starts_with('1') {
        return Check::new(NAME, Attach, State::Failed, "SELinux, deny_ptrace is on").but(
            "no process may attach to another one",
            "sudo setsebool deny_ptrace off",
        );
    }
    // SELinux's names have four parts, of which the third is the type.
    let kind = label.split(':').nth(2);
    match (kind, label) {
        (Some(kind), _) if enforcing == "1" && kind.starts_with("container") => {
            Check::new(NAME, Trace, State::Warning, format!("SELinux, {kind}")).but(
                "a container's process may neither use BPF nor look at others",
                "docker, podman --security-opt label=disable; Kubernetes seLinuxOptions: {type: spc_t}",
            )
        }
        (Some(kind), _) => Check::ok(NAME, Trace, format!("SELinux, {kind}")),
        (None, "" | "unconfined") => Check::ok(NAME, Trace, "none confines this process"),
        (None, profile) if profile.ends_with("(enforce)") => {
            Check::new(NAME, Trace, State::Warning, format!("AppArmor, {profile}")).but(
                "it may forbid ptrace, BPF and perf events whatever the capabilities",
                "if they fail: docker --security-opt apparmor=unconfined, Kubernetes appArmorProfile: {type: Unconfined}",
            )
        }
        (None, other) => Check::info(NAME, Trace, text::printable(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_processes_are_told_of() {
        let mounts = |options| {
            format!(
                "22 1 0:2 / / rw - ext4 /dev/sda rw\n23 22 0:21 / /proc rw,relatime shared:5 - proc proc {options}\n"
            )
        };
        for (options, capable, state) in [
            ("rw", false, State::Ok),
            ("rw,hidepid=off", false, State::Ok),
            ("rw,hidepid=invisible", false, State::Warning),
            ("rw,gid=4,hidepid=2", false, State::Warning),
            ("rw,hidepid=2", true, State::Ok),
        ] {
            assert_eq!(hidden(&mounts(options), capable).state, state, "{options}");
        }
    }

    #[test]
    fn security_modules_that_may_be_in_the_way() {
        for (label, enforcing, deny, state) in [
            ("", "", "", State::Ok),
            ("unconfined", "", "", State::Ok),
            ("docker-default (enforce)", "", "", State::Warning),
            ("docker-default (complain)", "", "", State::Info),
            (
                "unconfined_u:unconfined_r:unconfined_t:s0",
                "1",
                "0 0",
                State::Ok,
            ),
            (
                "unconfined_u:unconfined_r:unconfined_t:s0",
                "1",
                "1 1",
                State::Failed,
            ),
            (
                "system_u:system_r:container_t:s0:c1,c2",
                "1",
                "0 0",
                State::Warning,
            ),
            (
                "system_u:system_r:container_t:s0:c1,c2",
                "0",
                "1 1",
                State::Ok,
            ),
        ] {
            assert_eq!(
                module(label, enforcing, deny).state,
                state,
                "{label} {enforcing} {deny}"
            );
        }
    }
}
