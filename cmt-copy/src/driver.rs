//! The CUDA driver as the engine sees it: a table of function pointers, each called as `cuda.h` declares it.
//!
//! Nothing here links to libcuda or looks a symbol up; the payload hands the addresses in. The hooked functions are
//! reached through their originals, so a staged copy never enters its own hook.
#![expect(unsafe_code, reason = "calls the driver through function pointers")]

use core::ffi::c_void;

use cmt_common::api::{
    COPY_FNS, CopyFn, DRIVER_FNS, Direction, DirectionFrom, DriverFn, Flavour, HOOKED, Shape,
};

use crate::rows::Memcpy2D;
use crate::threads;

/// A `CUresult`; 0 is success.
pub(crate) type Code = i32;

/// `CUresult` values that the engine tells apart. Source: `cuda.h` of CUDA 13.0.
pub(crate) mod code {
    use super::Code;

    pub const SUCCESS: Code = 0;
    pub const INVALID_VALUE: Code = 1;
    pub const OUT_OF_MEMORY: Code = 2;
    pub const NOT_READY: Code = 600;
    /// First and last of `CUDA_ERROR_STREAM_CAPTURE_*` and their kin: somebody captures, nothing is broken.
    pub const CAPTURE_FIRST: Code = 900;
    pub const CAPTURE_LAST: Code = 908;
    pub const INVALID_CONTEXT: Code = 201;
    pub const CONTEXT_IS_DESTROYED: Code = 709;
}

/// The engine cannot be built.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DriverError {
    /// The driver lacks a function that staging cannot do without.
    #[error("the CUDA driver does not export {name}, which staging needs")]
    Missing {
        /// Its symbol.
        name: &'static str,
    },
}

type HtodAsyncFn = unsafe extern "C" fn(u64, *const c_void, usize, usize) -> Code;
type DtohAsyncFn = unsafe extern "C" fn(*mut c_void, u64, usize, usize) -> Code;
type Copy2DAsyncFn = unsafe extern "C" fn(*const Memcpy2D, usize) -> Code;
type StreamFn = unsafe extern "C" fn(usize) -> Code;
type WriteValueFn = unsafe extern "C" fn(usize, u64, u32, u32) -> Code;

/// The functions that exist once for each meaning of the null stream.
#[derive(Clone, Copy)]
struct Streams {
    htod_async: HtodAsyncFn,
    dtoh_async: DtohAsyncFn,
    copy_2d_async: Option<Copy2DAsyncFn>,
    is_capturing: unsafe extern "C" fn(usize, *mut i32) -> Code,
    query: StreamFn,
    synchronize: StreamFn,
    write_value: Option<WriteValueFn>,
    event_record: Option<unsafe extern "C" fn(usize, usize) -> Code>,
    id: Option<unsafe extern "C" fn(usize, *mut u64) -> Code>,
}

/// The functions of libcuda that the engine calls.
pub struct Driver {
    legacy: Option<Streams>,
    per_thread: Option<Streams>,
    ctx_get_current: unsafe extern "C" fn(*mut usize) -> Code,
    ctx_set_current: unsafe extern "C" fn(usize) -> Code,
    ctx_get_id: unsafe extern "C" fn(usize, *mut u64) -> Code,
    ctx_get_device: unsafe extern "C" fn(*mut i32) -> Code,
    ctx_get_flags: Option<unsafe extern "C" fn(*mut u32) -> Code>,
    device_get_attribute: Option<unsafe extern "C" fn(*mut i32, i32, i32) -> Code>,
    mem_host_register: unsafe extern "C" fn(*mut c_void, usize, u32) -> Code,
    mem_host_unregister: unsafe extern "C" fn(*mut c_void) -> Code,
    mem_host_get_device_pointer: unsafe extern "C" fn(*mut u64, *mut c_void, u32) -> Code,
    pointer_get_attributes: unsafe extern "C" fn(u32, *mut i32, *mut *mut c_void, u64) -> Code,
    exchange_capture_mode: unsafe extern "C" fn(*mut i32) -> Code,
    event_create: Option<unsafe extern "C" fn(*mut usize, u32) -> Code>,
    event_destroy: Option<StreamFn>,
    event_query: Option<StreamFn>,
}

/// A context and the number that tells it apart from a later one at the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    pub handle: usize,
    pub id: u64,
}

/// What the engine asks of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PointerFacts {
    /// `CUmemorytype`: 0 where the driver knows nothing of the address, 1 host, 2 device.
    pub memory_type: u32,
    pub managed: bool,
    pub device: i32,
    pub range_start: u64,
    pub range_bytes: u64,
    /// Whether synchronous copies to it are to be complete when they return, and the handle of its context, if it has one:
    /// asked for only by [`Driver::pointer_facts`] for such copies.
    pub sync_memops: bool,
    pub context: usize,
}

/// The function at `address` as a pointer of type `F`, `None` for 0.
///
/// # Safety
/// `F` must be a function pointer type, and `address` 0 or the address of a function of that type.
unsafe fn function<F: Copy>(address: u64) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<usize>()) };
    if address == 0 {
        return None;
    }
    let address = address as usize;
    // SAFETY: a function pointer has the size of an address (asserted) and the caller vouches for the type.
    Some(unsafe { core::mem::transmute_copy::<usize, F>(&address) })
}

impl Driver {
    /// Takes the addresses over. `originals[i]` leads to the original of `COPY_FNS[i]`, `driver[i]` is the address of
    /// `DRIVER_FNS[i]`; 0 stands for a function that the driver lacks.
    ///
    /// # Errors
    /// [`DriverError::Missing`] names the first function that staging cannot do without.
    ///
    /// # Safety
    /// Every address that is not 0 must be that of a function with the C signature that `cuda.h` gives it, and must
    /// stay valid as long as the engine lives.
    pub unsafe fn new(
        originals: &[u64; HOOKED],
        driver: &[u64; DRIVER_FNS.len()],
    ) -> Result<Self, DriverError> {
        threads::prepare();
        /// An optional or a required entry of `driver`.
        macro_rules! entry {
            (optional $which:ident) => {{
                // SAFETY: the caller vouches for the address, the field's type is the signature in `cuda.h`.
                unsafe { function(driver[DriverFn::$which as usize]) }
            }};
            ($which:ident) => {
                entry!(optional $which).ok_or(DriverError::Missing {
                    name: DRIVER_FNS[DriverFn::$which as usize],
                })?
            };
        }
        /// The functions of one flavour; `None` if one that is needed is missing.
        macro_rules! streams {
            ($flavour:expr, $capturing:ident, $query:ident, $synchronize:ident, $write:ident, $record:ident, $id:ident) => {
                (|| {
                    let original = |is_it: &dyn Fn(&CopyFn) -> bool| {
                        let wanted = |f: &CopyFn| f.stream.is_some() && f.flavour == $flavour && is_it(f);
                        Some(originals[COPY_FNS[..HOOKED].iter().position(wanted)?])
                    };
                    let linear = |direction| {
                        original(&|f: &CopyFn| f.direction == DirectionFrom::Fixed(direction))
                    };
                    let of_rows = original(&|f: &CopyFn| f.shape == Shape::DriverStruct2D);
                    Some(Streams {
                        // SAFETY: the caller vouches for the address; the table says which function stands there.
                        htod_async: unsafe { function(linear(Direction::HtoD)?) }?,
                        // SAFETY: as above.
                        dtoh_async: unsafe { function(linear(Direction::DtoH)?) }?,
                        // SAFETY: as above.
                        copy_2d_async: of_rows.and_then(|address| unsafe { function(address) }),
                        is_capturing: entry!(optional $capturing)?,
                        query: entry!(optional $query)?,
                        synchronize: entry!(optional $synchronize)?,
                        write_value: entry!(optional $write),
                        event_record: entry!(optional $record),
                        id: entry!(optional $id),
                    })
                })()
            };
        }
        let legacy = streams!(
            Flavour::Legacy,
            StreamIsCapturing,
            StreamQuery,
            StreamSynchronize,
            StreamWriteValue32,
            EventRecord,
            StreamGetId
        );
        let per_thread = streams!(
            Flavour::PerThread,
            StreamIsCapturingPtsz,
            StreamQueryPtsz,
            StreamSynchronizePtsz,
            StreamWriteValue32Ptsz,
            EventRecordPtsz,
            StreamGetIdPtsz
        );
        if legacy.is_none() && per_thread.is_none() {
            return Err(DriverError::Missing {
                name: "the asynchronous copies and stream queries",
            });
        }
        Ok(Self {
            legacy,
            per_thread,
            ctx_get_current: entry!(CtxGetCurrent),
            ctx_set_current: entry!(CtxSetCurrent),
            ctx_get_id: entry!(CtxGetId),
            ctx_get_device: entry!(CtxGetDevice),
            ctx_get_flags: entry!(optional CtxGetFlags),
            device_get_attribute: entry!(optional DeviceGetAttribute),
            mem_host_register: entry!(MemHostRegister),
            mem_host_unregister: entry!(MemHostUnregister),
            mem_host_get_device_pointer: entry!(MemHostGetDevicePointer),
            pointer_get_attributes: entry!(PointerGetAttributes),
            exchange_capture_mode: entry!(ThreadExchangeStreamCaptureMode),
            event_create: entry!(optional EventCreate),
            event_destroy: entry!(optional EventDestroy),
            event_query: entry!(optional EventQuery),
        })
    }

    /// The stream `handle` as a function of `flavour` understands it; `None` if the driver lacks that flavour.
    pub(crate) fn stream(&self, flavour: Flavour, handle: usize) -> Option<Stream<'_>> {
        let functions = match flavour {
            Flavour::Legacy => self.legacy.as_ref(),
            Flavour::PerThread => self.per_thread.as_ref(),
        }?;
        let is_the_threads_own =
            handle == STREAM_PER_THREAD || (handle == 0 && flavour == Flavour::PerThread);
        Some(Stream {
            functions,
            handle,
            is_the_threads_own,
        })
    }

    /// The context of the calling thread, if it has one.
    pub(crate) fn current_context(&self) -> Option<Context> {
        let mut handle = 0;
        // SAFETY: `new` vouches for the signature; the pointer is to a local of the type it writes.
        let result = unsafe { (self.ctx_get_current)(&mut handle) };
        if result != code::SUCCESS || handle == 0 {
            return None;
        }
        let id = self.context_id(handle).ok()?;
        Some(Context { handle, id })
    }

    fn context_id(&self, handle: usize) -> Result<u64, Code> {
        let mut id = 0;
        // SAFETY: as in `current_context`.
        match unsafe { (self.ctx_get_id)(handle, &mut id) } {
            code::SUCCESS => Ok(id),
            error => Err(error),
        }
    }

    /// False once the context is destroyed or its address has been given to another one. A driver that is broken or shut
    /// down answers with other errors, and still has what it pinned.
    pub(crate) fn is_alive(&self, context: Context) -> bool {
        match self.context_id(context.handle) {
            Ok(id) => id == context.id,
            Err(error) => ![code::INVALID_CONTEXT, code::CONTEXT_IS_DESTROYED].contains(&error),
        }
    }

    /// Runs `action` with `context` current on this thread, then restores what was current.
    pub(crate) fn within<T>(&self, context: Context, action: impl FnOnce() -> T) -> Option<T> {
        let mut before = 0;
        // SAFETY: as in `current_context`; both handles come from the driver.
        unsafe {
            if (self.ctx_get_current)(&mut before) != code::SUCCESS
                || (self.ctx_set_current)(context.handle) != code::SUCCESS
            {
                return None;
            }
        }
        let result = action();
        // SAFETY: `before` was current a moment ago.
        unsafe { (self.ctx_set_current)(before) };
        Some(result)
    }

    /// The device of the calling thread's context.
    pub(crate) fn current_device(&self) -> Option<i32> {
        let mut device = 0;
        // SAFETY: as in `current_context`.
        let result = unsafe { (self.ctx_get_device)(&mut device) };
        (result == code::SUCCESS).then_some(device)
    }

    /// A device attribute by its `CUdevice_attribute` number.
    pub(crate) fn device_attribute(&self, attribute: i32, device: i32) -> Option<i32> {
        let mut value = 0;
        // SAFETY: as in `current_context`.
        let result = unsafe { (self.device_get_attribute?)(&mut value, attribute, device) };
        (result == code::SUCCESS).then_some(value)
    }

    /// Whether synchronous copies to memory of the calling thread's context are to be complete when they return
    /// (CU_CTX_SYNC_MEMOPS); so too where the driver cannot say.
    pub(crate) fn context_syncs_memops(&self) -> bool {
        let mut flags = 0;
        // SAFETY: as in `current_context`.
        let result = self.ctx_get_flags.map(|get| unsafe { get(&mut flags) });
        result != Some(code::SUCCESS) || flags & 0x80 != 0
    }

    /// What the driver knows of `address`; how synchronous copies to it end only with `is_synchronous`. `Err` carries the
    /// driver's code.
    pub(crate) fn pointer_facts(
        &self,
        address: u64,
        is_synchronous: bool,
    ) -> Result<PointerFacts, Code> {
        // CU_POINTER_ATTRIBUTE_MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, RANGE_START_ADDR, RANGE_SIZE, SYNC_MEMOPS, CONTEXT.
        let mut attributes = [2, 8, 9, 11, 12, 6, 1];
        let count = attributes.len() - if is_synchronous { 0 } else { 2 };
        let (mut memory_type, mut managed, mut device) = (0u32, 0u32, -1i32);
        let (mut range_start, mut range_bytes) = (0u64, 0u64);
        let (mut sync_memops, mut context) = (0u32, 0usize);
        let mut data: [*mut c_void; 7] = [
            (&raw mut memory_type).cast(),
            (&raw mut managed).cast(),
            (&raw mut device).cast(),
            (&raw mut range_start).cast(),
            (&raw mut range_bytes).cast(),
            (&raw mut sync_memops).cast(),
            (&raw mut context).cast(),
        ];
        // SAFETY: each pointer leads to a local of the type that `cuda.h` gives its attribute; IS_MANAGED and SYNC_MEMOPS
        // write a bool or an int, and a zeroed u32 holds either.
        let result = unsafe {
            (self.pointer_get_attributes)(
                count as u32,
                attributes.as_mut_ptr(),
                data.as_mut_ptr(),
                address,
            )
        };
        if result != code::SUCCESS {
            return Err(result);
        }
        Ok(PointerFacts {
            memory_type,
            managed: managed != 0,
            device,
            range_start,
            range_bytes,
            sync_memops: sync_memops != 0,
            context,
        })
    }

    /// The `CUmemorytype` of `address`, 0 where the driver knows nothing of it. `Err` carries the driver's code.
    pub(crate) fn memory_type(&self, address: u64) -> Result<u32, Code> {
        let mut attribute = 2; // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        let mut memory_type = 0u32;
        let mut data = (&raw mut memory_type).cast::<c_void>();
        // SAFETY: one attribute, one pointer to a local of its type.
        let result =
            unsafe { (self.pointer_get_attributes)(1, &mut attribute, &mut data, address) };
        match result {
            code::SUCCESS => Ok(memory_type),
            // What `cuPointerGetAttribute` says of an address that the driver does not know.
            code::INVALID_VALUE => Ok(0),
            other => Err(other),
        }
    }

    /// Runs `action` so that it neither fails because of nor breaks a capture on another thread: during a global-mode
    /// capture, allocating, synchronising and even `cuStreamQuery` and `cuEventQuery` otherwise return 900 and break it
    /// (driver 580). `Err` carries the driver's code where that mode cannot be had.
    pub(crate) fn relaxed<T>(&self, action: impl FnOnce() -> T) -> Result<T, Code> {
        let mut mode = 2; // CU_STREAM_CAPTURE_MODE_RELAXED
        // SAFETY: the mode goes in and out through a local int.
        match unsafe { (self.exchange_capture_mode)(&mut mode) } {
            code::SUCCESS => {}
            error => return Err(error),
        }
        let result = action();
        // SAFETY: `mode` holds what the thread had before.
        unsafe { (self.exchange_capture_mode)(&mut mode) };
        Ok(result)
    }

    /// The same for an action that returns a code.
    fn relaxed_call(&self, action: impl FnOnce() -> Code) -> Code {
        self.relaxed(action).unwrap_or_else(|error| error)
    }

    /// Pins `bytes` bytes at `start`, portable and mapped.
    ///
    /// # Safety
    /// The range must be mapped, and stay so until it is unregistered or its context is destroyed.
    pub(crate) unsafe fn register(&self, start: *mut u8, bytes: usize) -> Code {
        // CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
        // SAFETY: the caller's range.
        self.relaxed_call(|| unsafe { (self.mem_host_register)(start.cast(), bytes, 1 | 2) })
    }

    /// Unpins the range that was registered at `start`.
    ///
    /// # Safety
    /// No transfer may use the range any more.
    pub(crate) unsafe fn unregister(&self, start: *mut u8) -> Code {
        // SAFETY: the caller's promise.
        self.relaxed_call(|| unsafe { (self.mem_host_unregister)(start.cast()) })
    }

    /// The device's address of pinned memory.
    pub(crate) fn device_pointer(&self, host: *mut u8) -> Option<u64> {
        let mut device = 0;
        // SAFETY: the driver looks the host address up and writes to a local.
        let result = self.relaxed_call(|| unsafe {
            (self.mem_host_get_device_pointer)(&mut device, host.cast(), 0)
        });
        (result == code::SUCCESS).then_some(device)
    }

    /// A new event without timing, if the driver has everything that events need.
    pub(crate) fn create_event(&self) -> Option<usize> {
        let (Some(create), Some(_), Some(_)) =
            (self.event_create, self.event_destroy, self.event_query)
        else {
            return None;
        };
        let mut event = 0;
        // CU_EVENT_DISABLE_TIMING
        // SAFETY: the pointer is to a local.
        let result = self.relaxed_call(|| unsafe { create(&mut event, 2) });
        (result == code::SUCCESS).then_some(event)
    }

    /// The code of `cuEventQuery`. To be called within [`Driver::relaxed`].
    ///
    /// # Safety
    /// `event` must come from [`Driver::create_event`] and not be destroyed, nor its context.
    pub(crate) unsafe fn query_event(&self, event: usize) -> Code {
        match self.event_query {
            // SAFETY: the caller's promise.
            Some(query) => unsafe { query(event) },
            None => code::NOT_READY,
        }
    }

    /// Destroys an event.
    ///
    /// # Safety
    /// As [`Driver::query_event`]; the event is not used again.
    pub(crate) unsafe fn destroy_event(&self, event: usize) {
        if let Some(destroy) = self.event_destroy {
            // SAFETY: the caller's promise.
            self.relaxed_call(|| unsafe { destroy(event) });
        }
    }
}

/// A stream handle together with the functions that give its null value the right meaning.
#[derive(Clone, Copy)]
pub(crate) struct Stream<'a> {
    functions: &'a Streams,
    handle: usize,
    /// Whether each thread means another stream by this handle.
    is_the_threads_own: bool,
}

/// CU_STREAM_PER_THREAD.
const STREAM_PER_THREAD: usize = 2;

/// What tells a stream apart from every other one of its context, past ones included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamId {
    /// What `cuStreamGetId` says.
    Driver(u64),
    /// The default stream of the thread with this number. It is not known whether the driver's ids of two threads differ.
    Thread(u64),
}

impl Stream<'_> {
    /// False only if the driver says clearly that the stream is not capturing.
    ///
    /// On the legacy stream the driver answers 906 while any blocking stream captures.
    pub(crate) fn may_be_capturing(self) -> bool {
        let mut status = 0;
        // SAFETY: the handle is the application's, who passed it to a copy; the pointer is to a local.
        let result = unsafe { (self.functions.is_capturing)(self.handle, &mut status) };
        result != code::SUCCESS || status != 0
    }

    /// What tells this stream apart; `None` if the driver cannot say.
    pub(crate) fn id(self) -> Option<StreamId> {
        if self.is_the_threads_own {
            return threads::number().map(StreamId::Thread);
        }
        let mut id = 0;
        // SAFETY: as in `may_be_capturing`.
        let result = unsafe { (self.functions.id?)(self.handle, &mut id) };
        (result == code::SUCCESS).then_some(StreamId::Driver(id))
    }

    /// [`code::SUCCESS`] if the stream is idle, [`code::NOT_READY`] if it is not (or if asking would disturb a
    /// capture), else the error that a synchronise would return.
    pub(crate) fn query(self, driver: &Driver) -> Code {
        let mut status = 0;
        // SAFETY: as in `may_be_capturing`.
        match unsafe { (self.functions.is_capturing)(self.handle, &mut status) } {
            code::SUCCESS if status == 0 => {}
            code::SUCCESS | code::CAPTURE_FIRST..=code::CAPTURE_LAST => return code::NOT_READY,
            // A context that a kernel has broken says so to every call.
            error => return error,
        }
        // SAFETY: the handle is the application's, who passed it to a copy that has not returned.
        match driver.relaxed_call(|| unsafe { (self.functions.query)(self.handle) }) {
            code::CAPTURE_FIRST..=code::CAPTURE_LAST => code::NOT_READY,
            other => other,
        }
    }

    /// Waits for all work of the stream.
    pub(crate) fn synchronize(self, driver: &Driver) -> Code {
        // SAFETY: as in `query`.
        driver.relaxed_call(|| unsafe { (self.functions.synchronize)(self.handle) })
    }

    /// Enqueues a copy to the device.
    ///
    /// # Safety
    /// `host` must be pinned, hold its bytes, and stay unchanged until the copy is complete; `device` must be a range
    /// that the application may write by its contract with CUDA.
    pub(crate) unsafe fn copy_to_device(self, device: u64, host: *const u8, bytes: usize) -> Code {
        // SAFETY: the caller's promise.
        unsafe { (self.functions.htod_async)(device, host.cast(), bytes, self.handle) }
    }

    /// Enqueues a copy to the host.
    ///
    /// # Safety
    /// `host` must be pinned and untouched until the copy is complete; `device` must be a range that the application
    /// may read by its contract with CUDA.
    pub(crate) unsafe fn copy_to_host(self, host: *mut u8, device: u64, bytes: usize) -> Code {
        // SAFETY: the caller's promise.
        unsafe { (self.functions.dtoh_async)(host.cast(), device, bytes, self.handle) }
    }

    /// Whether rectangles can be enqueued.
    pub(crate) fn copies_rows(self) -> bool {
        self.functions.copy_2d_async.is_some()
    }

    /// Enqueues a copy of a rectangle; an error where [`Stream::copies_rows`] says no.
    ///
    /// # Safety
    /// As [`Stream::copy_to_device`] and [`Stream::copy_to_host`], for every row.
    pub(crate) unsafe fn copy_rows(self, copy: &Memcpy2D) -> Code {
        match self.functions.copy_2d_async {
            // SAFETY: the caller's promise; the driver reads the structure before it returns.
            Some(function) => unsafe { function(copy, self.handle) },
            None => code::INVALID_VALUE,
        }
    }

    /// Enqueues a write of `value` to `device`, after all that was enqueued before it. `None` if there is no such
    /// function.
    ///
    /// # Safety
    /// `device` must be the device's address of a pinned, 4-byte aligned word that lives until the write is complete.
    pub(crate) unsafe fn write_value(self, device: u64, value: u32) -> Option<Code> {
        // CU_STREAM_WRITE_VALUE_DEFAULT: with a barrier, so that the copies before it are visible first.
        // SAFETY: the caller's promise.
        Some(unsafe { (self.functions.write_value?)(self.handle, device, value, 0) })
    }

    /// Records `event`. `None` if there is no such function.
    ///
    /// # Safety
    /// `event` must be alive.
    pub(crate) unsafe fn record(self, event: usize) -> Option<Code> {
        // SAFETY: the caller's promise.
        Some(unsafe { (self.functions.event_record?)(event, self.handle) })
    }
}
