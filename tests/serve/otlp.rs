//! `cmt serve --otlp`: a collector gets what a scraper gets, and one that fails or hangs holds up nobody.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use cmt_tests::{Named, Rung, Samples, Serve, account_of, cmt, require, until};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{Metric, number_data_point};
use prost::Message as _;

use crate::shared;

const PATIENCE: Duration = Duration::from_secs(60);

/// A collector that answers the first requests with an error.
struct Collector {
    url: String,
    received: Receiver<ExportMetricsServiceRequest>,
}

impl Collector {
    fn start(errors: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let (send, received) = channel();
        thread::spawn(move || {
            let mut answered = 0;
            for stream in listener.incoming().flatten() {
                let mut stream = BufReader::new(stream);
                while let Some(body) = request(&mut stream) {
                    let fails = answered < errors;
                    answered += 1;
                    let status = if fails { "503 Busy" } else { "200 OK" };
                    let head = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
                    let _ = stream.get_mut().write_all(head.as_bytes());
                    let body = ExportMetricsServiceRequest::decode(&body[..]).expect("a request");
                    if !fails && send.send(body).is_err() {
                        return;
                    }
                }
            }
        });
        Self { url, received }
    }

    /// What comes next.
    fn next(&self) -> Pushed {
        while self.received.try_recv().is_ok() {}
        let request = self.received.recv_timeout(PATIENCE).expect("a push");
        let [resource] = &request.resource_metrics[..] else {
            panic!("one resource: {request:?}");
        };
        let about = resource.resource.as_ref().expect("a resource");
        assert_eq!(value(&about.attributes, "service.name"), Some("cmt"));
        let scopes = resource.scope_metrics.iter();
        Pushed(scopes.flat_map(|scope| scope.metrics.clone()).collect())
    }
}

/// The body of a request; `None` at the end of a connection.
fn request(stream: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let mut length = 0;
    let mut begun = false;
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim().to_ascii_lowercase();
        if !begun {
            assert!(line.starts_with("post /v1/metrics "), "{line}");
            begun = true;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().expect("a length");
        }
        if let Some(value) = line.strip_prefix("content-type:") {
            assert_eq!(value.trim(), "application/x-protobuf");
        }
        if line.is_empty() {
            let mut body = vec![0; length];
            stream.read_exact(&mut body).ok()?;
            return Some(body);
        }
    }
}

fn value<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a str> {
    let found = attributes.iter().find(|one| one.key == key)?;
    match found.value.as_ref()?.value.as_ref()? {
        any_value::Value::StringValue(text) => Some(text),
        _ => None,
    }
}

struct Pushed(Vec<Metric>);

impl Pushed {
    fn data(&self, name: &str) -> &Data {
        let metric = self.0.iter().find(|metric| metric.name == name);
        let metric = metric.unwrap_or_else(|| panic!("no {name}"));
        metric.data.as_ref().expect("data")
    }

    /// The sum of a counter, of one workload if one is named.
    fn sum(&self, name: &str, workload: Option<&str>) -> f64 {
        let Data::Sum(sum) = self.data(name) else {
            panic!("{name} is no sum");
        };
        assert!(
            sum.is_monotonic && sum.aggregation_temporality == 2,
            "{name}"
        );
        let points = sum.data_points.iter().filter(|point| {
            let own = value(&point.attributes, "workload");
            workload.is_none() || own == workload
        });
        let values = points.map(|point| match point.value {
            Some(number_data_point::Value::AsDouble(value)) => value,
            ref other => panic!("{name}: {other:?}"),
        });
        values.sum()
    }

    /// Counts and seconds of all latencies.
    fn latencies(&self) -> (f64, f64) {
        let Data::ExponentialHistogram(all) = self.data("cmt_copy_duration_seconds") else {
            panic!("no exponential histogram");
        };
        assert_eq!(all.aggregation_temporality, 2);
        let mut sums = (0.0, 0.0);
        for point in &all.data_points {
            assert_eq!(point.scale, 3);
            let buckets = point.positive.as_ref().expect("buckets");
            let inside: u64 = buckets.bucket_counts.iter().sum();
            assert_eq!(inside + point.zero_count, point.count, "{point:?}");
            // By their bounds the mean is what the sum says it is.
            let bound = |at: f64| 2f64.powf((f64::from(buckets.offset) + at) / 8.0);
            let counts = buckets.bucket_counts.iter().enumerate();
            let middle = |at: usize| bound(at as f64 + 0.5);
            let guessed: f64 = counts.map(|(at, count)| *count as f64 * middle(at)).sum();
            let sum = point.sum.expect("a sum");
            assert!(
                (guessed / sum - 1.0).abs() < 0.15,
                "{guessed} for {point:?}"
            );
            sums.0 += point.count as f64;
            sums.1 += sum;
        }
        sums
    }
}

#[test]
fn a_collector_gets_what_a_scraper_gets() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let collector = Collector::start(2);
    let args = ["--otlp", &collector.url, "--otlp-interval", "500ms"];
    let serve = Serve::start(&[], &args);
    let named = Named::new("sv-otl", "victim-rt");
    let victim = named.start(&["--bytes", "4K,256K", "--calls", "300", "--hold"]);
    thread::sleep(Duration::from_secs(2));
    victim.signal(libc::SIGUSR1);
    let own = account_of(&victim.finish());
    let workload = named.workload();
    until("it counts all calls", || {
        serve.scrape().of_workload(&workload) == own
    });
    let pushed = collector.next();
    let counted = ["calls", "errors", "bytes"]
        .map(|what| pushed.sum(&format!("cmt_copy_{what}_total"), Some(&workload)) as u64);
    assert_eq!(counted, own);

    // All else is equal too, once nothing else copies meanwhile.
    const SUMS: [&str; 7] = [
        "cmt_copy_calls_total",
        "cmt_copy_bytes_total",
        "cmt_copy_errors_total",
        "cmt_copy_seconds_total",
        "cmt_copy_wait_seconds_total",
        "cmt_copy_function_calls_total",
        "cmt_lost_total",
    ];
    let latencies = |samples: &Samples| {
        ["count", "sum"].map(|what| samples.sum(&format!("cmt_copy_duration_seconds_{what}"), &[]))
    };
    until("nothing else copies", || {
        let before = serve.scrape();
        let pushed = collector.next();
        let after = serve.scrape();
        let sums = |samples: &Samples| SUMS.map(|name| samples.sum(name, &[]));
        if sums(&before) != sums(&after) {
            return false;
        }
        // Seconds are added up in another order.
        for (name, sum) in SUMS.iter().zip(sums(&after)) {
            let pushed = pushed.sum(name, None);
            assert!(
                (pushed - sum).abs() <= 1e-12 * sum,
                "{name}: {pushed} {sum}"
            );
        }
        let [count, seconds] = latencies(&after);
        let (pushed_count, pushed_seconds) = pushed.latencies();
        assert_eq!(pushed_count, count);
        assert!((pushed_seconds - seconds).abs() < 1e-6 * seconds);
        true
    });
    let samples = serve.scrape();
    assert_eq!(samples.sum("cmt_otlp_failures_total", &[]), 2.0);
    assert!(samples.sum("cmt_otlp_pushes_total", &[]) > 3.0);
    let (_, said, _) = serve.end(libc::SIGTERM);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 2, "{said}");
    assert!(lines[0].contains("503"), "{said}");
    assert!(lines[1].contains("takes metrics again"), "{said}");
}

#[test]
fn a_collector_that_hangs_or_is_not_there_holds_up_nobody() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    // It accepts, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", silent.local_addr().expect("an address"));
    let serve = Serve::start(&[], &["--otlp", &url, "--otlp-interval", "1s"]);
    until("pushes fail", || {
        serve.scrape().sum("cmt_otlp_failures_total", &[]) >= 2.0
    });
    let (status, said, took) = serve.end(libc::SIGTERM);
    assert_eq!(status.code(), Some(0), "{said}");
    assert!(took < Duration::from_secs(2), "{took:?}");
    for (args, word) in [
        (&["--otlp", "collector:4318"][..], "collector:4318"),
        (&["--otlp", &url, "--otlp-interval", "0s"], "interval"),
        (
            &["--otlp", &url, "--otlp-http-config", "/nowhere"],
            "/nowhere",
        ),
    ] {
        let refused = cmt([&["serve", "--listen", "127.0.0.1:0"], args].concat());
        let sentence = refused.refusal();
        assert!(
            sentence.contains(word) && sentence.contains("nothing was traced"),
            "{sentence}"
        );
    }
}
