//! Encryption and passwords, from a file as Prometheus and its exporters read it (`web.config.file`).
//!
//! Of that format: `tls_server_config` with `cert_file` and `key_file`, and `basic_auth_users` with bcrypt hashes. Anything
//! else in it is refused, since what is left out here might be what protects somebody.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;

use bcrypt::HashParts;
use serde::Deserialize;
use thiserror::Error;

/// Why a file is not used.
#[derive(Debug, Error)]
pub enum WebConfigError {
    /// It could not be read.
    #[error("cannot read {path}; nothing was traced")]
    Read {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// It is not what it should be.
    #[error("{path} is no web config: {reason}; nothing was traced")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// A password is not hashed, or in another way.
    #[error(
        "{path}: the password of {user} is no bcrypt hash (htpasswd -nB makes one); nothing was traced"
    )]
    Hash {
        /// The file.
        path: PathBuf,
        /// Whose.
        user: String,
    },
}

/// What such a file says. Without one: neither encryption nor passwords.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebConfig {
    /// Certificate and key.
    #[serde(rename = "tls_server_config")]
    pub tls: Option<Tls>,
    /// Names and hashes of passwords; empty where everybody may ask.
    #[serde(rename = "basic_auth_users", default)]
    pub users: BTreeMap<String, String>,
}

/// Files in PEM.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The certificate and those that vouch for it.
    pub cert_file: PathBuf,
    /// Its key.
    pub key_file: PathBuf,
}

impl WebConfig {
    /// Reads a file. Paths in it that are not absolute begin at its folder.
    pub fn read(path: &Path) -> Result<Self, WebConfigError> {
        let text = fs::read_to_string(path).map_err(|source| WebConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        let config = Self::parse(&text).map_err(|reason| WebConfigError::Syntax {
            path: path.to_owned(),
            reason,
        })?;
        let mut hashes = config.users.iter();
        if let Some((user, _)) = hashes.find(|(_, hash)| HashParts::from_str(hash).is_err()) {
            return Err(WebConfigError::Hash {
                path: path.to_owned(),
                user: user.clone(),
            });
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        Ok(Self {
            tls: config.tls.map(|tls| Tls {
                cert_file: folder.join(tls.cert_file),
                key_file: folder.join(tls.key_file),
            }),
            ..config
        })
    }

    /// An empty file is one, too.
    fn parse(text: &str) -> Result<Self, String> {
        let config: Option<Self> = serde_saphyr::from_str(text).map_err(|error| {
            let told = error.to_string();
            told.lines().next().unwrap_or_default().to_owned()
        })?;
        Ok(config.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "$2y$10$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi";

    #[test]
    fn what_prometheus_documents_is_read_and_all_else_is_refused() {
        let config = WebConfig::parse(&format!(
            "tls_server_config:\n  cert_file: a.pem\n  key_file: /b.key\nbasic_auth_users:\n  alice: {HASH}\n"
        ))
        .expect("a config");
        assert_eq!(config.users["alice"], HASH);
        assert_eq!(config.tls.expect("files").key_file, Path::new("/b.key"));
        for empty in ["", "# nothing\n", "{}"] {
            let config = WebConfig::parse(empty).expect(empty);
            assert!(config.tls.is_none() && config.users.is_empty());
        }
        for wrong in [
            "tls_server_config:\n  cert_file: a.pem\n",
            "tls_server_config:\n  cert_file: a\n  key_file: b\n  client_ca_file: c\n",
            "http_server_config:\n  http2: true\n",
            "basic_auth_users: [alice]\n",
            "{",
        ] {
            WebConfig::parse(wrong).expect_err(wrong);
        }
    }

    #[test]
    fn paths_begin_at_the_file_and_passwords_must_be_hashed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("web.yml");
        let write = |text: &str| fs::write(&path, text).expect("write");
        write("tls_server_config: {cert_file: a.pem, key_file: /b.key}");
        let tls = WebConfig::read(&path)
            .expect("a config")
            .tls
            .expect("files");
        assert_eq!(tls.cert_file, folder.path().join("a.pem"));
        assert_eq!(tls.key_file, Path::new("/b.key"));
        write("basic_auth_users: {bob: secret}");
        let error = WebConfig::read(&path).expect_err("no hash").to_string();
        assert!(
            error.contains("bob") && !error.contains("secret"),
            "{error}"
        );
    }
}
