//! What `cmt attach` makes of the two windows: classes that became slower, copies that began to fail.
//!
//! Pure judgement; acting on it is the command's business.

use std::collections::BTreeSet;

use cmt_common::api::{COPY_FNS, Direction};

use crate::compare::Comparison;
use crate::trace::Snapshot;

/// A class is only judged by this many calls on either side.
const ENOUGH_CALLS: u64 = 20;
/// Slower than this share of the rate before is no longer noise.
const NOISE: f64 = 0.95;

/// A class of copies that the new copier made slower.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slower {
    /// True for DtoH, false for HtoD.
    pub dtoh: bool,
    /// Smallest size of the class, in bytes.
    pub class_bytes: u64,
    /// Rate after by rate before.
    pub ratio: f64,
}

/// Classes that were slower in the second window than in the first.
pub fn slower(comparison: &Comparison) -> Vec<Slower> {
    comparison
        .rows()
        .filter(|row| row.staged && row.calls_before.min(row.calls_after) >= ENOUGH_CALLS)
        .filter_map(|row| {
            let dtoh = match row.direction {
                direction if direction == Direction::HtoD.name() => false,
                direction if direction == Direction::DtoH.name() => true,
                _ => return None,
            };
            let ratio = row.speedup.filter(|&ratio| ratio < NOISE)?;
            Some(Slower {
                dtoh,
                class_bytes: row.size_class_bytes,
                ratio,
            })
        })
        .collect()
}

/// Functions whose calls failed in the second window, though they were called without a failure in the first.
pub fn failing(before: &Snapshot, after: &Snapshot) -> Vec<&'static str> {
    let functions = |snapshot: &Snapshot, failed: bool| -> BTreeSet<u16> {
        snapshot
            .rows
            .iter()
            .filter(|(_, stat)| {
                if failed {
                    stat.errors > 0
                } else {
                    stat.calls > 0
                }
            })
            .map(|(key, _)| key.function)
            .collect()
    };
    let called = functions(before, false);
    let failed_before = functions(before, true);
    functions(after, true)
        .into_iter()
        .filter(|function| called.contains(function) && !failed_before.contains(function))
        .filter_map(|function| COPY_FNS.get(usize::from(function)))
        .map(|function| function.name)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cmt_common::event::CopyKey;
    use cmt_common::histogram::size_class_of;

    use crate::compare::Window;
    use crate::histogram::Stat;

    fn snapshot(calls: u64, ns: u64, errors: u64) -> Snapshot {
        let mut stat = Stat::default();
        for _ in 0..calls {
            stat.record(1 << 20, ns);
        }
        stat.calls += errors;
        stat.errors = errors;
        let key = CopyKey {
            pid: 1,
            function: 0,
            direction: Direction::HtoD as u8,
            memory: 0,
            size_class: size_class_of(1 << 20),
            _pad: [0; 7],
        };
        let mut snapshot = Snapshot::empty();
        snapshot.rows.insert(key, stat);
        snapshot
    }

    fn judge(before: &Snapshot, after: &Snapshot) -> Vec<Slower> {
        slower(&Comparison::new(&Window::new(before), &Window::new(after)))
    }

    #[test]
    fn a_class_that_lost_is_named_and_noise_is_not() {
        let before = snapshot(30, 100_000, 0);
        let lost = judge(&before, &snapshot(30, 200_000, 0));
        assert_eq!(
            (lost.len(), lost[0].dtoh, lost[0].class_bytes),
            (1, false, 1 << 20)
        );
        assert!(judge(&before, &snapshot(30, 102_000, 0)).is_empty());
        assert!(
            judge(&before, &snapshot(3, 200_000, 0)).is_empty(),
            "too few calls"
        );
    }

    #[test]
    fn only_new_failures_count() {
        let (fine, failing_now) = (snapshot(5, 1000, 0), snapshot(5, 1000, 2));
        assert_eq!(failing(&fine, &failing_now), ["cuMemcpyHtoD_v2"]);
        assert!(failing(&failing_now, &failing_now).is_empty());
        assert!(failing(&Snapshot::empty(), &failing_now).is_empty());
    }
}
