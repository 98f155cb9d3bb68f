//! A trace told piece by piece: the counts of one interval after the other, which add up to those of the whole.

use std::fmt::Write as _;

use jiff::Timestamp;
use serde::Serialize;

use super::report::Report;
use super::{Snapshot, table};

/// How intervals are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// One object a line: `cmt/trace/1` and the fields of [`Line`].
    Json,
    /// A line with the time, and the tables of a report.
    Text,
}

/// What a line of JSON holds beside the report.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    report: &'a Report,
    /// Counts from 1.
    interval: u64,
    /// The interval's end, RFC 3339, UTC.
    time: String,
}

/// Where the last interval ended.
#[derive(Debug)]
pub struct Intervals {
    form: Form,
    pair_ns: Option<u64>,
    last: Option<Snapshot>,
    number: u64,
}

impl Intervals {
    /// Begins with the trace.
    pub fn new(form: Form, pair_ns: Option<u64>) -> Self {
        Self {
            form,
            pair_ns,
            last: None,
            number: 0,
        }
    }

    /// The interval that ends with `whole`, as text of whole lines.
    ///
    /// # Errors
    /// None that is known: JSON can say all that a report holds.
    pub fn next(&mut self, whole: Snapshot) -> serde_json::Result<String> {
        let part = match &self.last {
            Some(last) => whole.since(last),
            None => whole.clone(),
        };
        self.last = Some(whole);
        self.number += 1;
        let report = Report::new(&part, self.pair_ns);
        let time = format!("{:.3}", Timestamp::now());
        match self.form {
            Form::Json => {
                let line = Line {
                    report: &report,
                    interval: self.number,
                    time,
                };
                Ok(serde_json::to_string(&line)? + "\n")
            }
            Form::Text => {
                let mut text = String::new();
                // Writing to a String cannot fail.
                let _ = write!(
                    text,
                    "{time}  interval {}, {:.1}s: {} copies",
                    self.number,
                    report.duration_s,
                    table::grouped(part.calls())
                );
                let _ = match report.lost {
                    0 => writeln!(text),
                    lost => writeln!(text, ", lost {}", table::grouped(lost)),
                };
                let classes = Report::new(&part.without_backing(), self.pair_ns);
                Ok(text + &table::tables(&classes) + "\n")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    use cmt_common::event::CopyKey;

    use crate::histogram::Stat;
    use crate::trace::Process;

    /// A trace of process 7 that has run for `ms` and has seen `calls` copies.
    fn whole(start: Instant, ms: u64, calls: u64) -> Snapshot {
        let mut stat = Stat::default();
        for call in 0..calls {
            stat.record(4096, 1000 + call);
        }
        let key = CopyKey {
            pid: 7,
            function: 0,
            direction: 1,
            memory: 0,
            size_class: 13,
            backing: 0,
            _pad: [0; 6],
        };
        let process = Process {
            comm: "python3".into(),
            named: true,
            ..Process::default()
        };
        let duration = Duration::from_millis(ms);
        let mut whole = Snapshot {
            at: start + duration,
            duration,
            probe_pairs: calls,
            ..Snapshot::empty()
        };
        whole.processes.insert(7, process);
        if calls > 0 {
            whole.rows.insert(key, stat);
        }
        whole
    }

    #[test]
    fn intervals_add_up_to_the_whole() {
        let start = Instant::now();
        let mut intervals = Intervals::new(Form::Json, Some(180));
        let states = [(1000, 10), (2000, 10), (3000, 45), (3200, 47)];
        let lines: Vec<serde_json::Value> = states
            .into_iter()
            .map(|(ms, calls)| {
                let line = intervals.next(whole(start, ms, calls)).unwrap();
                assert_eq!(line.find('\n'), Some(line.len() - 1));
                serde_json::from_str(&line).unwrap()
            })
            .collect();
        let mut calls = Vec::new();
        for (line, number) in lines.iter().zip(1..) {
            assert_eq!(line["schema"], "cmt/trace/1");
            assert_eq!(line["interval"], number);
            assert!(line["time"].as_str().unwrap().parse::<Timestamp>().is_ok());
            let copies = &line["processes"][0]["copies"];
            calls.push(copies[0]["calls"].as_u64().unwrap_or(0));
            assert_eq!(line["overhead"]["calls"], calls[calls.len() - 1]);
        }
        assert_eq!(calls, [10, 0, 35, 2]);
        assert_eq!(lines[3]["duration_s"], 0.2);
    }

    #[test]
    fn bytes_that_are_counted_after_their_call_are_not_lost() {
        let start = Instant::now();
        let mut intervals = Intervals::new(Form::Json, None);
        // A snapshot between the two.
        let mut early = whole(start, 1000, 10);
        for stat in early.rows.values_mut() {
            stat.bytes -= 4096;
        }
        let mut bytes = 0;
        for state in [early, whole(start, 2000, 10), whole(start, 3000, 10)] {
            let line = intervals.next(state).unwrap();
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            bytes += line["processes"][0]["copies"][0]["bytes"]
                .as_u64()
                .unwrap_or(0);
        }
        assert_eq!(bytes, 40960);
    }

    #[test]
    fn text_has_a_line_with_the_time() {
        let mut intervals = Intervals::new(Form::Text, None);
        let text = intervals.next(whole(Instant::now(), 1000, 1234)).unwrap();
        let first = text.lines().next().unwrap();
        assert!(
            first.ends_with("Z  interval 1, 1.0s: 1,234 copies"),
            "{first}"
        );
        assert!(text.contains("python3 (pid 7): 1,234 copies"), "{text}");
        assert!(text.lines().all(|line| line.len() <= 80));
    }
}
