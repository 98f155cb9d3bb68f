//! Moments and ranges as the command line writes them.

use std::time::Duration;

use jiff::Timestamp;

use crate::trace::duration;

/// A day has this many seconds.
pub const DAY_S: f64 = 86_400.0;

/// Parses a range: what durations are elsewhere, and days and weeks.
///
/// # Errors
/// A sentence.
pub fn range(text: &str) -> Result<Duration, String> {
    let day = Duration::from_secs(DAY_S as u64);
    let days = |number: &str, unit: u32| {
        number
            .parse::<f64>()
            .ok()
            .filter(|number| (0.0..1e5).contains(number))
            .map(|number| day.mul_f64(number * f64::from(unit)))
            .ok_or_else(|| format!("{text:?} is no range; write 30m, 1h, 7d or 2w"))
    };
    let range = match (text.strip_suffix('d'), text.strip_suffix('w')) {
        (Some(number), _) => days(number, 1)?,
        (_, Some(number)) => days(number, 7)?,
        _ => duration::parse(text)?,
    };
    match range.as_secs() {
        0 => Err("the shortest range is 1s".into()),
        _ => Ok(range),
    }
}

/// Parses a moment, in seconds since 1970: `2026-11-30T12:00:00Z`, such a number of seconds, `now` or `now-2h`.
///
/// # Errors
/// A sentence.
pub fn moment(text: &str) -> Result<f64, String> {
    let now_s = Timestamp::now().as_millisecond() as f64 / 1e3;
    if let Some(rest) = text.strip_prefix("now") {
        return match rest.strip_prefix('-') {
            Some(ago) => Ok(now_s - range(ago)?.as_secs_f64()),
            None if rest.is_empty() => Ok(now_s),
            None => Err(format!("{text:?} is no moment; write now or now-2h")),
        };
    }
    let seconds = text.parse::<f64>().ok().filter(|value| value.is_finite());
    seconds
        .or_else(|| {
            let moment = text.parse::<Timestamp>().ok()?;
            Some(moment.as_millisecond() as f64 / 1e3)
        })
        .ok_or_else(|| {
            format!(
                "{text:?} is no moment; write 2026-11-30T12:00:00Z, now-2h or seconds since 1970"
            )
        })
}

/// A moment as text, to the second.
pub fn shown(at_s: f64) -> String {
    Timestamp::from_second(at_s as i64).map_or_else(|_| at_s.to_string(), |at| at.to_string())
}

/// A length of time of three digits: `820us`, `34s`, `5.2m`, `3.1h`, `12d`.
pub fn length(seconds: f64) -> String {
    match seconds {
        _ if seconds < 99.5 => crate::trace::table::time((seconds * 1e9) as u64),
        _ if seconds < 5970.0 => short(seconds / 60.0, "m"),
        _ if seconds < 172_800.0 => short(seconds / 3600.0, "h"),
        _ => short(seconds / DAY_S, "d"),
    }
}

fn short(value: f64, unit: &str) -> String {
    match value {
        _ if value < 9.95 => format!("{value:.1}{unit}"),
        _ => format!("{value:.0}{unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_moments_are_understood_and_nonsense_is_refused() {
        assert_eq!(range("1h"), Ok(Duration::from_secs(3600)));
        assert_eq!(range("1.5d"), Ok(Duration::from_secs(129_600)));
        assert_eq!(range("2w"), Ok(Duration::from_secs(14 * 86_400)));
        assert_eq!(moment("1970-01-02T00:00:00Z"), Ok(DAY_S));
        assert_eq!(moment("1764500000"), Ok(1_764_500_000.0));
        let now = moment("now").expect("now");
        assert!((now - 7200.0 - moment("now-2h").expect("then")).abs() < 5.0);
        for text in ["", "d", "-1d", "0.5s", "NaNd", "1y"] {
            assert!(range(text).is_err(), "{text}");
        }
        for text in ["", "yesterday", "now+1h", "NaN", "2026-11-30"] {
            assert!(moment(text).is_err(), "{text}");
        }
    }

    #[test]
    fn lengths_are_short() {
        for (seconds, text) in [
            (0.5, "500ms"),
            (90.0, "90s"),
            (372.0, "6.2m"),
            (7200.0, "2.0h"),
            (864_000.0, "10d"),
        ] {
            assert_eq!(length(seconds), text);
        }
    }
}
