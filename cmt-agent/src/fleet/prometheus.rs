//! The query API of Prometheus, as Thanos, Mimir and VictoriaMetrics speak it too. Knows nothing of cmt's metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde::Deserialize;
use thiserror::Error;
use ureq::http::HeaderMap;

use super::http_config::Access;
use super::latencies::Latencies;

/// A series' labels, its name as `__name__`.
pub type Labels = BTreeMap<String, String>;

fn what_to_do(kind: &str) -> &'static str {
    match kind {
        "bad_data" => "is it --match, --patched or --unpatched?",
        _ => "where it is too much, a shorter --range or a --match asks for less",
    }
}

/// Why a question got no answer.
#[derive(Debug, Error)]
pub enum Error {
    /// No HTTP answer at all.
    #[error("no answer from {url} (is this Prometheus's address, and may this machine reach it?)")]
    Unreachable {
        /// Without credentials.
        url: String,
        /// What the connection said.
        source: Box<ureq::Error>,
    },
    /// A certificate was not trusted, on either side.
    #[error(
        "no trusted connection to {url}; where its certificates are of one's own, name them in --http-config FILE \
         (tls_config: ca_file, cert_file, key_file)"
    )]
    Untrusted {
        /// Without credentials.
        url: String,
        /// What the connection said.
        source: Box<ureq::Error>,
    },
    /// 401 or 403.
    #[error(
        "{url} refuses these credentials (HTTP {status}); give them with --http-config FILE, which is what promtool takes as \
         --http.config.file"
    )]
    Unauthorized {
        /// Without credentials.
        url: String,
        /// 401 or 403.
        status: u16,
    },
    /// Prometheus says why not.
    #[error(
        "{url} could not answer (HTTP {status}, {kind}): {text}; {}. The question was {query}",
        what_to_do(kind)
    )]
    Refused {
        /// Without credentials.
        url: String,
        /// HTTP status.
        status: u16,
        /// `bad_data`, `execution`, `timeout` …
        kind: String,
        /// Its own words.
        text: String,
        /// What it was asked.
        query: String,
    },
    /// Something answers there, but no query API.
    #[error(
        "{url} is no Prometheus query API (HTTP {status}: {text}); with Mimir the address ends in /prometheus, with a cluster \
         of VictoriaMetrics in /select/0/prometheus"
    )]
    Foreign {
        /// Without credentials.
        url: String,
        /// HTTP status.
        status: u16,
        /// How the answer begins.
        text: String,
    },
}

/// One value of an instant query.
#[derive(Clone, Debug)]
pub struct Sample {
    /// What it belongs to.
    pub labels: Labels,
    /// Its value; NaN where it is a histogram.
    pub value: f64,
    /// The native histogram, if it is one.
    pub histogram: Option<Latencies>,
}

/// The samples of one series.
#[derive(Clone, Debug)]
pub struct Series {
    /// What it belongs to.
    pub labels: Labels,
    /// Time in seconds since 1970, and value.
    pub values: Vec<(f64, f64)>,
    /// The same for native histograms.
    pub histograms: Vec<(f64, Latencies)>,
}

/// Where to ask.
#[derive(Debug)]
pub struct Prometheus {
    agent: ureq::Agent,
    base: String,
    headers: HeaderMap,
    asked: AtomicU32,
}

#[derive(Deserialize)]
struct Answer {
    status: String,
    data: Option<Data>,
    #[serde(default, rename = "errorType")]
    error_type: String,
    #[serde(default)]
    error: String,
    #[serde(default)]
    warnings: Vec<String>,
}

#[derive(Deserialize)]
#[serde(tag = "resultType", content = "result", rename_all = "lowercase")]
enum Data {
    Vector(Vec<RawSample>),
    Matrix(Vec<RawSeries>),
    Scalar((f64, String)),
    String((f64, String)),
}

#[derive(Deserialize)]
struct RawSample {
    metric: Labels,
    value: Option<(f64, String)>,
    histogram: Option<(f64, Latencies)>,
}

#[derive(Deserialize)]
struct RawSeries {
    metric: Labels,
    #[serde(default)]
    values: Vec<(f64, String)>,
    #[serde(default)]
    histograms: Vec<(f64, Latencies)>,
}

impl Prometheus {
    /// Prepares to ask `url`, which may have a path of its own.
    pub fn new(url: &str, access: Access, timeout: Duration) -> Self {
        let agent = ureq::Agent::config_builder()
            .tls_config(access.tls)
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .build()
            .new_agent();
        Self {
            agent,
            base: url.trim_end_matches('/').to_owned(),
            headers: access.headers,
            asked: AtomicU32::new(0),
        }
    }

    /// Questions that were asked so far.
    pub fn asked(&self) -> u32 {
        self.asked.load(Ordering::Relaxed)
    }

    /// The values of `query` at a moment, in seconds since 1970.
    pub fn instant(&self, query: &str, at_s: f64) -> Result<Vec<Sample>, Error> {
        let samples = match self.ask(query, at_s)? {
            Data::Vector(samples) => samples,
            Data::Scalar(value) | Data::String(value) => vec![RawSample {
                metric: Labels::new(),
                value: Some(value),
                histogram: None,
            }],
            Data::Matrix(_) => Vec::new(),
        };
        Ok(samples
            .into_iter()
            .map(|sample| Sample {
                labels: sample.metric,
                value: sample.value.map_or(f64::NAN, |(_, value)| number(&value)),
                histogram: sample.histogram.map(|(_, histogram)| histogram),
            })
            .collect())
    }

    /// The samples as they were scraped, of a query that ends in `[RANGE]`.
    pub fn samples(&self, query: &str, at_s: f64) -> Result<Vec<Series>, Error> {
        let Data::Matrix(series) = self.ask(query, at_s)? else {
            return Ok(Vec::new());
        };
        Ok(series
            .into_iter()
            .map(|series| Series {
                labels: series.metric,
                values: series
                    .values
                    .into_iter()
                    .map(|(at, value)| (at, number(&value)))
                    // VictoriaMetrics shows where a series ended.
                    .filter(|(_, value)| !value.is_nan())
                    .collect(),
                histograms: series.histograms,
            })
            .collect())
    }

    fn ask(&self, query: &str, at_s: f64) -> Result<Data, Error> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        log::debug!("at {at_s}: {query}");
        let started = std::time::Instant::now();
        let url = self.shown();
        let unreachable = |source: ureq::Error| {
            let is_tls = ["certificate", "alert"].map(|word| source.to_string().contains(word));
            let (url, source) = (url.clone(), Box::new(source));
            match is_tls.contains(&true) {
                true => Error::Untrusted { url, source },
                false => Error::Unreachable { url, source },
            }
        };
        let mut request = self.agent.post(format!("{}/api/v1/query", self.base));
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        // Of the last half minute VictoriaMetrics answers as of its beginning, unless `nocache` is set; others ignore that.
        let at = format!("{at_s:.3}");
        let form = [("query", query), ("time", &at), ("nocache", "1")];
        let mut response = request.send_form(form).map_err(unreachable)?;
        let status = response.status().as_u16();
        let text = response
            .body_mut()
            .with_config()
            .limit(1 << 30)
            .read_to_string()
            .map_err(unreachable)?;
        log::debug!("{} bytes in {:?}", text.len(), started.elapsed());
        if status == 401 || status == 403 {
            return Err(Error::Unauthorized { url, status });
        }
        let Ok(answer) = serde_json::from_str::<Answer>(&text) else {
            let text = text.chars().filter(|c| !c.is_control()).take(80).collect();
            return Err(Error::Foreign { url, status, text });
        };
        for warning in answer.warnings {
            eprintln!("cmt: warning: {url} says: {warning}");
        }
        match (answer.status.as_str(), answer.data) {
            ("success", Some(data)) => Ok(data),
            _ => Err(Error::Refused {
                url,
                status,
                kind: answer.error_type,
                text: shortened(&answer.error),
                query: shortened(query),
            }),
        }
    }

    /// The address without what stands before an `@`.
    fn shown(&self) -> String {
        match self.base.split_once("://") {
            Some((scheme, rest)) => {
                let host = rest.find('/').unwrap_or(rest.len());
                let after = rest[..host].rfind('@').map_or(0, |at| at + 1);
                format!("{scheme}://{}", &rest[after..])
            }
            None => self.base.clone(),
        }
    }
}

/// A text without its middle where it is long: that may name hundreds of nodes.
fn shortened(text: &str) -> String {
    const END: usize = 250;
    let all: Vec<char> = text.chars().collect();
    match all.len() > 2 * END {
        true => [&all[..END], &[' ', '…', ' '], &all[all.len() - END..]]
            .concat()
            .iter()
            .collect(),
        false => text.to_owned(),
    }
}

/// A value as the API writes it: in quotes, with `NaN`, `+Inf` and `-Inf`.
pub(super) fn number(text: &str) -> f64 {
    text.parse().unwrap_or(f64::NAN)
}
