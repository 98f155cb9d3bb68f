//! The API table: the one list of the CUDA functions that cmt knows.
//!
//! The probes, the hooks, the reports and the tests read it; nothing else lists function names. Argument positions are
//! those of the System V x86-64 calling convention: 0 to 5 in registers, 6 and up on the stack.
//! Source: `cuda.h` and `cuda_runtime_api.h` of CUDA 13.0.

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

/// Where a probe reads the direction of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectionFrom {
    /// The function name says it.
    Fixed(Direction),
    /// An argument of type `cudaMemcpyKind`.
    Kind(u8),
    /// Only the addresses tell (unified addressing), or the memory types inside a parameter structure.
    Addresses,
}

/// Where a probe finds the addresses and the byte count of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Arguments: destination, source, bytes.
    Linear {
        /// Position of the destination.
        dst: u8,
        /// Position of the source.
        src: u8,
        /// Position of the byte count.
        bytes: u8,
    },
    /// Arguments: destination, source, width in bytes, height.
    Pitched {
        /// Position of the destination.
        dst: u8,
        /// Position of the source.
        src: u8,
        /// Position of the width in bytes.
        width: u8,
        /// Position of the height.
        height: u8,
    },
    /// Argument 0 points to a `CUDA_MEMCPY2D`.
    DriverStruct2D,
    /// Argument 0 points to a `CUDA_MEMCPY3D`.
    DriverStruct3D,
    /// Argument 0 points to a `cudaMemcpy3DParms`.
    RuntimeStruct3D,
}

/// Which stream a null stream argument means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// The legacy default stream.
    Legacy,
    /// The per-thread default stream (`_ptds`, `_ptsz`).
    PerThread,
}

/// One copy function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyFn {
    /// Exported symbol name.
    pub name: &'static str,
    /// The library that exports it.
    pub layer: Layer,
    /// Where its direction stands.
    pub direction: DirectionFrom,
    /// Where its addresses and bytes stand.
    pub shape: Shape,
    /// Position of the stream argument; `None` for a synchronous function.
    pub stream: Option<u8>,
    /// What a null stream means.
    pub flavour: Flavour,
    /// True where the payload replaces it.
    pub hooked: bool,
}

const LINEAR: Shape = Shape::Linear {
    dst: 0,
    src: 1,
    bytes: 2,
};

const fn driver(
    name: &'static str,
    direction: DirectionFrom,
    shape: Shape,
    stream: Option<u8>,
) -> CopyFn {
    CopyFn {
        name,
        layer: Layer::Driver,
        direction,
        shape,
        stream,
        flavour: Flavour::Legacy,
        hooked: false,
    }
}

const fn runtime(
    name: &'static str,
    direction: DirectionFrom,
    shape: Shape,
    stream: Option<u8>,
) -> CopyFn {
    CopyFn {
        name,
        layer: Layer::Runtime,
        direction,
        shape,
        stream,
        flavour: Flavour::Legacy,
        hooked: false,
    }
}

const fn twin(of: CopyFn, name: &'static str) -> CopyFn {
    CopyFn {
        name,
        flavour: Flavour::PerThread,
        ..of
    }
}

const fn hooked(function: CopyFn) -> CopyFn {
    CopyFn {
        hooked: true,
        ..function
    }
}

const HTOD: DirectionFrom = DirectionFrom::Fixed(Direction::HtoD);
const DTOH: DirectionFrom = DirectionFrom::Fixed(Direction::DtoH);
const DTOD: DirectionFrom = DirectionFrom::Fixed(Direction::DtoD);
const ANY: DirectionFrom = DirectionFrom::Addresses;

const DRV_HTOD: CopyFn = hooked(driver("cuMemcpyHtoD_v2", HTOD, LINEAR, None));
const DRV_DTOH: CopyFn = hooked(driver("cuMemcpyDtoH_v2", DTOH, LINEAR, None));
const DRV_HTOD_ASYNC: CopyFn = hooked(driver("cuMemcpyHtoDAsync_v2", HTOD, LINEAR, Some(3)));
const DRV_DTOH_ASYNC: CopyFn = hooked(driver("cuMemcpyDtoHAsync_v2", DTOH, LINEAR, Some(3)));
const DRV_ANY: CopyFn = hooked(driver("cuMemcpy", ANY, LINEAR, None));
const DRV_ANY_ASYNC: CopyFn = hooked(driver("cuMemcpyAsync", ANY, LINEAR, Some(3)));
const DRV_DTOD: CopyFn = driver("cuMemcpyDtoD_v2", DTOD, LINEAR, None);
const DRV_DTOD_ASYNC: CopyFn = driver("cuMemcpyDtoDAsync_v2", DTOD, LINEAR, Some(3));
const DRV_PEER: CopyFn = driver(
    "cuMemcpyPeer",
    DTOD,
    Shape::Linear {
        dst: 0,
        src: 2,
        bytes: 4,
    },
    None,
);
const DRV_PEER_ASYNC: CopyFn = driver(
    "cuMemcpyPeerAsync",
    DTOD,
    Shape::Linear {
        dst: 0,
        src: 2,
        bytes: 4,
    },
    Some(5),
);
const DRV_2D: CopyFn = hooked(driver("cuMemcpy2D_v2", ANY, Shape::DriverStruct2D, None));
const DRV_2D_UNALIGNED: CopyFn = hooked(driver(
    "cuMemcpy2DUnaligned_v2",
    ANY,
    Shape::DriverStruct2D,
    None,
));
const DRV_2D_ASYNC: CopyFn = hooked(driver(
    "cuMemcpy2DAsync_v2",
    ANY,
    Shape::DriverStruct2D,
    Some(1),
));
const DRV_3D: CopyFn = driver("cuMemcpy3D_v2", ANY, Shape::DriverStruct3D, None);
const DRV_3D_ASYNC: CopyFn = driver("cuMemcpy3DAsync_v2", ANY, Shape::DriverStruct3D, Some(1));

const RT_PITCHED: Shape = Shape::Pitched {
    dst: 0,
    src: 2,
    width: 4,
    height: 5,
};
const RT_COPY: CopyFn = runtime("cudaMemcpy", DirectionFrom::Kind(3), LINEAR, None);
const RT_COPY_ASYNC: CopyFn = runtime("cudaMemcpyAsync", DirectionFrom::Kind(3), LINEAR, Some(4));
const RT_PEER_SHAPE: Shape = Shape::Linear {
    dst: 0,
    src: 2,
    bytes: 4,
};
const RT_PEER: CopyFn = runtime("cudaMemcpyPeer", DTOD, RT_PEER_SHAPE, None);
const RT_PEER_ASYNC: CopyFn = runtime("cudaMemcpyPeerAsync", DTOD, RT_PEER_SHAPE, Some(5));
const RT_2D: CopyFn = runtime("cudaMemcpy2D", DirectionFrom::Kind(6), RT_PITCHED, None);
const RT_2D_ASYNC: CopyFn = runtime(
    "cudaMemcpy2DAsync",
    DirectionFrom::Kind(6),
    RT_PITCHED,
    Some(7),
);
const RT_3D: CopyFn = runtime("cudaMemcpy3D", ANY, Shape::RuntimeStruct3D, None);
const RT_3D_ASYNC: CopyFn = runtime("cudaMemcpy3DAsync", ANY, Shape::RuntimeStruct3D, Some(1));

/// Every copy function that cmt probes or hooks. A function's position is its identity in events, cookies and slots.
pub const COPY_FNS: &[CopyFn] = &[
    DRV_HTOD,
    twin(DRV_HTOD, "cuMemcpyHtoD_v2_ptds"),
    DRV_DTOH,
    twin(DRV_DTOH, "cuMemcpyDtoH_v2_ptds"),
    DRV_HTOD_ASYNC,
    twin(DRV_HTOD_ASYNC, "cuMemcpyHtoDAsync_v2_ptsz"),
    DRV_DTOH_ASYNC,
    twin(DRV_DTOH_ASYNC, "cuMemcpyDtoHAsync_v2_ptsz"),
    DRV_ANY,
    twin(DRV_ANY, "cuMemcpy_ptds"),
    DRV_ANY_ASYNC,
    twin(DRV_ANY_ASYNC, "cuMemcpyAsync_ptsz"),
    DRV_2D,
    twin(DRV_2D, "cuMemcpy2D_v2_ptds"),
    DRV_2D_UNALIGNED,
    twin(DRV_2D_UNALIGNED, "cuMemcpy2DUnaligned_v2_ptds"),
    DRV_2D_ASYNC,
    twin(DRV_2D_ASYNC, "cuMemcpy2DAsync_v2_ptsz"),
    DRV_DTOD,
    twin(DRV_DTOD, "cuMemcpyDtoD_v2_ptds"),
    DRV_DTOD_ASYNC,
    twin(DRV_DTOD_ASYNC, "cuMemcpyDtoDAsync_v2_ptsz"),
    DRV_PEER,
    twin(DRV_PEER, "cuMemcpyPeer_ptds"),
    DRV_PEER_ASYNC,
    twin(DRV_PEER_ASYNC, "cuMemcpyPeerAsync_ptsz"),
    DRV_3D,
    twin(DRV_3D, "cuMemcpy3D_v2_ptds"),
    DRV_3D_ASYNC,
    twin(DRV_3D_ASYNC, "cuMemcpy3DAsync_v2_ptsz"),
    RT_COPY,
    twin(RT_COPY, "cudaMemcpy_ptds"),
    RT_COPY_ASYNC,
    twin(RT_COPY_ASYNC, "cudaMemcpyAsync_ptsz"),
    RT_PEER,
    RT_PEER_ASYNC,
    RT_2D,
    twin(RT_2D, "cudaMemcpy2D_ptds"),
    RT_2D_ASYNC,
    twin(RT_2D_ASYNC, "cudaMemcpy2DAsync_ptsz"),
    RT_3D,
    twin(RT_3D, "cudaMemcpy3D_ptds"),
    RT_3D_ASYNC,
    twin(RT_3D_ASYNC, "cudaMemcpy3DAsync_ptsz"),
];

/// Number of functions that the payload replaces: the first entries of [`COPY_FNS`].
pub const HOOKED: usize = 18;

const _: () = {
    let mut index = 0;
    while index < COPY_FNS.len() {
        assert!(
            COPY_FNS[index].hooked == (index < HOOKED),
            "the hooked functions come first"
        );
        index += 1;
    }
};

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
    alloc("cuMemHostRegister_v2", AllocEffect::Register),
    alloc(
        "cuMemAllocManaged",
        AllocEffect::Allocate(MemoryKind::Managed),
    ),
    alloc("cuMemAlloc_v2", AllocEffect::Allocate(MemoryKind::Device)),
    alloc("cuMemFreeHost", AllocEffect::Release),
    alloc("cuMemHostUnregister", AllocEffect::Release),
    alloc("cuMemFree_v2", AllocEffect::Release),
];

/// The functions of libcuda that the copy engine calls besides the originals of the hooked ones.
///
/// The discriminant is the position in [`crate::control::Control::driver`]. A position whose function the driver does
/// not export holds 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum DriverFn {
    /// `CUresult cuCtxGetCurrent(CUcontext *)`
    CtxGetCurrent,
    /// `CUresult cuCtxSetCurrent(CUcontext)`
    CtxSetCurrent,
    /// `CUresult cuCtxGetId(CUcontext, unsigned long long *)`, from CUDA 12.0
    CtxGetId,
    /// `CUresult cuCtxGetDevice(CUdevice *)`
    CtxGetDevice,
    /// `CUresult cuDeviceGetAttribute(int *, CUdevice_attribute, CUdevice)`
    DeviceGetAttribute,
    /// `CUresult cuMemHostAlloc(void **, size_t, unsigned)`
    MemHostAlloc,
    /// `CUresult cuMemFreeHost(void *)`
    MemFreeHost,
    /// `CUresult cuMemHostRegister_v2(void *, size_t, unsigned)`
    MemHostRegister,
    /// `CUresult cuMemHostUnregister(void *)`
    MemHostUnregister,
    /// `CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *, void *, unsigned)`
    MemHostGetDevicePointer,
    /// `CUresult cuPointerGetAttributes(unsigned, CUpointer_attribute *, void **, CUdeviceptr)`
    PointerGetAttributes,
    /// `CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *)`
    StreamIsCapturing,
    /// `CUresult cuStreamIsCapturing_ptsz(CUstream, CUstreamCaptureStatus *)`
    StreamIsCapturingPtsz,
    /// `CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *)`
    ThreadExchangeStreamCaptureMode,
    /// `CUresult cuStreamWriteValue32_v2(CUstream, CUdeviceptr, cuuint32_t, unsigned)`
    StreamWriteValue32,
    /// `CUresult cuStreamWriteValue32_v2_ptsz(CUstream, CUdeviceptr, cuuint32_t, unsigned)`
    StreamWriteValue32Ptsz,
    /// `CUresult cuStreamSynchronize(CUstream)`
    StreamSynchronize,
    /// `CUresult cuStreamSynchronize_ptsz(CUstream)`
    StreamSynchronizePtsz,
    /// `CUresult cuStreamQuery(CUstream)`
    StreamQuery,
    /// `CUresult cuStreamQuery_ptsz(CUstream)`
    StreamQueryPtsz,
    /// `CUresult cuEventCreate(CUevent *, unsigned)`
    EventCreate,
    /// `CUresult cuEventDestroy_v2(CUevent)`
    EventDestroy,
    /// `CUresult cuEventRecord(CUevent, CUstream)`
    EventRecord,
    /// `CUresult cuEventRecord_ptsz(CUevent, CUstream)`
    EventRecordPtsz,
    /// `CUresult cuEventQuery(CUevent)`
    EventQuery,
    /// `CUresult cuStreamGetId(CUstream, unsigned long long *)`, from CUDA 12.0
    StreamGetId,
    /// `CUresult cuStreamGetId_ptsz(CUstream, unsigned long long *)`, from CUDA 12.0
    StreamGetIdPtsz,
    /// `CUresult cuCtxGetFlags(unsigned *)`
    CtxGetFlags,
}

/// Symbol names of [`DriverFn`], by discriminant.
pub const DRIVER_FNS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxGetId",
    "cuCtxGetDevice",
    "cuDeviceGetAttribute",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuPointerGetAttributes",
    "cuStreamIsCapturing",
    "cuStreamIsCapturing_ptsz",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamWriteValue32_v2",
    "cuStreamWriteValue32_v2_ptsz",
    "cuStreamSynchronize",
    "cuStreamSynchronize_ptsz",
    "cuStreamQuery",
    "cuStreamQuery_ptsz",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventRecord_ptsz",
    "cuEventQuery",
    "cuStreamGetId",
    "cuStreamGetId_ptsz",
    "cuCtxGetFlags",
];

const _: () = assert!(DRIVER_FNS.len() == DriverFn::CtxGetFlags as usize + 1);
