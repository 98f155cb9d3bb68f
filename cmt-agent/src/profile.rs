//! Profiles: a plan for copies in a file (`cmt/profile/1`).

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use cmt_common::control::{PLAN_ROWS, Plan, PlanRow, store};
use serde::{Deserialize, Serialize};

use crate::compare::bytes;

/// The name and version of the format.
pub const SCHEMA: &str = "cmt/profile/1";
/// Bounds that no sane plan leaves: threads, and bytes of slots, slices and rings.
const MOST_THREADS: u32 = 256;
const MOST_BYTES: u64 = 1 << 30;
const LEAST_SLICE: u64 = 4 << 10;
/// No profile is longer, in bytes.
const MOST_FILE: u64 = 1 << 20;

/// Why a profile is refused.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("profile {}: cannot be read", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is not JSON of the right form.
    #[error("profile {}: not a {SCHEMA} object", path.display())]
    Format {
        /// Which.
        path: PathBuf,
        /// Where it goes wrong.
        #[source]
        source: serde_json::Error,
    },
    /// It says something that makes no sense.
    #[error("profile {}: {what}", path.display())]
    Nonsense {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

/// A plan as it stands in a file.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    schema: String,
    /// Rows for HtoD, smallest copies first.
    pub htod: Vec<Row>,
    /// Rows for DtoH.
    pub dtoh: Vec<Row>,
}

/// One row of it: copies up to a size.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    up_to_bytes: u64,
    slot_bytes: u64,
    slice_bytes: u64,
    ring_bytes: u64,
    threads: u32,
    store: Store,
}

#[derive(Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Store {
    Ordinary,
    NonTemporal,
    RepMovsb,
}

/// Reads a plan and checks that it makes sense.
pub fn read(path: &Path) -> Result<Plan, ProfileError> {
    let mut text = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(MOST_FILE).read_to_string(&mut text))
        .map_err(|source| ProfileError::Read {
            path: path.to_owned(),
            source,
        })?;
    parse(&text, path)
}

/// Parses a plan; `path` names it in errors.
pub fn parse(text: &str, path: &Path) -> Result<Plan, ProfileError> {
    let named = || path.to_owned();
    let nonsense = |what| ProfileError::Nonsense {
        path: named(),
        what,
    };
    let file: File = serde_json::from_str(text).map_err(|source| ProfileError::Format {
        path: named(),
        source,
    })?;
    if file.schema != SCHEMA {
        return Err(nonsense(format!(
            "its schema is {:?}, not {SCHEMA:?}",
            file.schema
        )));
    }
    Ok(Plan {
        htod: rows("htod", &file.htod).map_err(nonsense)?,
        dtoh: rows("dtoh", &file.dtoh).map_err(nonsense)?,
    })
}

/// The plan as a `cmt/profile/1` object.
pub fn to_json(plan: &Plan) -> String {
    serde_json::to_string(&File::of(plan)).expect("plain numbers and names")
}

impl File {
    /// The file that says what `plan` says.
    pub fn of(plan: &Plan) -> Self {
        let rows = |rows: &[PlanRow]| {
            rows.iter()
                .filter(|row| row.up_to_bytes > 0)
                .map(|row| Row {
                    up_to_bytes: row.up_to_bytes,
                    slot_bytes: row.slot_bytes,
                    slice_bytes: row.slice_bytes,
                    ring_bytes: row.ring_bytes,
                    threads: row.threads,
                    store: match row.store {
                        store::NON_TEMPORAL => Store::NonTemporal,
                        store::REP_MOVSB => Store::RepMovsb,
                        _ => Store::Ordinary,
                    },
                })
                .collect()
        };
        Self {
            schema: SCHEMA.to_owned(),
            htod: rows(&plan.htod),
            dtoh: rows(&plan.dtoh),
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.up_to_bytes {
            0x100_0000_0000.. => write!(f, "{:<17}", "all others")?,
            up_to if (up_to + 1).is_power_of_two() => {
                write!(f, "{:<17}", format!("below {}", bytes(up_to + 1)))?;
            }
            up_to => write!(f, "{:<17}", format!("up to {}", bytes(up_to)))?,
        }
        if self.threads == 0 {
            return write!(f, "original function");
        }
        let store = match self.store {
            Store::Ordinary => "ordinary",
            Store::NonTemporal => "non-temporal",
            Store::RepMovsb => "rep movsb",
        };
        write!(
            f,
            "{} threads, slots {}, slices {}, ring {}, {store}",
            self.threads,
            bytes(self.slot_bytes),
            bytes(self.slice_bytes),
            bytes(self.ring_bytes),
        )
    }
}

fn rows(direction: &str, rows: &[Row]) -> Result<[PlanRow; PLAN_ROWS], String> {
    if rows.len() > PLAN_ROWS {
        return Err(format!(
            "{direction} has {} rows; at most {PLAN_ROWS}",
            rows.len()
        ));
    }
    let mut plan = [PlanRow::default(); PLAN_ROWS];
    let mut last = 0;
    for (index, (row, to)) in rows.iter().zip(&mut plan).enumerate() {
        let sane = row.up_to_bytes > last
            && row.threads <= MOST_THREADS
            && (row.threads == 0
                || (LEAST_SLICE <= row.slice_bytes
                    && row.slice_bytes <= row.slot_bytes
                    && row.slot_bytes <= row.ring_bytes
                    && row.ring_bytes <= MOST_BYTES));
        if !sane {
            return Err(format!(
                "{direction} row {index} makes no sense: up_to_bytes must grow, threads be at most {MOST_THREADS}, and \
                 {LEAST_SLICE} <= slice_bytes <= slot_bytes <= ring_bytes <= {MOST_BYTES}"
            ));
        }
        last = row.up_to_bytes;
        *to = PlanRow {
            up_to_bytes: row.up_to_bytes,
            slot_bytes: row.slot_bytes,
            slice_bytes: row.slice_bytes,
            ring_bytes: row.ring_bytes,
            threads: row.threads,
            store: match row.store {
                Store::Ordinary => store::ORDINARY,
                Store::NonTemporal => store::NON_TEMPORAL,
                Store::RepMovsb => store::REP_MOVSB,
            },
        };
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<Plan, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("profile.json");
        fs::write(&path, text).expect("a file");
        read(&path).map_err(|error| format!("{:#}", anyhow::Error::from(error)))
    }

    #[test]
    fn a_sane_profile_is_read() {
        let plan = check(
            r#"{"schema": "cmt/profile/1", "dtoh": [], "htod": [{"up_to_bytes": 65535, "threads": 0, "slot_bytes": 0,
                "slice_bytes": 0, "ring_bytes": 0, "store": "ordinary"}, {"up_to_bytes": 1073741824, "threads": 4,
                "slot_bytes": 1048576, "slice_bytes": 65536, "ring_bytes": 4194304, "store": "non-temporal"}]}"#,
        )
        .expect("a plan");
        assert_eq!(
            (plan.htod[1].threads, plan.htod[1].store),
            (4, store::NON_TEMPORAL)
        );
        assert_eq!(plan.dtoh, Plan::NONE.dtoh);
    }

    #[test]
    fn the_estimates_survive_the_way_through_json() {
        for cpus in [1, 2, 4, 16, 128] {
            let plan = cmt_copy::plan::estimate(cpus);
            assert_eq!(check(&to_json(&plan)), Ok(plan), "{cpus}");
        }
    }

    #[test]
    fn damaged_and_foreign_ones_are_refused_with_the_reason() {
        let row = r#"{"up_to_bytes": 1, "threads": 4, "slot_bytes": 1, "slice_bytes": 65536, "ring_bytes": 1, "store": "ordinary"}"#;
        for (text, reason) in [
            ("{", "not a cmt/profile/1 object"),
            (
                r#"{"schema": "cmt/trace/1", "htod": [], "dtoh": []}"#,
                "its schema is",
            ),
            (
                &format!(r#"{{"schema": "cmt/profile/1", "dtoh": [], "htod": [{row}]}}"#),
                "htod row 0 makes no sense",
            ),
        ] {
            let error = check(text).expect_err(text);
            assert!(error.contains(reason), "{error}");
        }
    }
}
