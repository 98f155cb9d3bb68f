//! What the probes hand to the host: keys and values of the BPF maps, and the cookie that tells a probe what it is on.
//!
//! All structures are `repr(C)` without padding, since both sides read them as bytes.

use crate::api::{
    AllocEffect, AllocFn, COPY_FNS, CopyFn, DirectionFrom, Layer, MemoryKind, ON_DEVICE, Shape,
    SyncFn, SyncScope,
};
use crate::histogram::BUCKETS;

/// Key of one histogram: a process, a function and the class of its copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct CopyKey {
    /// Process id (tgid) as the host sees it.
    pub pid: u32,
    /// Position in [`COPY_FNS`].
    pub function: u16,
    /// [`crate::api::Direction`] as a number.
    pub direction: u8,
    /// [`MemoryKind`] of the host side as a number.
    pub memory: u8,
    /// See [`crate::histogram::size_class_of`].
    pub size_class: u8,
    /// [`crate::api::Backing`] of the host side as a number.
    pub backing: u8,
    /// Zero.
    pub _pad: [u8; 6],
}

impl CopyKey {
    /// All keys of process `pid`.
    pub const fn of_process(pid: u32) -> core::ops::RangeInclusive<Self> {
        let first = Self {
            pid,
            function: 0,
            direction: 0,
            memory: 0,
            size_class: 0,
            backing: 0,
            _pad: [0; 6],
        };
        let last = Self {
            pid,
            function: u16::MAX,
            direction: u8::MAX,
            memory: u8::MAX,
            size_class: u8::MAX,
            backing: u8::MAX,
            _pad: [u8::MAX; 6],
        };
        first..=last
    }
}

/// What is counted under one [`CopyKey`]. Times and the histogram cover successful calls only.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CopyStat {
    /// All calls, failed ones included.
    pub calls: u64,
    /// Calls that returned another code than 0.
    pub errors: u64,
    /// Bytes of successful calls.
    pub bytes: u64,
    /// Sum of the latencies.
    pub total_ns: u64,
    /// The longest latency.
    pub max_ns: u64,
    /// Calls behind which the same thread waited for the same stream, or for everything, with no other copy in between.
    pub waited: u64,
    /// Time in those waits: with `total_ns` it is what the caller feels.
    pub wait_ns: u64,
    /// From the beginning of those calls to the end of their waits, what the program did in between included.
    pub until_ns: u64,
    /// What the last failed call returned.
    pub last_error: u64,
    /// Latencies by [`crate::histogram::bucket_of`].
    pub buckets: [u64; BUCKETS],
}

/// Where the direction of a call stands, as it travels in a cookie.
pub const DIRECTION_ADDRESSES: u8 = 5;
/// The direction is a `cudaMemcpyKind` argument.
pub const DIRECTION_KIND: u8 = 6;

/// Shapes as they travel in a cookie.
pub const SHAPE_LINEAR: u8 = 0;
/// See [`Shape::Pitched`].
pub const SHAPE_PITCHED: u8 = 1;
/// See [`Shape::DriverStruct2D`].
pub const SHAPE_DRIVER_2D: u8 = 2;
/// See [`Shape::DriverStruct3D`].
pub const SHAPE_DRIVER_3D: u8 = 3;
/// See [`Shape::RuntimeStruct3D`].
pub const SHAPE_RUNTIME_3D: u8 = 4;
/// See [`Shape::RuntimePeer3D`].
pub const SHAPE_RUNTIME_PEER_3D: u8 = 5;
/// See [`Shape::Batch`].
pub const SHAPE_BATCH: u8 = 6;
/// See [`Shape::Batch3D`].
pub const SHAPE_BATCH_3D: u8 = 7;
/// See [`Shape::One3D`].
pub const SHAPE_ONE_3D: u8 = 8;

/// Copies of one batch that are looked at. A call with more is counted as one whose arguments could not be read.
pub const MOST_IN_BATCH: u64 = 1024;
/// The same for batches of 3D copies.
pub const MOST_IN_BATCH_3D: u64 = 128;

/// No such argument.
pub const NO_ARG: u8 = 15;

/// What a copy probe knows of its function: an entry of [`COPY_FNS`] in the 64 bits of a BPF cookie.
///
/// BPF programs read no table with strings in it; the host packs what they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyCookie(pub u64);

impl CopyCookie {
    /// The cookie of the function at position `index` of [`COPY_FNS`].
    pub const fn new(index: usize) -> Self {
        let function: CopyFn = COPY_FNS[index];
        let (direction, kind_arg) = match function.direction {
            DirectionFrom::Fixed(direction) => (direction as u8, NO_ARG),
            DirectionFrom::Kind(arg) => (DIRECTION_KIND, arg),
            DirectionFrom::Addresses => (DIRECTION_ADDRESSES, NO_ARG),
        };
        let (shape, dst, src, bytes, height) = match function.shape {
            Shape::Linear { dst, src, bytes } => (SHAPE_LINEAR, dst, src, bytes, NO_ARG),
            Shape::Pitched {
                dst,
                src,
                width,
                height,
            } => (SHAPE_PITCHED, dst, src, width, height),
            Shape::DriverStruct2D => (SHAPE_DRIVER_2D, NO_ARG, NO_ARG, NO_ARG, NO_ARG),
            Shape::DriverStruct3D => (SHAPE_DRIVER_3D, NO_ARG, NO_ARG, NO_ARG, NO_ARG),
            Shape::RuntimeStruct3D => (SHAPE_RUNTIME_3D, NO_ARG, NO_ARG, NO_ARG, NO_ARG),
            Shape::RuntimePeer3D => (SHAPE_RUNTIME_PEER_3D, NO_ARG, NO_ARG, NO_ARG, NO_ARG),
            Shape::Batch => (SHAPE_BATCH, NO_ARG, NO_ARG, NO_ARG, NO_ARG),
            Shape::Batch3D => (SHAPE_BATCH_3D, NO_ARG, NO_ARG, NO_ARG, NO_ARG),
            Shape::One3D => (SHAPE_ONE_3D, NO_ARG, NO_ARG, NO_ARG, NO_ARG),
        };
        assert!(index < 1 << 12 && ON_DEVICE < NO_ARG);
        let runtime = matches!(function.layer, Layer::Runtime) as u64;
        let stream = match function.stream {
            Some(position) => position as u64,
            None => NO_ARG as u64,
        };
        Self(
            index as u64
                | stream << 12
                | (direction as u64) << 16
                | (kind_arg as u64) << 20
                | (shape as u64) << 24
                | (dst as u64) << 28
                | (src as u64) << 32
                | (bytes as u64) << 36
                | (height as u64) << 40
                | runtime << 44,
        )
    }

    const fn nibble(self, shift: u32) -> u8 {
        (self.0 >> shift) as u8 & 15
    }

    /// Position in [`COPY_FNS`].
    pub const fn function(self) -> u16 {
        self.0 as u16 & 0xfff
    }

    /// Position of the stream argument, or [`NO_ARG`] for a synchronous function.
    pub const fn stream_arg(self) -> u8 {
        self.nibble(12)
    }

    /// A [`crate::api::Direction`] as a number, [`DIRECTION_ADDRESSES`] or [`DIRECTION_KIND`].
    pub const fn direction(self) -> u8 {
        self.nibble(16)
    }

    /// Position of the `cudaMemcpyKind` argument, or [`NO_ARG`].
    pub const fn kind_arg(self) -> u8 {
        self.nibble(20)
    }

    /// One of the `SHAPE_` numbers.
    pub const fn shape(self) -> u8 {
        self.nibble(24)
    }

    /// Position of the destination, [`ON_DEVICE`] or [`NO_ARG`].
    pub const fn dst_arg(self) -> u8 {
        self.nibble(28)
    }

    /// Position of the source, [`ON_DEVICE`] or [`NO_ARG`].
    pub const fn src_arg(self) -> u8 {
        self.nibble(32)
    }

    /// Position of the byte count or width, or [`NO_ARG`].
    pub const fn bytes_arg(self) -> u8 {
        self.nibble(36)
    }

    /// Position of the height, or [`NO_ARG`].
    pub const fn height_arg(self) -> u8 {
        self.nibble(40)
    }

    /// True for functions of libcudart.
    pub const fn runtime(self) -> bool {
        self.0 >> 44 & 1 == 1
    }

    /// The same cookie for a probe on target number `target`, below [`MAX_TARGETS`]; 0 is no target in particular.
    pub const fn with_target(self, target: u16) -> Self {
        Self(self.0 | (target as u64) << 48)
    }

    /// See [`CopyCookie::with_target`].
    pub const fn target(self) -> u16 {
        (self.0 >> 48) as u16
    }
}

/// What a probe on a waiting function knows of it: 1 where it waits for the stream that is argument 0 only.
pub const fn sync_cookie(function: &SyncFn) -> u64 {
    matches!(function.scope, SyncScope::Stream) as u64
}

/// Targets that the host may number. A numbered target is counted under the process id that the host knows it by, which
/// in another pid namespace is not the kernel's.
pub const MAX_TARGETS: usize = 1024;

/// Effects of allocation functions as they travel in a cookie: `*arg0` becomes memory of the kind in bits 8 to 15.
pub const ALLOC_ALLOCATE: u8 = 0;
/// See [`AllocEffect::Register`].
pub const ALLOC_REGISTER: u8 = 1;
/// See [`AllocEffect::Release`].
pub const ALLOC_RELEASE: u8 = 2;

/// The cookie of an allocation probe: effect in bits 0 to 7, memory kind in bits 8 to 15.
pub const fn alloc_cookie(function: &AllocFn) -> u64 {
    match function.effect {
        AllocEffect::Allocate(kind) => ALLOC_ALLOCATE as u64 | (kind as u64) << 8,
        AllocEffect::Register => ALLOC_REGISTER as u64 | (MemoryKind::Pinned as u64) << 8,
        AllocEffect::Release => ALLOC_RELEASE as u64,
    }
}

/// What an allocation probe knows of its function: [`alloc_cookie`], and the target's number from bit 48 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocCookie(pub u64);

impl AllocCookie {
    /// The cookie of `function` for target number `target` (see [`CopyCookie::with_target`]).
    pub const fn new(function: &AllocFn, target: u16) -> Self {
        Self(alloc_cookie(function) | (target as u64) << 48)
    }

    /// One of the `ALLOC_` numbers.
    pub const fn effect(self) -> u8 {
        self.0 as u8
    }

    /// A [`MemoryKind`] as a number.
    pub const fn kind(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// See [`CopyCookie::with_target`].
    pub const fn target(self) -> u16 {
        (self.0 >> 48) as u16
    }
}

/// The outermost copy call that a thread is in.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Call {
    /// Stack pointer at the entry, where the return address is.
    pub sp: u64,
    /// When it began, CLOCK_MONOTONIC.
    pub start_ns: u64,
    /// What it copies if it succeeds.
    pub bytes: u64,
    /// Destination.
    pub dst: u64,
    /// Source.
    pub src: u64,
    /// The stream it was given; 0 where it takes none.
    pub stream: u64,
    /// Process id as the host knows it.
    pub pid: u32,
    /// Position in the API table.
    pub function: u16,
    /// Where the destination is: one of [`place`].
    pub dst_place: u8,
    /// Where the source is: one of [`place`].
    pub src_place: u8,
    /// 1 where the call does not say how many bytes it copies and a nested driver call will: a copy of an array by the
    /// runtime counts elements.
    pub bytes_missing: u32,
    /// 1 where it is to be counted.
    pub counts: u32,
    /// Calls that began within it.
    pub nested: u32,
    /// Target number of the probe that saw it. A file that two mounts show under two numbers has two probes.
    pub target: u16,
    /// 1 where it takes a stream.
    pub asynchronous: u8,
    /// What the destination's page said when the call began: see [`crate::kernel::page`].
    pub dst_page: u8,
    /// The same of the source.
    pub src_page: u8,
    /// Zero.
    pub _pad: [u8; 7],
}

/// An asynchronous copy that a thread has made, and nothing since: the one whose cost a wait that follows belongs to.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Pending {
    /// Under what it was counted.
    pub key: CopyKey,
    /// When it began.
    pub start_ns: u64,
    /// Its stream as it was given.
    pub stream: u64,
    /// When the wait began; 0 while there is none.
    pub wait_start_ns: u64,
}

/// One copy, as `--events` shows it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CopyEvent {
    /// Under what it was counted.
    pub key: CopyKey,
    /// When it began, CLOCK_MONOTONIC.
    pub start_ns: u64,
    /// How long the call took.
    pub elapsed_ns: u64,
    /// What it copied if it succeeded.
    pub bytes: u64,
    /// Host address, or 0 where no side is the host's.
    pub host: u64,
    /// The stream as it was given; 0 where it takes none.
    pub stream: u64,
    /// Thread id as the kernel counts.
    pub tid: u32,
    /// What it returned.
    pub result: u32,
}

/// More nested calls than this within one of the same library are no nesting: the outer call was left by a jump, and its
/// frame has not been overwritten yet.
pub const MOST_NESTED: u32 = 64;

/// Phases of a trace, as the host tells the programs.
pub mod phase {
    /// Probes are being placed: calls are followed, so that nested ones are known as such, but not counted.
    pub const PLACING: u32 = 0;
    /// Calls that begin now are counted when they return.
    pub const COUNTING: u32 = 1;
    /// Probes are being taken away: calls that have begun are still counted, others are not looked at.
    pub const ENDING: u32 = 2;
}

/// Where one side of a copy is, as far as its call says.
pub mod place {
    /// Host memory.
    pub const HOST: u8 = 0;
    /// Device memory or an array.
    pub const DEVICE: u8 = 1;
    /// The address decides.
    pub const BY_ADDRESS: u8 = 2;
    /// A `cudaMemcpyKind` or `CUmemorytype` that does not exist; the callee will refuse it.
    pub const INVALID: u8 = 3;
}

/// What could not be recorded: a position in the map of losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Lost {
    /// A copy whose class found no room among the histograms.
    CopiesFull,
    /// A copy that began while too many threads were in one.
    CallsFull,
    /// A copy that never returned, since its frame was left by a jump or its thread ended; and copies that for this reason
    /// were taken for nested ones.
    NoReturn,
    /// A copy whose arguments could not be read.
    Unreadable,
    /// A range of memory that found no room: copies from and to it may count as pageable.
    RangesFull,
}

/// Number of [`Lost`] reasons.
pub const LOST_REASONS: usize = Lost::RangesFull as usize + 1;

/// Names of [`Lost`] reasons, as reports print them.
pub const LOST_NAMES: [&str; LOST_REASONS] = [
    "no room for another class of copies",
    "too many threads copying at once",
    "never returned",
    "arguments not readable",
    "no room for another memory range",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{ALLOC_FNS, Direction};

    #[test]
    fn a_copy_cookie_says_what_the_table_says() {
        for (index, function) in COPY_FNS.iter().enumerate() {
            let plain = CopyCookie::new(index);
            let cookie = plain.with_target(1023);
            assert_eq!(plain.target(), 0);
            assert_eq!(cookie.target(), 1023);
            assert_eq!(cookie.function() as usize, index);
            assert_eq!(cookie.runtime(), function.layer == Layer::Runtime);
            assert_eq!(cookie.stream_arg(), function.stream.unwrap_or(NO_ARG));
            match function.direction {
                DirectionFrom::Fixed(direction) => {
                    assert_eq!(Direction::from_raw(cookie.direction()), direction);
                    assert_eq!(cookie.kind_arg(), NO_ARG);
                }
                DirectionFrom::Kind(arg) => {
                    assert_eq!(
                        (cookie.direction(), cookie.kind_arg()),
                        (DIRECTION_KIND, arg)
                    );
                }
                DirectionFrom::Addresses => assert_eq!(cookie.direction(), DIRECTION_ADDRESSES),
            }
            match function.shape {
                Shape::Linear { dst, src, bytes } => assert_eq!(
                    (
                        cookie.shape(),
                        cookie.dst_arg(),
                        cookie.src_arg(),
                        cookie.bytes_arg()
                    ),
                    (SHAPE_LINEAR, dst, src, bytes)
                ),
                Shape::Pitched {
                    dst,
                    src,
                    width,
                    height,
                } => {
                    assert_eq!(
                        (cookie.shape(), cookie.dst_arg(), cookie.src_arg()),
                        (SHAPE_PITCHED, dst, src)
                    );
                    assert_eq!((cookie.bytes_arg(), cookie.height_arg()), (width, height));
                }
                Shape::DriverStruct2D => assert_eq!(cookie.shape(), SHAPE_DRIVER_2D),
                Shape::DriverStruct3D => assert_eq!(cookie.shape(), SHAPE_DRIVER_3D),
                Shape::RuntimeStruct3D => assert_eq!(cookie.shape(), SHAPE_RUNTIME_3D),
                Shape::RuntimePeer3D => assert_eq!(cookie.shape(), SHAPE_RUNTIME_PEER_3D),
                Shape::Batch => assert_eq!(cookie.shape(), SHAPE_BATCH),
                Shape::Batch3D => assert_eq!(cookie.shape(), SHAPE_BATCH_3D),
                Shape::One3D => assert_eq!(cookie.shape(), SHAPE_ONE_3D),
            }
        }
    }

    #[test]
    fn an_alloc_cookie_says_what_the_table_says() {
        for function in ALLOC_FNS {
            let cookie = AllocCookie::new(function, 7);
            assert_eq!(cookie.target(), 7);
            match function.effect {
                AllocEffect::Allocate(kind) => {
                    assert_eq!(
                        (cookie.effect(), cookie.kind()),
                        (ALLOC_ALLOCATE, kind as u8)
                    );
                }
                AllocEffect::Register => assert_eq!(
                    (cookie.effect(), cookie.kind()),
                    (ALLOC_REGISTER, MemoryKind::Pinned as u8)
                ),
                AllocEffect::Release => assert_eq!(cookie.effect(), ALLOC_RELEASE),
            }
        }
    }
}
