//! Where and when a result was made, and by which version: for pages that are passed on.

use std::fmt;

use jiff::Timestamp;
use nix::sys::utsname::uname;
use serde::{Deserialize, Serialize};

/// The origin of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Version of `cmt`.
    pub version: String,
    /// Name of the machine.
    pub host: String,
    /// RFC 3339, UTC.
    pub time: String,
}

impl Origin {
    /// This machine, now.
    pub fn now() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: uname()
                .map(|name| name.nodename().to_string_lossy().into_owned())
                .unwrap_or_default(),
            time: format!("{:.0}", Timestamp::now()),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cmt {} on {}, {}", self.version, self.host, self.time)
    }
}
