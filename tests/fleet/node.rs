//! A node that reports made-up copies as `cmt serve` reports real ones, and remembers what it made up.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::protobuf;

/// Bounds of the classic buckets: powers of four from 1 µs, in nanoseconds.
pub fn bounds_ns() -> impl Iterator<Item = u64> {
    (0..13).map(|power| 1000 << (2 * power))
}

/// One copy.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    pub direction: &'static str,
    pub memory: &'static str,
    pub workload: &'static str,
    pub bytes: u64,
    pub latency_ns: u64,
}

impl Copy {
    pub fn size_class(&self) -> u64 {
        match self.bytes {
            0..4096 => 0,
            bytes => 1 << (bytes.ilog2() / 2 * 2).min(30),
        }
    }
}

/// In which form it tells of its histograms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Classic,
    Native,
}

/// What it counted since it started.
#[derive(Debug, Default)]
pub struct State {
    pub copies: Vec<Copy>,
    pub lost: u64,
    /// Seconds since 1970; not told when 0.
    pub start_time_s: f64,
}

/// A node, until it is dropped.
#[derive(Debug)]
pub struct Node {
    pub address: String,
    state: Arc<Mutex<State>>,
    scrapes: Arc<AtomicU32>,
}

impl Node {
    pub fn start(form: Form) -> Self {
        Self::listen(TcpListener::bind("127.0.0.1:0").expect("a port"), form)
    }

    pub fn start_at(address: &str, form: Form, state: State) -> Self {
        let node = Self::listen(TcpListener::bind(address).expect("the port"), form);
        *node.state.lock().expect("the state") = state;
        node
    }

    fn listen(listener: TcpListener, form: Form) -> Self {
        let node = Self {
            address: listener.local_addr().expect("its address").to_string(),
            state: Arc::default(),
            scrapes: Arc::default(),
        };
        let (state, scrapes) = (Arc::downgrade(&node.state), Arc::clone(&node.scrapes));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let Some(state) = state.upgrade() else { return };
                let body = match form {
                    Form::Classic => text(&state.lock().expect("the state")).into_bytes(),
                    Form::Native => protobuf::families(&state.lock().expect("the state")),
                };
                // Without an answer the scrape failed, and Prometheus knows.
                let _ = answer(stream, form, &body);
                scrapes.fetch_add(1, Ordering::SeqCst);
            }
        });
        node
    }

    /// Counts copies, and waits until Prometheus has seen them: the scrape that was under way may not have.
    pub fn count(&self, copies: &[Copy]) {
        self.change(|state| state.copies.extend_from_slice(copies));
    }

    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().expect("the state"));
        self.wait();
    }

    pub fn wait(&self) {
        let seen = self.scrapes.load(Ordering::SeqCst);
        let started = Instant::now();
        while self.scrapes.load(Ordering::SeqCst) < seen + 2 {
            assert!(started.elapsed() < Duration::from_secs(20), "not scraped");
            thread::sleep(Duration::from_millis(20));
        }
        // From the scrape to the store.
        thread::sleep(Duration::from_millis(200));
    }
}

impl Drop for Node {
    /// Wakes the listener, which ends when its state has gone.
    fn drop(&mut self) {
        self.state = Arc::default();
        let _ = TcpStream::connect(&self.address);
        thread::sleep(Duration::from_millis(50));
    }
}

fn answer(mut stream: TcpStream, form: Form, body: &[u8]) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut request = Vec::new();
    let mut buffer = [0; 4096];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            n => request.extend_from_slice(&buffer[..n]),
        }
    }
    let kind = match form {
        Form::Classic => "text/plain; version=0.0.4",
        Form::Native => {
            "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
        }
    };
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    stream.write_all(body)
}

/// Labels and their values.
pub type Pairs = Vec<(&'static str, String)>;

/// Counters, by name and labels.
pub fn counters(state: &State) -> BTreeMap<(&'static str, Pairs), f64> {
    let mut counters = BTreeMap::new();
    for copy in &state.copies {
        let labels = vec![
            ("direction", copy.direction.to_owned()),
            ("memory", copy.memory.to_owned()),
            ("workload", copy.workload.to_owned()),
        ];
        let seconds = copy.latency_ns as f64 / 1e9;
        for (name, value) in [
            ("cmt_copy_calls_total", 1.0),
            ("cmt_copy_bytes_total", copy.bytes as f64),
            ("cmt_copy_errors_total", 0.0),
            ("cmt_copy_seconds_total", seconds),
            ("cmt_copy_wait_seconds_total", seconds / 4.0),
        ] {
            *counters.entry((name, labels.clone())).or_default() += value;
        }
        if copy.memory == "pageable" {
            let labels = vec![("workload", copy.workload.to_owned())];
            *counters
                .entry(("cmt_copy_recoverable_seconds_total", labels))
                .or_default() += seconds / 2.0;
        }
    }
    let probes = state.copies.len() as f64;
    counters.insert(("cmt_probe_calls_total", Vec::new()), probes);
    for (reason, lost) in [("no_room", state.lost), ("not_readable", 0)] {
        let reason = vec![("reason", reason.to_owned())];
        counters.insert(("cmt_lost_total", reason), lost as f64);
    }
    if state.start_time_s > 0.0 {
        counters.insert(
            ("process_start_time_seconds", Vec::new()),
            state.start_time_s,
        );
    }
    counters
}

/// Latencies, by the labels of the histogram.
pub fn classes(state: &State) -> BTreeMap<Pairs, Vec<u64>> {
    let mut classes: BTreeMap<_, Vec<u64>> = BTreeMap::new();
    for copy in &state.copies {
        let labels = vec![
            ("direction", copy.direction.to_owned()),
            ("memory", copy.memory.to_owned()),
            ("size_class", copy.size_class().to_string()),
        ];
        classes.entry(labels).or_default().push(copy.latency_ns);
    }
    classes
}

fn labels(pairs: &[(&str, String)]) -> String {
    let pairs: Vec<String> = pairs
        .iter()
        .map(|(label, value)| format!("{label}={value:?}"))
        .collect();
    pairs.join(",")
}

/// The text format.
pub fn text(state: &State) -> String {
    let mut text = String::from("cmt_build_info{version=\"0.1.0\"} 1\n");
    for ((name, pairs), value) in counters(state) {
        let _ = writeln!(text, "{name}{{{}}} {value}", labels(&pairs));
    }
    text += "# TYPE cmt_copy_duration_seconds histogram\n";
    for (pairs, latencies) in classes(state) {
        let labels = labels(&pairs);
        let name = "cmt_copy_duration_seconds";
        for bound_ns in bounds_ns() {
            let count = latencies.iter().filter(|ns| **ns <= bound_ns).count();
            let le = bound_ns as f64 / 1e9;
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{le:e}\"}} {count}");
        }
        let count = latencies.len();
        let sum = latencies.iter().sum::<u64>() as f64 / 1e9;
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
        let _ = writeln!(
            text,
            "{name}_count{{{labels}}} {count}\n{name}_sum{{{labels}}} {sum}"
        );
    }
    text
}
