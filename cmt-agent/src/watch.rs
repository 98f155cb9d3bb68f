//! What `cmt attach` makes of the two windows: classes that became slower, copies that began to fail.
//!
//! Pure judgement; acting on it is the command's business.

use std::collections::BTreeMap;

use cmt_common::api::{COPY_FNS, Direction};

use crate::compare::Comparison;
use crate::trace::Snapshot;

/// A class is only judged by this many calls on either side.
const ENOUGH_CALLS: u64 = 20;
/// Where some copies failed before, so many must fail to be more.
const ENOUGH_ERRORS: u64 = 10;
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
        .filter(|row| row.may_lose && row.calls_before.min(row.calls_after) >= ENOUGH_CALLS)
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

/// Calls of one function, and how many of them failed.
#[derive(Clone, Copy, Default)]
struct Calls {
    all: u64,
    failed: u64,
}

fn by_function(snapshot: &Snapshot) -> BTreeMap<u16, Calls> {
    let mut calls = BTreeMap::<u16, Calls>::new();
    for (key, stat) in &snapshot.rows {
        let calls = calls.entry(key.function).or_default();
        calls.all += stat.calls;
        calls.failed += stat.errors;
    }
    calls
}

/// How many copies failed in both windows; `None` where none did.
pub fn errors(before: &Snapshot, after: &Snapshot) -> Option<String> {
    let [before, after] = [before, after].map(|snapshot| {
        let calls = by_function(snapshot);
        let sum = |what: fn(&Calls) -> u64| calls.values().map(what).sum::<u64>();
        (sum(|calls| calls.failed), sum(|calls| calls.all))
    });
    (before.0 + after.0 > 0).then(|| {
        format!(
            "copies that returned an error: {} of {} before, {} of {} after",
            before.0, before.1, after.0, after.1
        )
    })
}

/// Functions of which a greater share of calls failed in the second window: more than twice as many as in the first, or any
/// where none did or where nothing was seen in it.
pub fn failing(before: &Snapshot, after: &Snapshot) -> Vec<&'static str> {
    let before = by_function(before);
    by_function(after)
        .into_iter()
        .filter(|(function, after)| {
            let before = before.get(function).copied().unwrap_or_default();
            match before.failed {
                0 => after.failed > 0,
                _ => {
                    let share = |calls: Calls| calls.failed as f64 / calls.all.max(1) as f64;
                    after.failed >= ENOUGH_ERRORS && share(*after) > 2.0 * share(before)
                }
            }
        })
        .filter_map(|(function, _)| COPY_FNS.get(usize::from(function)))
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
            backing: 0,
            _pad: [0; 6],
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
        assert_eq!(
            failing(&Snapshot::empty(), &failing_now),
            ["cuMemcpyHtoD_v2"]
        );
        let (seldom, often) = (snapshot(90, 1000, 10), snapshot(60, 1000, 40));
        assert_eq!(failing(&seldom, &often), ["cuMemcpyHtoD_v2"]);
        assert!(failing(&often, &seldom).is_empty());
        assert!(
            failing(&seldom, &snapshot(30, 1000, 9)).is_empty(),
            "too few"
        );
        let line = errors(&seldom, &often).expect("there are some");
        assert!(
            line.ends_with("10 of 100 before, 40 of 100 after"),
            "{line}"
        );
        assert_eq!(errors(&fine, &fine), None);
    }
}
