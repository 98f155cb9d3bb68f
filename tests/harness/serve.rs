//! Starts `cmt serve`, and reads what it serves.
#![expect(unsafe_code, reason = "sends signals")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Victim, built, cmt_command};
use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model::MetricFamily;
use prost::Message as _;
use serde_json::Value;

/// Probes are placed, and what a victim did is counted, within this time.
const PATIENCE: Duration = Duration::from_secs(60);
const PROTOBUF: &str =
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";

/// A `cmt serve` that is ready; killed if it is dropped before it ends.
#[derive(Debug)]
pub struct Serve {
    child: Child,
    stderr: BufReader<ChildStderr>,
    /// Where it answers.
    pub address: String,
}

impl Serve {
    /// Starts one on a port of its own, and waits until it is ready.
    #[track_caller]
    pub fn start(env: &[(&str, &str)], args: &[&str]) -> Self {
        Self::start_unready(env, args).ready()
    }

    /// Waits until it is ready.
    #[track_caller]
    pub fn ready(mut self) -> Self {
        let address = self.address.strip_prefix("http://").expect("plain");
        self.address = address.to_owned();
        until("it is ready", || self.get("/readyz", "").0 == 200);
        self
    }

    /// The same, without waiting; the address begins with the scheme.
    #[track_caller]
    pub fn start_unready(env: &[(&str, &str)], args: &[&str]) -> Self {
        let mut command = cmt_command(["serve", "--listen", "127.0.0.1:0"]);
        command.args(args).envs(env.iter().copied());
        Self::spawn(command)
    }

    /// The same by a command line of the caller's.
    #[track_caller]
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start cmt");
        let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("read what cmt says");
        let address = line.trim().strip_prefix("listening on ");
        let address = address.unwrap_or_else(|| panic!("{line}")).to_owned();
        Self {
            child,
            stderr,
            address,
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Status, header and body.
    pub fn ask(&self, method: &str, path: &str, accept: &str) -> (u16, String, Vec<u8>) {
        let mut stream = TcpStream::connect(&self.address).expect("connect");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: cmt\r\nAccept: {accept}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        )
        .expect("ask");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("an answer");
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
        let body = answer.split_off(end.expect("a header") + 4);
        let header = String::from_utf8(answer).expect("text");
        let status = header.split(' ').nth(1).expect("a status");
        (status.parse().expect("a number"), header, body)
    }

    /// The same by GET.
    pub fn get(&self, path: &str, accept: &str) -> (u16, String, Vec<u8>) {
        self.ask("GET", path, accept)
    }

    /// What a Prometheus reads as text.
    #[track_caller]
    pub fn scrape(&self) -> Samples {
        let (status, header, body) = self.get("/metrics", "text/plain");
        assert_eq!(status, 200, "{header}");
        Samples::of(&String::from_utf8(body).expect("text"))
    }

    /// What a Prometheus reads as protobuf.
    #[track_caller]
    pub fn scrape_protobuf(&self) -> Vec<MetricFamily> {
        let (status, header, body) = self.get("/metrics", PROTOBUF);
        assert!(
            status == 200 && header.contains("application/vnd.google.protobuf"),
            "{header}"
        );
        let mut rest = &body[..];
        let mut families = Vec::new();
        while !rest.is_empty() {
            families.push(MetricFamily::decode_length_delimited(&mut rest).expect("a family"));
        }
        families
    }

    /// Sends a signal, waits for the end; what it said after the address, and how long it took.
    #[track_caller]
    pub fn end(mut self, signal: i32) -> (ExitStatus, String, Duration) {
        let begun = Instant::now();
        // SAFETY: no memory is touched; the process is our child and not yet waited for, so the id is its own.
        let result = unsafe { libc::kill(self.child.id() as i32, signal) };
        assert_eq!(result, 0);
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("look at cmt") {
                break status;
            }
            assert!(begun.elapsed() < PATIENCE, "cmt serve does not end");
            thread::sleep(Duration::from_millis(5));
        };
        let took = begun.elapsed();
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).expect("what it says");
        (status, said, took)
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The lines of a scrape: name and labels, and the value.
#[derive(Debug)]
pub struct Samples(pub BTreeMap<String, f64>);

impl Samples {
    /// Those of a page of text.
    pub fn of(page: &str) -> Self {
        let lines = page.lines().filter(|line| !line.starts_with('#'));
        let samples = lines.map(|line| {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            (series.to_owned(), value.parse().expect("a number"))
        });
        Self(samples.collect())
    }

    /// The sum of all series of a name whose labels hold all of `words`.
    pub fn sum(&self, name: &str, words: &[&str]) -> f64 {
        let of_name = self.0.iter().filter(|(series, _)| {
            let labels = series.strip_prefix(name);
            labels.is_some_and(|labels| {
                (labels.is_empty() || labels.starts_with('{'))
                    && words.iter().all(|word| labels.contains(word))
            })
        });
        of_name.map(|(_, value)| value).sum()
    }

    /// Calls, errors and bytes of a workload.
    pub fn of_workload(&self, workload: &str) -> [u64; 3] {
        let escaped = workload.replace('\\', "\\\\").replace('"', "\\\"");
        let label = format!("workload=\"{escaped}\"");
        ["calls", "errors", "bytes"]
            .map(|what| self.sum(&format!("cmt_copy_{what}_total"), &[&label]) as u64)
    }
}

/// A victim under a name that no other has.
#[derive(Debug)]
pub struct Named {
    folder: tempfile::TempDir,
    name: String,
}

impl Named {
    /// A name for a victim, until this is dropped.
    pub fn new(name: &str, victim: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let name = format!("{name}-{}", std::process::id());
        symlink(built().victim(victim), folder.path().join(&name)).expect("a link");
        Self { folder, name }
    }

    /// Starts the victim under its name, and waits until it copies.
    #[track_caller]
    pub fn start(&self, args: &[&str]) -> Victim {
        Victim::spawn(self.command(args))
    }

    /// The command line for that, for tests that change how it is started.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.folder.path().join(&self.name));
        command
            .args(args)
            .env("LD_LIBRARY_PATH", &built().folder)
            .env_remove("RUST_LOG");
        command
    }

    /// The name that its copies are counted under.
    pub fn workload(&self) -> String {
        format!("comm/{}", self.name)
    }
}

/// Waits for something that takes some seconds at most.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Calls, errors and bytes by a victim's own account.
#[track_caller]
pub fn account_of(account: &Value) -> [u64; 3] {
    let functions = account["functions"].as_object().expect("functions");
    ["calls", "errors", "bytes"].map(|what| {
        let counts = functions.values();
        counts
            .map(|counts| counts[what].as_u64().expect(what))
            .sum()
    })
}
