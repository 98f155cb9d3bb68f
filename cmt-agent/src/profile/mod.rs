//! Profiles: a plan for copies in a file (`cmt/profile/1`), and where it was measured.

pub mod known;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use cmt_common::control::{PLAN_ROWS, Plan, PlanRow, store};
use serde::{Deserialize, Serialize};

use crate::compare::bytes;
use crate::cores::Cores;
use crate::link::Link;
use crate::target::text::printable;

/// The name and version of the format.
pub const SCHEMA: &str = "cmt/profile/1";
/// Bounds that no sane plan leaves: threads, and bytes of slots, slices and rings.
const MOST_THREADS: u32 = 256;
const MOST_BYTES: u64 = 1 << 30;
const LEAST_SLICE: u64 = 4 << 10;
/// What every version of the format begins with.
const FAMILY: &str = "cmt/profile/";
/// No profile is longer, in bytes.
const MOST_FILE: u64 = 1 << 20;
/// No text in it is longer, in bytes.
const MOST_TEXT: usize = 256;
/// No more classes are measured.
const MOST_CLASSES: usize = 128;

fn unread(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::NotFound => "no name of `cmt profile list`, and no such file",
        _ => "cannot be read",
    }
}

/// Why a profile is refused.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("profile {}: {}", path.display(), unread(source))]
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
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    schema: String,
    /// Rows for HtoD, smallest copies first.
    pub htod: Vec<Row>,
    /// Rows for DtoH.
    pub dtoh: Vec<Row>,
    /// CPUs that helpers run on.
    #[serde(default)]
    pub cores: Cores,
    /// The machine that it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
    /// How it was found; a plan that was not measured has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

/// What a plan depends on. What is not known is none.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Name of the GPU.
    pub gpu: Option<String>,
    /// Version of NVIDIA's kernel module.
    pub driver: Option<String>,
    /// Its link.
    pub link: Option<Link>,
    /// Model name of the processor.
    pub cpu: Option<String>,
    /// Processors that may be used.
    pub cpus: u32,
    /// Processors' worth of time that the cgroup grants.
    #[serde(default)]
    pub quota: Option<f64>,
    /// Kernel, as in `6.18`.
    #[serde(default)]
    pub kernel: Option<String>,
}

/// How a plan was found.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// RFC 3339, UTC.
    pub date: String,
    /// Version of `cmt`.
    pub version: String,
    /// `fast` or `full`.
    pub search: String,
    /// Whether it ended before it was done.
    #[serde(default)]
    pub interrupted: bool,
    /// What it found, class by class.
    pub classes: Vec<Class>,
}

/// One size class of a direction, by copies of its smallest size.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// `HtoD` or `DtoH`.
    pub direction: String,
    /// Length of the copies.
    pub bytes: u64,
    /// Samples of each of the three.
    pub samples: u64,
    /// By the median until the device was idle, in 1e9 bytes a second: the driver's pageable copies.
    pub stock_gbps: f64,
    /// The same copies by this plan.
    pub tuned_gbps: f64,
    /// Pinned ones.
    pub pinned_gbps: f64,
    /// The same copies by the estimate, in the same passes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instant_gbps: Option<f64>,
    /// The driver's copies with fresh host memory, in the same passes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fresh_stock_gbps: Option<f64>,
    /// These by this plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fresh_tuned_gbps: Option<f64>,
    /// Candidates that were tried.
    #[serde(default)]
    pub candidates: u32,
    /// Those that were compared at last.
    #[serde(default)]
    pub finalists: u32,
    /// Those of the last within 3 % of the best.
    #[serde(default)]
    pub near: u32,
    /// By which part the last of them was slower than the best.
    #[serde(default)]
    pub spread: f64,
}

/// One row of it: copies up to a size.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    up_to_bytes: u64,
    slot_bytes: u64,
    slice_bytes: u64,
    ring_bytes: u64,
    threads: u32,
    store: Store,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Store {
    Ordinary,
    NonTemporal,
    RepMovsb,
}

/// Reads a plan and checks that it makes sense.
pub fn read(path: &Path) -> Result<Plan, ProfileError> {
    read_file(path).map(|(_, plan)| plan)
}

/// Reads a profile and checks that it makes sense: the file, or where there is none the one of that name that `cmt` brings
/// along.
pub fn read_file(path: &Path) -> Result<(File, Plan), ProfileError> {
    let named = known::all().find(|(name, _)| Path::new(name) == path);
    if let Some((_, text)) = named.filter(|_| !path.exists()) {
        return parse_file(text, path);
    }
    let mut text = Vec::new();
    fs::File::open(path)
        .and_then(|file| file.take(MOST_FILE + 1).read_to_end(&mut text))
        .map_err(|source| ProfileError::Read {
            path: path.to_owned(),
            source,
        })?;
    let nonsense = |what: &str| ProfileError::Nonsense {
        path: path.to_owned(),
        what: what.to_owned(),
    };
    if text.len() as u64 > MOST_FILE {
        return Err(nonsense("longer than 1 MiB, which no profile is"));
    }
    let text = String::from_utf8(text).map_err(|_| nonsense("not UTF-8 text"))?;
    parse_file(&text, path)
}

/// Parses a plan; `path` names it in errors.
pub fn parse(text: &str, path: &Path) -> Result<Plan, ProfileError> {
    parse_file(text, path).map(|(_, plan)| plan)
}

/// Parses a profile; `path` names it in errors.
pub fn parse_file(text: &str, path: &Path) -> Result<(File, Plan), ProfileError> {
    /// What all versions have.
    #[derive(Deserialize)]
    struct Head {
        schema: Option<String>,
    }
    let format = |source| ProfileError::Format {
        path: path.to_owned(),
        source,
    };
    let nonsense = |what| ProfileError::Nonsense {
        path: path.to_owned(),
        what,
    };
    let head: Head = serde_json::from_str(text).map_err(format)?;
    // A field that only another version has is not what is wrong with it.
    if let Some(schema) = head.schema.filter(|schema| schema != SCHEMA) {
        let known = SCHEMA.strip_prefix(FAMILY).and_then(|it| it.parse().ok());
        let version = schema.strip_prefix(FAMILY).and_then(|it| it.parse().ok());
        let newer = match version.zip(known) {
            Some((version, known)) if version > known => ": it needs a newer cmt",
            None | Some::<(u32, u32)>(_) => "",
        };
        return Err(nonsense(format!(
            "its schema is {schema:?}, not {SCHEMA:?}{newer}"
        )));
    }
    let file: File = serde_json::from_str(text).map_err(format)?;
    let plan = file.plan().map_err(nonsense)?;
    file.check_words().map_err(nonsense)?;
    Ok((file, plan))
}

/// The plan as a `cmt/profile/1` object.
pub fn to_json(plan: &Plan) -> String {
    serde_json::to_string(&File::of(plan)).expect("plain numbers and names")
}

impl File {
    /// Its plan, if it makes sense.
    fn plan(&self) -> Result<Plan, String> {
        Ok(Plan {
            htod: rows("htod", &self.htod)?,
            dtoh: rows("dtoh", &self.dtoh)?,
            cores: self.cores.number(),
            ..Plan::NONE
        })
    }

    /// What is said beside the plan is shown on terminals and compared with what is measured.
    fn check_words(&self) -> Result<(), String> {
        let machine = self.machine.iter().flat_map(|machine| {
            let link = machine.link.as_ref().map(|link| &link.speed);
            let texts = [&machine.gpu, &machine.driver, &machine.cpu, &machine.kernel];
            texts.into_iter().flatten().chain(link)
        });
        let measured = self.measured.iter().flat_map(|measured| {
            let directions = measured.classes.iter().map(|class| &class.direction);
            [&measured.date, &measured.version, &measured.search]
                .into_iter()
                .chain(directions)
        });
        for text in machine.chain(measured) {
            if text.len() > MOST_TEXT || *text != printable(text) {
                return Err("a text in it is too long, or not for printing".to_owned());
            }
        }
        let Some(measured) = &self.measured else {
            return Ok(());
        };
        let sane = |class: &Class| {
            let rates = [class.stock_gbps, class.tuned_gbps, class.pinned_gbps];
            let more = [
                class.instant_gbps,
                class.fresh_stock_gbps,
                class.fresh_tuned_gbps,
            ];
            let mut all = rates.into_iter().chain(more.into_iter().flatten());
            all.all(|rate| (0.0..1e6).contains(&rate))
                && ["HtoD", "DtoH"].contains(&&*class.direction)
        };
        if measured.classes.len() > MOST_CLASSES || !measured.classes.iter().all(sane) {
            return Err("what was measured makes no sense: rates are GB/s".to_owned());
        }
        Ok(())
    }

    /// As JSON of several lines.
    pub fn to_text(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain numbers and names") + "\n"
    }

    /// Whether copies of any size are staged.
    pub fn stages(&self) -> bool {
        self.htod
            .iter()
            .chain(&self.dtoh)
            .any(|row| row.threads > 0)
    }

    /// The same with another plan.
    pub fn with(self, plan: &Plan) -> Self {
        Self {
            machine: self.machine,
            measured: self.measured,
            ..Self::of(plan)
        }
    }

    /// The file that says what `plan` says, for which machine, and how it was found.
    pub fn on(plan: &Plan, machine: &Machine, measured: Option<Measured>) -> Self {
        Self {
            machine: Some(machine.clone()),
            measured,
            ..Self::of(plan)
        }
    }

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
            cores: Cores::of(plan.cores),
            machine: None,
            measured: None,
        }
    }
}

impl Row {
    /// Whether it stages its copies.
    pub fn stages(&self) -> bool {
        self.threads > 0
    }
}

/// One line of 77 columns at most.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.up_to_bytes {
            0x100_0000_0000.. => write!(f, "{:<15}", "all others")?,
            up_to if (up_to + 1).is_power_of_two() => {
                write!(f, "{:<15}", format!("below {}", bytes(up_to + 1)))?;
            }
            up_to => write!(f, "{:<15}", format!("up to {}", bytes(up_to)))?,
        }
        if self.threads == 0 {
            return write!(f, "original function");
        }
        let store = match self.store {
            Store::Ordinary => "ordinary",
            Store::NonTemporal => "non-temporal",
            Store::RepMovsb => "rep movsb",
        };
        let threads = match self.threads {
            1 => "1 thread".to_owned(),
            threads => format!("{threads} threads"),
        };
        write!(
            f,
            "{threads:<11}slot {:<7} slice {:<7} ring {:<6} {store}",
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
    fn one_that_cmt_brings_along_goes_by_its_name() {
        for (name, _) in known::all() {
            let (file, _) = read_file(Path::new(name)).expect("a profile");
            assert!(file.measured.is_some(), "{name}");
        }
        let error = read(Path::new("nvidia-none-1")).expect_err("no such file");
        assert!(error.to_string().contains("nvidia-none-1"), "{error}");
    }

    #[test]
    fn what_is_no_text_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("profile.json");
        fs::write(&path, b"{\xff}").expect("a file");
        let error = read(&path).expect_err("no text").to_string();
        assert!(error.ends_with("not UTF-8 text"), "{error}");
    }

    #[test]
    fn the_choice_of_cores_survives_the_way_through_json() {
        let mut plan = cmt_copy::plan::estimate(4);
        for choice in Cores::EVERY {
            plan.cores = choice.number();
            assert_eq!(check(&to_json(&plan)), Ok(plan));
        }
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
            (
                r#"{"schema": "cmt/profile/2", "htod": [], "dtoh": [], "new": 1}"#,
                "not \"cmt/profile/1\": it needs a newer cmt",
            ),
            (
                r#"{"schema": "cmt/profile/1", "htod": [], "dtoh": [], "new": 1}"#,
                "unknown field `new`",
            ),
            (r#"{"htod": [], "dtoh": []}"#, "missing field `schema`"),
            (
                r#"{"schema": "cmt/profile/1", "htod": [], "dtoh": [], "cores": "some"}"#,
                "unknown variant `some`",
            ),
            (
                r#"{"schema": "cmt/profile/1", "htod": [], "dtoh": [], "machine": {"gpu": "\u001b[2J", "cpus": 1}}"#,
                "not for printing",
            ),
            (
                r#"{"schema": "cmt/profile/1", "htod": [], "dtoh": [], "measured": {"date": "", "version": "", "search": "",
                    "classes": [{"direction": "HtoD", "bytes": 1, "samples": 1, "stock_gbps": -1, "tuned_gbps": 1,
                    "pinned_gbps": 1}]}}"#,
                "rates are GB/s",
            ),
            (&" ".repeat(2 << 20), "longer than 1 MiB"),
        ] {
            let error = check(text).expect_err(text);
            assert!(error.contains(reason), "{error}");
        }
    }
}
