//! Whether `cmt trace` and `cmt attach` would work on this machine, found out by trying.
//!
//! A check states what was found, what that means, and what to do about it. Nothing is changed and nothing is left behind.

mod gpu;
mod kernel;
mod rights;

use serde::Serialize;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be.
    Ok,
    /// Only to be known.
    Info,
    /// Works, but not everything or not everywhere.
    Warning,
    /// Does not work.
    Failed,
}

/// What needs a check to succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Need {
    /// `cmt trace`, and `cmt attach`, which traces before and after.
    Trace,
    /// `cmt attach` alone.
    Attach,
}

/// One thing that was looked at.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it ended.
    pub state: State,
    /// What needs it.
    pub need: Need,
    /// What was found.
    pub found: String,
    /// What it means, where it is not as it should be.
    pub meaning: Option<&'static str>,
    /// What to do about it.
    pub remedy: Option<&'static str>,
}

impl Check {
    fn new(name: &'static str, need: Need, state: State, found: impl Into<String>) -> Self {
        Self {
            name,
            state,
            need,
            found: found.into(),
            meaning: None,
            remedy: None,
        }
    }

    fn ok(name: &'static str, need: Need, found: impl Into<String>) -> Self {
        Self::new(name, need, State::Ok, found)
    }

    fn but(mut self, meaning: &'static str, remedy: &'static str) -> Self {
        self.meaning = Some(meaning);
        self.remedy = Some(remedy);
        self
    }
}

/// A process that maps a CUDA library now.
#[derive(Clone, Debug, Serialize)]
pub struct CudaProcess {
    /// Process id.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Paths of its libcuda and libcudart, as it sees them.
    pub libraries: Vec<String>,
}

/// All that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `cmt/doctor/1`.
    pub schema: &'static str,
    /// `cmt trace` would work.
    pub trace: bool,
    /// `cmt attach` would work.
    pub attach: bool,
    /// Everything that was looked at.
    pub checks: Vec<Check>,
    /// Who could be traced now, as far as this user may look.
    pub processes: Vec<CudaProcess>,
}

/// Looks at everything.
pub fn examine() -> Report {
    let processes = gpu::processes();
    let mut checks = vec![
        kernel::version(),
        kernel::btf(),
        kernel::bpf(),
        kernel::uprobes(),
        kernel::lockdown(),
        kernel::memory_files(),
    ];
    checks.extend(rights::capabilities());
    checks.extend([
        rights::ptrace_scope(),
        gpu::architecture(),
        gpu::driver(),
        gpu::libraries(&processes),
        gpu::cpus(),
    ]);
    let works = |need| {
        !checks
            .iter()
            .any(|check| check.need == need && check.state == State::Failed)
    };
    Report {
        schema: "cmt/doctor/1",
        trace: works(Need::Trace),
        attach: works(Need::Trace) && works(Need::Attach),
        checks,
        processes,
    }
}
