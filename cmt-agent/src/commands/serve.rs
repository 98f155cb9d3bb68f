//! `cmt serve`: metrics of all processes of this machine, for a Prometheus to fetch.

use std::net::{SocketAddr, TcpListener};

use anyhow::Context as _;

use crate::serve;
use crate::serve::totals::MOST_WORKLOADS;

/// Trace all processes of this machine and serve what they copy as metrics
#[derive(clap::Args)]
pub struct Args {
    /// Address and port to answer on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9469")]
    listen: SocketAddr,
    /// Workloads that are told apart; what comes later counts as "other"
    #[arg(long, value_name = "N", default_value_t = MOST_WORKLOADS)]
    max_workloads: usize,
}

/// Serves until a signal ends it.
pub fn run(args: Args) -> anyhow::Result<()> {
    let listener = TcpListener::bind(args.listen)
        .with_context(|| format!("cannot listen on {}; nothing was traced", args.listen))?;
    if !args.listen.ip().is_loopback() {
        eprintln!(
            "cmt: warning: {} can be reached by others, without encryption or password",
            args.listen
        );
    }
    serve::run(listener, args.max_workloads)
}
