//! `cmt fleet`: the copies of a whole fleet, from its Prometheus.

use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;

use crate::fleet::http_config::{self, Access};
use crate::fleet::prometheus::Prometheus;
use crate::fleet::report::Report;
use crate::fleet::{Window, table, time};
use crate::pipe;
use crate::trace::duration;

/// Shows the copies of a whole fleet, from the Prometheus that scrapes its `cmt serve`
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// The range's end: now, now-2h, 2026-11-30T12:00:00Z, seconds since 1970
    #[arg(long, value_name = "TIME", default_value = "now", value_parser = time::moment)]
    at: f64,
    /// How many of the worst workloads and nodes to name
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
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
    /// How long to wait for one answer
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration::parse, global = true)]
    timeout: Duration,
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
    /// Write a page of HTML that needs no network
    #[arg(long, value_name = "FILE", global = true)]
    html: Option<PathBuf>,
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
}

/// Asks and reports.
pub fn run(args: Args) -> anyhow::Result<()> {
    let source = &args.source;
    let prometheus = source.open()?;
    let window = source.window(args.at);
    let report = Report::ask(&prometheus, window, &source.matchers, args.top)?;
    match source.json {
        true => pipe::print(&(serde_json::to_string(&report)? + "\n"))?,
        false => pipe::print(&table::render(&report))?,
    }
    Ok(())
}
