//! The API table: the one list of the CUDA functions that cmt knows.
//!
//! The probes, the hooks, the reports and the tests read it; nothing else lists function names. Argument positions are
//! those of the System V x86-64 calling convention: 0 to 5 in registers, 6 and up on the stack.
//! Source: `cuda.h` and `cuda_runtime_api.h` of CUDA 12.1 to 13.5.

mod copy;
mod driver;
mod memory;
mod sync;

pub use copy::{
    COPY_FNS, CopyFn, DirectionFrom, Flavour, HOOKED, OBSOLETE_COPY_FNS, ON_DEVICE, Shape,
};
pub use driver::{DRIVER_FNS, DriverFn};
pub use memory::{ALLOC_FNS, AllocEffect, AllocFn, Backing, MemoryKind};
pub use sync::{SYNC_FNS, SyncFn, SyncScope};

/// The library that exports a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// `libcudart`, the runtime API.
    Runtime,
    /// `libcuda`, the driver API.
    Driver,
}

/// The way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Direction {
    /// Host to host (`cudaMemcpyHostToHost` = 0).
    HtoH = 0,
    /// Host to device (1).
    HtoD = 1,
    /// Device to host (2).
    DtoH = 2,
    /// Device to device (3).
    DtoD = 3,
    /// The addresses decide (`cudaMemcpyDefault` = 4) and nothing is known of them.
    Unknown = 4,
}

impl Direction {
    /// The direction with the discriminant `raw`; [`Direction::Unknown`] for any other number.
    pub const fn from_raw(raw: u8) -> Self {
        match raw {
            0 => Self::HtoH,
            1 => Self::HtoD,
            2 => Self::DtoH,
            3 => Self::DtoD,
            _ => Self::Unknown,
        }
    }

    /// The field's name for it, as reports print it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HtoH => "HtoH",
            Self::HtoD => "HtoD",
            Self::DtoH => "DtoH",
            Self::DtoD => "DtoD",
            Self::Unknown => "unknown",
        }
    }
}
