//! Single copies as they were made: `--events`, one JSON line each.

use cmt_common::api::{Backing, COPY_FNS, Direction, MemoryKind};
use cmt_common::event::CopyEvent;
use serde::Serialize;

/// One copy in the names of a report.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Event {
    /// When it began: seconds on the machine's monotonic clock (CLOCK_MONOTONIC).
    pub at_s: f64,
    /// Process id.
    pub pid: u32,
    /// Thread id as the kernel counts.
    pub tid: u32,
    /// The outermost CUDA function that was called.
    pub function: &'static str,
    /// `HtoD`, `DtoH`, `DtoD`, `HtoH` or `unknown`.
    pub direction: &'static str,
    /// Kind of the host memory, as in the report.
    pub memory: &'static str,
    /// What pageable host memory is made of, as in the report.
    pub backing: &'static str,
    /// What it copied; of a failed call what it was to copy.
    pub bytes: u64,
    /// How long the call took.
    pub latency_ns: u64,
    /// What it returned: 0 is success.
    pub result: u32,
    /// Host address; 0 where no side is the host's.
    pub host: u64,
    /// The stream as it was given; 0 where the function takes none, or the default stream.
    pub stream: u64,
}

impl From<&CopyEvent> for Event {
    fn from(event: &CopyEvent) -> Self {
        let key = &event.key;
        Self {
            at_s: event.start_ns as f64 / 1e9,
            pid: key.pid,
            tid: event.tid,
            function: COPY_FNS
                .get(usize::from(key.function))
                .map_or("unknown", |function| function.name),
            direction: Direction::from_raw(key.direction).name(),
            memory: MemoryKind::from_raw(key.memory).name(),
            backing: Backing::from_raw(key.backing).name(),
            bytes: event.bytes,
            latency_ns: event.elapsed_ns,
            result: event.result,
            host: event.host,
            stream: event.stream,
        }
    }
}
