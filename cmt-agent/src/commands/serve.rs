//! `cmt serve`: metrics of all processes of this machine, for a Prometheus to fetch.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;

use anyhow::Context as _;

use crate::serve;
use crate::serve::totals::MOST_WORKLOADS;
use crate::serve::web_config::WebConfig;

/// Trace all processes of this machine and serve what they copy as metrics
#[derive(clap::Args)]
pub struct Args {
    /// Address and port to answer on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9469")]
    listen: SocketAddr,
    /// Encryption and passwords: a web config as Prometheus and its exporters have it
    #[arg(long, value_name = "FILE")]
    web_config: Option<PathBuf>,
    /// Workloads that are told apart; what comes later counts as "other"
    #[arg(long, value_name = "N", default_value_t = MOST_WORKLOADS)]
    max_workloads: usize,
}

/// Serves until a signal ends it.
pub fn run(args: Args) -> anyhow::Result<()> {
    let web = match &args.web_config {
        Some(path) => WebConfig::read(path)?,
        None => WebConfig::default(),
    };
    let listener = TcpListener::bind(args.listen)
        .with_context(|| format!("cannot listen on {}; nothing was traced", args.listen))?;
    if !args.listen.ip().is_loopback() {
        for (missing, what) in [
            (web.tls.is_none(), "encryption"),
            (web.users.is_empty(), "a password"),
        ] {
            if missing {
                eprintln!(
                    "cmt: warning: others may reach {} without {what}; see --web-config",
                    args.listen
                );
            }
        }
    }
    serve::run(listener, web, args.max_workloads)
}
