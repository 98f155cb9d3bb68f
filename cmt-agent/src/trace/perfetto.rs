//! Single copies as a file that <https://ui.perfetto.dev> opens: slices by process and thread.
//!
//! The format is the Trace Event Format in JSON, which the Perfetto UI imports: an array that needs no end, so what was
//! written before a crash opens, too.

use std::collections::HashSet;
use std::io::{self, Write};

use serde_json::json;

use super::events::Event;

/// Writes a trace bit by bit.
pub struct Perfetto<W> {
    to: W,
    named: HashSet<u32>,
}

impl<W: Write> Perfetto<W> {
    /// Begins a trace.
    pub fn new(mut to: W) -> io::Result<Self> {
        to.write_all(b"[\n")?;
        Ok(Self {
            to,
            named: HashSet::new(),
        })
    }

    /// Adds a copy; `comm` names a process that comes for the first time.
    pub fn add(&mut self, event: &Event, comm: impl FnOnce() -> String) -> io::Result<()> {
        if self.named.insert(event.pid) {
            let name = json!({
                "ph": "M", "name": "process_name", "pid": event.pid, "args": {"name": comm()},
            });
            writeln!(self.to, "{name},")?;
        }
        let slice = json!({
            "ph": "X",
            "cat": "copy",
            "name": format!("{} {}", event.function, event.direction),
            "pid": event.pid,
            "tid": event.tid,
            // Microseconds.
            "ts": event.at_s * 1e6,
            "dur": event.latency_ns as f64 / 1e3,
            "args": {
                "bytes": event.bytes,
                "memory": event.memory,
                "backing": event.backing,
                "GB/s": event.bytes as f64 / event.latency_ns.max(1) as f64,
                "result": event.result,
                "stream": event.stream,
            },
        });
        writeln!(self.to, "{slice},")
    }

    /// Ends the trace.
    pub fn finish(mut self) -> io::Result<()> {
        // The format allows no comma before the end: an event without meaning takes its place.
        let end = json!({"ph": "M", "name": "trace_end", "pid": 0, "args": {}});
        writeln!(self.to, "{end}\n]")?;
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn a_trace_is_json_and_names_each_process_once() {
        let event = |pid| Event {
            at_s: 12.5,
            pid,
            tid: pid + 1,
            function: "cudaMemcpy",
            direction: "HtoD",
            memory: "pageable",
            backing: "anonymous",
            bytes: 4096,
            latency_ns: 2048,
            result: 0,
            host: 0x7000,
            stream: 0,
        };
        let mut file = Vec::new();
        let mut trace = Perfetto::new(&mut file).expect("begin");
        for pid in [7, 8, 7] {
            trace
                .add(&event(pid), || format!("\"process\" {pid}"))
                .expect("add");
        }
        trace.finish().expect("end");
        let read: Vec<Value> = serde_json::from_slice(&file).expect("JSON");
        let named: Vec<_> = read
            .iter()
            .filter(|event| event["name"] == "process_name")
            .map(|event| event["args"]["name"].as_str())
            .collect();
        assert_eq!(named, [Some("\"process\" 7"), Some("\"process\" 8")]);
        let slices: Vec<_> = read.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(slices.len(), 3);
        assert_eq!(slices[0]["ts"], 12.5e6);
        assert_eq!(slices[0]["dur"], 2.048);
        assert_eq!(slices[0]["args"]["GB/s"], 2.0);
    }
}
