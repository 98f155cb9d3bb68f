//! `cmt serve`: metrics of all processes of this machine, for a Prometheus to fetch.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::builder::RangedU64ValueParser;

use crate::fleet::http_config::{self, Access};
use crate::link::Link;
use crate::probes::rights::{self, Deed};
use crate::serve::otlp::Push;
use crate::serve::policy::{Mode, Policy};
use crate::serve::totals::MOST_WORKLOADS;
use crate::serve::web_config::WebConfig;
use crate::serve::{self, Wishes};
use crate::trace::duration;

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
    #[arg(long, value_name = "N", default_value_t = MOST_WORKLOADS,
          value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    max_workloads: usize,
    /// How long a workload's name stays after its last process, if another needs the room
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration::parse)]
    keep_workloads: Duration,
    /// Count by process, too: the first 64 to copy, the others as "other"
    #[arg(long)]
    by_pid: bool,
    /// Attach to what this file allows, and take back what does not help
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Push the metrics to an OpenTelemetry collector too, by OTLP over HTTP (http://127.0.0.1:4318)
    #[arg(long, value_name = "URL")]
    otlp: Option<String>,
    /// How often to push
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = duration::parse, requires = "otlp")]
    otlp_interval: Duration,
    /// Credentials and certificates for that: a file as promtool takes it (--http.config.file)
    #[arg(long, value_name = "FILE", requires = "otlp")]
    otlp_http_config: Option<PathBuf>,
}

/// Serves until a signal ends it.
pub fn run(args: Args) -> anyhow::Result<()> {
    let web = match &args.web_config {
        Some(path) => WebConfig::read(path)?,
        None => WebConfig::default(),
    };
    let policy = args.policy.as_deref().map(policy).transpose()?;
    let push = args.otlp.as_deref().map(|base| push(base, &args));
    let push = push.transpose()?;
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
    if policy.is_some() && Link::best().is_none() {
        eprintln!(
            "cmt: warning: no GPU's link is known here (sysfs), so no gain can be estimated and the policy attaches to nothing"
        );
    }
    let wishes = Wishes {
        web,
        most_workloads: args.max_workloads,
        names_kept: args.keep_workloads,
        by_pid: args.by_pid,
        policy,
        push,
    };
    serve::run(listener, wishes)
}

fn push(base: &str, args: &Args) -> anyhow::Result<Push> {
    let access = match &args.otlp_http_config {
        Some(path) => http_config::read(path).context("nothing was traced")?,
        None => Access::default(),
    };
    Push::new(base, args.otlp_interval, access)
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
