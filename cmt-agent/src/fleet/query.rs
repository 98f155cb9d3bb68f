//! PromQL for the metrics of `cmt serve`, and the time that a question is about.

use super::prometheus::Labels;

/// How long a sample stands for its series, as Prometheus has it by default: a node that was not scraped for longer is gone.
pub const LOOKBACK_S: f64 = 300.0;
/// Longer ranges are searched for restarts at this many moments.
const MOMENTS: f64 = 240.0;
/// Up to this length every sample is looked at.
const ALL_SAMPLES_S: f64 = 7200.0;

/// From so many bytes on, names are written without what they have in common: VictoriaMetrics takes questions of 16 KiB at
/// most, and Prometheus looks plain names up fastest.
const LONG: usize = 2000;

/// From when to when, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// Beginning.
    pub start_s: f64,
    /// End.
    pub end_s: f64,
}

impl Window {
    /// Its length.
    pub fn seconds(&self) -> f64 {
        ((self.end_s - self.start_s) * 1e3).round().max(1.0) / 1e3
    }

    /// Its length as PromQL writes it: whole, in seconds or else milliseconds.
    pub fn length(&self) -> String {
        length(self.seconds())
    }

    /// `[…]` over the range and the scrapes before it that say how it began: all samples.
    pub fn samples(&self) -> String {
        format!("[{}]", length(self.seconds() + LOOKBACK_S))
    }

    /// The same, in a long range at some moments.
    pub fn moments(&self) -> String {
        let seconds = self.seconds();
        match seconds <= ALL_SAMPLES_S {
            true => self.samples(),
            false => format!(
                "[{}:{}s]",
                length(seconds + LOOKBACK_S),
                (seconds / MOMENTS).round()
            ),
        }
    }
}

fn length(seconds: f64) -> String {
    match (seconds * 1e3).round() as u64 {
        ms if ms.is_multiple_of(1000) => format!("{}s", ms / 1000),
        ms => format!("{ms}ms"),
    }
}

/// `name{matchers}`; a name with anything but word characters is an expression of names.
pub fn select(name: &str, matchers: &[&str]) -> String {
    let is_plain = name
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || "_:".contains(c));
    let expression = format!("__name__=~\"{name}\"");
    let mut all: Vec<&str> = Vec::new();
    if !is_plain {
        all.push(&expression);
    }
    all.extend(matchers.iter().filter(|matcher| !matcher.is_empty()));
    format!("{}{{{}}}", if is_plain { name } else { "" }, all.join(","))
}

/// A matcher for these values of a label, or with `!~` for all others; empty where that says nothing.
pub fn any_of<'a>(label: &str, operator: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    let [before, after] = match names.iter().map(|name| name.len()).sum::<usize>() > LONG {
        true => shared(&names),
        false => [""; 2],
    };
    let own: Vec<String> = names
        .iter()
        .map(|name| quoted(&name[before.len()..name.len() - after.len()]))
        .collect();
    match (names.is_empty(), own.join("|")) {
        (true, _) => String::new(),
        (false, own) if before.len() + after.len() == 0 => format!("{label}{operator}\"{own}\""),
        (false, own) => {
            let [before, after] = [before, after].map(quoted);
            format!("{label}{operator}\"{before}({own}){after}\"")
        }
    }
}

/// What all names begin with, and what the rest of all of them ends with.
fn shared<'a>(names: &[&'a str]) -> [&'a str; 2] {
    let first = names.first().copied().unwrap_or_default();
    let before = first
        .char_indices()
        .rev()
        .map(|(at, _)| &first[..at])
        .find(|part| names.iter().all(|name| name.starts_with(part)))
        .unwrap_or_default();
    let rest = |name: &'a str| &name[before.len()..];
    let after = rest(first)
        .char_indices()
        .map(|(at, _)| &rest(first)[at..])
        .find(|part| names.iter().all(|name| rest(name).ends_with(part)))
        .unwrap_or_default();
    [before, after]
}

/// A text as it stands for itself in a regular expression within a string of PromQL.
fn quoted(text: &str) -> String {
    let mut safe = String::new();
    for c in text.chars() {
        match c {
            '"' | '\n' => safe.push('.'),
            _ if c.is_alphanumeric() || "_-:/% ".contains(c) => safe.push(c),
            // A backslash for the regular expression takes two in a string.
            '\\' => safe.push_str("\\\\\\\\"),
            _ => {
                safe.push_str("\\\\");
                safe.push(c);
            }
        }
    }
    safe
}

/// The values of `by` in a sample's labels, empty where it has none.
pub fn values(labels: &Labels, by: &[&str]) -> Vec<String> {
    by.iter()
        .map(|label| labels.get(*label).cloned().unwrap_or_default())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_are_quoted() {
        assert_eq!(
            select("cmt_x_total", &["", "a=\"b\""]),
            "cmt_x_total{a=\"b\"}"
        );
        assert_eq!(select("cmt_(a|b)", &[]), "{__name__=~\"cmt_(a|b)\"}");
        assert_eq!(
            any_of("instance", "!~", ["10.0.0.1:9469", "a-b"]),
            r#"instance!~"10\\.0\\.0\\.1:9469|a-b""#
        );
        assert_eq!(any_of("instance", "=~", []), "");
    }

    #[test]
    fn many_names_are_written_without_what_they_share() {
        let names: Vec<String> = (100..500).map(|at| format!("node.{at}:9469")).collect();
        let matcher = any_of("instance", "=~", names.iter().map(String::as_str));
        assert!(
            matcher.starts_with(r#"instance=~"node\\.(100|101|"#),
            "{matcher}"
        );
        assert!(matcher.ends_with(r#"|498|499):9469""#), "{matcher}");
        for (names, parts) in [
            (["aa", "aaa"], ["a", "a"]),
            (["ä-1", "ö-1"], ["", "-1"]),
            (["a", "b"], ["", ""]),
        ] {
            assert_eq!(shared(&names), parts);
        }
    }

    #[test]
    fn long_ranges_are_searched_at_some_moments() {
        let window = |end_s| Window {
            start_s: 0.0,
            end_s,
        };
        assert_eq!(window(3600.0).moments(), "[3900s]");
        assert_eq!(window(9.5).length(), "9500ms");
        assert_eq!(window(86400.0).moments(), "[86700s:360s]");
    }
}
