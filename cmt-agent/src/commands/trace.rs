//! `cmt trace`: which copies live processes make, from which memory, and how long they take.

use std::io::{self, Write as _};
use std::time::Duration;

use anyhow::Context as _;
use console::Term;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};

use crate::trace::report::Report;
use crate::trace::{Snapshot, Targets, Tracer, duration, table};

/// Shows the copies of live processes: direction, memory, sizes, latencies.
#[derive(clap::Args)]
pub struct Args {
    /// Processes to trace
    #[arg(value_name = "PID", required_unless_present = "all", value_parser = clap::value_parser!(u32).range(1..))]
    pids: Vec<u32>,
    /// Trace every process that maps a CUDA library, now or later
    #[arg(long, conflicts_with = "pids")]
    all: bool,
    /// How long to trace (500ms, 10s, 1m); without it, until Ctrl-C
    #[arg(long = "for", value_name = "TIME", value_parser = duration::parse)]
    duration: Option<Duration>,
    /// Print one JSON object (cmt/trace/1) instead of tables
    #[arg(long)]
    json: bool,
}

/// Traces, then prints the report on stdout.
pub fn run(args: Args) -> anyhow::Result<()> {
    let mut pids = args.pids;
    pids.sort_unstable();
    pids.dedup();
    let targets = if args.all {
        Targets::All
    } else {
        Targets::Pids(pids)
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (snapshot, pair_ns) = runtime.block_on(trace(&targets, args.duration, !args.json))?;
    let report = Report::new(&snapshot, pair_ns);
    for warning in &snapshot.warnings {
        eprintln!("cmt: warning: {warning}");
    }
    let text = if args.json {
        if snapshot.calls() == 0 {
            eprint!("{}", table::render(&snapshot, &report, &targets));
        }
        serde_json::to_string(&report)? + "\n"
    } else {
        table::render(&snapshot, &report, &targets)
    };
    io::stdout()
        .write_all(text.as_bytes())
        .context("cannot write the report")
}

/// Traces until the time is over, a signal comes, or all named processes have ended.
async fn trace(
    targets: &Targets,
    duration: Option<Duration>,
    live: bool,
) -> Result<(Snapshot, Option<u64>), anyhow::Error> {
    // From here on Ctrl-C ends the trace instead of the process, so that what was seen is not lost.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut tracer = Tracer::start(targets.clone(), false)?;
    let pair_ns = tracer.pair_ns();
    let mut view = LiveView::new(live);
    if duration.is_none() {
        eprintln!("tracing; Ctrl-C ends it");
    }
    tokio::select! {
        () = until_over(&tracer, duration, &mut view) => {}
        () = arrives(&mut interrupt) => {}
        () = arrives(&mut terminate) => {}
    }
    view.clear();
    Ok((tracer.stop()?, pair_ns))
}

async fn arrives(signal: &mut Signal) {
    signal.recv().await;
}

async fn until_over(tracer: &Tracer, duration: Option<Duration>, view: &mut LiveView) {
    let watch = async {
        let mut second = interval(Duration::from_millis(100));
        second.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut tick = 0u32;
        loop {
            second.tick().await;
            if tracer.ended() {
                return;
            }
            tick += 1;
            if tick.is_multiple_of(10) {
                view.show(tracer);
            }
        }
    };
    match duration {
        Some(duration) => {
            // Whether the time is over or the processes are, the trace is.
            let _ = tokio::time::timeout(duration, watch).await;
        }
        None => watch.await,
    }
}

/// The tables so far, drawn over and over on stderr where that is a terminal.
struct LiveView {
    terminal: Option<Term>,
    lines: usize,
}

impl LiveView {
    fn new(wanted: bool) -> Self {
        let terminal = Term::stderr();
        Self {
            terminal: (wanted && terminal.is_term()).then_some(terminal),
            lines: 0,
        }
    }

    fn show(&mut self, tracer: &Tracer) {
        let Some(terminal) = self.terminal.clone() else {
            return;
        };
        let text = match tracer.snapshot() {
            Ok(snapshot) => {
                let report = Report::new(&snapshot, tracer.pair_ns());
                let tables = table::tables(&report);
                if tables.is_empty() {
                    format!("no copies yet, {:.0} s\n", report.duration_s)
                } else {
                    tables
                }
            }
            Err(error) => format!("{error}\n"),
        };
        self.clear();
        // Taller than the screen, the top would scroll away and could not be cleared.
        let most = usize::from(terminal.size().0).saturating_sub(1).max(1);
        for line in text.lines().take(most) {
            // A terminal that has gone is no reason to end the trace.
            let _ = terminal.write_line(line);
            self.lines += 1;
        }
    }

    fn clear(&mut self) {
        if let Some(terminal) = &self.terminal {
            let _ = terminal.clear_last_lines(self.lines);
            self.lines = 0;
        }
    }
}
