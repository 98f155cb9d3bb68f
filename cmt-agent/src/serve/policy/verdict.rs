//! What came of an attach: judged by the copies before it and after it.
//!
//! Pure judgement; acting on it is the steward's business.

use std::collections::BTreeSet;

use cmt_common::control::Plan;

use crate::compare::{self, Comparison, StagedBytes, Window};
use crate::trace::Snapshot;
use crate::watch;

/// Copies that fail in another way than they did before: those of a greater share, or with a code that was not seen. Empty where
/// there are none.
pub fn failing(before: &Snapshot, after: &Snapshot) -> Vec<String> {
    let known = codes(before);
    let new = codes(after)
        .into_iter()
        .filter(|code| !known.contains(code));
    let functions = watch::failing(before, after).into_iter();
    functions
        .map(str::to_owned)
        .chain(new.map(|code| format!("error {code}")))
        .collect()
}

fn codes(snapshot: &Snapshot) -> BTreeSet<u64> {
    let failed = snapshot.rows.values().filter(|stat| stat.errors > 0);
    failed.map(|stat| stat.last_error).collect()
}

/// Seconds that the copies of every minute before would have taken less at the rates of after, or why that is no success.
pub fn gained(
    before: &Snapshot,
    after: &Snapshot,
    plan: &Plan,
    staged: Option<&StagedBytes>,
    least: f64,
) -> Result<f64, String> {
    let windows = Comparison::new(&Window::new(before), &Window::new(after));
    let comparison = windows.judged_by(plan, staged);
    if let Some(slower) = watch::slower(&comparison).first() {
        let direction = if slower.dtoh { "DtoH" } else { "HtoD" };
        return Err(format!(
            "{direction} {} is slower ({:.2}x)",
            compare::bytes(slower.class_bytes),
            slower.ratio
        ));
    }
    let minutes = before.duration.as_secs_f64() / 60.0;
    let gained = comparison.saved_ns() / 1e9 / minutes.max(1e-9);
    match gained < least {
        true => Err(format!(
            "it gains {gained:.2} s of every minute, less than {least}"
        )),
        false => Ok(gained),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cmt_common::api::Direction;
    use cmt_common::event::CopyKey;
    use cmt_common::histogram::size_class_of;

    use super::*;
    use crate::histogram::Stat;

    const MIB: u64 = 1 << 20;

    /// A minute of 4 MiB uploads that take `ms` each, and some that fail with a code.
    fn minute(calls: u64, ms: u64, failed: Option<(u64, u64)>) -> Snapshot {
        let mut stat = Stat::default();
        for _ in 0..calls {
            stat.record(4 * MIB, ms * 1_000_000);
        }
        if let Some((errors, code)) = failed {
            (stat.errors, stat.last_error) = (errors, code);
            stat.calls += errors;
        }
        let key = CopyKey {
            pid: 1,
            function: 0,
            direction: Direction::HtoD as u8,
            memory: 0,
            size_class: size_class_of(4 * MIB),
            backing: 0,
            _pad: [0; 6],
        };
        Snapshot {
            rows: [(key, stat)].into(),
            duration: Duration::from_secs(60),
            ..Snapshot::empty()
        }
    }

    #[test]
    fn a_gain_is_what_copies_took_less() {
        let plan = cmt_copy::plan::estimate(8);
        let judge = |before, after, least| gained(&before, &after, &plan, None, least);
        // Each of a hundred would be 3 ms shorter, however many there are now.
        let gain = judge(minute(100, 5, None), minute(200, 2, None), 0.2);
        assert!(
            gain.as_ref().is_ok_and(|s| (s - 0.3).abs() < 1e-6),
            "{gain:?}"
        );
        let little = judge(minute(100, 5, None), minute(200, 2, None), 0.4);
        assert!(
            little.as_ref().is_err_and(|why| why.contains("0.30 s")),
            "{little:?}"
        );
        let slower = judge(minute(100, 5, None), minute(100, 6, None), 0.0);
        assert!(
            slower.as_ref().is_err_and(|why| why.contains("HtoD 4 MiB")),
            "{slower:?}"
        );
        // Nothing to compare: nothing gained, and nothing lost.
        assert_eq!(judge(minute(100, 5, None), Snapshot::empty(), 0.0), Ok(0.0));
    }

    #[test]
    fn failures_are_new_by_share_or_by_code() {
        let (fine, some) = (minute(100, 1, None), minute(90, 1, Some((10, 700))));
        assert!(failing(&fine, &fine).is_empty());
        assert!(failing(&some, &some).is_empty());
        assert_eq!(failing(&fine, &some), ["cuMemcpyHtoD_v2", "error 700"]);
        assert_eq!(
            failing(&some, &minute(90, 1, Some((10, 719)))),
            ["error 719"]
        );
        assert_eq!(
            failing(&some, &minute(50, 1, Some((50, 700)))),
            ["cuMemcpyHtoD_v2"]
        );
    }
}
