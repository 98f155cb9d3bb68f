//! Prometheus's protobuf format, by hand: the only one in which Prometheus 2 takes native histograms.

use std::collections::BTreeMap;

use crate::node::{State, classes, counters};

/// Native buckets are powers of 2^(1/8).
pub const SCHEMA: i32 = 3;

/// All metrics as delimited `MetricFamily` messages.
pub fn families(state: &State) -> Vec<u8> {
    let mut by_name: BTreeMap<&str, Vec<Vec<u8>>> = BTreeMap::new();
    for ((name, labels), value) in counters(state) {
        let mut metric = pairs(&labels);
        let mut counter = Vec::new();
        double(&mut counter, 1, value);
        bytes(&mut metric, 3, &counter);
        by_name.entry(name).or_default().push(metric);
    }
    let mut all = Vec::new();
    for (name, metrics) in by_name {
        family(&mut all, name, 0, &metrics);
    }
    let histograms: Vec<Vec<u8>> = classes(state)
        .into_iter()
        .map(|(labels, latencies)| {
            let mut metric = pairs(&labels);
            bytes(&mut metric, 7, &histogram(&latencies));
            metric
        })
        .collect();
    if !histograms.is_empty() {
        family(&mut all, "cmt_copy_duration_seconds", 4, &histograms);
    }
    all
}

fn family(all: &mut Vec<u8>, name: &str, kind: u64, metrics: &[Vec<u8>]) {
    let mut family = Vec::new();
    bytes(&mut family, 1, name.as_bytes());
    number(&mut family, 3, kind);
    for metric in metrics {
        bytes(&mut family, 4, metric);
    }
    varint(all, family.len() as u64);
    all.extend(family);
}

fn pairs(labels: &[(&'static str, String)]) -> Vec<u8> {
    let mut metric = Vec::new();
    for (name, value) in labels {
        let mut pair = Vec::new();
        bytes(&mut pair, 1, name.as_bytes());
        bytes(&mut pair, 2, value.as_bytes());
        bytes(&mut metric, 1, &pair);
    }
    metric
}

fn histogram(latencies: &[u64]) -> Vec<u8> {
    let mut buckets: BTreeMap<i64, i64> = BTreeMap::new();
    for ns in latencies {
        let index = ((*ns as f64 / 1e9).log2() * f64::from(1 << SCHEMA)).ceil() as i64;
        *buckets.entry(index).or_default() += 1;
    }
    let mut message = Vec::new();
    number(&mut message, 1, latencies.len() as u64);
    double(&mut message, 2, latencies.iter().sum::<u64>() as f64 / 1e9);
    number(&mut message, 5, zigzag(i64::from(SCHEMA)));
    double(&mut message, 6, 1e-128);
    let (mut deltas, mut next, mut last) = (Vec::new(), 0, 0);
    for (index, count) in buckets {
        // One span a bucket: its distance from the end of the one before.
        let mut span = Vec::new();
        number(&mut span, 1, zigzag(index - next));
        number(&mut span, 2, 1);
        bytes(&mut message, 12, &span);
        varint(&mut deltas, zigzag(count - last));
        (next, last) = (index + 1, count);
    }
    bytes(&mut message, 13, &deltas);
    message
}

fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn number(out: &mut Vec<u8>, field: u64, value: u64) {
    varint(out, field << 3);
    varint(out, value);
}

fn double(out: &mut Vec<u8>, field: u64, value: f64) {
    varint(out, field << 3 | 1);
    out.extend(value.to_le_bytes());
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, value.len() as u64);
    out.extend(value);
}
