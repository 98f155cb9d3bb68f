//! What staging was worth, by the processes' own counters.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use cmt_common::control::{Counters, PASS_REASON_NAMES, PASS_REASONS, SIZE_CLASSES};
use serde::Serialize;

use crate::trace::table::grouped;

const MIB: f64 = (1u64 << 20) as f64;

/// Counters of several processes, added up.
#[derive(Clone, Debug, Default)]
pub struct Copied {
    processes: u64,
    calls: [u64; 2],
    errors: u64,
    passed: [u64; PASS_REASONS],
    /// By direction and size class: bytes, and nanoseconds for all of them by stock and staged where they were compared.
    classes: Vec<Class>,
}

#[derive(Clone, Debug, Default)]
struct Class {
    dtoh: bool,
    class: usize,
    bytes: u64,
    /// Bytes of processes in which they were compared.
    compared_bytes: u64,
    stock_ns: f64,
    staged_ns: f64,
}

impl Copied {
    /// Adds those of one more process, which may write to them at any time.
    pub fn add(&mut self, counters: &Counters) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.processes += 1;
        for (sum, calls) in self.calls.iter_mut().zip(&counters.staged_calls) {
            *sum = sum.saturating_add(read(calls));
        }
        for errors in &counters.staged_errors {
            self.errors = self.errors.saturating_add(read(errors));
        }
        for (sum, passed) in self.passed.iter_mut().zip(&counters.passed) {
            *sum = sum.saturating_add(read(passed));
        }
        if self.classes.is_empty() {
            let all = [false, true].into_iter().flat_map(|dtoh| {
                (0..SIZE_CLASSES).map(move |class| Class {
                    dtoh,
                    class,
                    ..Class::default()
                })
            });
            self.classes = all.collect();
        }
        for (sum, class) in self
            .classes
            .iter_mut()
            .zip(counters.classes.iter().flatten())
        {
            let bytes = read(&class.bytes);
            sum.bytes = sum.bytes.saturating_add(bytes);
            let (stock, staged) = (
                read(&class.stock_ns_per_mib),
                read(&class.staged_ns_per_mib),
            );
            if stock > 0 && staged > 0 {
                sum.compared_bytes = sum.compared_bytes.saturating_add(bytes);
                sum.stock_ns += bytes as f64 / MIB * stock as f64;
                sum.staged_ns += bytes as f64 / MIB * staged as f64;
            }
        }
    }
}

/// What was measured when the plan was made: by direction and size class, nanoseconds for a MiB by stock and staged.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// `(dtoh, size class, stock, staged)`.
    pub classes: Vec<(bool, usize, f64, f64)>,
}

/// What a run has gained.
#[derive(Clone, Debug, Serialize)]
pub struct Gain {
    /// Processes that copied.
    processes: u64,
    staged: [Staged; 2],
    errors: u64,
    passed: Vec<Passed>,
    /// Seconds that staged copies would have taken more with stock; null where nothing was compared.
    saved_s: Option<f64>,
    /// Bytes that this figure is for: by comparison with stock's copies of this very run.
    compared_in_run_bytes: u64,
    /// And by what was measured when the plan was made.
    compared_by_profile_bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
struct Staged {
    direction: &'static str,
    calls: u64,
    bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
struct Passed {
    reason: &'static str,
    calls: u64,
}

impl Gain {
    /// Of `copied`, by the comparisons in it, and by `measured` where there are none.
    pub fn of(copied: &Copied, measured: &Measured) -> Self {
        let (mut saved_ns, mut in_run, mut by_profile) = (0.0, 0, 0);
        let mut bytes = [0u64; 2];
        for class in &copied.classes {
            let all = &mut bytes[usize::from(class.dtoh)];
            *all = all.saturating_add(class.bytes);
            saved_ns += class.stock_ns - class.staged_ns;
            in_run += class.compared_bytes;
            let rest = class.bytes - class.compared_bytes;
            let known = measured
                .classes
                .iter()
                .find(|it| (it.0, it.1) == (class.dtoh, class.class));
            if let Some(&(_, _, stock, staged)) = known.filter(|_| rest > 0) {
                by_profile += rest;
                saved_ns += rest as f64 / MIB * (stock - staged);
            }
        }
        let staged = |direction, at: usize| Staged {
            direction,
            calls: copied.calls[at],
            bytes: bytes[at],
        };
        Self {
            processes: copied.processes,
            staged: [staged("HtoD", 0), staged("DtoH", 1)],
            errors: copied.errors,
            passed: PASS_REASON_NAMES
                .iter()
                .zip(copied.passed)
                .filter(|&(_, calls)| calls > 0)
                .map(|(reason, calls)| Passed { reason, calls })
                .collect(),
            saved_s: (in_run + by_profile > 0).then_some(saved_ns / 1e9),
            compared_in_run_bytes: in_run,
            compared_by_profile_bytes: by_profile,
        }
    }
}

impl fmt::Display for Gain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.processes == 0 {
            return write!(f, "no process copied between host and GPU");
        }
        let processes = match self.processes {
            1 => "1 process".to_owned(),
            many => format!("{} processes", grouped(many)),
        };
        let calls = self.staged.iter().map(|staged| staged.calls).sum();
        let bytes: u64 = self.staged.iter().map(|staged| staged.bytes).sum();
        if calls == 0 {
            let passed: u64 = self.passed.iter().map(|passed| passed.calls).sum();
            return write!(
                f,
                "{processes}, none of {} copies staged: small, pinned, or not between host and GPU",
                grouped(passed)
            );
        }
        write!(
            f,
            "{processes}, {} copies of {:.1} GB staged, ",
            grouped(calls),
            bytes as f64 / 1e9
        )?;
        let compared = self.compared_in_run_bytes + self.compared_by_profile_bytes;
        match self.saved_s {
            None => write!(f, "none compared with the driver's own"),
            Some(saved) => {
                let (seconds, what) = match saved < 0.0 {
                    true => (-saved, "lost"),
                    false => (saved, "saved"),
                };
                write!(f, "about {seconds:.1} s {what}")?;
                match compared < bytes {
                    true => write!(f, " on {:.1} GB of them", compared as f64 / 1e9),
                    false => Ok(()),
                }
            }
        }
    }
}
