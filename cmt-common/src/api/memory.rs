//! Kinds of memory, and the functions that make and end them.

/// The kind of the memory that a copy reads or writes on the host side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum MemoryKind {
    /// Ordinary memory: the copies that cmt accelerates.
    Pageable = 0,
    /// Page-locked by `cuMemHostAlloc`, `cuMemAllocHost` or `cuMemHostRegister`.
    Pinned = 1,
    /// From `cuMemAllocManaged`.
    Managed = 2,
    /// Device memory (used inside the tracer to tell directions apart; no host side has it).
    Device = 3,
    /// No host side, or nothing is known of it.
    Unknown = 4,
}

impl MemoryKind {
    /// The kind with the discriminant `raw`; [`MemoryKind::Unknown`] for any other number.
    pub const fn from_raw(raw: u8) -> Self {
        match raw {
            0 => Self::Pageable,
            1 => Self::Pinned,
            2 => Self::Managed,
            3 => Self::Device,
            _ => Self::Unknown,
        }
    }

    /// The field's name for it, as reports print it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pageable => "pageable",
            Self::Pinned => "pinned",
            Self::Managed => "managed",
            Self::Device => "device",
            Self::Unknown => "unknown",
        }
    }
}

/// What the host side of a copy is made of, where the kernel's page tables could be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Backing {
    /// Not asked (pinned or managed memory, no host side) or not to be told on this kernel.
    Unknown = 0,
    /// Ordinary memory in small pages.
    Anonymous = 1,
    /// Ordinary memory in huge pages, transparent or not.
    Huge = 2,
    /// Pages of a file: a mapped model or data set.
    File = 3,
    /// Shared memory: `/dev/shm`, memfd, tmpfs.
    Shared = 4,
    /// No page was there when the call began: nobody had touched it.
    Untouched = 5,
}

impl Backing {
    /// The backing with the discriminant `raw`; [`Backing::Unknown`] for any other number.
    pub const fn from_raw(raw: u8) -> Self {
        match raw {
            1 => Self::Anonymous,
            2 => Self::Huge,
            3 => Self::File,
            4 => Self::Shared,
            5 => Self::Untouched,
            _ => Self::Unknown,
        }
    }

    /// What reports print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Anonymous => "anonymous",
            Self::Huge => "huge",
            Self::File => "file",
            Self::Shared => "shared",
            Self::Untouched => "untouched",
        }
    }
}

/// What an allocation function does to the kind of a host or device range, as far as a probe needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocEffect {
    /// Writes the address of new memory of this kind to `*arg0`; the size is argument 1.
    Allocate(MemoryKind),
    /// Pins the range that starts at argument 0; the size is argument 1.
    Register,
    /// Ends whatever was known of the range that starts at argument 0.
    Release,
}

/// One allocation function of libcuda.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocFn {
    /// Exported symbol name.
    pub name: &'static str,
    /// What it does.
    pub effect: AllocEffect,
}

const fn alloc(name: &'static str, effect: AllocEffect) -> AllocFn {
    AllocFn { name, effect }
}

/// Every allocation function that the tracer follows.
pub const ALLOC_FNS: &[AllocFn] = &[
    alloc("cuMemHostAlloc", AllocEffect::Allocate(MemoryKind::Pinned)),
    alloc(
        "cuMemAllocHost_v2",
        AllocEffect::Allocate(MemoryKind::Pinned),
    ),
    alloc("cuMemHostRegister", AllocEffect::Register),
    alloc("cuMemHostRegister_v2", AllocEffect::Register),
    alloc(
        "cuMemAllocManaged",
        AllocEffect::Allocate(MemoryKind::Managed),
    ),
    alloc("cuMemAlloc_v2", AllocEffect::Allocate(MemoryKind::Device)),
    alloc("cuMemAllocAsync", AllocEffect::Allocate(MemoryKind::Device)),
    alloc(
        "cuMemAllocAsync_ptsz",
        AllocEffect::Allocate(MemoryKind::Device),
    ),
    alloc(
        "cuMemAllocFromPoolAsync",
        AllocEffect::Allocate(MemoryKind::Device),
    ),
    alloc(
        "cuMemAllocFromPoolAsync_ptsz",
        AllocEffect::Allocate(MemoryKind::Device),
    ),
    alloc("cuMemFreeHost", AllocEffect::Release),
    alloc("cuMemHostUnregister", AllocEffect::Release),
    alloc("cuMemFree_v2", AllocEffect::Release),
    alloc("cuMemFreeAsync", AllocEffect::Release),
    alloc("cuMemFreeAsync_ptsz", AllocEffect::Release),
];
