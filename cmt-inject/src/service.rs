//! The control thread: carries out the host's commands, one at a time, until it is told to stop.
#![expect(
    unsafe_code,
    reason = "futex, and the plain fields of the control block"
)]

use core::ffi::c_void;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::FromRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use cmt_common::control::{Control, HookSlot, RELOCATED_MAX, WINDOW_MAX, command, hook, state};

use cmt_copy::signals;

use crate::hook::{Function, HookEngine};
use crate::route;

/// Longest that a DISABLE waits for calls in flight; the host gives up a little earlier.
const DRAIN_LIMIT: Duration = Duration::from_secs(61);

/// Stack of the control thread, which uses 100 KiB of it; glibc takes the program's thread-local variables out of it, too. What is not
/// touched costs address space only. The smaller one is for programs that have little of that.
const STACK_BYTES: [usize; 2] = [4 << 20, 256 << 10];

/// Starts the control thread; false if none can be had.
pub fn start(control: &'static Control) -> bool {
    // One control thread at most; the new one writes its own id over this.
    if control
        .control_tid
        .compare_exchange(0, u32::MAX, Ordering::AcqRel, Ordering::Relaxed)
        .is_err()
    {
        return false;
    }
    control.pid.store(std::process::id(), Ordering::Release);
    // Commands that an earlier host left behind are not for us; those from now on are.
    let seen = control.command_seq.load(Ordering::Acquire);
    control.done_seq.store(seen, Ordering::Release);
    let started = spawn(move || Some((control, seen)));
    if !started {
        control.control_tid.store(0, Ordering::Release);
    }
    started
}

/// Work that ends with a block to serve, from the commands after a number on.
type Begin = Box<dyn FnOnce() -> Option<(&'static Control, u32)> + Send>;

/// Starts a thread that serves the block that `begin` returns, if it returns one, and takes none of the program's signals. False
/// if no thread can be had.
///
/// Not by std, whose threads take the loader's lock (glibc's `__cxa_thread_atexit_impl`): the caller may hold it, or wait for
/// whoever does.
pub fn spawn(begin: impl FnOnce() -> Option<(&'static Control, u32)> + Send + 'static) -> bool {
    let begin: *mut Begin = Box::into_raw(Box::new(Box::new(begin)));
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
    // SAFETY: every structure is initialised by the call that comes before its use; the box belongs to the new thread, or
    // is taken back where there is none.
    unsafe {
        let has_attributes = libc::pthread_attr_init(attributes.as_mut_ptr()) == 0;
        if has_attributes {
            libc::pthread_attr_setdetachstate(
                attributes.as_mut_ptr(),
                libc::PTHREAD_CREATE_DETACHED,
            );
        }
        let started = has_attributes
            && signals::blocked(|| {
                STACK_BYTES.into_iter().any(|bytes| {
                    libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), bytes);
                    let (thread, begin) = (thread.as_mut_ptr(), begin.cast::<c_void>());
                    libc::pthread_create(thread, attributes.as_ptr(), run, begin) == 0
                })
            });
        if has_attributes {
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
        }
        if !started {
            drop(Box::from_raw(begin));
        }
        started
    }
}

/// First function of the control thread.
extern "C" fn run(begin: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` made this pointer from a box and gave it away; the name is NUL-terminated and shorter than 16 bytes.
    let begin = unsafe {
        libc::prctl(libc::PR_SET_NAME, c"cmt-control".as_ptr());
        Box::from_raw(begin.cast::<Begin>())
    };
    // What a panic leaves is nothing that anybody looks at again.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        if let Some((control, seen)) = begin() {
            serve(control, seen);
        }
    }));
    null_mut()
}

fn serve(control: &'static Control, mut seen: u32) {
    // SAFETY: the call takes nothing and only returns a number. libc's own function for it is younger than glibc 2.28.
    let tid = unsafe { libc::syscall(libc::SYS_gettid) };
    control.control_tid.store(tid as u32, Ordering::Release);
    let mut engine = crate::hook::engine();
    loop {
        wait(&control.command_seq, seen);
        let seq = control.command_seq.load(Ordering::Acquire);
        if seq == seen {
            continue;
        }
        seen = seq;
        let number = control.command.load(Ordering::Acquire);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            carry_out(control, engine.as_mut(), number)
        }))
        .unwrap_or_else(|_| Err("it panicked".to_owned()));
        if let Err(message) = &outcome {
            put_text(message, &raw const control.message);
        }
        control
            .result
            .store(u32::from(outcome.is_err()), Ordering::Release);
        let stop = number == command::STOP && outcome.is_ok();
        if stop {
            control.control_tid.store(0, Ordering::Release);
        }
        control.done_seq.store(seen, Ordering::Release);
        if stop {
            return;
        }
    }
}

/// Starts staging by the plan in `control`.
pub fn enable(control: &'static Control) -> Result<(), String> {
    route::enable(control, plan(control))?;
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    control
        .enabled_at_ns
        .store(now.as_nanos() as u64, Ordering::Relaxed);
    control.state.store(state::ENABLED, Ordering::Release);
    Ok(())
}

fn carry_out(
    control: &'static Control,
    engine: &mut dyn HookEngine,
    number: u32,
) -> Result<(), String> {
    match number {
        command::PREPARE => {
            prepare(control, engine)?;
            control.state.store(state::PREPARED, Ordering::Release);
        }
        command::ENABLE => enable(control)?,
        command::SET_PLAN => route::set_plan(control, plan(control)),
        command::DISABLE => {
            if !route::disable(DRAIN_LIMIT) {
                return Err("copies in flight did not come back".to_owned());
            }
            control.state.store(state::DISABLED, Ordering::Release);
        }
        command::STOP => {
            route::stop()?;
            control.state.store(state::STOPPED, Ordering::Release);
        }
        other => return Err(format!("unknown command {other}")),
    }
    Ok(())
}

/// Prepares every hook that is not prepared yet: trampolines and thunks of an earlier attach are used again.
fn prepare(control: &'static Control, engine: &mut dyn HookEngine) -> Result<(), String> {
    let given = control.boot.maps_fd.swap(0, Ordering::AcqRel);
    // SAFETY: the bootstrap has received this descriptor for us; nobody else knows it, and it is taken once.
    let maps = (given != 0).then(|| unsafe { File::from_raw_fd(given as i32 - 1) });
    crate::hook::set_maps(maps);
    let prepared = prepare_all(control, engine);
    crate::hook::set_maps(None);
    prepared
}

/// The same, with our memory map where it always is.
pub fn prepare_all(control: &Control, engine: &mut dyn HookEngine) -> Result<(), String> {
    put_text(engine.name(), &raw const control.engine);
    for (index, slot) in control.hooks.iter().enumerate() {
        let address = slot.address.load(Ordering::Acquire);
        if address == 0 || slot.status.load(Ordering::Acquire) == hook::PREPARED {
            continue;
        }
        let function = Function {
            address,
            size: slot.size.load(Ordering::Acquire),
        };
        let status = match engine.prepare(function, route::replacement(index)) {
            Ok(prepared) => {
                route::set_original(index, prepared.trampoline);
                fill(slot, &prepared);
                hook::PREPARED
            }
            Err(error) => {
                put_text(&error.to_string(), &raw const slot.reason);
                hook::REFUSED
            }
        };
        slot.status.store(status, Ordering::Release);
    }
    engine.seal().map_err(|error| error.to_string())
}

fn fill(slot: &HookSlot, prepared: &crate::hook::Prepared) {
    let window = |bytes: &[u8]| {
        let mut filled = [0u8; WINDOW_MAX];
        filled[..bytes.len()].copy_from_slice(bytes);
        filled
    };
    let slot_at = (&raw const *slot).cast_mut();
    // SAFETY: the slot lies in shared memory that is mapped writable; the host reads these fields only after `status`.
    unsafe {
        (&raw mut (*slot_at).original).write_volatile(window(&prepared.original));
        (&raw mut (*slot_at).patched).write_volatile(window(&prepared.patched));
        for (index, moved) in prepared.relocated.iter().take(RELOCATED_MAX).enumerate() {
            (&raw mut (*slot_at).relocated[index]).write_volatile(*moved);
        }
    }
    slot.relocated_len
        .store(prepared.relocated.len() as u32, Ordering::Relaxed);
    slot.window.store(prepared.window, Ordering::Relaxed);
    slot.window_len
        .store(prepared.original.len() as u32, Ordering::Relaxed);
    slot.trampoline
        .store(prepared.trampoline, Ordering::Relaxed);
}

/// Where a prepared hook is to be patched, and what is to stand there.
pub fn patch(slot: &HookSlot) -> (u64, Vec<u8>) {
    // SAFETY: plain bytes, which `fill` has written.
    let patched = unsafe { (&raw const slot.patched).read_volatile() };
    let len = slot.window_len.load(Ordering::Relaxed) as usize;
    (
        slot.window.load(Ordering::Relaxed),
        patched[..len.min(WINDOW_MAX)].to_vec(),
    )
}

fn plan(control: &Control) -> cmt_common::control::Plan {
    // SAFETY: plain integers in mapped memory, valid whatever they hold; the host writes them before the command.
    unsafe { (&raw const control.plan).read_volatile() }
}

/// Writes a NUL-terminated text into a field of the control block, cut to fit.
fn put_text<const N: usize>(text: &str, field: *const [u8; N]) {
    let field = field.cast_mut().cast::<u8>();
    let len = text.len().min(N - 1);
    for (index, byte) in text.bytes().take(len).chain([0]).enumerate() {
        // SAFETY: `field` is an array of N bytes in shared, writable memory and `index` is at most N - 1.
        unsafe { field.add(index).write_volatile(byte) };
    }
}

fn wait(word: &AtomicU32, seen: u32) {
    futex(word, libc::FUTEX_WAIT, seen, std::ptr::null());
}

/// Waits while `word` is `seen`, for `limit` at most.
pub fn wait_for(word: &AtomicU32, seen: u32, limit: Duration) {
    let limit = libc::timespec {
        tv_sec: limit.as_secs().cast_signed(),
        tv_nsec: limit.subsec_nanos().into(),
    };
    futex(word, libc::FUTEX_WAIT, seen, &raw const limit);
}

/// Wakes whoever waits on `word`.
pub fn wake(word: &AtomicU32) {
    futex(
        word,
        libc::FUTEX_WAKE,
        i32::MAX.cast_unsigned(),
        std::ptr::null(),
    );
}

fn futex(word: &AtomicU32, operation: libc::c_int, value: u32, limit: *const libc::timespec) {
    // SAFETY: the kernel uses the word, which is valid, and a limit that is valid or null.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, limit) };
}
