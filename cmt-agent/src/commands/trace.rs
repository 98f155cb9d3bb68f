//! `cmt trace`: which copies live processes make, from which memory, and how long they take.

use std::fs;
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::error::ErrorKind;
use crossterm::event::Event;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, sleep_until};

use crate::output_file::OutputFile;
use crate::pipe;
use crate::trace::intervals::{Form, Intervals};
use crate::trace::record::{Recorded, Recorder};
use crate::trace::report::Report;
use crate::trace::view::{self, View, Wish};
use crate::trace::{Snapshot, Targets, Tracer, duration, hgrm, table};

/// How often the view shows something new.
const REFRESH: Duration = Duration::from_secs(1);
/// How often is looked whether the processes have ended.
const LOOK: Duration = Duration::from_millis(100);
/// Intervals are not shorter: every one reads all counters.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);

/// Shows the copies of live processes: direction, memory, sizes, latencies.
#[derive(clap::Args)]
pub struct Args {
    /// Processes to trace
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
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
    /// Print the counts of every interval (1s, 1m) when it ends; with --json as JSON Lines
    #[arg(long, value_name = "TIME", value_parser = interval_length)]
    interval: Option<Duration>,
    /// Print the report at the end only, on a terminal too
    #[arg(long)]
    no_live: bool,
    /// Print each single copy as a line of JSON, and no report
    #[arg(long, conflicts_with_all = ["json", "interval"])]
    events: bool,
    /// Write each single copy to a file that ui.perfetto.dev opens
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    /// Write the latencies as HdrHistogram does: all to FILE (.hgrm), and each direction and kind of memory beside it
    #[arg(long, value_name = "FILE")]
    hgrm: Option<PathBuf>,
}

fn interval_length(text: &str) -> Result<Duration, String> {
    match duration::parse(text)? {
        length if length < SHORTEST_INTERVAL => Err("the shortest interval is 100ms".into()),
        length => Ok(length),
    }
}

impl Args {
    fn targets(&self) -> Targets {
        if self.all {
            return Targets::All;
        }
        if self.pids.is_empty() {
            let sentence = "say what to trace: processes (cmt trace PID…), or every one (cmt trace --all)\n\n\
                            Example: cmt trace 4242 --for 10s\n\n\
                            For more information, try 'cmt trace --help'.\n";
            clap::Error::raw(ErrorKind::MissingRequiredArgument, sentence).exit();
        }
        let mut pids = self.pids.clone();
        pids.sort_unstable();
        pids.dedup();
        Targets::Pids(pids)
    }
}

/// Traces, and prints on stdout what was seen: all at the end, or by interval.
pub fn run(args: Args) -> anyhow::Result<()> {
    let targets = args.targets();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let Some((whole, pair_ns)) = runtime.block_on(trace(&args, &targets))? else {
        return Ok(());
    };
    for warning in &whole.warnings {
        eprintln!("cmt: warning: {warning}");
    }
    if let Some(path) = &args.hgrm {
        write_hgrm(path, &whole)?;
    }
    let report = Report::new(&whole, pair_ns);
    let unprobed = unprobed(&whole, &targets);
    if args.json {
        if whole.calls() == 0 && unprobed.is_none() {
            eprint!("{}", table::render(&whole, &report, &targets));
        }
        if args.interval.is_none() {
            pipe::print(&(serde_json::to_string(&report)? + "\n"))?;
        }
    } else if unprobed.is_none() && !args.events {
        pipe::print(&table::render(&whole, &report, &targets))?;
    }
    match unprobed {
        Some(sentence) => bail!(sentence),
        None => Ok(()),
    }
}

/// Why nothing at all could be probed: no process that was named has ever mapped a CUDA library.
fn unprobed(whole: &Snapshot, targets: &Targets) -> Option<String> {
    let Targets::Pids(pids) = targets else {
        return None;
    };
    let named = pids
        .iter()
        .filter_map(|pid| Some((pid, whole.processes.get(pid)?)));
    let mut without = Vec::new();
    for (pid, process) in named {
        if !process.libraries.is_empty() {
            return None;
        }
        without.push(format!("{pid} ({})", process.comm));
    }
    let (pids, map) = match without.len() {
        1 => ("pid", "maps"),
        _ => ("pids", "map"),
    };
    Some(format!(
        "{pids} {} {map} no CUDA library: nothing could be probed; name the process that copies, perhaps a child of this \
         one, or let `cmt trace --all` find it",
        without.join(", ")
    ))
}

fn say_recorded(recorded: Recorded) {
    eprint!("cmt: {} copies written", recorded.copies);
    match recorded.dropped {
        0 => eprintln!(),
        dropped => eprintln!(", {dropped} came too fast and were DROPPED (the report counts them)"),
    }
}

fn write_hgrm(path: &Path, whole: &Snapshot) -> anyhow::Result<()> {
    let files = hgrm::files(path, whole);
    for (path, text) in &files {
        fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    let names: Vec<String> = files
        .iter()
        .map(|(path, _)| path.display().to_string())
        .collect();
    match names.is_empty() {
        true => eprintln!("cmt: no copy succeeded, so there are no latencies to write"),
        false => eprintln!("cmt: latencies written to {}", names.join(", ")),
    }
    Ok(())
}

/// What is shown while the trace runs.
enum Output {
    Nothing,
    Intervals(Intervals),
    // Boxed, as it is far larger than the others.
    Live(Box<View>),
}

/// Whether the trace goes on, and if not, whether somebody still waits for what it saw.
#[derive(PartialEq, Eq)]
enum Then {
    GoOn,
    End,
    NobodyListens,
}

impl Output {
    fn new(args: &Args, targets: &Targets, pair_ns: Option<u64>) -> anyhow::Result<Self> {
        let form = if args.json { Form::Json } else { Form::Text };
        if args.interval.is_some() {
            return Ok(Self::Intervals(Intervals::new(form, pair_ns)));
        }
        if args.json || args.events || args.no_live || !view::is_possible() {
            return Ok(Self::Nothing);
        }
        let view = View::open(targets.clone(), args.duration, pair_ns)
            .context("the terminal cannot be used; try --no-live")?;
        Ok(Self::Live(Box::new(view)))
    }

    /// Shows what was counted up to now.
    fn show(&mut self, whole: Snapshot) -> anyhow::Result<Then> {
        match self {
            Self::Nothing => {}
            Self::Intervals(intervals) => {
                let printed = pipe::print(&intervals.next(whole)?);
                if printed.as_ref().is_err_and(is_broken_pipe) {
                    return Ok(Then::NobodyListens);
                }
                printed?;
            }
            Self::Live(view) => view.update(whole).context("drawing on the terminal")?,
        }
        Ok(Then::GoOn)
    }

    /// Waits for a key; for ever where none can come.
    async fn event(&mut self) -> io::Result<Event> {
        match self {
            Self::Live(view) => view.event().await,
            _ => std::future::pending().await,
        }
    }

    fn react(&mut self, event: &Event) -> anyhow::Result<Then> {
        let Self::Live(view) = self else {
            return Ok(Then::GoOn);
        };
        match view.react(event).context("drawing on the terminal")? {
            Wish::Stay => Ok(Then::GoOn),
            Wish::Quit => Ok(Then::End),
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Traces until the time is over, a signal or a key comes, or all named processes have ended. `None` where nobody listens any
/// more.
async fn trace(args: &Args, targets: &Targets) -> anyhow::Result<Option<(Snapshot, Option<u64>)>> {
    // From here on Ctrl-C ends the trace instead of the process, so that what was seen is not lost.
    let mut signals = Signals::new()?;
    let open = |path: &PathBuf| OutputFile::open(path, "nothing was traced");
    let perfetto = args.perfetto.as_ref().map(open).transpose()?;
    // Written when all is over, and others beside it.
    args.hgrm.as_ref().map(open).transpose()?;
    let telling = args.events || perfetto.is_some();
    let mut tracer = Tracer::start(targets.clone(), telling)?;
    let recorder = tracer
        .take_events()
        .map(|events| Recorder::start(events, args.events, perfetto));
    let pair_ns = tracer.pair_ns();
    let mut output = Output::new(args, targets, pair_ns)?;
    match output {
        Output::Live(_) => signals.heed_hang_up()?,
        Output::Intervals(_) => signals.keep_broken_pipes()?,
        Output::Nothing => {}
    }
    if args.duration.is_none() && !matches!(output, Output::Live(_)) {
        eprintln!("tracing; Ctrl-C ends it");
    }
    let running = until_over(args, &tracer, &mut output, &mut signals, recorder.as_ref()).await;
    let whole = tracer.stop()?;
    if let Some(recorder) = recorder {
        say_recorded(recorder.finish().context("writing single copies")?);
    }
    let mut then = running?;
    if then != Then::NobodyListens && matches!(output, Output::Intervals(_)) {
        then = output.show(whole.clone())?;
    }
    Ok((then != Then::NobodyListens).then_some((whole, pair_ns)))
}

async fn until_over(
    args: &Args,
    tracer: &Tracer,
    output: &mut Output,
    signals: &mut Signals,
    recorder: Option<&Recorder>,
) -> anyhow::Result<Then> {
    let start = Instant::now();
    let mut look = every(start, LOOK);
    let mut beat = every(start, args.interval.unwrap_or(REFRESH));
    let end = args.duration.map(|duration| start + duration);
    if matches!(output, Output::Live(_)) {
        output.show(tracer.snapshot()?)?;
    }
    loop {
        let then = tokio::select! {
            biased;
            () = signals.next() => Then::End,
            () = reached(end) => Then::End,
            event = output.event() => output.react(&event.context("reading from the terminal")?)?,
            _ = beat.tick() => match output {
                Output::Nothing => Then::GoOn,
                _ => output.show(tracer.snapshot()?)?,
            },
            _ = look.tick() => {
                let is_over = tracer.ended() || recorder.is_some_and(Recorder::has_failed);
                if is_over { Then::End } else { Then::GoOn }
            }
        };
        if then != Then::GoOn {
            return Ok(then);
        }
    }
}

fn every(start: Instant, period: Duration) -> Interval {
    let mut ticks = interval_at(start + period, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks
}

async fn reached(end: Option<Instant>) {
    match end {
        Some(end) => sleep_until(end).await,
        None => std::future::pending().await,
    }
}

/// The signals that end a trace.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// The end of the terminal. Without a view it ends the process, unless somebody chose that it does not (`nohup`).
    hang_up: Option<Signal>,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: None,
        })
    }

    fn heed_hang_up(&mut self) -> io::Result<()> {
        self.hang_up = Some(signal(SignalKind::hangup())?);
        Ok(())
    }

    /// Makes writing to a pipe without a reader an error, instead of the end of the process.
    fn keep_broken_pipes(&mut self) -> io::Result<()> {
        // Once taken, a signal stays so.
        signal(SignalKind::pipe()).map(drop)
    }

    async fn next(&mut self) {
        let hang_up = async {
            match &mut self.hang_up {
                Some(signal) => signal.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => {
                // The terminal has echoed the key.
                if io::stderr().is_terminal() && self.hang_up.is_none() {
                    eprintln!();
                }
            }
            _ = self.terminate.recv() => {}
            _ = hang_up => {}
        }
    }
}
