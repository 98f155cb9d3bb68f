//! Figures and names that fit a column whatever they are: the view never cuts a number, it counts in larger units.

use std::time::Duration;

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use crate::trace::table;

/// A number of calls in at most 5 columns: `0`, `0.4`, `9999`, `12.3k`, `18.4E`.
pub fn count(number: f64) -> String {
    const UNITS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    if number < 9999.5 {
        let few = number > 0.0 && number < 9.95 && number.fract() != 0.0;
        return match few {
            true if number < 0.05 => "<0.1".into(),
            true => format!("{number:.1}"),
            false => format!("{number:.0}"),
        };
    }
    let (mut scaled, mut unit) = (number, 0);
    while scaled >= 999.5 && unit + 1 < UNITS.len() {
        scaled /= 1000.0;
        unit += 1;
    }
    let digits = match scaled {
        _ if scaled < 9.995 => 2,
        _ if scaled < 99.95 => 1,
        _ => 0,
    };
    format!("{:.digits$}{}", scaled.min(9999.0), UNITS[unit])
}

/// A rate in GB/s in at most 5 columns; `-` where nothing moved.
pub fn gb_per_s(rate: f64) -> String {
    match rate {
        _ if rate <= 0.0 => "-".into(),
        _ if rate < 0.005 => "<0.01".into(),
        _ if rate < 9.995 => format!("{rate:.2}"),
        _ if rate < 99.95 => format!("{rate:.1}"),
        _ => count(rate.round()),
    }
}

/// A share in at most 6 columns; `-` for none.
pub fn percent(share: f64) -> String {
    match share * 100.0 {
        percent if percent <= 0.0 => "-".into(),
        percent if percent < 0.05 => "<0.1%".into(),
        percent if percent < 9.95 => format!("{percent:.1}%"),
        percent => format!("{}%", count(percent.round())),
    }
}

/// A latency in at most 7 columns.
pub fn latency(ns: u64) -> String {
    const HOUR_NS: u64 = 3_600_000_000_000;
    match ns / HOUR_NS {
        0..3 => table::time(ns),
        hours @ 3..100_000 => format!("{hours}h"),
        hours => format!("{}d", hours / 24),
    }
}

/// A length of time as `h:mm:ss`.
pub fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    format!(
        "{}:{:02}:{:02}",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

/// The beginning of `text` that fits `width` columns, ending in `…` where something is missing. A wide character that does
/// not fit goes as a whole.
pub fn clip(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut clipped = String::new();
    let mut used = 0;
    for character in text.chars() {
        let wide = character.width().unwrap_or(0);
        if used + wide + 1 > width {
            break;
        }
        clipped.push(character);
        used += wide;
    }
    if width > 0 {
        clipped.push('…');
    }
    clipped
}

/// `text` with blanks up to `width` columns, at its end or, for figures, before it.
pub fn pad(text: &str, width: usize, right: bool) -> String {
    let blanks = " ".repeat(width.saturating_sub(text.width()));
    match right {
        true => blanks + text,
        false => text.to_owned() + &blanks,
    }
}

/// As many of the parts as fit `width` columns whole, two blanks between them.
pub fn join(parts: &[String], width: usize) -> String {
    let mut text = String::new();
    for part in parts.iter().filter(|part| !part.is_empty()) {
        let gap = if text.is_empty() { "" } else { "  " };
        if text.width() + gap.len() + part.width() <= width {
            text += gap;
            text += part;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_fit_their_columns() {
        for (number, shown) in [
            (0.0, "0"),
            (0.01, "<0.1"),
            (0.4, "0.4"),
            (7.0, "7"),
            (9999.0, "9999"),
            (12_345.0, "12.3k"),
            (999_960.0, "1.00M"),
            (u64::MAX as f64, "18.4E"),
        ] {
            assert_eq!(count(number), shown);
        }
        assert_eq!(gb_per_s(0.0), "-");
        assert_eq!(gb_per_s(12.34), "12.3");
        assert_eq!(percent(0.034), "3.4%");
        assert_eq!(percent(2.13), "213%");
        assert_eq!(latency(1_234), "1.2us");
        assert_eq!(latency(4 * 3_600_000_000_000), "4h");
        assert_eq!(clock(Duration::from_secs(3723)), "1:02:03");
        let mut number = 1e-6;
        while number < 1e40 {
            for (text, most) in [
                (count(number), 5),
                (gb_per_s(number), 5),
                (percent(number), 6),
                (latency(number as u64), 7),
                (table::size(number.min(u64::MAX as f64)), 7),
            ] {
                assert!(text.len() <= most, "{number}: {text}");
            }
            number *= 1.37;
        }
    }

    #[test]
    fn wide_characters_are_cut_as_a_whole() {
        assert_eq!(clip("python3", 15), "python3");
        assert_eq!(clip("python3", 5), "pyth…");
        assert_eq!(clip("数据加载", 8), "数据加载");
        assert_eq!(clip("数据加载", 6), "数据…");
        assert_eq!(clip("数据加载", 1), "…");
        assert_eq!(clip("x", 0), "");
        assert_eq!(pad("数", 4, true), "  数");
        assert_eq!(pad("数", 4, false), "数  ");
        let parts = ["one".to_owned(), "three four".to_owned(), "two".to_owned()];
        assert_eq!(join(&parts, 8), "one  two");
    }
}
