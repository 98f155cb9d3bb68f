//! A Prometheus of our own, or a VictoriaMetrics, from Debian's packages, on a port of its own.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tempfile::TempDir;

/// Who scrapes and answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The real one.
    Prometheus,
    /// It has no native histograms.
    VictoriaMetrics,
}

impl Engine {
    /// Its program and its package.
    pub fn package(self) -> (&'static str, &'static str) {
        match self {
            Self::Prometheus => ("prometheus", "prometheus"),
            Self::VictoriaMetrics => ("victoria-metrics", "victoria-metrics"),
        }
    }

    /// Starts it on no data, with more arguments: it scrapes these addresses every second.
    pub fn start(self, targets: &[String], arguments: &[&str]) -> Prometheus {
        match self {
            Self::Prometheus => Prometheus::start_with(targets, arguments),
            Self::VictoriaMetrics => Prometheus::victoria(targets, arguments),
        }
    }

    /// Starts it on samples of the past: `text` makes them, given how many of a timestamp's units are a second.
    pub fn remembering(self, text: impl FnOnce(u64) -> String) -> Prometheus {
        if self == Self::VictoriaMetrics {
            let started = self.start(&[], &[]);
            started.send("POST /api/v1/import/prometheus", &text(1000));
            started.settle();
            return started;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("past.om");
        fs::write(&path, text(1) + "# EOF\n").expect("written");
        let made = Command::new("promtool")
            .args(["tsdb", "create-blocks-from", "openmetrics"])
            .args([&path, folder.path()])
            .output();
        let made = made.expect("promtool");
        assert!(made.status.success(), "{made:?}");
        let mut started = Prometheus::start_in(folder.path(), &[], &[]);
        started.folder = Some(folder);
        started
    }
}

/// It runs until this is dropped.
#[derive(Debug)]
pub struct Prometheus {
    engine: Engine,
    child: Child,
    /// Removed with it.
    folder: Option<TempDir>,
    /// Where it listens.
    pub url: String,
}

/// In the place of a first argument: without native histograms.
pub const CLASSIC: &str = "classic";

impl Prometheus {
    /// Starts it on no data: it scrapes these addresses every second.
    pub fn start(targets: &[String]) -> Self {
        Self::start_with(targets, &[])
    }

    /// The same with more arguments.
    pub fn start_with(targets: &[String], arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut started = Self::start_in(folder.path(), targets, arguments);
        started.folder = Some(folder);
        started
    }

    /// Starts it on the data in a folder.
    pub fn start_in(folder: &Path, targets: &[String], arguments: &[&str]) -> Self {
        // Without it, it reads text and the histograms' classic half.
        let (native, arguments) = match arguments {
            [CLASSIC, rest @ ..] => (None, rest),
            _ => (Some("--enable-feature=native-histograms"), arguments),
        };
        let address = format!("127.0.0.1:{}", free_port());
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", scraping(folder, targets)))
            .arg(format!("--storage.tsdb.path={}", folder.display()))
            .arg("--storage.tsdb.retention.time=100y")
            .arg(format!("--web.listen-address={address}"))
            .args(native)
            .args(arguments);
        Self::listening(Engine::Prometheus, command, folder, address)
    }

    /// A VictoriaMetrics in its place.
    fn victoria(targets: &[String], arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let address = format!("127.0.0.1:{}", free_port());
        let mut command = Command::new("victoria-metrics");
        command
            .arg(format!(
                "-promscrape.config={}",
                scraping(folder.path(), targets)
            ))
            .arg(format!(
                "-storageDataPath={}",
                folder.path().join("data").display()
            ))
            .arg(format!("-httpListenAddr={address}"))
            .args(arguments);
        let mut started = Self::listening(Engine::VictoriaMetrics, command, folder.path(), address);
        started.folder = Some(folder);
        started
    }

    /// Starts a program that logs on stderr, and waits until it listens.
    fn listening(engine: Engine, mut command: Command, folder: &Path, address: String) -> Self {
        let log_path = folder.join("log");
        let mut child = command
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log_path).expect("its log"))
            .spawn()
            .expect("start it");
        let started = Instant::now();
        while TcpStream::connect(&address).is_err() {
            let log = || fs::read_to_string(&log_path).unwrap_or_default();
            assert!(child.try_wait().expect("look").is_none(), "{}", log());
            assert!(started.elapsed() < Duration::from_secs(60), "{}", log());
            thread::sleep(Duration::from_millis(50));
        }
        Self {
            engine,
            child,
            folder: None,
            url: format!("http://{address}"),
        }
    }

    /// Makes all that was scraped visible to questions. VictoriaMetrics does that by itself a second or two later.
    pub fn settle(&self) {
        if self.engine == Engine::VictoriaMetrics {
            self.send("GET /internal/force_flush", "");
        }
    }

    /// Sends it something that it has to accept.
    fn send(&self, what: &str, body: &str) {
        let address = self.url.trim_start_matches("http://");
        let mut stream = TcpStream::connect(address).expect("it listens");
        let length = body.len();
        let request = format!("{what} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        assert!(answer.starts_with("HTTP/1.0 20"), "{what}: {answer}");
    }

    /// Its resident memory, in bytes.
    pub fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.unwrap_or_default();
        let line = status.lines().find(|line| line.starts_with("VmHWM"));
        let kib = line.and_then(|line| line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes a configuration that scrapes these addresses every second, which both programs read, and returns its path.
fn scraping(folder: &Path, targets: &[String]) -> String {
    let config = format!(
        "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\n\
         scrape_configs: [{{job_name: cmt, static_configs: [{{targets: {targets:?}}}]}}]\n"
    );
    let path = folder.join("prometheus.yml");
    fs::write(&path, config).expect("its configuration");
    path.display().to_string()
}

/// A port of this machine on which nobody listens.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its address").port()
}

/// Seconds since 1970.
pub fn unix_time() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.expect("after 1970").as_secs_f64()
}
