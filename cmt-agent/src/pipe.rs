//! Results on stdout, and what happens when nobody takes them.
#![expect(unsafe_code, reason = "changing a signal's disposition")]

use std::io::Write as _;

use anyhow::Context as _;
use nix::sys::signal::{SigHandler, Signal, signal};

/// Ends this process quietly when it writes to a pipe whose reader has gone, as `cmt status | head -1` makes it.
///
/// Rust starts programs with SIGPIPE ignored, so that writing fails instead.
pub fn end_quietly() {
    // SAFETY: the default disposition runs no code of ours.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
}

/// Writes a result to stdout.
///
/// # Errors
/// When it cannot be written, as to a full disk; what the command did stays done.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .context("cannot write the report to stdout")
}
