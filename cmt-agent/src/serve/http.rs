//! The HTTP side: which pages there are, and in which format a scraper wants its metrics. Nothing here can be written to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::{prometheus_protobuf, prometheus_text, text};
use prometheus_client::registry::Registry;

use super::password::{self, Users};

/// What the pages are made of.
pub struct Pages {
    /// All metrics.
    pub registry: Registry,
    /// Brings the totals up to date.
    pub refresh: Box<dyn Fn() -> Result<(), String> + Send + Sync>,
    /// True once probes are in place.
    pub ready: AtomicBool,
    /// True as long as counts can be read.
    pub healthy: AtomicBool,
}

/// The pages: `/metrics`, for `users` only where there are any, and for all `/healthz` and `/readyz`. Others do not exist.
pub fn router(pages: Arc<Pages>, users: Users) -> Router {
    let metrics = match users.are_named() {
        true => get(metrics).layer(from_fn_with_state(Arc::new(users), password::check)),
        false => get(metrics),
    };
    Router::new()
        .route("/metrics", metrics)
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(pages)
}

async fn healthz(State(pages): State<Arc<Pages>>) -> Response {
    say(
        pages.healthy.load(Ordering::Acquire),
        "counts cannot be read",
    )
}

async fn readyz(State(pages): State<Arc<Pages>>) -> Response {
    say(
        pages.ready.load(Ordering::Acquire),
        "probes are being placed",
    )
}

fn say(good: bool, otherwise: &'static str) -> Response {
    match good {
        true => "ok\n".into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, format!("{otherwise}\n")).into_response(),
    }
}

async fn metrics(State(pages): State<Arc<Pages>>, headers: HeaderMap) -> Response {
    if !pages.ready.load(Ordering::Acquire) {
        return readyz(State(pages)).await;
    }
    let accepted = headers
        .get_all(ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .collect::<Vec<_>>()
        .join(",");
    let format = Format::accepted(&accepted);
    // It reads the kernel's maps and waits for others that do.
    let body = tokio::task::spawn_blocking(move || {
        (pages.refresh)()?;
        format.encode(&pages.registry)
    })
    .await;
    match body {
        Ok(Ok(body)) => ([(CONTENT_TYPE, format.content_type())], body).into_response(),
        Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, error + "\n").into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// An exposition format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text,
    OpenMetrics,
    Protobuf,
}

impl Format {
    /// The one that an `Accept` header wants most; text where it names none.
    fn accepted(header: &str) -> Self {
        let mut best = (0.0, Self::Text);
        for range in header.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let Some(format) = parts.next().and_then(Self::of_type) else {
                continue;
            };
            let parameters: Vec<(&str, &str)> =
                parts.filter_map(|part| part.split_once('=')).collect();
            let value = |name: &str| {
                let found = parameters.iter().find(|(own, _)| *own == name);
                found.map(|(_, value)| value.trim_matches('"'))
            };
            let is_ours = format != Self::Protobuf
                || value("proto").is_none_or(|proto| proto == "io.prometheus.client.MetricFamily")
                    && value("encoding").is_none_or(|encoding| encoding == "delimited");
            let weight = match value("q") {
                Some(q) => q.parse().unwrap_or(0.0),
                None => 1.0,
            };
            if is_ours && weight > best.0 {
                best = (weight, format);
            }
        }
        best.1
    }

    fn of_type(name: &str) -> Option<Self> {
        match name.to_ascii_lowercase().as_str() {
            "application/vnd.google.protobuf" => Some(Self::Protobuf),
            "application/openmetrics-text" => Some(Self::OpenMetrics),
            "text/plain" | "text/*" | "*/*" => Some(Self::Text),
            _ => None,
        }
    }

    fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Protobuf => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
            }
        }
    }

    fn encode(self, registry: &Registry) -> Result<Vec<u8>, String> {
        let mut page = String::new();
        match self {
            Self::Text => prometheus_text::encode(&mut page, registry),
            Self::OpenMetrics => text::encode(&mut page, registry),
            Self::Protobuf => {
                return prometheus_protobuf::encode_to_vec(registry)
                    .map_err(|error| error.to_string());
            }
        }
        .map_err(|error| error.to_string())?;
        Ok(page.into_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrapers_get_what_they_want_most() {
        for (header, format) in [
            ("", Format::Text),
            ("*/*", Format::Text),
            ("text/html,*/*;q=0.8", Format::Text),
            ("application/openmetrics-text", Format::OpenMetrics),
            ("image/png", Format::Text),
            (
                "application/vnd.google.protobuf;proto=other.Message",
                Format::Text,
            ),
            // Prometheus 2.42, and 3.5 with native histograms.
            (
                "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
                Format::OpenMetrics,
            ),
            (
                "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
                Format::Protobuf,
            ),
        ] {
            assert_eq!(Format::accepted(header), format, "{header}");
        }
    }
}
