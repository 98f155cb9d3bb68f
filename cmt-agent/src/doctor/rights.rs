//! What this user may do.

use std::fs;

use super::Check;
use super::Need::{self, Attach, Trace};
use super::State::{self, Failed, Info, Warning};
use crate::probes::rights::{Capability, Standing};

struct Wanted {
    capability: Capability,
    need: Need,
    /// How it ends where it is missing.
    without: State,
    meaning: &'static str,
}

const WANTED: [Wanted; 7] = [
    Wanted {
        capability: Capability::Bpf,
        need: Trace,
        without: Failed,
        meaning: "BPF maps and programs cannot be created",
    },
    Wanted {
        capability: Capability::Perfmon,
        need: Trace,
        without: Failed,
        meaning: "BPF programs that trace cannot be loaded",
    },
    Wanted {
        capability: Capability::SysPtrace,
        need: Attach,
        without: Failed,
        meaning: "only processes of this user can be traced, not --all; none attached to where ptrace is restricted",
    },
    Wanted {
        capability: Capability::CheckpointRestore,
        need: Attach,
        without: Failed,
        meaning: "the memory that cmt shares with a target cannot be opened, nor a deleted library",
    },
    Wanted {
        capability: Capability::DacReadSearch,
        need: Trace,
        without: Warning,
        meaning: "other users' libraries cannot be traced where they are deleted or in closed folders",
    },
    Wanted {
        capability: Capability::DacOverride,
        need: Attach,
        without: Warning,
        meaning: "other users' processes cannot be attached to",
    },
    Wanted {
        capability: Capability::SysAdmin,
        need: Attach,
        without: Info,
        meaning: "processes that see no /proc cannot be attached to",
    },
];

pub(super) fn capabilities() -> Vec<Check> {
    checks(&Standing::ours())
}

fn checks(ours: &Standing) -> Vec<Check> {
    let is_missing = |wanted: &&Wanted| !wanted.capability.is_granted_by(ours.effective);
    // One command for all of them.
    let missing: Vec<Capability> = WANTED
        .iter()
        .filter(is_missing)
        .filter(|wanted| wanted.without != Info)
        .map(|wanted| wanted.capability)
        .collect();
    let check = |wanted: &Wanted| {
        let name = wanted.capability.name();
        if !is_missing(&wanted) {
            return Check::ok(name, wanted.need, "held");
        }
        let found = Check::new(name, wanted.need, wanted.without, "missing");
        match wanted.without {
            Info => found.means(wanted.meaning),
            _ => found.but(wanted.meaning, ours.grant(&missing, &[])),
        }
    };
    WANTED.iter().map(check).collect()
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
        _ => Check::new(name, Attach, Failed, format!("ptrace_scope {value}")).but(
            "no process may attach to another one until the next boot",
            "boot with kernel.yama.ptrace_scope at most 2",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BPF: u64 = 1 << 39;
    const PERFMON: u64 = 1 << 38;
    const SYS_ADMIN: u64 = 1 << 21;
    const SYS_PTRACE: u64 = 1 << 19;
    const CHECKPOINT_RESTORE: u64 = 1 << 40;
    const DAC_OVERRIDE: u64 = 1 << 1;

    #[test]
    fn a_capability_can_be_part_of_a_wider_one() {
        use State::Ok;
        for (effective, states) in [
            (0, [Failed, Failed, Failed, Failed, Warning, Warning, Info]),
            (SYS_ADMIN, [Ok, Ok, Failed, Ok, Warning, Warning, Ok]),
            (
                BPF | DAC_OVERRIDE,
                [Ok, Failed, Failed, Failed, Ok, Ok, Info],
            ),
            (
                BPF | PERFMON | SYS_PTRACE | CHECKPOINT_RESTORE,
                [Ok, Ok, Ok, Ok, Warning, Warning, Info],
            ),
        ] {
            let standing = Standing {
                effective,
                bounding: u64::MAX,
                ..Standing::ours()
            };
            let found: Vec<State> = checks(&standing).iter().map(|check| check.state).collect();
            assert_eq!(found, states, "{effective:#x}");
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
