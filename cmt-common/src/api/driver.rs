//! The functions of libcuda that the copy engine calls.

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
