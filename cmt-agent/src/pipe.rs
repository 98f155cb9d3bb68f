//! What happens when nobody reads our output any more.
#![expect(unsafe_code, reason = "changing a signal's disposition")]

use nix::sys::signal::{SigHandler, Signal, signal};

/// Ends this process quietly when it writes to a pipe whose reader has gone, as `cmt status | head -1` makes it.
///
/// Rust starts programs with SIGPIPE ignored, so that writing fails instead.
pub fn end_quietly() {
    // SAFETY: the default disposition runs no code of ours.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
}
