//! The metrics by name, as `prometheus-client` writes them in each of its formats.

use std::fmt::Error;
use std::sync::{Arc, Mutex, PoisonError};

use cmt_common::event::LOST_NAMES;
use procfs::process::Process;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NativeHistogram,
    NativeHistogramBuckets, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::{Registry, Unit};

use super::buckets::{self, SCHEMA, ZERO_THRESHOLD, seconds};
use super::by_pid::ByPid;
use super::totals::{Class, Counts, Flow, Totals};
use super::workloads::OTHER;
use crate::histogram::Stat;

const NO_EXEMPLAR: Option<&Exemplar<NoLabelSet, f64>> = None;

/// A registry that shows `totals` as they are when it is asked.
pub fn registry(totals: Arc<Mutex<Totals>>) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Node(totals)));
    registry.register_collector(Box::new(Own));
    registry
}

#[derive(Debug)]
struct Node(Arc<Mutex<Totals>>);

impl Collector for Node {
    fn encode(&self, mut to: DescriptorEncoder) -> Result<(), Error> {
        let totals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        durations(&mut to, &totals)?;
        flows(&mut to, &totals)?;
        let mut functions = to.encode_descriptor(
            "cmt_copy_function_calls",
            "Copy calls by the outermost CUDA function that was called.",
            None,
            MetricType::Counter,
        )?;
        for (function, calls) in &totals.functions {
            count(&mut functions, &[("function", *function)], calls)?;
        }
        let mut recoverable = to.encode_descriptor(
            "cmt_copy_recoverable",
            "Estimated time that cmt attach would have given back.",
            Some(&Unit::Seconds),
            MetricType::Counter,
        )?;
        for (workload, gained) in &totals.recoverable_s {
            count(&mut recoverable, &[("workload", &**workload)], gained)?;
        }
        if let Some(by_pid) = &totals.by_pid {
            processes(&mut to, by_pid)?;
        }
        if let Some(actions) = &totals.actions {
            let mut encoder = to.encode_descriptor(
                "cmt_policy_actions",
                "What was done by the policy.",
                None,
                MetricType::Counter,
            )?;
            for (workload, action, times) in actions.iter() {
                let labels = [("action", action), ("workload", workload)];
                count(&mut encoder, &labels, &times)?;
            }
        }
        tracing(&mut to, &totals)
    }
}

fn durations(to: &mut DescriptorEncoder, totals: &Totals) -> Result<(), Error> {
    let mut durations = to.encode_descriptor(
        "cmt_copy_duration",
        "Time in successful copy calls.",
        Some(&Unit::Seconds),
        MetricType::Histogram,
    )?;
    for (class, stat) in &totals.classes {
        duration(&mut durations, class, stat)?;
    }
    Ok(())
}

fn duration(to: &mut MetricEncoder, class: &Class, stat: &Stat) -> Result<(), Error> {
    let size = class
        .size_bytes
        .map_or_else(|| OTHER.to_owned(), |bytes| bytes.to_string());
    let labels = [
        ("direction", class.direction.name()),
        ("memory", class.memory),
        ("size_class", &*size),
    ];
    let native = buckets::native(stat);
    to.encode_family(&labels)?
        .encode_histogram_with_native::<NoLabelSet>(
            seconds(stat.total_ns),
            stat.count(),
            &buckets::classic(stat),
            None,
            NativeHistogram {
                schema: SCHEMA,
                zero_threshold: ZERO_THRESHOLD,
                zero_count: 0,
                negative: NativeHistogramBuckets {
                    spans: &[],
                    deltas: &[],
                },
                positive: NativeHistogramBuckets {
                    spans: &native.spans,
                    deltas: &native.deltas,
                },
                created: None,
            },
        )
}

fn flows(to: &mut DescriptorEncoder, totals: &Totals) -> Result<(), Error> {
    flow(
        to,
        totals,
        "cmt_copy_bytes",
        "Bytes of successful copy calls.",
        None,
        |counts| counts.bytes,
    )?;
    flow(
        to,
        totals,
        "cmt_copy_calls",
        "Copy calls, failed ones included.",
        None,
        |counts| counts.calls,
    )?;
    flow(
        to,
        totals,
        "cmt_copy_errors",
        "Copy calls that returned an error.",
        None,
        |counts| counts.errors,
    )?;
    flow(
        to,
        totals,
        "cmt_copy",
        "Time in successful copy calls.",
        Some(&Unit::Seconds),
        |counts| seconds(counts.total_ns),
    )?;
    flow(
        to,
        totals,
        "cmt_copy_wait",
        "Time in waits right behind asynchronous copies.",
        Some(&Unit::Seconds),
        |counts| seconds(counts.wait_ns),
    )
}

fn flow<V: EncodeCounterValue>(
    to: &mut DescriptorEncoder,
    totals: &Totals,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: impl Fn(&Counts) -> V,
) -> Result<(), Error> {
    let mut encoder = to.encode_descriptor(name, help, unit, MetricType::Counter)?;
    for (flow, counts) in &totals.flows {
        count(&mut encoder, &labels(flow), &value(counts))?;
    }
    Ok(())
}

fn labels(flow: &Flow) -> [(&str, &str); 3] {
    [
        ("direction", flow.direction.name()),
        ("memory", flow.memory),
        ("workload", &flow.workload),
    ]
}

fn processes(to: &mut DescriptorEncoder, by_pid: &ByPid) -> Result<(), Error> {
    process(
        to,
        by_pid,
        "cmt_process_copy_bytes",
        "Bytes of successful copy calls, by process.",
        None,
        |counts| counts.bytes,
    )?;
    process(
        to,
        by_pid,
        "cmt_process_copy_calls",
        "Copy calls, failed ones included, by process.",
        None,
        |counts| counts.calls,
    )?;
    process(
        to,
        by_pid,
        "cmt_process_copy_errors",
        "Copy calls that returned an error, by process.",
        None,
        |counts| counts.errors,
    )?;
    process(
        to,
        by_pid,
        "cmt_process_copy",
        "Time in successful copy calls, by process.",
        Some(&Unit::Seconds),
        |counts| seconds(counts.total_ns),
    )
}

fn process<V: EncodeCounterValue>(
    to: &mut DescriptorEncoder,
    by_pid: &ByPid,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: impl Fn(&Counts) -> V,
) -> Result<(), Error> {
    let mut encoder = to.encode_descriptor(name, help, unit, MetricType::Counter)?;
    for (pid, row) in by_pid.rows() {
        let labels = [("pid", &*pid.to_string()), ("workload", &row.workload)];
        count(&mut encoder, &labels, &value(&row.counts))?;
    }
    let labels = [("pid", OTHER), ("workload", OTHER)];
    count(&mut encoder, &labels, &value(&by_pid.other))
}

/// What tracing could not do, and what it costs.
fn tracing(to: &mut DescriptorEncoder, totals: &Totals) -> Result<(), Error> {
    let mut lost = to.encode_descriptor(
        "cmt_lost",
        "What could not be recorded.",
        None,
        MetricType::Counter,
    )?;
    for (reason, times) in LOST_NAMES.iter().zip(&totals.lost) {
        count(&mut lost, &[("reason", &*reason.replace(' ', "_"))], times)?;
    }
    counter(
        to,
        "cmt_probe_calls",
        "Calls that passed a pair of probes.",
        None,
        &totals.probe_pairs,
    )?;
    if let Some(pair_ns) = totals.pair_ns {
        counter(
            to,
            "cmt_probe_cost",
            "CPU time that probes took of the traced processes.",
            Some(&Unit::Seconds),
            &seconds(totals.probe_pairs.saturating_mul(pair_ns)),
        )?;
    }
    if let Some(attached) = totals.attached {
        gauge(
            to,
            "cmt_attached_processes",
            "Processes that have the new copier.",
            &(attached as u64),
        )?;
    }
    gauge(
        to,
        "cmt_traced_processes",
        "Processes that map a CUDA library.",
        &(totals.traced as u64),
    )?;
    if let Some(pushes) = totals.pushes {
        counter(
            to,
            "cmt_otlp_pushes",
            "Pushes to a collector that were tried.",
            None,
            &pushes.all,
        )?;
        counter(
            to,
            "cmt_otlp_failures",
            "Pushes to a collector that failed.",
            None,
            &pushes.failed,
        )?;
    }
    to.encode_descriptor("cmt_build", "What runs here.", None, MetricType::Info)?
        .encode_info(&[("version", env!("CARGO_PKG_VERSION"))])
}

/// What `cmt` itself takes, by the names that all exporters use.
#[derive(Debug)]
struct Own;

impl Collector for Own {
    fn encode(&self, mut to: DescriptorEncoder) -> Result<(), Error> {
        // What cannot be read is left out.
        let Ok(own) = Process::myself() else {
            return Ok(());
        };
        if let Ok(stat) = own.stat() {
            let ticks = (stat.utime + stat.stime) as f64;
            counter(
                &mut to,
                "process_cpu",
                "CPU time of cmt.",
                Some(&Unit::Seconds),
                &(ticks / procfs::ticks_per_second() as f64),
            )?;
            if let Ok(boot_s) = procfs::boot_time_secs() {
                let since_boot_s = stat.starttime as f64 / procfs::ticks_per_second() as f64;
                gauge(
                    &mut to,
                    "process_start_time_seconds",
                    "When cmt started, in seconds since 1970.",
                    &(boot_s as f64 + since_boot_s),
                )?;
            }
            gauge(
                &mut to,
                "process_resident_memory_bytes",
                "Resident memory of cmt.",
                &(stat.rss * procfs::page_size()),
            )?;
            gauge(
                &mut to,
                "process_virtual_memory_bytes",
                "Virtual memory of cmt.",
                &stat.vsize,
            )?;
        }
        if let Ok(fds) = own.fd_count() {
            gauge(
                &mut to,
                "process_open_fds",
                "Open file descriptors of cmt.",
                &(fds as u64),
            )?;
        }
        Ok(())
    }
}

fn count<const N: usize>(
    to: &mut MetricEncoder,
    labels: &[(&str, &str); N],
    value: &impl EncodeCounterValue,
) -> Result<(), Error> {
    to.encode_family(labels)?.encode_counter(value, NO_EXEMPLAR)
}

fn counter(
    to: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: &impl EncodeCounterValue,
) -> Result<(), Error> {
    to.encode_descriptor(name, help, unit, MetricType::Counter)?
        .encode_counter(value, NO_EXEMPLAR)
}

fn gauge(
    to: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    value: &impl EncodeGaugeValue,
) -> Result<(), Error> {
    to.encode_descriptor(name, help, None, MetricType::Gauge)?
        .encode_gauge(value)
}
