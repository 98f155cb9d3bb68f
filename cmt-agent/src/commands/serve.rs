//! `cmt serve`: metrics of all processes of this machine, for a Prometheus to fetch.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::probes::rights::{self, Deed};
use crate::serve::policy::{Mode, Policy};
use crate::serve::totals::MOST_WORKLOADS;
use crate::serve::web_config::WebConfig;
use crate::serve::{self, Wishes};

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
    /// Attach to what this file allows, and take back what does not help
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
}

/// Serves until a signal ends it.
pub fn run(args: Args) -> anyhow::Result<()> {
    let web = match &args.web_config {
        Some(path) => WebConfig::read(path)?,
        None => WebConfig::default(),
    };
    let policy = args.policy.as_deref().map(policy).transpose()?;
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
    let wishes = Wishes {
        web,
        most_workloads: args.max_workloads,
        policy,
    };
    serve::run(listener, wishes)
}

/// Reads a policy, and refuses one that could not be carried out.
fn policy(path: &Path) -> anyhow::Result<Policy> {
    let policy = Policy::read(path)?;
    let deed = Deed::Attach { own: false };
    if policy.mode == Mode::Attach && !rights::may(deed) {
        bail!(
            "{} is to attach to processes: {}; nothing was traced",
            path.display(),
            rights::refusal(deed)
        );
    }
    Ok(policy)
}
