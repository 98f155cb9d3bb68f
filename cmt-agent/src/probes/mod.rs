//! Places cmt's BPF programs on the CUDA functions of live processes, and takes them away again.
//!
//! Knows libraries, programs and links; knows nothing of what is counted (that is `trace`).

mod btf;
mod cost;
mod first;
pub(crate) mod kernel;
pub(crate) mod library;
mod link;
mod load;
mod maps;
mod pages;
mod programs;
pub mod rights;

use std::fs;
use std::io;

use thiserror::Error;

pub use cost::pair_ns;
pub use library::{Library, Mapped};
pub use link::{Links, Target, detach};
pub use maps::{CopyStats, Events, Maps};
pub use pages::learn;
pub use programs::{Probes, Reach, Whose};

/// Why probes could not be placed.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// The kernel said no to BPF or to the probe.
    #[error("the kernel refuses {what}: {reason}")]
    Denied {
        /// What was refused.
        what: &'static str,
        /// Which right is missing and how to get it.
        reason: String,
    },
    /// The kernel has no BPF, or no uprobes.
    #[error(
        "this kernel cannot do {what}; tracing needs Linux 5.15 or newer with BPF and uprobes ({source})"
    )]
    Unsupported {
        /// What is missing.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Probes carry no cookies.
    #[error(
        "Linux {major}.{minor} is too old to trace: probes carry BPF cookies, which came with Linux 5.15; use a newer kernel"
    )]
    TooOld {
        /// Of its version.
        major: u32,
        /// Of its version.
        minor: u32,
    },
    /// The verifier refused a program: a fault of cmt, or a kernel that is too old.
    #[error("the kernel's verifier refuses program {program}: {log}")]
    Verifier {
        /// The program.
        program: &'static str,
        /// The end of the verifier's log.
        log: String,
    },
    /// The embedded object is not what this binary expects.
    #[error("the embedded BPF object is broken: {0}")]
    Object(String),
    /// A map could not be created, read or written.
    #[error("BPF map {map}: {reason}")]
    Map {
        /// The map.
        map: &'static str,
        /// What went wrong.
        reason: String,
    },
    /// The kernel would not place probes on a file.
    #[error("cannot place probes on {path}")]
    Attach {
        /// The library, as the target maps it.
        path: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A library could not be read.
    #[error("cannot read {path}")]
    Library {
        /// The library, as the target maps it.
        path: String,
        /// What went wrong.
        source: io::Error,
    },
}

impl ProbeError {
    /// Whether a library may not be read.
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Library { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }

    /// Whether there were no descriptors left.
    pub fn is_exhaustion(&self) -> bool {
        matches!(
            self,
            Self::Library { source, .. }
                if matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
        )
    }

    /// The error for a failed system call that was to do `what`.
    fn of(what: &'static str, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::Denied {
                what,
                reason: rights::refusal(rights::Deed::Trace),
            },
            _ => Self::Unsupported { what, source },
        }
    }
}

/// True where process ids here are those that the kernel counts by.
pub fn in_first_pid_namespace() -> bool {
    // PROC_PID_INIT_INO of the kernel.
    const FIRST: &str = "pid:[4026531836]";
    fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() == FIRST)
}
