//! The rungs of the test ladder: what a test needs, and whether this machine has it.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread;

use crate::{Finished, cmt};

/// A file to which every test adds one line: `rung TAB result TAB test TAB reason`. `cargo xtask test` reads it.
const LOG: &str = "CMT_RUNG_LOG";
/// When it is 1, a test that cannot run fails.
const REQUIRE: &str = "CMT_REQUIRE_RUNGS";
/// Path of NVIDIA's own libcudart.
const LIBCUDART: &str = "CMT_LIBCUDART";

/// What a test needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    /// Root, eBPF, ptrace and a C compiler: programs on our own libcuda are traced and attached to.
    StandIn,
    /// Root and eBPF.
    Kernel,
    /// The same, and NVIDIA's libcudart (without a driver, so its calls fail).
    RealLibcudart,
    /// A Prometheus of our own; no rights.
    Fleet,
    /// An NVIDIA GPU and its driver.
    Gpu,
}

impl Rung {
    /// As `cargo xtask test` prints it.
    pub fn name(self) -> &'static str {
        match self {
            Self::StandIn => "stand-in",
            Self::Kernel => "kernel",
            Self::RealLibcudart => "real-libcudart",
            Self::Fleet => "fleet",
            Self::Gpu => "gpu",
        }
    }

    /// Why this machine cannot run it.
    fn obstacle(self) -> Option<String> {
        match self {
            Self::StandIn => doctor("attach"),
            Self::Kernel => doctor("trace"),
            Self::RealLibcudart => {
                if std::env::var_os(LIBCUDART).is_none_or(|path| !Path::new(&path).exists()) {
                    return Some(format!("{LIBCUDART} does not name NVIDIA's libcudart"));
                }
                doctor("trace")
            }
            Self::Fleet => None,
            Self::Gpu => {
                (!Path::new("/dev/nvidiactl").exists()).then(|| "no NVIDIA GPU".to_string())
            }
        }
    }
}

/// Path of NVIDIA's own libcudart.
///
/// # Panics
/// On machines where [`Rung::RealLibcudart`] cannot run.
pub fn libcudart() -> PathBuf {
    let path = std::env::var_os(LIBCUDART).expect("the rung can run");
    path.into()
}

/// Why `cmt doctor` thinks that a command would not work; asked once for each test process.
fn doctor(command: &'static str) -> Option<String> {
    static REPORT: OnceLock<Finished> = OnceLock::new();
    let finished = REPORT.get_or_init(|| cmt(["doctor", "--json"]));
    let report = finished.parse();
    if report[command] == true {
        return None;
    }
    let failed: Vec<String> = report["checks"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|check| check["state"] == "failed")
        .map(|check| format!("{}: {}", check["name"], check["found"]))
        .collect();
    Some(format!(
        "cmt {command} cannot work here ({})",
        failed.join(", ")
    ))
}

/// A test that runs; its end is logged.
#[derive(Debug)]
pub struct Turn {
    rung: Rung,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let result = if thread::panicking() {
            "failed"
        } else {
            "passed"
        };
        log(self.rung, result, "");
    }
}

/// Lets a test go on if this machine has what it needs; else says why not.
///
/// # Panics
/// When the machine has not, and `CMT_REQUIRE_RUNGS` is 1.
#[must_use = "a test whose rung cannot run has to return"]
pub fn require(rung: Rung) -> Option<Turn> {
    require_packages(rung, &[])
}

/// The same for a test that needs more: names of programs or paths of files, each with the Debian package that has it.
///
/// # Panics
/// As [`require`] does.
#[must_use = "a test whose rung cannot run has to return"]
pub fn require_packages(rung: Rung, needed: &[(&str, &str)]) -> Option<Turn> {
    let missing = needed.iter().find(|(file, _)| !is_installed(file));
    let missing =
        missing.map(|(file, package)| ("lacking", format!("no {file}: apt-get install {package}")));
    let obstacle = || rung.obstacle().map(|reason| ("skipped", reason));
    let Some((result, reason)) = missing.or_else(obstacle) else {
        return Some(Turn { rung });
    };
    eprintln!("skipped, rung {}: {reason}", rung.name());
    log(rung, result, &reason);
    assert!(
        std::env::var_os(REQUIRE).is_none_or(|value| value != "1"),
        "the rung {} must run here: {reason}",
        rung.name()
    );
    None
}

/// Whether a file exists: anywhere on the search path if it is a name only.
fn is_installed(file: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // An absolute path replaces what it is joined to.
    std::env::split_paths(&path).any(|folder| folder.join(file).exists())
}

fn log(rung: Rung, result: &str, reason: &str) {
    let Some(path) = std::env::var_os(LOG) else {
        return;
    };
    let test = thread::current().name().unwrap_or("?").to_string();
    let line = format!("{}\t{result}\t{test}\t{reason}\n", rung.name());
    let file = OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
    if let Err(error) = written {
        eprintln!("{LOG}: {error}");
    }
}
