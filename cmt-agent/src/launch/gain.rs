//! What staging was worth, by the processes' own counters.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use cmt_common::control::{Counters, PASS_REASON_NAMES, PASS_REASONS, SIZE_CLASSES, size_class};
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
    classes: Vec<Sum>,
}

#[derive(Clone, Debug, Default)]
struct Sum {
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
                (0..SIZE_CLASSES).map(move |class| Sum {
                    dtoh,
                    class,
                    ..Sum::default()
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

/// What was measured on this machine when the plan was made.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Each size class of either direction once at most.
    pub classes: Vec<Class>,
}

impl Measured {
    /// Of a size class; those above the largest that was measured are taken to be like that.
    fn of(&self, dtoh: bool, class: usize) -> Option<&Class> {
        let same_way = self.classes.iter().filter(|it| it.dtoh == dtoh);
        let largest = same_way.clone().max_by_key(|it| it.bytes);
        same_way
            .clone()
            .find(|it| size_class(it.bytes) == class)
            .or_else(|| largest.filter(|it| size_class(it.bytes) < class))
    }
}

/// Of one size class.
#[derive(Clone, Debug)]
pub struct Class {
    /// To the host.
    pub dtoh: bool,
    /// A size of the class.
    pub bytes: u64,
    /// The driver's pageable copies, in 1e9 bytes a second.
    pub stock_gbps: f64,
    /// The same by the plan.
    pub tuned_gbps: f64,
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
        let (mut saved_ns, mut in_run, mut by_profile) = (0.0, 0u64, 0u64);
        let mut bytes = [0u64; 2];
        for class in &copied.classes {
            let all = &mut bytes[usize::from(class.dtoh)];
            *all = all.saturating_add(class.bytes);
            saved_ns += class.stock_ns - class.staged_ns;
            in_run = class.compared_bytes.saturating_add(in_run);
            let rest = class.bytes.saturating_sub(class.compared_bytes);
            // What short copies in a row gain depends on how they come; the profile's come in one way.
            let is_paced = cmt_copy::is_paced(class.dtoh, 1 << class.class);
            let known = measured
                .of(class.dtoh, class.class)
                .filter(|it| rest > 0 && it.stock_gbps > 0.0 && it.tuned_gbps > 0.0 && !is_paced);
            if let Some(known) = known {
                by_profile = rest.saturating_add(by_profile);
                saved_ns += rest as f64 * (1.0 / known.stock_gbps - 1.0 / known.tuned_gbps);
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
            saved_s: (in_run > 0 || by_profile > 0).then_some(saved_ns / 1e9),
            compared_in_run_bytes: in_run,
            compared_by_profile_bytes: by_profile,
        }
    }
}

impl fmt::Display for Gain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.processes == 0 {
            return write!(
                f,
                "no process was tuned: none copied between host and GPU, or none could be"
            );
        }
        let processes = match self.processes {
            1 => "1 process".to_owned(),
            many => format!("{} processes", grouped(many)),
        };
        let sum = |of: fn(&Staged) -> u64| self.staged.iter().map(of).fold(0, u64::saturating_add);
        let (calls, bytes) = (sum(|staged| staged.calls), sum(|staged| staged.bytes));
        if calls == 0 {
            let reasons = self.passed.iter();
            let reasons: Vec<String> = reasons
                .map(|passed| format!("{} {}", grouped(passed.calls), passed.reason))
                .collect();
            return write!(f, "{processes}, no copy staged: {}", reasons.join(", "));
        }
        write!(
            f,
            "{processes}, {} copies of {} staged, ",
            grouped(calls),
            amount(bytes)
        )?;
        let compared = self
            .compared_in_run_bytes
            .saturating_add(self.compared_by_profile_bytes);
        match self.saved_s {
            None => write!(f, "none compared with the driver's own"),
            Some(saved) => {
                let (seconds, what) = match saved < 0.0 {
                    true => (-saved, "lost"),
                    false => (saved, "saved"),
                };
                match seconds < 1.0 {
                    true => write!(f, "about {:.0} ms {what}", seconds * 1e3)?,
                    false => write!(f, "about {seconds:.1} s {what}")?,
                }
                match compared < bytes {
                    true => write!(f, " on {} of them", amount(compared)),
                    false => Ok(()),
                }
            }
        }
    }
}

fn amount(bytes: u64) -> String {
    match bytes {
        1_000_000_000.. => format!("{:.1} GB", bytes as f64 / 1e9),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use cmt_common::control::CONTROL_BYTES;

    use super::*;
    use crate::injector::ControlMap;

    /// Copied 1 GiB up and 2 GiB down in copies of 64 MiB; the way up was compared in the run.
    fn copied() -> Copied {
        let block = ControlMap::copy_of(&[0; CONTROL_BYTES]);
        let counters = &block.counters;
        for (direction, (bytes, times)) in [(1u64 << 30, [100_000, 20_000]), (2 << 30, [0, 0])]
            .into_iter()
            .enumerate()
        {
            let class = &counters.classes[direction][26];
            counters.staged_calls[direction].store(bytes >> 26, Ordering::Relaxed);
            class.bytes.store(bytes, Ordering::Relaxed);
            class.stock_ns_per_mib.store(times[0], Ordering::Relaxed);
            class.staged_ns_per_mib.store(times[1], Ordering::Relaxed);
        }
        let mut copied = Copied::default();
        copied.add(counters);
        copied
    }

    #[test]
    fn what_the_run_has_compared_counts_first_and_what_nobody_has_measured_is_not_counted() {
        let alone = Gain::of(&copied(), &Measured::default());
        // 1024 MiB, 80 µs each.
        assert!((alone.saved_s.expect("compared") - 0.08192).abs() < 1e-9);
        assert_eq!(
            (alone.compared_in_run_bytes, alone.compared_by_profile_bytes),
            (1 << 30, 0)
        );
        assert_eq!(
            alone.to_string(),
            "1 process, 48 copies of 3.2 GB staged, about 82 ms saved on 1.1 GB of them"
        );
        let class = |dtoh, bytes| Class {
            dtoh,
            bytes,
            stock_gbps: 10.0,
            tuned_gbps: 40.0,
        };
        let measured = Measured {
            classes: vec![
                class(false, 1 << 26),
                class(true, 1 << 20),
                class(true, (1 << 26) + 5),
            ],
        };
        let both = Gain::of(&copied(), &measured);
        let more = (2u64 << 30) as f64 * (0.1 - 0.025) / 1e9;
        assert!((both.saved_s.expect("compared") - 0.08192 - more).abs() < 1e-9);
        assert_eq!(
            both.to_string(),
            "1 process, 48 copies of 3.2 GB staged, about 243 ms saved"
        );
    }

    #[test]
    fn what_a_hostile_process_counts_is_no_more_than_nonsense() {
        let block = ControlMap::copy_of(&[0xFF; CONTROL_BYTES]);
        let mut copied = Copied::default();
        copied.add(&block.counters);
        copied.add(&block.counters);
        Gain::of(&copied, &Measured::default()).to_string();
    }

    #[test]
    fn larger_copies_than_were_measured_count_as_the_largest_and_smaller_ones_do_not() {
        let class = |bytes, stock_gbps| Class {
            dtoh: true,
            bytes,
            stock_gbps,
            tuned_gbps: 40.0,
        };
        let measured = Measured {
            classes: vec![class(1 << 24, 20.0), class(1 << 25, 10.0)],
        };
        let rate = |class| measured.of(true, class).map(|it| it.stock_gbps);
        assert_eq!(
            [23, 24, 25, 26, 40].map(rate),
            [None, Some(20.0), Some(10.0), Some(10.0), Some(10.0)]
        );
        assert!(measured.of(false, 25).is_none());
    }

    #[test]
    fn a_loss_is_called_one_and_nothing_is_said_of_what_was_not_compared() {
        let class = Class {
            dtoh: true,
            bytes: 1 << 26,
            stock_gbps: 10.0,
            tuned_gbps: 1.0,
        };
        let gain = Gain::of(
            &copied(),
            &Measured {
                classes: vec![class],
            },
        );
        assert!(gain.to_string().ends_with("about 1.9 s lost"), "{gain}");
        assert_eq!(
            Gain::of(&Copied::default(), &Measured::default()).to_string(),
            "no process was tuned: none copied between host and GPU, or none could be"
        );
    }
}
