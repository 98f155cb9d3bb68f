//! How the payload comes into a program that `cmt tune` starts: preloaded, it waits for libcuda.
//!
//! A library that needs none itself (`preload.s`, by `LD_PRELOAD`) loads it before the program's first instruction. It exports
//! nothing that a program asks for, and does nothing but watch the loader, until libcuda is mapped. Then nobody can be in libcuda's code yet, and its copy
//! functions are patched on the spot: no thread has to be stopped, and no other process is needed. With its first copy a
//! process tells `cmt tune` of itself and gets the plan; where nobody answers, its copies stay with the original functions.
//!
//! Nothing is here that runs in a process that `cmt attach` has come to.
#![expect(
    unsafe_code,
    reason = "memory that is shared with the host, and a constructor"
)]

mod code;
mod host;
mod loader;
mod symbols;

use std::alloc::{Layout, alloc_zeroed};
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

use cmt_common::api::{COPY_FNS, DRIVER_FNS, HOOKED};
use cmt_common::control::{Control, MAGIC, VERSION, boot, hook};

use crate::hook::builtin::Builtin;
use crate::{cmt_payload_main, route, service};

/// What is known of libcuda once its functions are patched, as it stands in every process that begins to copy; null before.
static TEMPLATE: AtomicPtr<Control> = AtomicPtr::new(std::ptr::null_mut());
/// Where the libcuda was loaded that was patched last.
static PATCHED_AT: AtomicU64 = AtomicU64::new(0);
/// The process that has begun last, or has tried: a forked child finds its parent's id.
static BEGUN_BY: AtomicI32 = AtomicI32::new(0);

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    if !host::is_wanted() {
        return;
    }
    let _ = catch_unwind(|| {
        // This library has its own copy of std, so the hook is ours alone: a panic here must not print.
        std::panic::set_hook(Box::new(|_| {}));
        if let Some(libraries) = loader::watch(loader_has_changed)
            && is_alone()
        {
            look(libraries);
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
    let _ = catch_unwind(|| look(libraries));
}

/// Patches libcuda if it is there and was not there before.
fn look(mut libraries: loader::Libraries) {
    // A process that has begun keeps what it knows; a libcuda that it loads anew is left alone.
    if BEGUN_BY.load(Ordering::Acquire) != 0 {
        return;
    }
    let Some(cuda) = libraries.find(|library| library.file_name().starts_with(b"libcuda.so"))
    else {
        PATCHED_AT.store(0, Ordering::Release);
        return;
    };
    if PATCHED_AT.swap(cuda.base(), Ordering::AcqRel) != cuda.base() {
        patch(&cuda);
    }
}

fn patch(cuda: &loader::Library) {
    // SAFETY: a control block is plain numbers, for which zeros are valid; it is never freed.
    let Some(control) = (unsafe {
        alloc_zeroed(Layout::new::<Control>())
            .cast::<Control>()
            .as_ref()
    }) else {
        return;
    };
    symbols::each(cuda, |name, address, size| {
        if let Some(index) = COPY_FNS[..HOOKED]
            .iter()
            .position(|function| function.name.as_bytes() == name)
        {
            control.hooks[index]
                .address
                .store(address, Ordering::Relaxed);
            control.hooks[index].size.store(size, Ordering::Relaxed);
        } else if let Some(index) = DRIVER_FNS
            .iter()
            .position(|function| function.as_bytes() == name)
        {
            control.driver[index].store(address, Ordering::Relaxed);
        }
    });
    if service::prepare_all(control, &mut Builtin::default()).is_err() {
        return;
    }
    let mut patched = false;
    for slot in &control.hooks {
        if slot.status.load(Ordering::Relaxed) == hook::PREPARED
            && let (window, bytes) = service::patch(slot)
            && code::write(window, &bytes)
        {
            slot.committed.store(1, Ordering::Relaxed);
            patched = true;
        }
    }
    if patched {
        TEMPLATE.store((&raw const *control).cast_mut(), Ordering::Release);
    }
}

/// Starts to stage in this process, if it was started by `cmt tune` and has not begun yet. Called by its copies while nothing
/// is staged; true if that has changed.
#[cold]
pub fn begin() -> bool {
    // SAFETY: once set, the pointer is valid for the life of the process, and of its forked children.
    let Some(template) = (unsafe { TEMPLATE.load(Ordering::Acquire).as_ref() }) else {
        return false;
    };
    let pid = std::process::id().cast_signed();
    // One thread of each process, once.
    if BEGUN_BY.swap(pid, Ordering::AcqRel) == pid {
        return false;
    }
    let begun = catch_unwind(|| {
        let block = host::introduce(template)?;
        route::forget_parent();
        block.pid.store(pid.cast_unsigned(), Ordering::Relaxed);
        block
            .entry
            .store(cmt_payload_main as *const () as u64, Ordering::Relaxed);
        block.version.store(VERSION, Ordering::Relaxed);
        block.boot.state.store(boot::RUNNING, Ordering::Relaxed);
        block.magic.store(MAGIC, Ordering::Release);
        service::begin(block).ok()
    });
    let begun = begun.is_ok_and(|begun| begun.is_some());
    if !begun {
        // Nor will its children.
        TEMPLATE.store(std::ptr::null_mut(), Ordering::Release);
    }
    begun
}
