//! What the bench and the process that it measures say to each other: one line of JSON each way.

use serde::{Deserialize, Serialize};

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Direction {
    /// Host to device.
    HtoD,
    /// Device to host.
    DtoH,
}

impl Direction {
    /// The field's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::HtoD => "HtoD",
            Self::DtoH => "DtoH",
        }
    }
}

/// The host's side of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// Pageable, the same buffer in every copy.
    Reused,
    /// Pageable, a new mapping for every copy: filled just before (HtoD), or never touched (DtoH).
    Fresh,
    /// Allocated by `cuMemHostAlloc`, the same buffer in every copy.
    Pinned,
}

impl Memory {
    /// As the report names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reused => "reused",
            Self::Fresh => "fresh",
            Self::Pinned => "pinned",
        }
    }
}

/// Copies that are made to check those of one kind, by the last of them. Short ones are staged only where they come in a row.
pub fn copies_to_check(direction: Direction, memory: Memory, bytes: u64) -> usize {
    let is_short = cmt_copy::is_paced(direction == Direction::DtoH, bytes);
    match is_short && memory == Memory::Reused {
        true => 8,
        false => 1,
    }
}

/// What is asked of the process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Allocate for copies of at most so many bytes.
    Allocate {
        /// A multiple of 8.
        bytes: usize,
    },
    /// Time copies of one kind.
    Measure(Cell),
    /// Time a few copies of one kind right now, after so many that are not counted; they are not checked.
    Time(Cell, usize),
    /// Keep the thread that copies on the CPU where it runs now.
    Bind,
}

/// One kind of copy, and how often to make it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// Which way.
    pub direction: Direction,
    /// The host's side.
    pub memory: Memory,
    /// Length of each copy.
    pub bytes: usize,
    /// Copies that are made whatever they take.
    pub least: usize,
    /// Copies that are enough.
    pub most: usize,
    /// Between these two: no new copy once this has passed, preparation counted.
    pub budget_ms: u64,
}

/// What the process answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// It has a context.
    Ready(Device),
    /// Memory is there.
    Allocated,
    /// The copies were made.
    Measured(Batch),
    /// They were made; processor time was not taken.
    Timed(Batch),
    /// The thread stays where it is, if the kernel allows it.
    Bound,
    /// It could not do it.
    Failed(String),
}

/// The device as the driver describes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// As in `0000:0B:00.0`.
    pub pci_bus_id: String,
    /// CUDA version of the driver's interface, 1000 for 1.0.
    pub cuda_version: i32,
    /// Memory of the device that nobody uses.
    pub free_bytes: u64,
    /// Median time of `cuCtxSynchronize` with nothing to wait for.
    pub idle_synchronize_ns: u64,
}

/// Timed copies of one kind.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Batch {
    /// Until the call returned.
    pub call_ns: Vec<u64>,
    /// Until the device was idle.
    pub idle_ns: Vec<u64>,
    /// Processor time of the whole process for these copies, of all its threads, until they slept again.
    pub cpu_ns: u64,
    /// First byte that differed in the copy that was checked; none if all were right.
    pub wrong_at: Option<usize>,
}
