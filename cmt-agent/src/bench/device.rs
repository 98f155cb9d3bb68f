//! The few CUDA calls that the measuring process makes, with their results checked.
#![expect(unsafe_code, reason = "calls into libcuda")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::time::Instant;

use cudarc::driver::sys::{self, CUresult};

use super::wire;

/// Why a CUDA call failed.
#[derive(Debug, thiserror::Error)]
#[error("{call} returned {code:?}")]
pub struct CudaError {
    /// The function.
    call: &'static str,
    /// What it returned.
    code: CUresult,
}

fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(CudaError { call, code }),
    }
}

/// Whether a libcuda can be loaded here.
pub fn is_present() -> bool {
    // SAFETY: loads libcuda, whose constructors are those that any CUDA program runs.
    unsafe { sys::is_culib_present() }
}

/// Makes the first device's primary context current on this thread, and describes the device.
///
/// The context lives as long as the process.
pub fn open() -> Result<wire::Device, CudaError> {
    let mut device = 0;
    let mut context = std::ptr::null_mut();
    let mut cuda_version = 0;
    let (mut name, mut bus_id) = ([0 as c_char; 256], [0 as c_char; 32]);
    let (mut free, mut total) = (0, 0);
    // SAFETY: each call gets places of the types that it writes, with their lengths.
    unsafe {
        check("cuInit", sys::cuInit(0))?;
        check(
            "cuDriverGetVersion",
            sys::cuDriverGetVersion(&mut cuda_version),
        )?;
        check("cuDeviceGet", sys::cuDeviceGet(&mut device, 0))?;
        check(
            "cuDevicePrimaryCtxRetain",
            sys::cuDevicePrimaryCtxRetain(&mut context, device),
        )?;
        check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
        check(
            "cuDeviceGetName",
            sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, device),
        )?;
        check(
            "cuDeviceGetPCIBusId",
            sys::cuDeviceGetPCIBusId(bus_id.as_mut_ptr(), bus_id.len() as c_int - 1, device),
        )?;
        check("cuMemGetInfo", sys::cuMemGetInfo_v2(&mut free, &mut total))?;
    }
    let text = |bytes: &[c_char]| {
        // SAFETY: the arrays were zeroed and their last byte was kept from the driver.
        let text = unsafe { CStr::from_ptr(bytes.as_ptr()) };
        text.to_string_lossy().into_owned()
    };
    Ok(wire::Device {
        name: text(&name),
        pci_bus_id: text(&bus_id),
        cuda_version,
        free_bytes: free as u64,
        idle_synchronize_ns: idle_synchronize_ns()?,
    })
}

fn idle_synchronize_ns() -> Result<u64, CudaError> {
    const CALLS: usize = 1001;
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let begun = Instant::now();
        synchronize()?;
        times.push(begun.elapsed().as_nanos() as u64);
    }
    times.sort_unstable();
    Ok(times[CALLS / 2])
}

/// Waits until the context has nothing left to do.
pub fn synchronize() -> Result<(), CudaError> {
    // SAFETY: takes no argument.
    check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
}

/// Memory of the device; never freed.
#[derive(Clone, Copy)]
pub struct DeviceBuffer {
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates.
    pub fn new(bytes: usize) -> Result<Self, CudaError> {
        let mut address = 0;
        // SAFETY: writes one address.
        check("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&mut address, bytes)
        })?;
        Ok(Self { address, bytes })
    }

    /// Overwrites the first `bytes` bytes, and waits for that.
    pub fn clear(self, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= self.bytes);
        // SAFETY: within the allocation.
        check("cuMemsetD8", unsafe {
            sys::cuMemsetD8_v2(self.address, 0xEE, bytes)
        })?;
        synchronize()
    }

    /// Copies `from` to its beginning. The device may still be at it on return.
    pub fn write(self, from: &[u8]) -> Result<(), CudaError> {
        assert!(from.len() <= self.bytes);
        // SAFETY: readable by the slice, and within the allocation.
        let code = unsafe {
            sys::cuMemcpyHtoD_v2(self.address, from.as_ptr().cast::<c_void>(), from.len())
        };
        check("cuMemcpyHtoD", code)
    }

    /// Fills `to` from its beginning.
    pub fn read(self, to: &mut [u8]) -> Result<(), CudaError> {
        assert!(to.len() <= self.bytes);
        // SAFETY: writable by the slice, and within the allocation.
        let code = unsafe {
            sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast::<c_void>(), self.address, to.len())
        };
        check("cuMemcpyDtoH", code)
    }
}

/// Pinned host memory; lives as long as the process.
pub fn pinned(bytes: usize) -> Result<&'static mut [u8], CudaError> {
    let mut address = std::ptr::null_mut();
    // SAFETY: writes one address.
    check("cuMemHostAlloc", unsafe {
        sys::cuMemHostAlloc(&mut address, bytes, 0)
    })?;
    let address = NonNull::new(address.cast::<u8>()).expect("the driver said that it succeeded");
    // SAFETY: ours alone, never freed, and the write makes every byte of it initialised.
    unsafe {
        address.write_bytes(0, bytes);
        Ok(std::slice::from_raw_parts_mut(address.as_ptr(), bytes))
    }
}
