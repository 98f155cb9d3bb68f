//! Why attaching or detaching failed, and what was left as it was.

use std::io;

use cmt_common::control::VERSION;

use super::{CommandError, ThreadError};
use crate::target::TargetError;

/// Why attaching or detaching failed.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// The preflight refused.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A thread could not be stopped.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// The payload did not do what it was told.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Already patched.
    #[error(
        "process {pid} is already attached; see `cmt status {pid}`, or take it off with `cmt detach {pid}`"
    )]
    AlreadyAttached {
        /// Which.
        pid: u32,
    },
    /// Its libcuda is, or was to be, patched from within.
    #[error(
        "process {pid} was started by `cmt tune` and stages nothing yet: it begins with its first copy, or `cmt tune` has ended \
         before that; nothing was changed, start it without `cmt tune` to attach to it"
    )]
    Launched {
        /// Which.
        pid: u32,
    },
    /// Never patched.
    #[error("process {pid} is not attached; nothing to detach")]
    NotAttached {
        /// Which.
        pid: u32,
    },
    /// Another version's payload is inside.
    #[error(
        "process {pid} holds the payload of another cmt version (control block {found}, this cmt speaks {VERSION}); use that version, or restart the process"
    )]
    OtherVersion {
        /// Which.
        pid: u32,
        /// Its version.
        found: u32,
    },
    /// A forked child of a patched process.
    #[error(
        "process {pid} is a forked child of an attached process: it copies as stock does, and cannot be attached to or detached from"
    )]
    ForkedChild {
        /// Which.
        pid: u32,
    },
    /// Another `cmt` is at work on it.
    #[error("another cmt is at work on process {pid}; wait until it has finished")]
    Busy {
        /// Which.
        pid: u32,
    },
    /// No space for the stub.
    #[error(
        "no unused bytes were found behind the code of any of its libraries; nothing was changed"
    )]
    NoCave,
    /// A seccomp filter is in the way.
    #[error(
        "process {pid} runs under a seccomp filter that forbids {call}, which the payload needs; nothing was changed. Allow it in the container's or unit's profile"
    )]
    Seccomp {
        /// Which.
        pid: u32,
        /// The system call.
        call: &'static str,
    },
    /// No thread can be used.
    #[error(
        "no thread was found in a safe place within {waited_ms} ms; nothing was changed, try again"
    )]
    NoSafeThread {
        /// How long we looked.
        waited_ms: u128,
    },
    /// The bootstrap did not come up.
    #[error(
        "the target did not start a thread for the payload within {waited_s} s (limit of threads, descriptors or memory?); its copies are unchanged"
    )]
    NoBootstrap {
        /// How long we waited.
        waited_s: u64,
    },
    /// The payload could not be loaded.
    #[error("the payload could not be loaded: {message}; copies are unchanged")]
    NotLoaded {
        /// What the loader said.
        message: String,
    },
    /// Not one function can be hooked.
    #[error("none of the copy functions can be patched ({first}); copies are unchanged")]
    NothingToPatch {
        /// The first refusal.
        first: String,
    },
    /// A window holds other bytes than expected.
    #[error(
        "the code at {address:#x} is not what it was; another tool patched it? Nothing was changed"
    )]
    UnexpectedCode {
        /// Where.
        address: u64,
    },
    /// Threads kept standing in a window.
    #[error(
        "a thread stood inside the code to patch in each of {tries} tries; nothing was changed, try again"
    )]
    WindowBusy {
        /// How often we tried.
        tries: u32,
    },
    /// The target's memory could not be written.
    #[error("process {pid}: writing its memory")]
    Write {
        /// Which.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It would not do to attach, or what an attach has left may not be opened.
    #[error("process {pid} may not be {what}: {reason}")]
    NotAllowed {
        /// Which.
        pid: u32,
        /// What was to be done with it.
        what: &'static str,
        /// Why, and the remedy.
        reason: String,
    },
    /// The control block could not be mapped.
    #[error("process {pid}: mapping the control block")]
    Control {
        /// Which.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
}
