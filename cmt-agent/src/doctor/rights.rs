//! What this user may do.

use std::fs;

use procfs::process::Process;

use super::Need::{self, Attach, Trace};
use super::{Check, State};

const CAP_SYS_PTRACE: u64 = 1 << 19;
const CAP_SYS_ADMIN: u64 = 1 << 21;
const CAP_PERFMON: u64 = 1 << 38;
const CAP_BPF: u64 = 1 << 39;
const CAP_CHECKPOINT_RESTORE: u64 = 1 << 40;

struct Capability {
    name: &'static str,
    need: Need,
    /// Each of these is enough.
    any_of: u64,
    meaning: &'static str,
}

/// From capabilities(7); CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON.
const CAPABILITIES: [Capability; 4] = [
    Capability {
        name: "CAP_BPF",
        need: Trace,
        any_of: CAP_BPF | CAP_SYS_ADMIN,
        meaning: "BPF maps and programs cannot be created",
    },
    Capability {
        name: "CAP_PERFMON",
        need: Trace,
        any_of: CAP_PERFMON | CAP_SYS_ADMIN,
        meaning: "probes cannot be opened, and BPF programs may not read memory",
    },
    Capability {
        name: "CAP_SYS_PTRACE",
        need: Attach,
        any_of: CAP_SYS_PTRACE,
        meaning: "only processes of this user can be looked at, and none attached to where ptrace is restricted",
    },
    Capability {
        name: "CAP_CHECKPOINT_RESTORE",
        need: Attach,
        any_of: CAP_CHECKPOINT_RESTORE | CAP_SYS_ADMIN,
        meaning: "the memory that cmt shares with a target cannot be opened",
    },
];

pub(super) fn capabilities() -> Vec<Check> {
    let held = Process::myself()
        .and_then(|process| process.status())
        .map_or(0, |status| status.capeff);
    CAPABILITIES
        .iter()
        .map(|capability| check(capability, held))
        .collect()
}

fn check(capability: &Capability, held: u64) -> Check {
    if held & capability.any_of != 0 {
        return Check::ok(capability.name, capability.need, "held");
    }
    Check::new(capability.name, capability.need, State::Failed, "missing").but(
        capability.meaning,
        "run cmt as root (sudo cmt …), or: setcap cap_bpf,cap_perfmon,cap_sys_ptrace,cap_checkpoint_restore+ep cmt",
    )
}

pub(super) fn ptrace_scope() -> Check {
    const NAME: &str = "ptrace";
    let text = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    scope(NAME, text.trim())
}

/// Values from Documentation/admin-guide/LSM/Yama.rst.
fn scope(name: &'static str, value: &str) -> Check {
    match value {
        "" => Check::ok(name, Attach, "not restricted (no Yama)"),
        "0" => Check::ok(name, Attach, "not restricted (ptrace_scope 0)"),
        "1" | "2" => Check::ok(
            name,
            Attach,
            format!("with CAP_SYS_PTRACE only (ptrace_scope {value})"),
        ),
        _ => Check::new(name, Attach, State::Failed, format!("ptrace_scope {value}")).but(
            "no process may attach to another one until the next boot",
            "boot with kernel.yama.ptrace_scope at most 2",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_can_be_part_of_a_wider_one() {
        for (held, states) in [
            (0, [State::Failed; 4]),
            (
                CAP_SYS_ADMIN,
                [State::Ok, State::Ok, State::Failed, State::Ok],
            ),
            (
                CAP_BPF,
                [State::Ok, State::Failed, State::Failed, State::Failed],
            ),
            (
                CAP_BPF | CAP_PERFMON | CAP_SYS_PTRACE | CAP_CHECKPOINT_RESTORE,
                [State::Ok; 4],
            ),
        ] {
            let found = CAPABILITIES.each_ref().map(|one| check(one, held).state);
            assert_eq!(found, states, "{held:#x}");
        }
    }

    #[test]
    fn only_scope_3_forbids_attaching() {
        for (value, state) in [
            ("", State::Ok),
            ("0", State::Ok),
            ("1", State::Ok),
            ("2", State::Ok),
            ("3", State::Failed),
        ] {
            assert_eq!(scope("ptrace", value).state, state, "{value:?}");
        }
    }
}
