//! Which capabilities each deed takes, which of them this process lacks, and how to get them. Every refusal for want of rights
//! is worded here, whatever command it ends.
//!
//! What takes which was found by taking them away one by one: `docs/rights.md`, `tests/rights.rs`.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::{Pid, Uid};

use super::kernel;
use crate::target::text;

/// Capabilities by their numbers (capabilities(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// Files of others may be written.
    DacOverride = 1,
    /// Files and folders of others may be read.
    DacReadSearch = 2,
    /// Processes of others may be inspected.
    SysPtrace = 19,
    /// Includes three of the others.
    SysAdmin = 21,
    /// Programs that trace may be loaded.
    Perfmon = 38,
    /// BPF maps and programs may be created.
    Bpf = 39,
    /// `/proc/PID/map_files` may be followed.
    CheckpointRestore = 40,
}

use Capability::{
    Bpf, CheckpointRestore, DacOverride, DacReadSearch, Perfmon, SysAdmin, SysPtrace,
};

/// Those that `cmt` can do anything with.
const ALL: [Capability; 7] = [
    Bpf,
    Perfmon,
    SysPtrace,
    CheckpointRestore,
    DacReadSearch,
    DacOverride,
    SysAdmin,
];

impl Capability {
    /// As capabilities(7) writes it.
    pub fn name(self) -> &'static str {
        match self {
            DacOverride => "CAP_DAC_OVERRIDE",
            DacReadSearch => "CAP_DAC_READ_SEARCH",
            SysPtrace => "CAP_SYS_PTRACE",
            SysAdmin => "CAP_SYS_ADMIN",
            Perfmon => "CAP_PERFMON",
            Bpf => "CAP_BPF",
            CheckpointRestore => "CAP_CHECKPOINT_RESTORE",
        }
    }

    fn is_in(self, set: u64) -> bool {
        set >> self as u32 & 1 == 1
    }

    /// True if a set holds it, or one that includes it.
    pub fn is_granted_by(self, set: u64) -> bool {
        let wider = match self {
            Bpf | Perfmon | CheckpointRestore => SysAdmin,
            DacReadSearch => DacOverride,
            _ => self,
        };
        self.is_in(set) || wider.is_in(set)
    }
}

/// What the kernel may refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// Loading programs and placing probes.
    Trace,
    /// The same where each probe is a link of its own, before Linux 6.6.
    TraceBySingleLinks,
    /// Seeing what a process maps, to trace it.
    Inspect,
    /// Seeing what all processes map, for which --all asks.
    InspectAll,
    /// Opening a library that a process maps, where only others may look.
    ReadLibrary,
    /// The same where the library is deleted.
    ReadDeleted {
        /// [`is_own`] is true of the process.
        own: bool,
    },
    /// Seeing whether a process is attached.
    Look {
        /// [`is_own`] is true of the process.
        own: bool,
    },
    /// Opening what `cmt` shares with an attached process.
    OpenControl,
    /// Stopping and patching.
    Attach {
        /// [`is_own`] is true of the process.
        own: bool,
    },
    /// The same to a process that sees no `/proc`: it is handed a part of ours.
    AttachWithoutProc,
}

impl Deed {
    /// What it takes. Where it was refused, what earlier deeds take is held.
    fn needs(self) -> &'static [Capability] {
        match self {
            Self::Trace => &[Bpf, Perfmon],
            Self::TraceBySingleLinks => &[Bpf, Perfmon, SysAdmin],
            Self::Inspect => &[Bpf, Perfmon, SysPtrace],
            Self::InspectAll => &[SysPtrace],
            Self::ReadLibrary => &[DacReadSearch],
            Self::ReadDeleted { own: true } | Self::OpenControl => &[CheckpointRestore],
            Self::ReadDeleted { own: false } => &[CheckpointRestore, DacReadSearch],
            Self::Look { own: true } | Self::Attach { own: true } => {
                &[SysPtrace, CheckpointRestore]
            }
            Self::Look { own: false } => &[SysPtrace, CheckpointRestore, DacReadSearch],
            Self::Attach { own: false } => &[SysPtrace, CheckpointRestore, DacOverride],
            Self::AttachWithoutProc => &[SysAdmin],
        }
    }

    /// What the same command mostly takes besides.
    fn brings(self) -> &'static [Capability] {
        match self {
            Self::Attach { .. } | Self::AttachWithoutProc | Self::InspectAll => &[Bpf, Perfmon],
            _ => &[],
        }
    }
}

/// What this process may do, and what limits it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Capabilities that are held.
    pub effective: u64,
    /// Capabilities that can be had at most.
    pub bounding: u64,
    /// Neither sudo nor setcap has any effect.
    pub no_new_privileges: bool,
    /// System calls are filtered.
    pub filtered: bool,
    /// Capabilities count for the whole machine.
    pub first_user_namespace: bool,
    /// A mode of [`kernel::lockdown`].
    pub lockdown: String,
}

impl Standing {
    /// Asks the kernel.
    pub fn ours() -> Self {
        // PROC_USER_INIT_INO of the kernel.
        const FIRST: &str = "user:[4026531837]";
        let status = text::read("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let mut lines = status.lines();
            let value = lines.find_map(|line| line.strip_prefix(name));
            value.map_or("", str::trim)
        };
        let set = |name| u64::from_str_radix(field(name), 16).unwrap_or(0);
        Self {
            effective: set("CapEff:"),
            bounding: set("CapBnd:"),
            no_new_privileges: field("NoNewPrivs:") == "1",
            filtered: field("Seccomp:") == "2",
            first_user_namespace: fs::read_link("/proc/self/ns/user")
                .is_ok_and(|link| link.as_os_str() == FIRST),
            lockdown: kernel::lockdown(),
        }
    }

    fn holds(&self, capability: Capability) -> bool {
        capability.is_granted_by(self.effective)
    }

    /// Why a deed was refused, and the remedy.
    fn refusal(&self, deed: Deed) -> String {
        if !self.first_user_namespace {
            return "capabilities of a user namespace (a rootless container) do not count for it; run it as root of the host, outside".into();
        }
        let missing: Vec<Capability> = deed
            .needs()
            .iter()
            .copied()
            .filter(|capability| !self.holds(*capability))
            .collect();
        if !missing.is_empty() {
            let names: Vec<&str> = missing.iter().map(|one| one.name()).collect();
            return format!(
                "{} missing; {}",
                names.join(", "),
                self.grant(&missing, deed.brings())
            );
        }
        if self.lockdown == "confidentiality" {
            return "no capability is missing, but kernel lockdown is in confidentiality mode; boot with lockdown=integrity or without".into();
        }
        if self.filtered {
            return "no capability is missing, but a seccomp filter is in force; run it outside the container, or start that with --security-opt seccomp=unconfined (Kubernetes: seccompProfile: {type: Unconfined})".into();
        }
        "no capability is missing, so a security module forbids it; run it outside the container, or see `cmt doctor`".into()
    }

    /// What gives a process like this one the capabilities that it misses, and those that will be missed next.
    pub fn grant(&self, missing: &[Capability], brings: &[Capability]) -> String {
        if missing.iter().any(|one| !one.is_in(self.bounding)) {
            let names: Vec<&str> = narrowest(|one| missing.contains(&one))
                .map(|one| one.name().trim_start_matches("CAP_"))
                .collect();
            return format!(
                "run it as root of the host (sudo cmt …), or start the container with --cap-add {} (Kubernetes: capabilities: {{add: [{}]}})",
                names.join(" --cap-add "),
                names.join(", ")
            );
        }
        if self.no_new_privileges {
            return "no_new_privs is set here, so neither sudo nor setcap helps: run it as root from elsewhere".into();
        }
        // It replaces what the file had.
        let names: Vec<String> = narrowest(|one| {
            missing.contains(&one)
                || one.is_in(self.effective)
                || brings.contains(&one) && one.is_in(self.bounding)
        })
        .map(|one| one.name().to_lowercase())
        .collect();
        format!(
            "run it as root (sudo cmt …), or once: {SETCAP} {}+ep {OURSELVES}",
            names.join(",")
        )
    }
}

/// How the command begins that gives this program's file capabilities, and how it ends.
pub const SETCAP: &str = "sudo setcap";
/// See [`SETCAP`].
pub const OURSELVES: &str = "$(command -v cmt)";

/// Those that are wanted, without the one that another includes.
fn narrowest(wanted: impl Fn(Capability) -> bool) -> impl Iterator<Item = Capability> {
    let wider = wanted(DacOverride);
    ALL.into_iter()
        .filter(move |one| wanted(*one) && !(wider && *one == DacReadSearch))
}

/// One sentence: why the kernel may have refused a deed to this process, and the remedy.
pub fn refusal(deed: Deed) -> String {
    Standing::ours().refusal(deed)
}

/// Whether this process holds what a deed takes.
pub fn may(deed: Deed) -> bool {
    let ours = Standing::ours();
    ours.first_user_namespace && deed.needs().iter().all(|one| ours.holds(*one))
}

/// Whether files in `/proc/PID` are this user's: not of a process that is another user's or not dumpable. (The folder itself
/// is so in the latter case too.)
pub fn is_own(pid: u32) -> bool {
    fs::metadata(format!("/proc/{pid}/mem"))
        .is_ok_and(|file| file.uid() == Uid::effective().as_raw())
}

/// Whether there is such a process, though `/proc` does not show it (hidepid): then CAP_SYS_PTRACE is missing.
pub fn is_hidden(pid: u32) -> bool {
    let there = || match i32::try_from(pid) {
        Ok(pid) if pid > 0 => kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH),
        _ => false,
    };
    there() && !Path::new(&format!("/proc/{pid}")).exists() && there()
}

/// Whether this process may look into `pid` as a debugger that only reads: for its maps alone newer kernels ask for less.
pub fn may_inspect(pid: u32) -> bool {
    let root = fs::read_link(format!("/proc/{pid}/root"));
    !root.is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(capabilities: &[Capability]) -> u64 {
        capabilities
            .iter()
            .fold(0, |set, one| set | 1 << *one as u32)
    }

    fn user_with(capabilities: &[Capability]) -> Standing {
        Standing {
            effective: set(capabilities),
            bounding: u64::MAX,
            no_new_privileges: false,
            filtered: false,
            first_user_namespace: true,
            lockdown: "none".to_owned(),
        }
    }

    #[test]
    fn what_is_missing_is_named_with_what_grants_it() {
        let user = user_with(&[Bpf, SysPtrace]);
        assert_eq!(
            user.refusal(Deed::Trace),
            "CAP_PERFMON missing; run it as root (sudo cmt …), or once: sudo setcap cap_bpf,cap_perfmon,cap_sys_ptrace+ep $(command -v cmt)"
        );
        let confined = Standing {
            bounding: set(&[Bpf]),
            ..user.clone()
        };
        assert_eq!(
            confined.refusal(Deed::Trace),
            "CAP_PERFMON missing; run it as root of the host (sudo cmt …), or start the container with --cap-add PERFMON (Kubernetes: capabilities: {add: [PERFMON]})"
        );
        let stuck = Standing {
            no_new_privileges: true,
            ..user
        };
        assert!(
            stuck
                .refusal(Deed::Trace)
                .contains("neither sudo nor setcap helps")
        );
    }

    #[test]
    fn attaching_asks_at_once_for_what_tracing_takes() {
        let refusal = user_with(&[]).refusal(Deed::Attach { own: false });
        assert!(
            refusal
                .starts_with("CAP_SYS_PTRACE, CAP_CHECKPOINT_RESTORE, CAP_DAC_OVERRIDE missing;"),
            "{refusal}"
        );
        let command =
            "setcap cap_bpf,cap_perfmon,cap_sys_ptrace,cap_checkpoint_restore,cap_dac_override+ep";
        assert!(refusal.contains(command), "{refusal}");
    }

    #[test]
    fn where_nothing_is_missing_the_cause_is_another() {
        let able = user_with(&[Bpf, Perfmon]);
        for (standing, word) in [
            (able.clone(), "security module"),
            (
                Standing {
                    filtered: true,
                    ..able.clone()
                },
                "seccomp",
            ),
            (
                Standing {
                    lockdown: "confidentiality".into(),
                    ..able.clone()
                },
                "lockdown",
            ),
            (
                Standing {
                    first_user_namespace: false,
                    ..able
                },
                "user namespace",
            ),
        ] {
            let refusal = standing.refusal(Deed::Trace);
            assert!(refusal.contains(word), "{refusal}");
        }
        // It includes both.
        assert!(
            user_with(&[SysAdmin])
                .refusal(Deed::Trace)
                .contains("no capability is missing")
        );
    }
}
