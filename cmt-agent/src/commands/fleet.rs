//! `cmt fleet`: the copies of a whole fleet, from its Prometheus.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;

use crate::fleet::compare::{Comparison, Side};
use crate::fleet::http_config::{self, Access};
use crate::fleet::prometheus::Prometheus;
use crate::fleet::report::Report;
use crate::fleet::savings::{self, Savings};
use crate::fleet::{Window, page, table, time};
use crate::output_file::OutputFile;
use crate::pipe;
use crate::trace::duration;

/// Shows the copies of a whole fleet, from the Prometheus that scrapes its `cmt serve`
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    question: Option<Question>,
    #[command(flatten)]
    source: Source,
    /// How many of the worst workloads and nodes to name
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// Write the report as a page of HTML that needs no network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

#[derive(clap::Subcommand)]
enum Question {
    Compare(Compare),
    Savings(Assumptions),
}

/// Compares two ranges, or two groups of nodes, by direction and size
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("first").required(true).args(["before", "unpatched"]))]
struct Compare {
    /// The first range: START/END, or its end, with --range as its length
    #[arg(long, value_name = "TIME", value_parser = span, requires = "after")]
    before: Option<Span>,
    /// The second range
    #[arg(long, value_name = "TIME", value_parser = span, requires = "before")]
    after: Option<Span>,
    /// Labels of the nodes without the patch: 'rollout="old"'
    #[arg(
        long,
        value_name = "LABELS",
        requires = "patched",
        conflicts_with = "before"
    )]
    unpatched: Option<String>,
    /// Labels of those with it
    #[arg(
        long,
        value_name = "LABELS",
        requires = "unpatched",
        conflicts_with = "before"
    )]
    patched: Option<String>,
}

/// Works out what shorter stops are worth in a year; with --prometheus also what nodes estimate
#[derive(clap::Args)]
struct Assumptions {
    /// Only this: resume, weight-sync, engine-start, wake, checkpoint, replica-restart
    #[arg(long, value_name = "NAME", value_parser = event)]
    event: Option<savings::Event>,
    /// How often it happens: 1h, or 1.4h..1.6h
    #[arg(long, value_name = "TIME", value_parser = savings::every, requires = "event")]
    every: Option<RangeInclusive<f64>>,
    /// Seconds that tuning saves each time
    #[arg(long, value_name = "N", value_parser = positive, requires = "event")]
    seconds: Option<f64>,
    /// GPUs of the fleet
    #[arg(long, value_name = "N", default_value_t = savings::GPUS, value_parser = clap::value_parser!(u64).range(1..))]
    gpus: u64,
    /// Dollars of a GPU-hour
    #[arg(long, value_name = "DOLLARS", default_value_t = savings::PRICE, value_parser = positive)]
    price: f64,
}

/// A range on the command line.
#[derive(Clone, Copy, Debug)]
enum Span {
    /// As long as --range says.
    EndsAt(f64),
    Is(Window),
}

fn span(text: &str) -> Result<Span, String> {
    let Some((start, end)) = text.split_once('/') else {
        return time::moment(text).map(Span::EndsAt);
    };
    let (start_s, end_s) = (time::moment(start)?, time::moment(end)?);
    match end_s - start_s >= 1.0 {
        true => Ok(Span::Is(Window { start_s, end_s })),
        false => Err(format!("{text:?} ends before it begins")),
    }
}

fn event(name: &str) -> Result<savings::Event, String> {
    let mut all = savings::events().into_iter();
    all.find(|event| event.name == name)
        .ok_or_else(|| "no such event; cmt fleet savings lists them".into())
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    number
        .filter(|number| *number > 0.0 && number.is_finite())
        .ok_or_else(|| format!("{text:?} is no positive number"))
}

/// Where to ask, and how to show the answer.
#[derive(clap::Args)]
struct Source {
    /// Address of Prometheus, Thanos, Mimir or VictoriaMetrics
    #[arg(long, value_name = "URL", global = true)]
    prometheus: Option<String>,
    /// Credentials and TLS, as promtool takes them in --http.config.file
    #[arg(long, value_name = "FILE", global = true)]
    http_config: Option<PathBuf>,
    /// Only what has these labels: 'job="cmt",cluster="a"'
    #[arg(
        long = "match",
        value_name = "LABELS",
        default_value = "",
        hide_default_value = true,
        global = true
    )]
    matchers: String,
    /// Length of the range (30m, 1h, 7d)
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = time::range, global = true)]
    range: Duration,
    /// The range's end: now, now-2h, 2026-11-30T12:00:00Z, seconds since 1970
    #[arg(long, value_name = "TIME", default_value = "now", value_parser = time::moment, global = true)]
    at: f64,
    /// Count by every node's own counters, not by what rules recorded
    #[arg(long, global = true)]
    exact: bool,
    /// How long to wait for one answer
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration::parse, global = true)]
    timeout: Duration,
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
}

impl Source {
    fn open(&self) -> anyhow::Result<Prometheus> {
        let Some(url) = &self.prometheus else {
            let sentence = "say whom to ask: --prometheus URL\n\n\
                            Example: cmt fleet --prometheus http://localhost:9090 --range 1h\n\n\
                            For more information, try 'cmt fleet --help'.\n";
            clap::Error::raw(ErrorKind::MissingRequiredArgument, sentence).exit();
        };
        let access = match &self.http_config {
            Some(path) => http_config::read(path)?,
            None => Access::default(),
        };
        Ok(Prometheus::new(url, access, self.timeout))
    }

    fn window(&self, end_s: f64) -> Window {
        Window {
            start_s: end_s - self.range.as_secs_f64(),
            end_s,
        }
    }

    fn print(
        &self,
        answer: &impl serde::Serialize,
        text: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        match self.json {
            true => pipe::print(&(serde_json::to_string(answer)? + "\n")),
            false => pipe::print(&text()),
        }
    }
}

/// Asks and reports.
pub fn run(args: Args) -> anyhow::Result<()> {
    let source = &args.source;
    match &args.question {
        None => overview(&args),
        Some(Question::Compare(compare)) => {
            let comparison = Comparison::ask(&source.open()?, &compare.sides(source))?;
            source.print(&comparison, || comparison.text())
        }
        Some(Question::Savings(assumptions)) => {
            let mut savings = assumptions.savings();
            if source.prometheus.is_some() {
                savings.ask(&source.open()?, source.window(source.at), &source.matchers)?;
            }
            source.print(&savings, || savings.text())
        }
    }
}

fn overview(args: &Args) -> anyhow::Result<()> {
    let source = &args.source;
    let prometheus = source.open()?;
    // A page that cannot be written is found out before anything is asked.
    let page = args
        .html
        .as_deref()
        .map(|path| OutputFile::open(path, "nothing was asked"))
        .transpose()?;
    let window = source.window(source.at);
    let report = Report::ask(
        &prometheus,
        window,
        &source.matchers,
        args.top,
        source.exact,
    )?;
    source.print(&report, || table::render(&report))?;
    if let Some(page) = page {
        page.write(&page::page(&report))?;
    }
    Ok(())
}

impl Compare {
    /// The sides to ask about; clap has seen to it that there are two.
    fn sides(&self, source: &Source) -> [Side; 2] {
        let window = |span: &Option<Span>| match span {
            Some(Span::Is(window)) => *window,
            Some(Span::EndsAt(end_s)) => source.window(*end_s),
            None => source.window(source.at),
        };
        let matchers = |labels: &Option<String>| match labels {
            Some(labels) if !source.matchers.is_empty() => {
                format!("{},{labels}", source.matchers)
            }
            Some(labels) => labels.clone(),
            None => source.matchers.clone(),
        };
        let names = match self.before {
            Some(_) => ["before", "after"],
            None => ["unpatched", "patched"],
        };
        let side = |name, span, labels| Side {
            name,
            window: window(span),
            matchers: matchers(labels),
            exact: source.exact,
        };
        [
            side(names[0], &self.before, &self.unpatched),
            side(names[1], &self.after, &self.patched),
        ]
    }
}

impl Assumptions {
    fn savings(&self) -> Savings {
        let Some(mut event) = self.event.clone() else {
            return Savings::new(self.gpus, self.price, &savings::events());
        };
        if let Some(every_s) = &self.every {
            (event.every_s, event.often) = (every_s.clone(), savings::SAID);
        }
        if let Some(seconds) = self.seconds {
            (event.saved_s, event.saves) = (seconds, savings::SAID);
        }
        Savings::new(self.gpus, self.price, &[event])
    }
}
