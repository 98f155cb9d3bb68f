//! The copy functions: the part of the API table that probes and hooks go on.

use super::{Direction, Layer};

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
        /// Position of the destination, or [`ON_DEVICE`].
        dst: u8,
        /// Position of the source, or [`ON_DEVICE`].
        src: u8,
        /// Position of the byte count.
        bytes: u8,
    },
    /// Arguments: destination, source, width in bytes, height.
    Pitched {
        /// Position of the destination, or [`ON_DEVICE`].
        dst: u8,
        /// Position of the source, or [`ON_DEVICE`].
        src: u8,
        /// Position of the width in bytes.
        width: u8,
        /// Position of the height.
        height: u8,
    },
    /// Argument 0 points to a `CUDA_MEMCPY2D`.
    DriverStruct2D,
    /// Argument 0 points to a `CUDA_MEMCPY3D` or a `CUDA_MEMCPY3D_PEER`, whose fields that matter stand alike.
    DriverStruct3D,
    /// Argument 0 points to a `cudaMemcpy3DParms`.
    RuntimeStruct3D,
    /// Argument 0 points to a `cudaMemcpy3DPeerParms`.
    RuntimePeer3D,
    /// Arguments: arrays of destinations, of sources and of byte counts, and their length. The first copy's addresses say
    /// which way all of them go.
    Batch,
    /// Arguments: a length, and an array of so many `CUDA_MEMCPY3D_BATCH_OP` (`cudaMemcpy3DBatchOp` is laid out alike).
    Batch3D,
    /// Argument 0 points to one `CUDA_MEMCPY3D_BATCH_OP`.
    One3D,
}

/// In place of a position: that side is an array or a symbol, which is the device's whatever the call says.
pub const ON_DEVICE: u8 = 14;

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

const fn linear(dst: u8, src: u8, bytes: u8) -> Shape {
    Shape::Linear { dst, src, bytes }
}

const fn pitched(dst: u8, src: u8, width: u8, height: u8) -> Shape {
    Shape::Pitched {
        dst,
        src,
        width,
        height,
    }
}

/// Arguments: destination, source, bytes.
const LINEAR: Shape = linear(0, 1, 2);
/// Arguments: destination and its context or device, source and its own, bytes.
const PEER: Shape = linear(0, 2, 4);

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
const DRV_PEER: CopyFn = driver("cuMemcpyPeer", DTOD, PEER, None);
const DRV_PEER_ASYNC: CopyFn = driver("cuMemcpyPeerAsync", DTOD, PEER, Some(5));
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

const DRV_3D_PEER: CopyFn = driver("cuMemcpy3DPeer", DTOD, Shape::DriverStruct3D, None);
const DRV_3D_PEER_ASYNC: CopyFn =
    driver("cuMemcpy3DPeerAsync", DTOD, Shape::DriverStruct3D, Some(1));
const DRV_A_TO_A: CopyFn = driver(
    "cuMemcpyAtoA_v2",
    DTOD,
    linear(ON_DEVICE, ON_DEVICE, 4),
    None,
);
const DRV_A_TO_D: CopyFn = driver("cuMemcpyAtoD_v2", DTOD, linear(0, ON_DEVICE, 3), None);
const DRV_D_TO_A: CopyFn = driver("cuMemcpyDtoA_v2", DTOD, linear(ON_DEVICE, 2, 3), None);
const DRV_A_TO_H: CopyFn = driver("cuMemcpyAtoH_v2", DTOH, linear(0, ON_DEVICE, 3), None);
const DRV_H_TO_A: CopyFn = driver("cuMemcpyHtoA_v2", HTOD, linear(ON_DEVICE, 2, 3), None);
const DRV_A_TO_H_ASYNC: CopyFn = driver(
    "cuMemcpyAtoHAsync_v2",
    DTOH,
    linear(0, ON_DEVICE, 3),
    Some(4),
);
const DRV_H_TO_A_ASYNC: CopyFn = driver(
    "cuMemcpyHtoAAsync_v2",
    HTOD,
    linear(ON_DEVICE, 2, 3),
    Some(4),
);
/// CUDA 12.8; the second version lacks the argument `failIdx`.
const DRV_BATCH: CopyFn = driver("cuMemcpyBatchAsync", ANY, Shape::Batch, Some(8));
const DRV_BATCH_2: CopyFn = driver("cuMemcpyBatchAsync_v2", ANY, Shape::Batch, Some(7));
const DRV_3D_BATCH: CopyFn = driver("cuMemcpy3DBatchAsync", ANY, Shape::Batch3D, Some(4));
const DRV_3D_BATCH_2: CopyFn = driver("cuMemcpy3DBatchAsync_v2", ANY, Shape::Batch3D, Some(3));
/// CUDA 13.2.
const DRV_ATTRIBUTES: CopyFn = driver("cuMemcpyWithAttributesAsync", ANY, LINEAR, Some(4));
const DRV_3D_ATTRIBUTES: CopyFn =
    driver("cuMemcpy3DWithAttributesAsync", ANY, Shape::One3D, Some(2));

const fn kind(position: u8) -> DirectionFrom {
    DirectionFrom::Kind(position)
}

const RT_COPY: CopyFn = runtime("cudaMemcpy", kind(3), LINEAR, None);
const RT_COPY_ASYNC: CopyFn = runtime("cudaMemcpyAsync", kind(3), LINEAR, Some(4));
const RT_PEER: CopyFn = runtime("cudaMemcpyPeer", DTOD, PEER, None);
const RT_PEER_ASYNC: CopyFn = runtime("cudaMemcpyPeerAsync", DTOD, PEER, Some(5));
const RT_PITCHED: Shape = pitched(0, 2, 4, 5);
const RT_2D: CopyFn = runtime("cudaMemcpy2D", kind(6), RT_PITCHED, None);
const RT_2D_ASYNC: CopyFn = runtime("cudaMemcpy2DAsync", kind(6), RT_PITCHED, Some(7));
const RT_3D: CopyFn = runtime("cudaMemcpy3D", ANY, Shape::RuntimeStruct3D, None);
const RT_3D_ASYNC: CopyFn = runtime("cudaMemcpy3DAsync", ANY, Shape::RuntimeStruct3D, Some(1));
const RT_3D_PEER: CopyFn = runtime("cudaMemcpy3DPeer", DTOD, Shape::RuntimePeer3D, None);
const RT_3D_PEER_ASYNC: CopyFn =
    runtime("cudaMemcpy3DPeerAsync", DTOD, Shape::RuntimePeer3D, Some(1));
const TO_SYMBOL: Shape = linear(ON_DEVICE, 1, 2);
const FROM_SYMBOL: Shape = linear(0, ON_DEVICE, 2);
const RT_TO_SYMBOL: CopyFn = runtime("cudaMemcpyToSymbol", kind(4), TO_SYMBOL, None);
const RT_TO_SYMBOL_ASYNC: CopyFn = runtime("cudaMemcpyToSymbolAsync", kind(4), TO_SYMBOL, Some(5));
const RT_FROM_SYMBOL: CopyFn = runtime("cudaMemcpyFromSymbol", kind(4), FROM_SYMBOL, None);
const RT_FROM_SYMBOL_ASYNC: CopyFn =
    runtime("cudaMemcpyFromSymbolAsync", kind(4), FROM_SYMBOL, Some(5));
const TO_ARRAY: Shape = linear(ON_DEVICE, 3, 4);
const FROM_ARRAY: Shape = linear(0, ON_DEVICE, 4);
const RT_TO_ARRAY: CopyFn = runtime("cudaMemcpyToArray", kind(5), TO_ARRAY, None);
const RT_TO_ARRAY_ASYNC: CopyFn = runtime("cudaMemcpyToArrayAsync", kind(5), TO_ARRAY, Some(6));
const RT_FROM_ARRAY: CopyFn = runtime("cudaMemcpyFromArray", kind(5), FROM_ARRAY, None);
const RT_FROM_ARRAY_ASYNC: CopyFn =
    runtime("cudaMemcpyFromArrayAsync", kind(5), FROM_ARRAY, Some(6));
const RT_A_TO_A: CopyFn = runtime(
    "cudaMemcpyArrayToArray",
    DTOD,
    linear(ON_DEVICE, ON_DEVICE, 6),
    None,
);
const TO_ARRAY_2D: Shape = pitched(ON_DEVICE, 3, 5, 6);
const FROM_ARRAY_2D: Shape = pitched(0, ON_DEVICE, 5, 6);
const RT_2D_TO_ARRAY: CopyFn = runtime("cudaMemcpy2DToArray", kind(7), TO_ARRAY_2D, None);
const RT_2D_TO_ARRAY_ASYNC: CopyFn =
    runtime("cudaMemcpy2DToArrayAsync", kind(7), TO_ARRAY_2D, Some(8));
const RT_2D_FROM_ARRAY: CopyFn = runtime("cudaMemcpy2DFromArray", kind(7), FROM_ARRAY_2D, None);
const RT_2D_FROM_ARRAY_ASYNC: CopyFn = runtime(
    "cudaMemcpy2DFromArrayAsync",
    kind(7),
    FROM_ARRAY_2D,
    Some(8),
);
const RT_2D_A_TO_A: CopyFn = runtime(
    "cudaMemcpy2DArrayToArray",
    DTOD,
    pitched(ON_DEVICE, ON_DEVICE, 6, 7),
    None,
);
/// The stream is argument 7 from CUDA 13 on; in 12.8 and 12.9 it is argument 8, behind `failIdx`.
const RT_BATCH: CopyFn = runtime("cudaMemcpyBatchAsync", ANY, Shape::Batch, Some(7));
/// The stream is argument 3 from CUDA 13 on; in 12.8 and 12.9 it is argument 4.
const RT_3D_BATCH: CopyFn = runtime("cudaMemcpy3DBatchAsync", ANY, Shape::Batch3D, Some(3));
/// CUDA 13.2.
const RT_ATTRIBUTES: CopyFn = runtime("cudaMemcpyWithAttributesAsync", ANY, LINEAR, Some(4));
const RT_3D_ATTRIBUTES: CopyFn = runtime(
    "cudaMemcpy3DWithAttributesAsync",
    ANY,
    Shape::One3D,
    Some(2),
);

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
    DRV_3D_PEER,
    twin(DRV_3D_PEER, "cuMemcpy3DPeer_ptds"),
    DRV_3D_PEER_ASYNC,
    twin(DRV_3D_PEER_ASYNC, "cuMemcpy3DPeerAsync_ptsz"),
    DRV_A_TO_A,
    twin(DRV_A_TO_A, "cuMemcpyAtoA_v2_ptds"),
    DRV_A_TO_D,
    twin(DRV_A_TO_D, "cuMemcpyAtoD_v2_ptds"),
    DRV_D_TO_A,
    twin(DRV_D_TO_A, "cuMemcpyDtoA_v2_ptds"),
    DRV_A_TO_H,
    twin(DRV_A_TO_H, "cuMemcpyAtoH_v2_ptds"),
    DRV_H_TO_A,
    twin(DRV_H_TO_A, "cuMemcpyHtoA_v2_ptds"),
    DRV_A_TO_H_ASYNC,
    twin(DRV_A_TO_H_ASYNC, "cuMemcpyAtoHAsync_v2_ptsz"),
    DRV_H_TO_A_ASYNC,
    twin(DRV_H_TO_A_ASYNC, "cuMemcpyHtoAAsync_v2_ptsz"),
    DRV_BATCH,
    twin(DRV_BATCH, "cuMemcpyBatchAsync_ptsz"),
    DRV_BATCH_2,
    twin(DRV_BATCH_2, "cuMemcpyBatchAsync_v2_ptsz"),
    DRV_3D_BATCH,
    twin(DRV_3D_BATCH, "cuMemcpy3DBatchAsync_ptsz"),
    DRV_3D_BATCH_2,
    twin(DRV_3D_BATCH_2, "cuMemcpy3DBatchAsync_v2_ptsz"),
    DRV_ATTRIBUTES,
    twin(DRV_ATTRIBUTES, "cuMemcpyWithAttributesAsync_ptsz"),
    DRV_3D_ATTRIBUTES,
    twin(DRV_3D_ATTRIBUTES, "cuMemcpy3DWithAttributesAsync_ptsz"),
    RT_3D_PEER,
    twin(RT_3D_PEER, "cudaMemcpy3DPeer_ptds"),
    RT_3D_PEER_ASYNC,
    twin(RT_3D_PEER_ASYNC, "cudaMemcpy3DPeerAsync_ptsz"),
    RT_TO_SYMBOL,
    twin(RT_TO_SYMBOL, "cudaMemcpyToSymbol_ptds"),
    RT_TO_SYMBOL_ASYNC,
    twin(RT_TO_SYMBOL_ASYNC, "cudaMemcpyToSymbolAsync_ptsz"),
    RT_FROM_SYMBOL,
    twin(RT_FROM_SYMBOL, "cudaMemcpyFromSymbol_ptds"),
    RT_FROM_SYMBOL_ASYNC,
    twin(RT_FROM_SYMBOL_ASYNC, "cudaMemcpyFromSymbolAsync_ptsz"),
    RT_TO_ARRAY,
    twin(RT_TO_ARRAY, "cudaMemcpyToArray_ptds"),
    RT_TO_ARRAY_ASYNC,
    twin(RT_TO_ARRAY_ASYNC, "cudaMemcpyToArrayAsync_ptsz"),
    RT_FROM_ARRAY,
    twin(RT_FROM_ARRAY, "cudaMemcpyFromArray_ptds"),
    RT_FROM_ARRAY_ASYNC,
    twin(RT_FROM_ARRAY_ASYNC, "cudaMemcpyFromArrayAsync_ptsz"),
    RT_A_TO_A,
    twin(RT_A_TO_A, "cudaMemcpyArrayToArray_ptds"),
    RT_2D_TO_ARRAY,
    twin(RT_2D_TO_ARRAY, "cudaMemcpy2DToArray_ptds"),
    RT_2D_TO_ARRAY_ASYNC,
    twin(RT_2D_TO_ARRAY_ASYNC, "cudaMemcpy2DToArrayAsync_ptsz"),
    RT_2D_FROM_ARRAY,
    twin(RT_2D_FROM_ARRAY, "cudaMemcpy2DFromArray_ptds"),
    RT_2D_FROM_ARRAY_ASYNC,
    twin(RT_2D_FROM_ARRAY_ASYNC, "cudaMemcpy2DFromArrayAsync_ptsz"),
    RT_2D_A_TO_A,
    twin(RT_2D_A_TO_A, "cudaMemcpy2DArrayToArray_ptds"),
    RT_BATCH,
    twin(RT_BATCH, "cudaMemcpyBatchAsync_ptsz"),
    RT_3D_BATCH,
    twin(RT_3D_BATCH, "cudaMemcpy3DBatchAsync_ptsz"),
    RT_ATTRIBUTES,
    twin(RT_ATTRIBUTES, "cudaMemcpyWithAttributesAsync_ptsz"),
    RT_3D_ATTRIBUTES,
    twin(RT_3D_ATTRIBUTES, "cudaMemcpy3DWithAttributesAsync_ptsz"),
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

/// Copy functions that libcuda exports and nothing is known to call: the first versions, with 32-bit addresses and sizes,
/// from before CUDA 3.2. They are neither probed nor hooked.
pub const OBSOLETE_COPY_FNS: &[&str] = &[
    "cuMemcpyHtoD",
    "cuMemcpyDtoH",
    "cuMemcpyDtoD",
    "cuMemcpyDtoA",
    "cuMemcpyAtoD",
    "cuMemcpyHtoA",
    "cuMemcpyAtoH",
    "cuMemcpyAtoA",
    "cuMemcpyHtoAAsync",
    "cuMemcpyAtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpy2D",
    "cuMemcpy2DUnaligned",
    "cuMemcpy2DAsync",
    "cuMemcpy3D",
    "cuMemcpy3DAsync",
];
