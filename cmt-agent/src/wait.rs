//! Waiting for a window of time to pass, with a progress bar and an ear for Ctrl-C.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::signal::unix::{SignalKind, signal};

/// How often `ended` is asked.
const STEP: Duration = Duration::from_millis(50);

/// Waits for `length`, or until `ended` says so; true if Ctrl-C, SIGTERM or the end of the terminal (SIGHUP) cut it
/// short.
///
/// Shows a bar on stderr where that is a terminal.
pub fn with_progress(
    name: &str,
    length: Duration,
    ended: impl Fn() -> bool,
) -> anyhow::Result<bool> {
    let bar = ProgressBar::with_draw_target(
        Some(length.as_millis() as u64),
        ProgressDrawTarget::stderr(),
    );
    bar.set_style(ProgressStyle::with_template(
        "tracing {prefix} {wide_bar} {eta}",
    )?);
    bar.set_prefix(name.to_owned());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime that waits")?;
    let interrupted = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hang_up = signal(SignalKind::hangup())?;
        let started = Instant::now();
        while started.elapsed() < length && !ended() {
            let step = STEP.min(length.saturating_sub(started.elapsed()));
            tokio::select! {
                () = tokio::time::sleep(step) => bar.set_position(started.elapsed().as_millis() as u64),
                _ = interrupt.recv() => return Ok(true),
                _ = terminate.recv() => return Ok(true),
                _ = hang_up.recv() => return Ok(true),
            }
        }
        anyhow::Ok(false)
    })?;
    bar.finish_and_clear();
    Ok(interrupted)
}
