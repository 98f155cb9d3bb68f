//! Pushes what `/metrics` shows to an OpenTelemetry collector: OTLP over HTTP, in protobuf.
//!
//! The SDK's instruments take single values, but ours were added up in the kernel; so the protocol's own messages are made here,
//! of the families that a scraper gets. Native histograms become exponential ones: both have 2^(1/8) as base, only the count
//! of their buckets begins one apart. A thread of its own pushes, so a slow collector holds up nobody.

use std::fs;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::exponential_histogram_data_point::Buckets;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, ExponentialHistogram, ExponentialHistogramDataPoint, Gauge, Metric,
    NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum, number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prometheus_client::encoding::prometheus_protobuf;
use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model::{
    Histogram, LabelPair, MetricFamily, MetricType,
};
use prost::Message as _;

use super::http::Pages;
use super::node::lock;
use super::totals::{Pushes, Totals};
use crate::fleet::http_config::Access;

/// Where a collector takes metrics.
const PATH: &str = "/v1/metrics";
/// A push that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(10);
/// Of an answer no more is read.
const MOST_ANSWER: u64 = 1 << 20;
const CUMULATIVE: i32 = AggregationTemporality::Cumulative as i32;

/// Where to push, and how often.
pub struct Push {
    url: String,
    every: Duration,
    access: Access,
}

impl Push {
    /// To the collector at `base`, an address as `OTEL_EXPORTER_OTLP_ENDPOINT` has it.
    ///
    /// # Errors
    /// When it is no address of HTTP.
    pub fn new(base: &str, every: Duration, access: Access) -> anyhow::Result<Self> {
        let uri: ureq::http::Uri = base
            .parse()
            .with_context(|| format!("{base:?} is no address; nothing was traced"))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
            bail!("{base:?} is no address of HTTP, as http://collector:4318; nothing was traced");
        }
        if every.is_zero() {
            bail!("an interval of 0 is none; nothing was traced");
        }
        let base = base.trim_end_matches('/');
        Ok(Self {
            url: match base.ends_with(PATH) {
                true => base.to_owned(),
                false => format!("{base}{PATH}"),
            },
            every,
            access,
        })
    }
}

/// Pushes from now on, until the process ends.
pub fn start(push: Push, pages: Arc<Pages>, totals: Arc<Mutex<Totals>>) {
    lock(&totals).pushes = Some(Pushes::default());
    let agent = ureq::Agent::config_builder()
        .tls_config(push.access.tls.clone())
        .timeout_global(Some(PATIENCE.min(push.every)))
        .http_status_as_error(false)
        .build()
        .new_agent();
    let started_ns = now_ns();
    thread::spawn(move || {
        let mut worked = true;
        loop {
            thread::sleep(push.every);
            let result = once(&push, &agent, &pages, started_ns);
            if let Some(pushes) = &mut lock(&totals).pushes {
                pushes.all += 1;
                pushes.failed += u64::from(result.is_err());
            }
            match &result {
                Err(error) if worked => eprintln!("cmt: warning: {}: {error:#}", push.url),
                Ok(()) if !worked => eprintln!("cmt: {} takes metrics again", push.url),
                _ => {}
            }
            worked = result.is_ok();
        }
    });
}

fn once(push: &Push, agent: &ureq::Agent, pages: &Pages, started_ns: u64) -> anyhow::Result<()> {
    (pages.refresh)().map_err(anyhow::Error::msg)?;
    let families = prometheus_protobuf::encode(&pages.registry)?;
    let body = request(families, started_ns, now_ns()).encode_to_vec();
    let mut request = agent.post(&push.url).content_type("application/x-protobuf");
    for (name, value) in &push.access.headers {
        request = request.header(name, value);
    }
    let mut response = request.send(&body)?;
    let status = response.status();
    let answer = response.body_mut().with_config().limit(MOST_ANSWER);
    let answer = answer.read_to_vec()?;
    if !status.is_success() {
        bail!("HTTP {status}");
    }
    let answer = ExportMetricsServiceResponse::decode(&answer[..])
        .context("it answers, but not as a collector does")?;
    match answer.partial_success {
        Some(partial) if partial.rejected_data_points > 0 => bail!(
            "{} data points were rejected: {}",
            partial.rejected_data_points,
            partial.error_message
        ),
        _ => Ok(()),
    }
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

/// All families in the collector's words.
fn request(
    families: Vec<MetricFamily>,
    started_ns: u64,
    now_ns: u64,
) -> ExportMetricsServiceRequest {
    let at = At { started_ns, now_ns };
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let version = env!("CARGO_PKG_VERSION");
    let resource = [
        ("service.name", "cmt"),
        ("service.version", version),
        ("service.instance.id", host.trim()),
        ("host.name", host.trim()),
    ];
    ExportMetricsServiceRequest {
        resource_metrics: vec![ResourceMetrics {
            resource: Some(Resource {
                attributes: resource.map(|(key, value)| attribute(key, value)).into(),
                ..Resource::default()
            }),
            scope_metrics: vec![ScopeMetrics {
                scope: Some(InstrumentationScope {
                    name: "cmt".to_owned(),
                    version: version.to_owned(),
                    ..InstrumentationScope::default()
                }),
                metrics: families
                    .into_iter()
                    .filter_map(|family| at.metric(family))
                    .collect(),
                ..ScopeMetrics::default()
            }],
            ..ResourceMetrics::default()
        }],
    }
}

/// The time of a push.
#[derive(Clone, Copy)]
struct At {
    started_ns: u64,
    now_ns: u64,
}

impl At {
    /// `None` for one without any values.
    fn metric(self, family: MetricFamily) -> Option<Metric> {
        if family.metric.is_empty() {
            return None;
        }
        let kind = MetricType::try_from(family.r#type);
        let points = family.metric.into_iter();
        let data = match kind {
            Ok(MetricType::Counter) => Data::Sum(Sum {
                data_points: points
                    .map(|one| self.number(&one.label, one.counter.map_or(0.0, |own| own.value)))
                    .collect(),
                aggregation_temporality: CUMULATIVE,
                is_monotonic: true,
            }),
            Ok(MetricType::Histogram) => Data::ExponentialHistogram(ExponentialHistogram {
                data_points: points
                    .filter_map(|one| Some(self.histogram(&one.label, &one.histogram?)))
                    .collect(),
                aggregation_temporality: CUMULATIVE,
            }),
            _ => Data::Gauge(Gauge {
                data_points: points
                    .map(|one| self.number(&one.label, one.gauge.map_or(0.0, |own| own.value)))
                    .collect(),
            }),
        };
        Some(Metric {
            unit: unit(&family.name).to_owned(),
            name: family.name,
            description: family.help,
            metadata: Vec::new(),
            data: Some(data),
        })
    }

    fn number(self, labels: &[LabelPair], value: f64) -> NumberDataPoint {
        NumberDataPoint {
            attributes: attributes(labels),
            start_time_unix_nano: self.started_ns,
            time_unix_nano: self.now_ns,
            value: Some(number_data_point::Value::AsDouble(value)),
            ..NumberDataPoint::default()
        }
    }

    fn histogram(
        self,
        labels: &[LabelPair],
        histogram: &Histogram,
    ) -> ExponentialHistogramDataPoint {
        ExponentialHistogramDataPoint {
            attributes: attributes(labels),
            start_time_unix_nano: self.started_ns,
            time_unix_nano: self.now_ns,
            count: histogram.sample_count,
            sum: Some(histogram.sample_sum),
            scale: histogram.schema,
            zero_count: histogram.zero_count,
            zero_threshold: histogram.zero_threshold,
            positive: Some(buckets(histogram)),
            ..ExponentialHistogramDataPoint::default()
        }
    }
}

/// Number `i` of a native histogram ends at the base's power `i`, of an exponential one at `i + 1`.
fn buckets(histogram: &Histogram) -> Buckets {
    let mut dense = Buckets::default();
    let (mut index, mut count) = (0, 0);
    let mut deltas = histogram.positive_delta.iter();
    for (number, span) in histogram.positive_span.iter().enumerate() {
        index += span.offset;
        if number == 0 {
            dense.offset = index - 1;
        } else {
            let empty = dense.bucket_counts.len() + span.offset as usize;
            dense.bucket_counts.resize(empty, 0);
        }
        for delta in deltas.by_ref().take(span.length as usize) {
            count += delta;
            dense.bucket_counts.push(count as u64);
            index += 1;
        }
    }
    dense
}

fn unit(name: &str) -> &'static str {
    let name = name.strip_suffix("_total").unwrap_or(name);
    match name.rsplit('_').next() {
        Some("seconds") => "s",
        Some("bytes") => "By",
        _ => "1",
    }
}

fn attributes(labels: &[LabelPair]) -> Vec<KeyValue> {
    let labels = labels.iter();
    labels.map(|one| attribute(&one.name, &one.value)).collect()
}

fn attribute(key: &str, value: &str) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue {
            value: Some(any_value::Value::StringValue(value.to_owned())),
        }),
        ..KeyValue::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::histogram::Stat;
    use crate::serve::buckets::native;
    use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model::BucketSpan;

    #[test]
    fn a_latency_lies_between_the_bounds_of_its_bucket() {
        let mut stat = Stat::default();
        let latencies = [900, 1000, 5_000, 5_100, 70_000_000, 3_000_000_000];
        for ns in latencies {
            stat.record(1, ns);
        }
        let native = native(&stat);
        let spans = native.spans.iter();
        let found = buckets(&Histogram {
            positive_span: spans
                .map(|(offset, length)| BucketSpan {
                    offset: *offset,
                    length: *length,
                })
                .collect(),
            positive_delta: native.deltas,
            ..Histogram::default()
        });
        let bound = |index: usize| 2f64.powf((f64::from(found.offset) + index as f64) / 8.0);
        let total: u64 = found.bucket_counts.iter().sum();
        assert_eq!(total, latencies.len() as u64);
        for ns in latencies {
            let s = ns as f64 / 1e9;
            let mut filled =
                (0..found.bucket_counts.len()).filter(|at| found.bucket_counts[*at] > 0);
            // The kernel's bucket went as a whole to the one that holds its middle.
            let within = |at: usize| bound(at) / 1.065 < s && s <= bound(at + 1) * 1.065;
            assert!(filled.any(within), "{s}: {found:?}");
        }
        // Empty ones at neither end.
        assert_ne!(found.bucket_counts.first(), Some(&0));
        assert_ne!(found.bucket_counts.last(), Some(&0));
    }

    #[test]
    fn buckets_are_the_native_ones() {
        let span = |offset, length| BucketSpan { offset, length };
        let found = buckets(&Histogram {
            positive_span: vec![span(0, 1), span(3, 2)],
            positive_delta: vec![5, -2, 1],
            ..Histogram::default()
        });
        // A second exactly, the upper bound of native bucket 0, is that of exponential bucket -1.
        assert_eq!(
            (found.offset, found.bucket_counts),
            (-1, vec![5, 0, 0, 0, 3, 4])
        );
        let none = buckets(&Histogram::default());
        assert_eq!(none, Buckets::default());
    }

    #[test]
    fn addresses_are_those_of_a_collector() {
        let push = |base| Push::new(base, Duration::from_secs(1), Access::default());
        for base in [
            "http://c:4318",
            "http://c:4318/",
            "http://c:4318/v1/metrics",
        ] {
            assert_eq!(push(base).expect(base).url, "http://c:4318/v1/metrics");
        }
        for wrong in ["", "c:4318", "grpc://c:4317", "http://", "/v1/metrics"] {
            assert!(push(wrong).is_err(), "{wrong}");
        }
    }
}
