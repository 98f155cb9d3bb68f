//! Durations as the command line writes them: `500ms`, `10s`, `1.5m`, `1h`; a bare number is seconds.

use std::time::Duration;

/// Parses a duration; the error is a sentence for the user.
pub fn parse(text: &str) -> Result<Duration, String> {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let seconds = match &text[number.len()..] {
        "ms" => 0.001,
        "s" | "" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        unit => return Err(format!("unknown unit {unit:?}; use ms, s, m or h")),
    };
    number
        .parse::<f64>()
        .ok()
        .and_then(|number| Duration::try_from_secs_f64(number * seconds).ok())
        .ok_or_else(|| format!("{text:?} is no duration; write 500ms, 10s or 1m"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_understood_and_nonsense_is_refused() {
        for (text, ms) in [
            ("500ms", 500),
            ("10s", 10_000),
            ("2", 2000),
            ("1.5m", 90_000),
            ("1h", 3_600_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "s", "-1s", "10x", "1 s s", "infs", "NaN"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
