//! The replacements of the hooked functions: each copy goes to the engine or to the original function.
#![expect(unsafe_code, reason = "calls foreign functions by address")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cmt_common::api::{COPY_FNS, HOOKED, Shape};
use cmt_common::control::{CPU_WORDS, ClassCounters, Control, PassReason, Plan, flag, size_class};
use cmt_copy::{Driver, Engine, Memcpy2D, Outcome, Request, Told};

use crate::launch;

/// How the original of hooked function `i` is called; 0 before it is prepared.
static ORIGINALS: [AtomicU64; HOOKED] = [const { AtomicU64::new(0) }; HOOKED];
/// True while copies may be staged.
static ENABLED: AtomicBool = AtomicBool::new(false);
/// Length from which a call of hooked function `i` enters the engine. Shorter ones, the most frequent, cost no more than
/// this look and a counter.
static ENTERS_FROM_BYTES: [AtomicUsize; HOOKED] = [const { AtomicUsize::new(usize::MAX) }; HOOKED];
/// Calls that are inside the engine now, on cache lines of its own: every call reads what stands around it.
static IN_FLIGHT: Line<AtomicU64> = Line(AtomicU64::new(0));
/// The engine; null while there is none.
static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(std::ptr::null_mut());
/// The control block, for counting.
static CONTROL: AtomicPtr<Control> = AtomicPtr::new(std::ptr::null_mut());
/// A page that the kernel clears in forked children; its first byte is 1 here.
static OURS: AtomicPtr<AtomicBool> = AtomicPtr::new(std::ptr::null_mut());

/// Keeps a word that is written often away from those that are read often (two cache lines, fetched in pairs).
#[repr(align(128))]
struct Line<T>(T);

type SyncCopy = unsafe extern "C" fn(u64, u64, usize) -> i32;
type AsyncCopy = unsafe extern "C" fn(u64, u64, usize, usize) -> i32;
type Copy2D = unsafe extern "C" fn(*const Memcpy2D) -> i32;
type AsyncCopy2D = unsafe extern "C" fn(*const Memcpy2D, usize) -> i32;

macro_rules! replacements {
    ($($index:literal => $kind:ident),* $(,)?) => {
        /// Address of the replacement of hooked function `index`.
        pub fn replacement(index: usize) -> u64 {
            match index {
                $($index => replacements!(@ $kind $index),)*
                _ => unreachable!("only hooked functions have replacements"),
            }
        }
    };
    (@ sync $index:literal) => { sync_copy::<$index> as *const () as u64 };
    (@ stream $index:literal) => { stream_copy::<$index> as *const () as u64 };
    (@ sync_2d $index:literal) => { sync_copy_2d::<$index> as *const () as u64 };
    (@ stream_2d $index:literal) => { stream_copy_2d::<$index> as *const () as u64 };
}

replacements! {
    0 => sync, 1 => sync, 2 => sync, 3 => sync, 4 => stream, 5 => stream,
    6 => stream, 7 => stream, 8 => sync, 9 => sync, 10 => stream, 11 => stream,
    12 => sync_2d, 13 => sync_2d, 14 => sync_2d, 15 => sync_2d, 16 => stream_2d, 17 => stream_2d,
}

const _: () = {
    let mut index = 0;
    while index < HOOKED {
        let stream = matches!(index, 4..=7 | 10..=11 | 16..=17);
        let of_rows = matches!(COPY_FNS[index].shape, Shape::DriverStruct2D);
        assert!(
            COPY_FNS[index].stream.is_some() == stream && of_rows == (index >= 12),
            "a replacement has another signature than its function"
        );
        index += 1;
    }
};

/// The original function's turn.
enum Original {
    Plain,
    /// It is to be timed, for the engine's guard: a copy of so many bytes, to the host or not.
    Timed {
        to_host: bool,
        bytes: usize,
    },
    /// The engine is to know when it has returned.
    Paced {
        to_host: bool,
    },
}

impl Original {
    #[inline]
    fn call(self, original: impl FnOnce() -> i32) -> i32 {
        let (to_host, bytes) = match self {
            Self::Plain => return original(),
            Self::Paced { to_host } => {
                let code = original();
                cmt_copy::note_paced(to_host);
                return code;
            }
            Self::Timed { to_host, bytes } => (to_host, bytes),
        };
        let start = Instant::now();
        let code = original();
        let took = start.elapsed();
        // As in `enter`: the engine is freed only when nobody is in here.
        IN_FLIGHT.0.fetch_add(1, Ordering::SeqCst);
        if code == 0
            && ENABLED.load(Ordering::SeqCst)
            // SAFETY: the engine is freed only after `ENABLED` was cleared and `IN_FLIGHT` has reached 0.
            && let Some(engine) = unsafe { ENGINE.load(Ordering::Acquire).as_ref() }
        {
            engine.note_stock(to_host, bytes, took);
            if let Some(control) = control() {
                tell_compared(engine, control, to_host, bytes);
            }
        }
        IN_FLIGHT.0.fetch_sub(1, Ordering::Release);
        if cmt_copy::is_paced(to_host, bytes as u64) {
            cmt_copy::note_paced(to_host);
        }
        code
    }
}

extern "C" fn sync_copy<const F: usize>(dst: u64, src: u64, bytes: usize) -> i32 {
    stage(F, dst, src, bytes, 0).unwrap_or_else(|turn| {
        let original = ORIGINALS[F].load(Ordering::Relaxed) as *const ();
        // SAFETY: the hook was committed after its trampoline was stored, and the function has this signature.
        turn.call(|| unsafe {
            std::mem::transmute::<*const (), SyncCopy>(original)(dst, src, bytes)
        })
    })
}

extern "C" fn stream_copy<const F: usize>(dst: u64, src: u64, bytes: usize, stream: usize) -> i32 {
    stage(F, dst, src, bytes, stream).unwrap_or_else(|turn| {
        let original = ORIGINALS[F].load(Ordering::Relaxed) as *const ();
        // SAFETY: as in `sync_copy`.
        turn.call(|| unsafe {
            std::mem::transmute::<*const (), AsyncCopy>(original)(dst, src, bytes, stream)
        })
    })
}

extern "C" fn sync_copy_2d<const F: usize>(copy: *const Memcpy2D) -> i32 {
    // SAFETY: the application's structure, which the original function would read, too.
    unsafe { stage_2d(F, copy, 0) }.unwrap_or_else(|turn| {
        let original = ORIGINALS[F].load(Ordering::Relaxed) as *const ();
        // SAFETY: as in `sync_copy`.
        turn.call(|| unsafe { std::mem::transmute::<*const (), Copy2D>(original)(copy) })
    })
}

extern "C" fn stream_copy_2d<const F: usize>(copy: *const Memcpy2D, stream: usize) -> i32 {
    // SAFETY: as in `sync_copy_2d`.
    unsafe { stage_2d(F, copy, stream) }.unwrap_or_else(|turn| {
        let original = ORIGINALS[F].load(Ordering::Relaxed) as *const ();
        // SAFETY: as in `sync_copy`.
        turn.call(|| unsafe {
            std::mem::transmute::<*const (), AsyncCopy2D>(original)(copy, stream)
        })
    })
}

/// Stages a copy and returns its result, or says how the original function is to do it.
#[inline]
fn stage(
    function: usize,
    dst: u64,
    src: u64,
    bytes: usize,
    stream: usize,
) -> Result<i32, Original> {
    let request = Request {
        function,
        dst,
        src,
        bytes,
        stream,
    };
    enter(enabled()?, function, bytes, |engine| {
        // SAFETY: the caller's copy, under the caller's own CUDA contract.
        unsafe { engine.copy_and_tell(&request) }
    })
}

/// The same for a rectangle.
///
/// # Safety
/// `copy` must be null or lead to a structure.
unsafe fn stage_2d(function: usize, copy: *const Memcpy2D, stream: usize) -> Result<i32, Original> {
    let control = enabled()?;
    // Not looked at where the original function might not do so either.
    if copy.is_null() {
        return Err(Original::Plain);
    }
    let control = match is_ours() {
        true => control,
        false => begun_in_child(control)?,
    };
    // SAFETY: the caller's promise. A copy of it, so that nobody changes it between two looks.
    let copy = unsafe { copy.read_unaligned() };
    enter(control, function, copy.bytes(), |engine| {
        // SAFETY: the caller's copy, under the caller's own CUDA contract.
        unsafe { engine.copy_2d_and_tell(function, &copy, stream) }
    })
}

/// The control block, while copies may be staged.
#[inline]
fn enabled() -> Result<&'static Control, Original> {
    let control = control().or_else(begun).ok_or(Original::Plain)?;
    if !ENABLED.load(Ordering::Relaxed) {
        pass(control, PassReason::Disabled)?;
    }
    Ok(control)
}

fn control() -> Option<&'static Control> {
    // SAFETY: once set, the pointer is valid for the life of the process.
    unsafe { CONTROL.load(Ordering::Acquire).as_ref() }
}

/// The control block of a process that `cmt tune` has started, once its first copy has begun to stage.
#[cold]
fn begun() -> Option<&'static Control> {
    launch::begin().then(control)?
}

/// The same in a forked child, to which its parent's helpers are lost, and its CUDA: it can have begun none before.
#[cold]
fn begun_in_child(parents: &Control) -> Result<&'static Control, Original> {
    match begun() {
        Some(control) => Ok(control),
        None => Err(pass(parents, PassReason::Disabled)
            .err()
            .unwrap_or(Original::Plain)),
    }
}

/// Asks the engine, if it is to be asked. It tells, too, whether the copy went to the host.
#[inline]
fn enter(
    control: &'static Control,
    function: usize,
    bytes: usize,
    ask: impl FnOnce(&Engine) -> Told,
) -> Result<i32, Original> {
    if bytes < ENTERS_FROM_BYTES[function].load(Ordering::Relaxed) {
        return pass(control, PassReason::BelowCutOver);
    }
    let control = match is_ours() {
        true => control,
        false => begun_in_child(control)?,
    };
    // From here on `disable` waits for us. The second look makes sure that it has seen us.
    IN_FLIGHT.0.fetch_add(1, Ordering::SeqCst);
    let result = if ENABLED.load(Ordering::SeqCst) {
        ask_enabled(control, bytes as u64, ask)
    } else {
        pass(control, PassReason::Disabled)
    };
    IN_FLIGHT.0.fetch_sub(1, Ordering::Release);
    result
}

fn ask_enabled(
    control: &Control,
    bytes: u64,
    ask: impl FnOnce(&Engine) -> Told,
) -> Result<i32, Original> {
    // SAFETY: the engine is freed only after `ENABLED` was cleared and `IN_FLIGHT` has reached 0.
    let engine = unsafe { ENGINE.load(Ordering::Acquire).as_ref() }.ok_or(Original::Plain)?;
    let told = catch_unwind(AssertUnwindSafe(|| ask(engine)));
    let counters = &control.counters;
    let told = match told {
        Ok(told) => told,
        Err(_) => {
            // Nothing is known of the engine any more; stock copies the same bytes to the same place.
            ENABLED.store(false, Ordering::SeqCst);
            counters.panics.fetch_add(1, Ordering::Relaxed);
            return Err(Original::Plain);
        }
    };
    let to_host = told.to_host;
    match told.outcome {
        Outcome::Staged(code) => {
            let direction = usize::from(to_host);
            if code == 0 {
                counters.staged_calls[direction].fetch_add(1, Ordering::Relaxed);
                counters.staged_bytes[direction].fetch_add(bytes, Ordering::Relaxed);
                let class = class_of(control, to_host, bytes);
                class.bytes.fetch_add(bytes, Ordering::Relaxed);
                if told.is_timed {
                    tell_compared(engine, control, to_host, bytes as usize);
                }
            } else {
                counters.staged_errors[direction].fetch_add(1, Ordering::Relaxed);
            }
            counters
                .pinned_bytes
                .store(engine.pinned_bytes(), Ordering::Relaxed);
            counters.helpers.store(engine.helpers(), Ordering::Relaxed);
            Ok(code)
        }
        Outcome::Pass(PassReason::Sampled) => {
            let _ = pass(control, PassReason::Sampled);
            let bytes = bytes as usize;
            Err(Original::Timed { to_host, bytes })
        }
        Outcome::Pass(reason) if told.is_paced => {
            pass(control, reason).map_err(|_| Original::Paced { to_host })
        }
        Outcome::Pass(reason) => pass(control, reason),
    }
}

/// Tells the host what the engine's guard has found out of such copies.
fn tell_compared(engine: &Engine, control: &Control, to_host: bool, bytes: usize) {
    if let Some([stock, staged]) = engine.compared(to_host, bytes) {
        let class = class_of(control, to_host, bytes as u64);
        class.stock_ns_per_mib.store(stock, Ordering::Relaxed);
        class.staged_ns_per_mib.store(staged, Ordering::Relaxed);
    }
}

fn class_of(control: &Control, to_host: bool, bytes: u64) -> &ClassCounters {
    &control.counters.classes[usize::from(to_host)][size_class(bytes)]
}

fn pass(control: &Control, reason: PassReason) -> Result<i32, Original> {
    control.counters.passed[reason as usize].fetch_add(1, Ordering::Relaxed);
    Err(Original::Plain)
}

/// False in a forked child, which has no helpers and whose CUDA does not work either.
fn is_ours() -> bool {
    // SAFETY: the page is never unmapped.
    unsafe { OURS.load(Ordering::Relaxed).as_ref() }
        .is_some_and(|ours| ours.load(Ordering::Relaxed))
}

/// Stores how the original of hooked function `index` is called.
pub fn set_original(index: usize, trampoline: u64) {
    ORIGINALS[index].store(trampoline, Ordering::Release);
}

/// Forgets the engine of the process that this one was forked from: what it has is that process's. No copy of ours is in it.
pub fn forget_parent() {
    ENABLED.store(false, Ordering::SeqCst);
    ENGINE.store(std::ptr::null_mut(), Ordering::Release);
    IN_FLIGHT.0.store(0, Ordering::SeqCst);
}

/// Starts an engine with `plan`; copies are staged from now on.
pub fn enable(control: &'static Control, plan: Plan) -> Result<(), String> {
    mark_ours()?;
    CONTROL.store((&raw const *control).cast_mut(), Ordering::Release);
    control.counters.clear();
    let guarded = control.flags.load(Ordering::Acquire) & flag::UNGUARDED == 0;
    // SAFETY: only this thread frees the engine.
    let left = unsafe { ENGINE.load(Ordering::Acquire).as_ref() };
    if left.is_some_and(|engine| engine.is_guarded() != guarded) {
        stop()?;
    }
    if ENGINE.load(Ordering::Acquire).is_null() {
        let originals = std::array::from_fn(|index| ORIGINALS[index].load(Ordering::Acquire));
        let driver = std::array::from_fn(|index| control.driver[index].load(Ordering::Acquire));
        // SAFETY: the host read the addresses from libcuda's symbol table, and the trampolines are sealed.
        let driver =
            unsafe { Driver::new(&originals, &driver) }.map_err(|error| error.to_string())?;
        let most_threads = control.max_threads.load(Ordering::Acquire);
        let engine = Engine::new(driver, plan, most_threads);
        let engine = if guarded { engine.guarded() } else { engine };
        engine.set_helper_cpus(helper_cpus(control));
        note_cut_overs(&engine);
        ENGINE.store(Box::into_raw(Box::new(engine)), Ordering::Release);
    } else {
        set_plan(control, plan);
    }
    ENABLED.store(true, Ordering::SeqCst);
    Ok(())
}

/// Gives the engine another plan.
pub fn set_plan(control: &Control, plan: Plan) {
    // SAFETY: only this thread frees the engine.
    if let Some(engine) = unsafe { ENGINE.load(Ordering::Acquire).as_ref() } {
        engine.set_plan(plan);
        engine.set_helper_cpus(helper_cpus(control));
        note_cut_overs(engine);
    }
}

fn helper_cpus(control: &Control) -> [u64; CPU_WORDS] {
    std::array::from_fn(|word| control.helper_cpus[word].load(Ordering::Acquire))
}

fn note_cut_overs(engine: &Engine) {
    for (function, from_bytes) in ENTERS_FROM_BYTES.iter().enumerate() {
        from_bytes.store(engine.cut_over(function), Ordering::Relaxed);
    }
}

/// Hooks pass through from now on; true once no call is inside the engine, false if one is still there at the limit.
pub fn disable(limit: Duration) -> bool {
    ENABLED.store(false, Ordering::SeqCst);
    let deadline = Instant::now() + limit;
    while IN_FLIGHT.0.load(Ordering::SeqCst) != 0 {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    true
}

/// Stops the engine's helpers and frees its pinned memory.
pub fn stop() -> Result<(), String> {
    if !disable(Duration::from_secs(1)) {
        return Err("copies are in flight".to_owned());
    }
    let engine = ENGINE.swap(std::ptr::null_mut(), Ordering::AcqRel);
    // SAFETY: it came from a Box, is no longer reachable, and `disable` has seen no call inside it.
    let Some(engine) = (unsafe { engine.as_mut() }).map(|engine| unsafe { Box::from_raw(engine) })
    else {
        return Ok(());
    };
    engine.shutdown();
    // SAFETY: as in `stage`.
    if let Some(control) = unsafe { CONTROL.load(Ordering::Acquire).as_ref() } {
        control
            .counters
            .pinned_bytes
            .store(engine.pinned_bytes(), Ordering::Relaxed);
        control
            .counters
            .helpers
            .store(engine.helpers(), Ordering::Relaxed);
    }
    Ok(())
}

/// Maps the page by which a forked child is told from us (`MADV_WIPEONFORK`, Linux 4.14).
fn mark_ours() -> Result<(), String> {
    // SAFETY: the page is never unmapped.
    if let Some(ours) = unsafe { OURS.load(Ordering::Acquire).as_ref() } {
        ours.store(true, Ordering::Relaxed);
        return Ok(());
    }
    const PAGE: usize = 4096;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice; it is filled before it is published.
    unsafe {
        let page = libc::mmap(
            std::ptr::null_mut(),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if page == libc::MAP_FAILED || libc::madvise(page, PAGE, libc::MADV_WIPEONFORK) != 0 {
            return Err(format!(
                "marking forked children: {}",
                std::io::Error::last_os_error()
            ));
        }
        let ours = page.cast::<AtomicBool>();
        (*ours).store(true, Ordering::Relaxed);
        OURS.store(ours, Ordering::Release);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn original(_: u64, _: u64, bytes: usize) -> i32 {
        bytes as i32
    }

    #[test]
    fn a_call_below_the_cut_over_goes_to_the_original_without_entering_the_engine() {
        let layout = std::alloc::Layout::new::<Control>();
        // SAFETY: a control block is plain numbers, for which zeros are valid; it is never freed.
        let control: &'static Control = unsafe { &*std::alloc::alloc_zeroed(layout).cast() };
        let address = original as *const () as u64;
        control
            .driver
            .iter()
            .for_each(|function| function.store(address, Ordering::Relaxed));
        (0..HOOKED).for_each(|index| set_original(index, address));
        let passed =
            |reason: PassReason| control.counters.passed[reason as usize].load(Ordering::Relaxed);
        let mut plan = Plan::NONE;
        enable(control, plan).expect("every function is there");
        assert_eq!(sync_copy::<0>(1, 2, 1 << 20), 1 << 20, "no plan");
        plan.htod[0].up_to_bytes = 999;
        plan.htod[1] = cmt_copy::PlanRow {
            up_to_bytes: u64::MAX,
            threads: 2,
            ..plan.htod[0]
        };
        set_plan(control, plan);
        // Without an engine, whoever would ask it counts nothing.
        let engine = ENGINE.swap(std::ptr::null_mut(), Ordering::AcqRel);
        assert_eq!(sync_copy::<0>(1, 2, 999), 999);
        assert_eq!(sync_copy::<2>(1, 2, 1 << 20), 1 << 20, "the other way");
        ENGINE.store(engine, Ordering::Release);
        assert_eq!(passed(PassReason::BelowCutOver), 3);
        // What the engine says of a driver whose every function fails.
        assert_eq!(sync_copy::<0>(1, 2, 2 << 20), 2 << 20);
        assert_eq!(passed(PassReason::NotHostToDevice), 1);
        assert_eq!(sync_copy::<0>(1, 2, 1000), 1000, "short, the first");
        assert_eq!(passed(PassReason::Alone), 1);
        // Downloads in a row are looked into: what came before was noted as such.
        (plan.dtoh[0], plan.dtoh[1]) = (plan.htod[0], plan.htod[1]);
        set_plan(control, plan);
        let is_looked_into = (0..100_000).any(|_| {
            sync_copy::<2>(1, 2, 64 << 10);
            passed(PassReason::NotHostToDevice) > 1
        });
        assert!(is_looked_into);
        assert!(disable(Duration::ZERO));
        assert_eq!(sync_copy::<0>(1, 2, 999), 999);
        assert_eq!(passed(PassReason::Disabled), 1);
        stop().expect("nothing is in flight");
    }
}
