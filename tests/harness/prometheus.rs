//! A Prometheus of our own, from Debian's package, on a port of its own.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tempfile::TempDir;

/// It runs until this is dropped.
#[derive(Debug)]
pub struct Prometheus {
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
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\n\
             scrape_configs: [{{job_name: cmt, static_configs: [{{targets: {targets:?}}}]}}]\n"
        );
        let path = folder.join("prometheus.yml");
        fs::write(&path, config).expect("its configuration");
        // Without it, it reads text and the histograms' classic half.
        let (native, arguments) = match arguments {
            [CLASSIC, rest @ ..] => (None, rest),
            _ => (Some("--enable-feature=native-histograms"), arguments),
        };
        let log_path = folder.join("log");
        let address = format!("127.0.0.1:{}", free_port());
        let mut child = Command::new("prometheus")
            .arg(format!("--config.file={}", path.display()))
            .arg(format!("--storage.tsdb.path={}", folder.display()))
            .arg("--storage.tsdb.retention.time=100y")
            .arg(format!("--web.listen-address={address}"))
            .args(native)
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log_path).expect("its log"))
            .spawn()
            .expect("start prometheus");
        let started = Instant::now();
        while std::net::TcpStream::connect(&address).is_err() {
            let log = || fs::read_to_string(&log_path).unwrap_or_default();
            assert!(child.try_wait().expect("look").is_none(), "{}", log());
            assert!(started.elapsed() < Duration::from_secs(60), "{}", log());
            thread::sleep(Duration::from_millis(50));
        }
        Self {
            child,
            folder: None,
            url: format!("http://{address}"),
        }
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
