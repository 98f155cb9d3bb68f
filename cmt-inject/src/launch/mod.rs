//! How the payload comes into a program that `cmt tune` starts: preloaded, it waits for libcuda.
//!
//! A library that needs none itself (`preload.s`, by `LD_PRELOAD`) loads it before the program's first instruction. It exports
//! nothing that a program asks for, and does nothing but watch the loader, until libcuda is mapped. Then nobody can be in
//! libcuda's code yet, and its copy functions are patched on the spot: no thread has to be stopped, and no other process is
//! needed. With its first copy a process tells `cmt tune` of itself and gets the plan; where nobody answers, its copies stay
//! with the original functions.
//!
//! Nothing is here that runs in a process that `cmt attach` has come to.
#![expect(
    unsafe_code,
    reason = "memory that is shared with the host, and a constructor"
)]

mod calm;
mod code;
mod host;
mod loader;
mod symbols;

use std::alloc::{Layout, alloc_zeroed};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cmt_common::api::{COPY_FNS, DRIVER_FNS, HOOKED};
use cmt_common::control::{Control, MAGIC, VERSION, boot, hook, state};

use crate::hook::builtin::Builtin;
use crate::{cmt_payload_main, route, service};

/// No copy waits longer for the plan; later ones have it when it comes.
const PATIENCE: Duration = Duration::from_secs(2);
const PAGE: u64 = 4096;

/// What is known of libcuda once its functions are patched, as it stands in every process that begins to copy; null before.
static TEMPLATE: AtomicPtr<Control> = AtomicPtr::new(std::ptr::null_mut());
/// The libcudas that were mapped when the loader said so last.
static MAPPED: Mutex<Mapped> = Mutex::new(Mapped {
    bases: Vec::new(),
    patched: None,
});
/// The process that has begun last, or has tried: a forked child finds its parent's id.
static BEGUN_BY: AtomicI32 = AtomicI32::new(0);

struct Mapped {
    bases: Vec<u64>,
    /// The one whose functions are patched.
    patched: Option<u64>,
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    if !host::is_wanted() {
        return;
    }
    calm::within(|| {
        // This library has its own copy of std, so the hook is ours alone: a panic here must not print.
        std::panic::set_hook(Box::new(|_| {}));
        if let Some(libraries) = loader::watch(loader_has_changed) {
            look(libraries, is_alone());
        }
    });
}

/// Whether this thread is the only one, as far as can be seen: a library's constructor may have started others, and those may
/// be anywhere in a libcuda that the program is linked to.
fn is_alone() -> bool {
    std::fs::read_dir("/proc/self/task").map_or(true, |threads| threads.count() == 1)
}

/// Runs on the thread that loads or unloads a library, which holds the loader's lock.
fn loader_has_changed(libraries: loader::Libraries) {
    calm::within(|| look(libraries, true));
}

/// Patches a libcuda that was not there before, if nobody can be in it and no other is patched.
fn look(libraries: loader::Libraries, nobody_is_in_it: bool) {
    // A process that has begun keeps what it knows.
    if BEGUN_BY.load(Ordering::Acquire) != 0 {
        return;
    }
    let Ok(mut mapped) = MAPPED.try_lock() else {
        return;
    };
    let found: Vec<_> = libraries
        .filter(|library| library.file_name().starts_with(b"libcuda.so"))
        .collect();
    let is_there = |base: &u64| found.iter().any(|library| library.base() == *base);
    mapped.patched = mapped.patched.filter(is_there);
    let new = found
        .iter()
        .find(|library| !mapped.bases.contains(&library.base()));
    if let Some(cuda) = new
        && nobody_is_in_it
        && mapped.patched.is_none()
        && calm::may_write_files()
    {
        let _kept = calm::StandardDescriptors::keep();
        mapped.patched = patch(cuda).then(|| cuda.base());
    }
    mapped.bases = found.iter().map(|library| library.base()).collect();
}

/// False if nothing was patched.
fn patch(cuda: &loader::Library) -> bool {
    // SAFETY: a control block is plain numbers, for which zeros are valid; it is never freed.
    let Some(control) = (unsafe {
        alloc_zeroed(Layout::new::<Control>())
            .cast::<Control>()
            .as_ref()
    }) else {
        return false;
    };
    symbols::each(cuda, |name, address, size| {
        let hooked = &COPY_FNS[..HOOKED];
        if let Some(index) = hooked
            .iter()
            .position(|function| function.name.as_bytes() == name)
        {
            let slot = &control.hooks[index];
            slot.address.store(address, Ordering::Relaxed);
            slot.size.store(size, Ordering::Relaxed);
        } else if let Some(index) = DRIVER_FNS
            .iter()
            .position(|function| function.as_bytes() == name)
        {
            control.driver[index].store(address, Ordering::Relaxed);
        }
    });
    if service::prepare_all(control, &mut Builtin::default()).is_err() {
        return false;
    }
    let mut patched = false;
    for slot in &control.hooks {
        if slot.status.load(Ordering::Relaxed) != hook::PREPARED {
            continue;
        }
        let (window, bytes) = service::patch(slot);
        // The host takes none for ours that lies in two pages.
        let in_one_page = window / PAGE == (window + bytes.len() as u64 - 1) / PAGE;
        if in_one_page && code::write(window, &bytes) {
            slot.committed.store(1, Ordering::Relaxed);
            patched = true;
        }
    }
    if patched {
        calm::note_filters();
        TEMPLATE.store((&raw const *control).cast_mut(), Ordering::Release);
    }
    patched
}

/// How far a process has come that begins.
const BEGINNING: u32 = 0;
const BEGUN: u32 = 1;
const GIVEN_UP: u32 = 2;

/// Starts to stage in this process, if it was started by `cmt tune` and has not begun yet. Called by its copies while nothing
/// is staged; true if that has changed.
///
/// The work is done by the control thread that is to be, with a stack of its own and all signals blocked: the caller's own may
/// have room for no more than a copy, and wait for signals.
#[cold]
pub fn begin() -> bool {
    // SAFETY: once set, the pointer is valid for the life of the process, and of its forked children.
    let Some(template) = (unsafe { TEMPLATE.load(Ordering::Acquire).as_ref() }) else {
        return false;
    };
    // A program that has confined itself since then may be killed for whatever we do.
    if calm::within(calm::has_the_same_mode) != Some(true) {
        TEMPLATE.store(std::ptr::null_mut(), Ordering::Release);
        return false;
    }
    let pid = std::process::id().cast_signed();
    // One thread of each process, once.
    if BEGUN_BY.swap(pid, Ordering::AcqRel) == pid {
        return false;
    }
    static PROGRESS: AtomicU32 = AtomicU32::new(BEGINNING);
    PROGRESS.store(BEGINNING, Ordering::Release);
    calm::within(|| {
        let started = service::spawn(move || {
            let block = introduced(template, pid);
            let progress = if block.is_some() { BEGUN } else { GIVEN_UP };
            if block.is_none() {
                // Nor will its children.
                TEMPLATE.store(std::ptr::null_mut(), Ordering::Release);
            }
            PROGRESS.store(progress, Ordering::Release);
            service::wake(&PROGRESS);
            // The block is new: nobody has given a command.
            block.map(|block| (block, 0))
        });
        if !started {
            TEMPLATE.store(std::ptr::null_mut(), Ordering::Release);
        }
        let deadline = Instant::now() + PATIENCE;
        while started && PROGRESS.load(Ordering::Acquire) == BEGINNING {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            service::wait_for(&PROGRESS, BEGINNING, left);
        }
        PROGRESS.load(Ordering::Acquire) == BEGUN
    })
    .unwrap_or(false)
}

/// This process's control block, with everything started that it needs but the control thread.
fn introduced(template: &Control, pid: i32) -> Option<&'static Control> {
    let _kept = calm::StandardDescriptors::keep();
    if !calm::has_the_same_filters() {
        return None;
    }
    let block = host::introduce(template)?;
    route::forget_parent();
    block.pid.store(pid.cast_unsigned(), Ordering::Relaxed);
    // This thread is the control thread, whose number it will write itself.
    block.control_tid.store(u32::MAX, Ordering::Relaxed);
    let entry = cmt_payload_main as *const () as u64;
    block.entry.store(entry, Ordering::Relaxed);
    block.version.store(VERSION, Ordering::Relaxed);
    block.boot.state.store(boot::RUNNING, Ordering::Relaxed);
    block.magic.store(MAGIC, Ordering::Release);
    if service::enable(block).is_err() {
        // Whoever attaches later finds no thread, and starts one.
        block.state.store(state::STOPPED, Ordering::Relaxed);
        block.control_tid.store(0, Ordering::Release);
        return None;
    }
    Some(block)
}
