//! The policy file: which workloads may be attached to, and what takes that back.
//!
//! Pure text: whoever reads a policy has touched nothing. What it does not know it refuses, since what is left out here might be
//! what keeps a process as it is.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use glob::Pattern;
use serde::{Deserialize, Deserializer, de};
use thiserror::Error;

use crate::trace::duration;

/// Shorter times are too short for any judgement.
const SHORTEST: Duration = Duration::from_secs(1);

/// Why a file is not used.
#[derive(Debug, Error)]
pub enum PolicyError {
    /// It could not be read.
    #[error("cannot read {path}; nothing was traced")]
    Read {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// It is not what it should be.
    #[error("{path} is no policy: {reason}; nothing was traced")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
}

/// What such a file says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Whether anything is done.
    pub mode: Mode,
    /// The first one that fits a workload counts; where none fits nothing is done.
    pub rules: Vec<Rule>,
}

/// Whether anything is done.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// It says what it would attach to.
    Observe,
    /// It attaches, and detaches.
    Attach,
}

/// What may be done to some workloads.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Which: a glob of the name that stands in the label `workload`.
    #[serde(deserialize_with = "pattern")]
    pub workload: Pattern,
    /// Attaches where that is estimated to give back so many seconds of every minute.
    #[serde(deserialize_with = "seconds")]
    pub min_gain: f64,
    /// How long a process is looked at for such an estimate. What it copies meanwhile is what the time after is compared with.
    #[serde(deserialize_with = "time", default = "a_minute")]
    pub observe: Duration,
    /// The share of the rule's processes that is attached to first, above 0 and up to 1.
    #[serde(deserialize_with = "share", default)]
    pub canary: Option<f64>,
    /// What takes it back.
    #[serde(default)]
    pub rollback: Rollback,
}

/// What takes an attach back, besides copies that begin to fail.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rollback {
    /// When it is judged.
    #[serde(deserialize_with = "time", default = "ten_minutes")]
    pub after: Duration,
    /// Fewer seconds of every minute given back by then are too few.
    #[serde(deserialize_with = "seconds", default)]
    pub min_gain: f64,
}

impl Default for Rollback {
    fn default() -> Self {
        Self {
            after: ten_minutes(),
            min_gain: 0.0,
        }
    }
}

impl Policy {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, PolicyError> {
        let text = fs::read_to_string(path).map_err(|source| PolicyError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text).map_err(|reason| PolicyError::Syntax {
            path: path.to_owned(),
            reason,
        })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let policy: Self = serde_saphyr::from_str(text).map_err(|error| {
            let told = error.to_string();
            told.lines().next().unwrap_or_default().to_owned()
        })?;
        match policy.rules.is_empty() {
            true => Err("it has no rules".to_owned()),
            false => Ok(policy),
        }
    }

    /// The number of the rule for a workload, the first being 0.
    pub fn rule_for(&self, workload: &str) -> Option<usize> {
        let mut rules = self.rules.iter();
        rules.position(|rule| rule.workload.matches(workload))
    }
}

fn a_minute() -> Duration {
    Duration::from_secs(60)
}

fn ten_minutes() -> Duration {
    Duration::from_secs(600)
}

fn pattern<'de, D: Deserializer<'de>>(from: D) -> Result<Pattern, D::Error> {
    let text = String::deserialize(from)?;
    Pattern::new(&text).map_err(|error| de::Error::custom(format!("{text:?}: {error}")))
}

fn seconds<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let seconds = f64::deserialize(from)?;
    match seconds.is_finite() && seconds >= 0.0 {
        true => Ok(seconds),
        false => Err(de::Error::custom(format!(
            "a gain is 0 or more seconds of every minute, not {seconds}"
        ))),
    }
}

fn time<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    let time = duration::parse(&text).map_err(de::Error::custom)?;
    match time >= SHORTEST {
        true => Ok(time),
        false => Err(de::Error::custom(format!("{text} is less than a second"))),
    }
}

fn share<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    let text = String::deserialize(from)?;
    let percent = text.strip_suffix('%').map(str::parse::<f64>);
    match percent {
        Some(Ok(percent)) if percent > 0.0 && percent <= 100.0 => Ok(Some(percent / 100.0)),
        _ => Err(de::Error::custom(format!(
            "{text:?} is no share; write 10%"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_fits_counts() {
        let policy = Policy::parse(
            "mode: attach\n\
             rules:\n\
             - {workload: 'unit/train-*.service', min_gain: 1.5, canary: 10%, rollback: {after: 5m, min_gain: 1}}\n\
             - {workload: 'pod/*', min_gain: 2, observe: 30s}\n",
        )
        .expect("a policy");
        assert_eq!(policy.mode, Mode::Attach);
        assert_eq!(policy.rule_for("unit/train-7.service"), Some(0));
        assert_eq!(policy.rule_for("pod/0fd4b2a1"), Some(1));
        assert_eq!(policy.rule_for("comm/python3"), None);
        let [first, second] = &policy.rules[..] else {
            panic!("two rules");
        };
        assert_eq!((first.min_gain, first.canary), (1.5, Some(0.1)));
        assert_eq!(
            (first.rollback.after, first.rollback.min_gain),
            (Duration::from_secs(300), 1.0)
        );
        assert_eq!(
            (second.observe, second.canary, second.rollback.after),
            (Duration::from_secs(30), None, ten_minutes())
        );
    }

    #[test]
    fn what_is_unclear_is_refused() {
        let rule = |more: &str| format!("mode: attach\nrules: [{{workload: a, {more}}}]");
        for (wrong, word) in [
            (String::new(), ""),
            ("rules: []".to_owned(), "mode"),
            ("mode: attach".to_owned(), "rules"),
            ("mode: attach\nrules: []".to_owned(), "no rules"),
            ("mode: dry\nrules: []".to_owned(), "dry"),
            (
                "mode: attach\nrules: [{workload: a}]".to_owned(),
                "min_gain",
            ),
            (
                "mode: attach\nrules: [{workload: '[', min_gain: 1}]".to_owned(),
                "[",
            ),
            (rule("min_gain: -1"), "-1"),
            (rule("min_gain: .nan"), "NaN"),
            (rule("min_gain: much"), "invalid floating point"),
            (rule("min_gain: 1, canary: 10"), "10"),
            (rule("min_gain: 1, canary: 0%"), "0%"),
            (rule("min_gain: 1, canary: 101%"), "101%"),
            (rule("min_gain: 1, observe: 0s"), "second"),
            (rule("min_gain: 1, observe: soon"), "soon"),
            (rule("min_gain: 1, rollback: {after: 5x}"), "unit"),
            (rule("min_gain: 1, rollback: {slower: 2}"), "slower"),
            (rule("min_gain: 1, mode: attach"), "mode"),
        ] {
            let error = Policy::parse(&wrong).expect_err(&wrong);
            assert!(error.contains(word), "{wrong}: {error}");
        }
    }
}
