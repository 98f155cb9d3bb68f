//! Whether `cmt trace` and `cmt attach` would work on this machine, found out by trying.
//!
//! A check states what was found, what that means, and what to do about it. Nothing is changed and nothing is left behind.

mod confinement;
mod gpu;
mod kernel;
mod processes;
mod rights;

use std::borrow::Cow;

use serde::Serialize;

pub use processes::CudaProcess;

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
    pub meaning: Option<Cow<'static, str>>,
    /// What to do about it.
    pub remedy: Option<Cow<'static, str>>,
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

    fn info(name: &'static str, need: Need, found: impl Into<String>) -> Self {
        Self::new(name, need, State::Info, found)
    }

    fn means(mut self, meaning: impl Into<Cow<'static, str>>) -> Self {
        self.meaning = Some(meaning.into());
        self
    }

    /// What it means, and what to do.
    fn but(
        mut self,
        meaning: impl Into<Cow<'static, str>>,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Self {
        self.remedy = Some(remedy.into());
        self.means(meaning)
    }
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
    let processes = processes::running();
    let mut checks = vec![
        kernel::version(),
        kernel::btf(),
        kernel::bpf(),
        kernel::links(),
    ];
    checks.extend(kernel::uprobes());
    checks.extend([
        kernel::lockdown(),
        kernel::sysctls(),
        kernel::memory_files(),
    ]);
    checks.extend(rights::capabilities());
    checks.extend([
        rights::ptrace_scope(),
        confinement::user_namespace(),
        confinement::pid_namespace(),
        confinement::process_folder(),
        confinement::system_calls(),
        confinement::security_module(),
        gpu::architecture(),
        gpu::driver(),
        processes::installed(),
        processes::check(&processes),
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
