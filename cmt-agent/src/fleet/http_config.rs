//! How to reach a Prometheus that wants to know who asks: the file that promtool's `--http.config.file` takes.
//!
//! Of Prometheus's `http_config` the parts that a client of its API needs; any other key is refused, so that none is left
//! unheeded.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use ureq::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST};
use ureq::http::{HeaderMap, HeaderName, HeaderValue};
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// Credentials and trust.
#[derive(Clone, Debug)]
pub struct Access {
    /// Headers to send: `Authorization`, and what names the tenant to Mimir.
    pub headers: HeaderMap,
    /// Whom to trust, and what to show to be trusted.
    pub tls: TlsConfig,
}

impl Default for Access {
    /// No credentials, and the certificates that this machine trusts.
    fn default() -> Self {
        Self {
            headers: HeaderMap::new(),
            tls: TlsConfig::builder().root_certs(trusted()).build(),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    authorization: Option<Authorization>,
    basic_auth: Option<BasicAuth>,
    bearer_token: Option<String>,
    bearer_token_file: Option<PathBuf>,
    http_headers: BTreeMap<String, Header>,
    tls_config: Tls,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Authorization {
    r#type: Option<String>,
    credentials: Option<String>,
    credentials_file: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct BasicAuth {
    username: String,
    password: Option<String>,
    password_file: Option<PathBuf>,
}

/// What a header is set to: any number of values, however they are given.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Header {
    values: Vec<String>,
    secrets: Vec<String>,
    files: Vec<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Tls {
    ca_file: Option<PathBuf>,
    cert_file: Option<PathBuf>,
    key_file: Option<PathBuf>,
    insecure_skip_verify: bool,
}

/// Reads the file, and those that it names, relative to its own folder.
///
/// # Errors
/// When one cannot be read, it is no such file, or it asks for two ways to authorise.
pub fn read(path: &Path) -> anyhow::Result<Access> {
    let text = text(path)?;
    let file: File = serde_saphyr::from_str(&text).map_err(|error| {
        anyhow::anyhow!(
            "{} is no http_config as promtool's --http.config.file has it: {error}",
            path.display()
        )
    })?;
    let folder = path.parent().unwrap_or(Path::new("."));
    access(&file, folder).with_context(|| path.display().to_string())
}

fn access(file: &File, folder: &Path) -> anyhow::Result<Access> {
    let mut ways = Vec::new();
    if let Some(wanted) = &file.authorization {
        let kind = wanted.r#type.as_deref().unwrap_or("Bearer");
        let credentials = secret(&wanted.credentials, &wanted.credentials_file, folder)?
            .context("authorization without credentials")?;
        ways.push(format!("{kind} {credentials}"));
    }
    if let Some(basic) = &file.basic_auth {
        let password = secret(&basic.password, &basic.password_file, folder)?.unwrap_or_default();
        let both = STANDARD.encode(format!("{}:{password}", basic.username));
        ways.push(format!("Basic {both}"));
    }
    if let Some(token) = secret(&file.bearer_token, &file.bearer_token_file, folder)? {
        ways.push(format!("Bearer {token}"));
    }
    if ways.len() > 1 {
        bail!("more than one of authorization, basic_auth and bearer_token");
    }
    let mut headers = headers(&file.http_headers, folder)?;
    if let Some(way) = ways.pop() {
        headers.insert(AUTHORIZATION, value(AUTHORIZATION.as_str(), &way)?);
    }
    Ok(Access {
        headers,
        tls: tls(&file.tls_config, folder)?,
    })
}

fn secret(
    inline: &Option<String>,
    file: &Option<PathBuf>,
    folder: &Path,
) -> anyhow::Result<Option<String>> {
    match file {
        Some(file) => Ok(Some(text(&folder.join(file))?.trim().to_owned())),
        None => Ok(inline.clone()),
    }
}

fn headers(wanted: &BTreeMap<String, Header>, folder: &Path) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, header) in wanted {
        let key: HeaderName = name
            .parse()
            .with_context(|| format!("{name} is no name of a header"))?;
        // Promtool reserves these too.
        if [AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST].contains(&key) {
            bail!("{name} cannot be set by http_headers");
        }
        let mut texts = [header.values.as_slice(), &header.secrets].concat();
        for file in &header.files {
            texts.push(text(&folder.join(file))?.trim().to_owned());
        }
        for text in texts {
            headers.append(key.clone(), value(name, &text)?);
        }
    }
    Ok(headers)
}

/// A value that no log shows.
fn value(name: &str, text: &str) -> anyhow::Result<HeaderValue> {
    let mut value = HeaderValue::from_str(text)
        .with_context(|| format!("a value of {name} is none that a header can have"))?;
    value.set_sensitive(true);
    Ok(value)
}

fn tls(tls: &Tls, folder: &Path) -> anyhow::Result<TlsConfig> {
    let mut config = TlsConfig::builder().disable_verification(tls.insecure_skip_verify);
    config = match &tls.ca_file {
        Some(file) => config.root_certs(RootCerts::from(certificates(&folder.join(file))?)),
        None => config.root_certs(trusted()),
    };
    match (&tls.cert_file, &tls.key_file) {
        (Some(cert), Some(key)) => {
            let key = folder.join(key);
            let private = PrivateKey::from_pem(text(&key)?.as_bytes())
                .with_context(|| format!("{} holds no private key", key.display()))?;
            let chain = certificates(&folder.join(cert))?;
            config = config.client_cert(Some(ClientCert::new_with_certs(&chain, private)));
        }
        (None, None) => {}
        _ => bail!("cert_file and key_file go together"),
    }
    Ok(config.build())
}

/// The certificates that this machine trusts.
fn trusted() -> RootCerts {
    let found = rustls_native_certs::load_native_certs();
    for error in found.errors {
        log::warn!("{error}");
    }
    RootCerts::from(
        found
            .certs
            .iter()
            .map(|certificate| Certificate::from_der(certificate).to_owned()),
    )
}

fn certificates(path: &Path) -> anyhow::Result<Vec<Certificate<'static>>> {
    let pem = text(path)?;
    let mut found = Vec::new();
    for item in parse_pem(pem.as_bytes()) {
        if let PemItem::Certificate(certificate) =
            item.with_context(|| format!("{} is no PEM file", path.display()))?
        {
            found.push(certificate);
        }
    }
    if found.is_empty() {
        bail!("{} holds no certificate", path.display());
    }
    Ok(found)
}

fn text(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> anyhow::Result<Access> {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("token"), "secret\n").expect("written");
        let path = folder.path().join("http.yml");
        fs::write(&path, text).expect("written");
        read(&path)
    }

    #[test]
    fn every_way_to_authorise_is_understood() {
        for (text, header) in [
            ("{}", None),
            ("authorization: {credentials: a1}", Some("Bearer a1")),
            (
                "authorization:\n  type: Token\n  credentials_file: token\n",
                Some("Token secret"),
            ),
            ("bearer_token_file: token", Some("Bearer secret")),
            (
                "basic_auth: {username: me, password: pw}\n",
                Some("Basic bWU6cHc="),
            ),
        ] {
            let access = read_text(text).unwrap_or_else(|error| panic!("{text}: {error:#}"));
            let found = access.headers.get(AUTHORIZATION);
            let found = found.map(|value| value.to_str().expect("a text"));
            assert_eq!(found, header, "{text}");
        }
    }

    #[test]
    fn headers_have_all_their_values() {
        let access =
            read_text("http_headers: {X-Scope-OrgID: {values: [a], secrets: [b], files: [token]}}")
                .expect("understood");
        let values: Vec<_> = access.headers.get_all("x-scope-orgid").iter().collect();
        assert_eq!(values, ["a", "b", "secret"]);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for text in [
            "proxy_url: http://proxy",
            "authorization: {credentials: a}\nbasic_auth: {username: b}",
            "tls_config: {cert_file: token}",
            "tls_config: {ca_file: token}",
            "authorization: {credentials_file: nowhere}",
            "- a list",
            "http_headers: {Authorization: {values: [a]}}",
            "http_headers: {a b: {values: [c]}}",
            "http_headers: {a: {values: [\"b\\nc\"]}}",
            "http_headers: {a: {files: [nowhere]}}",
        ] {
            assert!(read_text(text).is_err(), "{text}");
        }
        let config = read_text("tls_config: {insecure_skip_verify: true}").expect("understood");
        assert!(config.tls.disable_verification());
    }
}
