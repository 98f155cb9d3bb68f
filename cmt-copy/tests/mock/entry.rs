//! The driver's entry points, as the engine's table names them.

use core::ffi::c_void;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cmt_common::api::{DRIVER_FNS, DriverFn, HOOKED};

use cmt_copy::Memcpy2D;

use super::stream::Work;
use super::{
    CAPTURE_MODE, CURRENT, Context, DTOH_ASYNC, DTOH_ASYNC_PTSZ, HTOD_ASYNC, HTOD_ASYNC_PTSZ, Kind,
    NOT_READY, ROWS_ASYNC, ROWS_ASYNC_PTSZ, Range, Stream, books, fresh, range_of,
};

const DRIVER_COUNT: usize = DRIVER_FNS.len();

/// Where the mock maps pinned host memory in the device's address space: not where the host has it, so that mixing the
/// two up is noticed.
const DEVICE_VIEW: u64 = 1 << 60;

/// Originals and driver functions for `Driver::new`.
pub fn table() -> ([u64; HOOKED], [u64; DRIVER_COUNT]) {
    let mut originals = [0; HOOKED];
    originals[HTOD_ASYNC] = htod_async as *const () as u64;
    originals[HTOD_ASYNC_PTSZ] = htod_async_ptsz as *const () as u64;
    originals[DTOH_ASYNC] = dtoh_async as *const () as u64;
    originals[DTOH_ASYNC_PTSZ] = dtoh_async_ptsz as *const () as u64;
    originals[ROWS_ASYNC] = rows_async as *const () as u64;
    originals[ROWS_ASYNC_PTSZ] = rows_async_ptsz as *const () as u64;
    let mut driver = [0; DRIVER_COUNT];
    let entries: [(DriverFn, *const ()); 26] = [
        (DriverFn::CtxGetCurrent, ctx_get_current as *const ()),
        (DriverFn::CtxSetCurrent, ctx_set_current as *const ()),
        (DriverFn::CtxGetId, ctx_get_id as *const ()),
        (DriverFn::CtxGetDevice, ctx_get_device as *const ()),
        (DriverFn::DeviceGetAttribute, device_attribute as *const ()),
        (DriverFn::MemHostRegister, register as *const ()),
        (DriverFn::MemHostUnregister, unregister as *const ()),
        (
            DriverFn::MemHostGetDevicePointer,
            device_pointer as *const (),
        ),
        (DriverFn::PointerGetAttributes, attributes as *const ()),
        (DriverFn::StreamIsCapturing, is_capturing as *const ()),
        (
            DriverFn::StreamIsCapturingPtsz,
            is_capturing_ptsz as *const (),
        ),
        (
            DriverFn::ThreadExchangeStreamCaptureMode,
            exchange as *const (),
        ),
        (DriverFn::StreamWriteValue32, write_value as *const ()),
        (
            DriverFn::StreamWriteValue32Ptsz,
            write_value_ptsz as *const (),
        ),
        (DriverFn::StreamSynchronize, synchronize as *const ()),
        (
            DriverFn::StreamSynchronizePtsz,
            synchronize_ptsz as *const (),
        ),
        (DriverFn::StreamQuery, query as *const ()),
        (DriverFn::StreamQueryPtsz, query_ptsz as *const ()),
        (DriverFn::EventCreate, event_create as *const ()),
        (DriverFn::EventDestroy, event_destroy as *const ()),
        (DriverFn::EventRecord, event_record as *const ()),
        (DriverFn::EventRecordPtsz, event_record_ptsz as *const ()),
        (DriverFn::EventQuery, event_query as *const ()),
        (DriverFn::StreamGetId, stream_id as *const ()),
        (DriverFn::StreamGetIdPtsz, stream_id_ptsz as *const ()),
        (DriverFn::CtxGetFlags, ctx_get_flags as *const ()),
    ];
    for (function, address) in entries {
        driver[function as usize] = address as u64;
    }
    (originals, driver)
}

thread_local! {
    static PER_THREAD: RefCell<BTreeMap<usize, Arc<Stream>>> = const { RefCell::new(BTreeMap::new()) };
}

fn current() -> Option<Arc<Context>> {
    books().contexts.get(&CURRENT.get()).cloned()
}

/// The stream that a handle means: 1 and 2 are the driver's names for the legacy and the per-thread default stream.
fn stream(handle: usize, per_thread: bool) -> Option<Arc<Stream>> {
    let context = current()?;
    match handle {
        0 if per_thread => stream(2, true),
        0 | 1 => Some(Arc::clone(&context.legacy)),
        2 => PER_THREAD.with_borrow_mut(|own| {
            let own = own.entry(context.handle).or_insert_with(Stream::new);
            Some(Arc::clone(own))
        }),
        handle => books().streams.get(&handle).cloned(),
    }
}

/// The calling thread's default stream.
pub fn per_thread_stream() -> Option<Arc<Stream>> {
    stream(2, true)
}

fn known(address: u64) -> Option<(u64, Range)> {
    range_of(address, 1)
}

fn copy(to: u64, from: u64, bytes: usize, handle: usize, per_thread: bool, to_device: bool) -> i32 {
    let (Some(context), Some(stream)) = (current(), stream(handle, per_thread)) else {
        return 201;
    };
    context.dma_calls.fetch_add(1, Ordering::Relaxed);
    if context.copies_left.fetch_sub(1, Ordering::Relaxed) <= 0 {
        return context.copy_code.load(Ordering::Relaxed);
    }
    let (host, device) = if to_device { (from, to) } else { (to, from) };
    match range_of(device, bytes as u64) {
        Some((_, range)) if range.kind == Kind::Device => {}
        _ => return 1,
    }
    match known(host) {
        Some(_) => match range_of(host, bytes as u64) {
            Some((_, range)) if range.kind == Kind::Pinned => {
                stream.push(Work::Copy { to, from, bytes });
                0
            }
            _ => 1, // Leaves its registration.
        },
        None => {
            context.stock_copies.fetch_add(1, Ordering::Relaxed);
            context
                .stock_bytes
                .fetch_add(bytes as u64, Ordering::Relaxed);
            if to_device {
                let mut staged = vec![0; bytes];
                // SAFETY: the caller's memory, as for the real function.
                unsafe {
                    staged
                        .as_mut_ptr()
                        .copy_from_nonoverlapping(from as *const u8, bytes);
                }
                stream.push(Work::Staged { to, bytes: staged });
                0
            } else {
                stream.push(Work::Copy { to, from, bytes });
                stream.finish()
            }
        }
    }
}

extern "C" fn htod_async(to: u64, from: *const c_void, bytes: usize, handle: usize) -> i32 {
    copy(to, from as u64, bytes, handle, false, true)
}
extern "C" fn htod_async_ptsz(to: u64, from: *const c_void, bytes: usize, handle: usize) -> i32 {
    copy(to, from as u64, bytes, handle, true, true)
}
extern "C" fn dtoh_async(to: *mut c_void, from: u64, bytes: usize, handle: usize) -> i32 {
    copy(to as u64, from, bytes, handle, false, false)
}
extern "C" fn dtoh_async_ptsz(to: *mut c_void, from: u64, bytes: usize, handle: usize) -> i32 {
    copy(to as u64, from, bytes, handle, true, false)
}

/// A copy of a rectangle without offsets, between host and device.
fn copy_rows(copy: &Memcpy2D, handle: usize, per_thread: bool) -> i32 {
    let (Some(context), Some(stream)) = (current(), stream(handle, per_thread)) else {
        return 201;
    };
    context.dma_calls.fetch_add(1, Ordering::Relaxed);
    if context.copies_left.fetch_sub(1, Ordering::Relaxed) <= 0 {
        return context.copy_code.load(Ordering::Relaxed);
    }
    let (src, dst) = (&copy.src, &copy.dst);
    let to_device = (src.memory_type, dst.memory_type) == (1, 2);
    assert!(to_device || (src.memory_type, dst.memory_type) == (2, 1));
    assert_eq!([src.x_bytes, src.y, dst.x_bytes, dst.y], [0; 4]);
    let (host, device) = if to_device { (src, dst) } else { (dst, src) };
    let extent = |pitch: u64| pitch * (copy.height - 1) + copy.width_bytes;
    match range_of(device.device, extent(device.pitch)) {
        Some((_, range)) if range.kind == Kind::Device => {}
        _ => return 1,
    }
    let (width, height) = (copy.width_bytes, copy.height);
    match known(host.host) {
        Some(_) => match range_of(host.host, extent(host.pitch)) {
            Some((_, range)) if range.kind == Kind::Pinned => {
                stream.push(Work::Rows {
                    to: if to_device { dst.device } else { dst.host },
                    to_pitch: dst.pitch,
                    from: if to_device { src.host } else { src.device },
                    from_pitch: src.pitch,
                    width,
                    height,
                });
                0
            }
            _ => 1, // Leaves its registration.
        },
        None if to_device => {
            context.stock_copies.fetch_add(1, Ordering::Relaxed);
            context
                .stock_bytes
                .fetch_add(width * height, Ordering::Relaxed);
            for row in 0..height {
                let mut bytes = vec![0; width as usize];
                let from = (host.host + row * host.pitch) as *const u8;
                // SAFETY: the caller's memory, as for the real function.
                unsafe {
                    bytes
                        .as_mut_ptr()
                        .copy_from_nonoverlapping(from, width as usize);
                }
                let to = device.device + row * device.pitch;
                stream.push(Work::Staged { to, bytes });
            }
            0
        }
        None => 1,
    }
}

extern "C" fn rows_async(copy: *const Memcpy2D, handle: usize) -> i32 {
    // SAFETY: the engine passes a pointer to its own local.
    copy_rows(unsafe { &*copy }, handle, false)
}
extern "C" fn rows_async_ptsz(copy: *const Memcpy2D, handle: usize) -> i32 {
    // SAFETY: as above.
    copy_rows(unsafe { &*copy }, handle, true)
}

/// Writes `value` to `out`.
fn put<T>(out: *mut T, value: T) -> i32 {
    // SAFETY: the engine passes pointers to its own locals.
    unsafe { out.write(value) };
    0
}

extern "C" fn ctx_get_current(out: *mut usize) -> i32 {
    put(out, CURRENT.get())
}
extern "C" fn ctx_set_current(handle: usize) -> i32 {
    let alive = |context: &Arc<Context>| context.alive.load(Ordering::SeqCst);
    if handle != 0 && !books().contexts.get(&handle).is_some_and(alive) {
        return 709;
    }
    CURRENT.set(handle);
    0
}
extern "C" fn ctx_get_id(handle: usize, out: *mut u64) -> i32 {
    match books().contexts.get(&handle) {
        Some(context) if context.alive.load(Ordering::SeqCst) => {
            match context.id_code.load(Ordering::SeqCst) {
                0 => put(out, context.id),
                code => code,
            }
        }
        _ => 709,
    }
}
extern "C" fn ctx_get_flags(out: *mut u32) -> i32 {
    current().map_or(201, |context| {
        put(out, context.flags.load(Ordering::Relaxed))
    })
}
extern "C" fn ctx_get_device(out: *mut i32) -> i32 {
    put(out, 0)
}
extern "C" fn device_attribute(out: *mut i32, attribute: i32, _device: i32) -> i32 {
    let value = match current() {
        Some(context) if attribute == 100 => context.host_page_tables.load(Ordering::Relaxed),
        _ => 0,
    };
    put(out, value)
}

fn pin(start: u64, bytes: usize, context: &Context) {
    let range = Range {
        bytes,
        kind: Kind::Pinned,
        context: context.handle,
    };
    books().ranges.insert(start, range);
}

fn note_capture_mode(context: &Context) {
    if CAPTURE_MODE.get() != 2 {
        context.unrelaxed.fetch_add(1, Ordering::Relaxed);
    }
}

/// The same for functions that do not need the context otherwise.
fn note_current_capture_mode() {
    if let Some(context) = current() {
        note_capture_mode(&context);
    }
}

extern "C" fn register(start: *mut c_void, bytes: usize, _flags: u32) -> i32 {
    let Some(context) = current() else { return 201 };
    note_capture_mode(&context);
    context.register_calls.fetch_add(1, Ordering::Relaxed);
    match context.register_code.load(Ordering::Relaxed) {
        0 => {}
        code => return code,
    }
    if bytes as u64 > context.register_most.load(Ordering::Relaxed) {
        return 2;
    }
    pin(start as u64, bytes, &context);
    0
}
extern "C" fn unregister(start: *mut c_void) -> i32 {
    let Some(context) = current() else { return 201 };
    note_capture_mode(&context);
    match books().ranges.remove(&(start as u64)) {
        Some(_) => 0,
        None => 713,
    }
}
extern "C" fn device_pointer(out: *mut u64, host: *mut c_void, _flags: u32) -> i32 {
    note_current_capture_mode();
    match known(host as u64) {
        Some((_, range)) if range.kind == Kind::Pinned => put(out, host as u64 + DEVICE_VIEW),
        _ => 1,
    }
}
extern "C" fn attributes(
    count: u32,
    names: *const i32,
    data: *const *mut c_void,
    address: u64,
) -> i32 {
    let found = known(address);
    for index in 0..count as usize {
        // SAFETY: the engine passes `count` names and as many pointers to locals of the types below.
        unsafe {
            let out = *data.add(index);
            let (start, range) = match found {
                Some((start, range)) => (start, Some(range)),
                None => (0, None),
            };
            match *names.add(index) {
                2 => out
                    .cast::<u32>()
                    .write(match range.map(|range| range.kind) {
                        None => 0,
                        Some(Kind::Pinned) => 1,
                        Some(Kind::Device | Kind::Managed) => 2,
                    }),
                8 => out
                    .cast::<bool>()
                    .write(range.is_some_and(|range| range.kind == Kind::Managed)),
                9 => out
                    .cast::<i32>()
                    .write(if range.is_some() { 0 } else { -2 }),
                11 => out.cast::<u64>().write(start),
                1 => out
                    .cast::<usize>()
                    .write(range.map_or(0, |range| range.context)),
                6 => out
                    .cast::<bool>()
                    .write(books().sync_memops.contains(&start)),
                12 => out
                    .cast::<usize>()
                    .write(range.map_or(0, |range| range.bytes)),
                _ => return 1,
            }
        }
    }
    0
}

fn capturing(handle: usize, per_thread: bool, out: *mut i32) -> i32 {
    let (Some(context), Some(stream)) = (current(), stream(handle, per_thread)) else {
        return 201;
    };
    let is_legacy = Arc::ptr_eq(&stream, &context.legacy);
    if is_legacy && context.legacy_captures.load(Ordering::Relaxed) {
        return 906;
    }
    if context.says_what_broke_it.load(Ordering::Relaxed) {
        match stream.error.load(Ordering::SeqCst) {
            0 => {}
            code => return code,
        }
    }
    put(out, i32::from(stream.capturing.load(Ordering::Relaxed)))
}
extern "C" fn is_capturing(handle: usize, out: *mut i32) -> i32 {
    capturing(handle, false, out)
}
extern "C" fn is_capturing_ptsz(handle: usize, out: *mut i32) -> i32 {
    capturing(handle, true, out)
}
extern "C" fn exchange(mode: *mut i32) -> i32 {
    // SAFETY: the engine passes a local.
    let wanted = unsafe { mode.read() };
    put(mode, CAPTURE_MODE.replace(wanted))
}

fn write_word(handle: usize, per_thread: bool, to: u64, value: u32) -> i32 {
    let (Some(context), Some(stream)) = (current(), stream(handle, per_thread)) else {
        return 201;
    };
    match context.write_value_code.load(Ordering::Relaxed) {
        0 => {}
        code if context.writes_left.fetch_sub(1, Ordering::Relaxed) <= 0 => return code,
        _ => {}
    }
    let host = to.wrapping_sub(DEVICE_VIEW);
    match range_of(host, 4) {
        Some((_, range)) if range.kind == Kind::Pinned => {
            if !context.drop_writes.load(Ordering::Relaxed) {
                stream.push(Work::Write { to: host, value });
            }
            0
        }
        _ => 1,
    }
}
extern "C" fn write_value(handle: usize, to: u64, value: u32, _flags: u32) -> i32 {
    write_word(handle, false, to, value)
}
extern "C" fn write_value_ptsz(handle: usize, to: u64, value: u32, _flags: u32) -> i32 {
    write_word(handle, true, to, value)
}

fn finish(handle: usize, per_thread: bool) -> i32 {
    let (Some(context), Some(stream)) = (current(), stream(handle, per_thread)) else {
        return 201;
    };
    note_capture_mode(&context);
    match context.synchronize_code.load(Ordering::Relaxed) {
        0 => stream.finish(),
        code => code,
    }
}
extern "C" fn synchronize(handle: usize) -> i32 {
    finish(handle, false)
}
extern "C" fn synchronize_ptsz(handle: usize) -> i32 {
    finish(handle, true)
}

fn ask(handle: usize, per_thread: bool) -> i32 {
    note_current_capture_mode();
    let Some(stream) = stream(handle, per_thread) else {
        return 201;
    };
    match stream.error.load(Ordering::SeqCst) {
        0 if stream.is_idle() => 0,
        0 => NOT_READY,
        code => code,
    }
}
extern "C" fn query(handle: usize) -> i32 {
    ask(handle, false)
}
extern "C" fn query_ptsz(handle: usize) -> i32 {
    ask(handle, true)
}

fn id(handle: usize, per_thread: bool, out: *mut u64) -> i32 {
    if handle == 2 || (handle == 0 && per_thread) {
        return put(out, 2); // The same for the streams of all threads: nobody may rely on them to differ.
    }
    stream(handle, per_thread).map_or(201, |stream| put(out, stream.id))
}
extern "C" fn stream_id(handle: usize, out: *mut u64) -> i32 {
    id(handle, false, out)
}
extern "C" fn stream_id_ptsz(handle: usize, out: *mut u64) -> i32 {
    id(handle, true, out)
}

extern "C" fn event_create(out: *mut usize, _flags: u32) -> i32 {
    let Some(context) = current() else { return 201 };
    note_capture_mode(&context);
    match context.event_code.load(Ordering::Relaxed) {
        0 => {}
        code => return code,
    }
    let event = fresh() as usize;
    books()
        .events
        .insert(event, Arc::new(AtomicBool::new(true)));
    put(out, event)
}
extern "C" fn event_destroy(event: usize) -> i32 {
    note_current_capture_mode();
    i32::from(books().events.remove(&event).is_none())
}
fn record(event: usize, handle: usize, per_thread: bool) -> i32 {
    let done = Arc::new(AtomicBool::new(false));
    let (Some(context), Some(stream)) = (current(), stream(handle, per_thread)) else {
        return 201;
    };
    match context.record_code.load(Ordering::Relaxed) {
        0 => {}
        code => return code,
    }
    match books().events.get_mut(&event) {
        // A new record replaces the old one, as with real events.
        Some(slot) => *slot = Arc::clone(&done),
        None => return 400,
    }
    stream.push(Work::Record(done));
    0
}
extern "C" fn event_record(event: usize, handle: usize) -> i32 {
    record(event, handle, false)
}
extern "C" fn event_record_ptsz(event: usize, handle: usize) -> i32 {
    record(event, handle, true)
}
extern "C" fn event_query(event: usize) -> i32 {
    note_current_capture_mode();
    match books().events.get(&event) {
        Some(done) if done.load(Ordering::Acquire) => 0,
        Some(_) => NOT_READY,
        None => 400,
    }
}
