//! `cmt serve`: what all processes of a node copy, as metrics that a Prometheus fetches. For weeks, in bounded memory.
//!
//! `node` traces, `ledger` adds what is new to `totals`; `exposition` names it, `buckets` shapes it, and `http` hands it out.
//! Where that is asked for, `otlp` pushes the same to a collector, and `policy` attaches.

pub mod buckets;
mod by_pid;
mod exposition;
mod http;
mod ledger;
mod node;
pub mod otlp;
mod password;
pub mod policy;
pub mod totals;
pub mod web_config;
pub mod workloads;

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use axum_server::tls_rustls::RustlsConfig;
use axum_server::{Address, Handle, Server};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use self::by_pid::ByPid;
use self::http::Pages;
use self::node::Node;
use self::otlp::Push;
use self::password::Users;
use self::policy::Policy;
use self::totals::Totals;
use self::web_config::{Tls, WebConfig};

/// How often counts leave the kernel's map, whose room is bounded.
const TURN_EVERY: Duration = Duration::from_secs(1);
/// How often attached processes are counted.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// What a scraper may still take when the end has come.
const GRACE: Duration = Duration::from_millis(300);
/// A connection that has asked for nothing after so long is closed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// One that asks for nothing more, after so long.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Threads that answer, and threads that read the kernel's maps for them.
const ANSWERING: usize = 2;
const READING: usize = 2;

/// What is shared by those who answer and those who count.
type Shared = Arc<Mutex<Option<Node>>>;

/// What it is asked for.
pub struct Wishes {
    /// Encryption and passwords.
    pub web: WebConfig,
    /// Workloads that are told apart.
    pub most_workloads: usize,
    /// How long each is after its last process.
    pub names_kept: Duration,
    /// Whether counts by process are wanted, too.
    pub by_pid: bool,
    /// What to attach to, if anything.
    pub policy: Option<Policy>,
    /// Where to push, if anywhere.
    pub push: Option<Push>,
}

/// Traces all processes and answers on `listener` until a signal ends it.
pub fn run(listener: TcpListener, wishes: Wishes) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ANSWERING)
        .max_blocking_threads(READING)
        .enable_all()
        .build()
        .context("starting the runtime that answers")?;
    let mut totals = Totals::new(wishes.most_workloads, wishes.names_kept);
    totals.by_pid = wishes.by_pid.then(ByPid::default);
    let totals = Arc::new(Mutex::new(totals));
    let node: Shared = Arc::default();
    let result = runtime.block_on(serve(listener, wishes, totals, Arc::clone(&node)));
    runtime.shutdown_timeout(GRACE);
    // Takes the probes away.
    drop(take(&node));
    result
}

async fn serve(
    listener: TcpListener,
    wishes: Wishes,
    totals: Arc<Mutex<Totals>>,
    node: Shared,
) -> anyhow::Result<()> {
    // From here on a signal ends it in order.
    let mut ended = std::pin::pin!(signalled()?);
    let address = listener.local_addr().context("asking for the address")?;
    let shared = Arc::clone(&node);
    let pages = Arc::new(Pages {
        registry: exposition::registry(Arc::clone(&totals)),
        refresh: Box::new(move || turn(&shared)),
        ready: AtomicBool::new(false),
        healthy: AtomicBool::new(true),
    });
    let handle = Handle::new();
    listener
        .set_nonblocking(true)
        .context("preparing the listener")?;
    let router = http::router(Arc::clone(&pages), Users::new(wishes.web.users)).into_make_service();
    let certificate = match wishes.web.tls {
        Some(files) => Some(Certificate::load(files).await?),
        None => None,
    };
    let mut server = match &certificate {
        Some(certificate) => {
            let config = certificate.config.clone();
            let server = axum_server::from_tcp_rustls(listener, config).context("serving")?;
            tokio::spawn(patient(server, &handle).serve(router))
        }
        None => {
            let server = axum_server::from_tcp(listener).context("serving")?;
            tokio::spawn(patient(server, &handle).serve(router))
        }
    };
    let scheme = if certificate.is_some() {
        "https"
    } else {
        "http"
    };
    eprintln!("listening on {scheme}://{address}");
    let counting = async {
        let mut started = start(Arc::clone(&totals)).await?;
        started.see(node::look(started.traced()));
        put(&node, started);
        if let Some(policy) = wishes.policy {
            policy::start(policy, Arc::clone(&node), Arc::clone(&totals));
        }
        pages.ready.store(true, Ordering::Release);
        if let Some(push) = wishes.push {
            otlp::start(push, Arc::clone(&pages), Arc::clone(&totals));
        }
        log::info!("probes are in place");
        count(&node, &pages, certificate.as_ref()).await
    };
    tokio::select! {
        result = counting => result?,
        result = &mut server => return result?.context("serving"),
        () = &mut ended => {}
    }
    handle.graceful_shutdown(Some(GRACE));
    // Who is not done by then gets no answer.
    let _ = tokio::time::timeout(2 * GRACE, server).await;
    Ok(())
}

/// The same server, as patient as it should be.
fn patient<A: Address, Acceptor>(
    mut server: Server<A, Acceptor>,
    handle: &Handle<A>,
) -> Server<A, Acceptor> {
    server
        .http_builder()
        .http1()
        .header_read_timeout(IDLE_TIMEOUT);
    server
        .first_request_timeout(REQUEST_TIMEOUT)
        .handle(handle.clone())
}

/// Places probes, on a thread that an early end need not wait for: they go with the process.
async fn start(totals: Arc<Mutex<Totals>>) -> anyhow::Result<Node> {
    let (send, receive) = oneshot::channel();
    thread::spawn(move || {
        // At an early end nobody waits for it.
        let _ = send.send(Node::start(totals));
    });
    Ok(receive.await.context("placing probes")??)
}

/// Counts for ever.
async fn count(
    node: &Shared,
    pages: &Pages,
    certificate: Option<&Certificate>,
) -> anyhow::Result<()> {
    let mut looked = Instant::now();
    loop {
        tokio::time::sleep(TURN_EVERY).await;
        let shared = Arc::clone(node);
        let turned = spawn_blocking(move || turn(&shared)).await?;
        if let Err(error) = &turned
            && pages.healthy.load(Ordering::Acquire)
        {
            eprintln!("cmt: {error}");
        }
        pages.healthy.store(turned.is_ok(), Ordering::Release);
        if looked.elapsed() >= LOOK_EVERY {
            looked = Instant::now();
            let shared = Arc::clone(node);
            spawn_blocking(move || {
                // Looking takes long: not with what others wait for.
                let traced = with(&shared, |node| node.traced()).unwrap_or_default();
                let looked = node::look(traced);
                with(&shared, |node| node.see(looked))
            })
            .await?;
            if let Some(certificate) = certificate {
                certificate.renew().await;
            }
        }
    }
}

/// What we show that we are who we are.
struct Certificate {
    files: Tls,
    config: RustlsConfig,
}

impl Certificate {
    async fn load(files: Tls) -> anyhow::Result<Self> {
        let config = RustlsConfig::from_pem_file(&files.cert_file, &files.key_file).await;
        let config = config.with_context(|| {
            let (cert, key) = (files.cert_file.display(), files.key_file.display());
            format!("cannot use certificate {cert} with key {key}; nothing was traced")
        })?;
        Ok(Self { files, config })
    }

    /// Takes over what the files hold now. While they do not fit each other, what they held before goes on.
    async fn renew(&self) {
        let (cert, key) = (&self.files.cert_file, &self.files.key_file);
        if let Err(error) = self.config.reload_from_pem_file(cert, key).await {
            log::warn!("the certificate stays as it was: {error}");
        }
    }
}

/// Waits for Ctrl-C, SIGTERM or the end of the terminal.
fn signalled() -> anyhow::Result<impl Future<Output = ()>> {
    let listen = |kind| signal(kind).context("listening for signals");
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hang_up = listen(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hang_up.recv() => {}
        }
    })
}

fn turn(node: &Shared) -> Result<(), String> {
    match with(node, Node::turn) {
        Some(Err(error)) => Err(error.to_string()),
        // None: it is ending, and the totals are what they are.
        Some(Ok(())) | None => Ok(()),
    }
}

fn with<T>(node: &Shared, act: impl FnOnce(&mut Node) -> T) -> Option<T> {
    node.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .as_mut()
        .map(act)
}

fn put(node: &Shared, started: Node) {
    *node.lock().unwrap_or_else(PoisonError::into_inner) = Some(started);
}

fn take(node: &Shared) -> Option<Node> {
    node.lock().unwrap_or_else(PoisonError::into_inner).take()
}
