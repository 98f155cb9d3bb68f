//! The frida engine: gum's Interceptor moves the instructions.
//!
//! gum is asked to `replace_fast` the window inside a transaction that never ends. Until a transaction's end gum only
//! reads the function and builds its trampoline. What it does then, making the page writable for good and writing a
//! jump while other threads run, never comes: the host writes the jump, with all threads stopped, and the function's
//! page keeps its protection all along.
//!
//! gum's own pages are writable and executable. Sealing takes the right to write away.
#![expect(
    unsafe_code,
    reason = "reads trampolines that gum built, changes the protection of its pages, calls into C"
)]

use std::ffi::{c_char, c_void};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use cmt_common::control::Relocated;
use frida_gum::interceptor::Interceptor;
use frida_gum::{Gum, NativePointer};
use frida_gum_sys as sys;
use iced_x86::{BlockEncoderOptions, Decoder, DecoderOptions, FlowControl, Mnemonic};

use super::builtin;
use super::near::{Regions, read_code, writable_code};
use super::plan::{Plan, encode, far_jump};
use super::{Function, HookEngine, HookError, Prepared};

/// What gum moves at least, whatever the jump that will stand there takes.
const MOVED_BYTES: u64 = 16;
/// How far gum reads: an instruction may begin with the last byte that it moves.
const READ_BYTES: u64 = MOVED_BYTES + 16;
/// Bytes of a trampoline that are looked at: less than gum sets aside for one.
const TRAMPOLINE_BYTES: u64 = 128;

/// gum, once for the process: its trampolines are never freed, so it is never shut down.
static GUM: Mutex<Option<Open>> = Mutex::new(None);

/// Patches from the second instruction on and lets gum move what stood there.
#[derive(Default)]
pub struct Frida {
    /// For what gum does not build: the thunk, and the instructions before the window.
    regions: Regions,
}

impl HookEngine for Frida {
    fn name(&self) -> &'static str {
        "frida"
    }

    fn prepare(&mut self, function: Function, replacement: u64) -> Result<Prepared, HookError> {
        let plan = Plan::new(function)?;
        if plan.leaves() {
            // A stub: gum cannot move an instruction behind its jump, and wants to.
            return builtin::build(plan, &mut self.regions, replacement);
        }
        look_ahead(function, &plan)?;
        let region = self.regions.near(plan.window)?;
        let thunk = region.next_address();
        let patched = plan.patched(thunk)?;
        let mut code = plan.thunk(thunk, replacement)?;
        let trampoline = thunk + code.len() as u64;
        let kept = encode(&plan.kept, trampoline, BlockEncoderOptions::NONE)?.0;

        let mut gum = GUM.lock().unwrap_or_else(PoisonError::into_inner);
        let gum = match &mut *gum {
            Some(open) => open,
            closed => closed.insert(Open::new()?),
        };
        let moved = gum.replace(plan.window, thunk)?;
        code.extend(kept);
        code.extend(far_jump(moved));
        region.append(&code)?;
        Ok(Prepared {
            window: plan.window,
            patched,
            trampoline,
            relocated: relocated(&plan, moved),
            original: plan.original,
        })
    }

    fn seal(&mut self) -> Result<(), HookError> {
        self.regions.close();
        let mut gum = GUM.lock().unwrap_or_else(PoisonError::into_inner);
        gum.as_mut().map_or(Ok(()), Open::seal)
    }
}

/// Refuses a function in which gum would copy an instruction wrongly, abort, or read behind the end of the mapping.
fn look_ahead(function: Function, plan: &Plan) -> Result<(), HookError> {
    let start = plan.window - function.address;
    let code = read_code(plan.window, READ_BYTES)?;
    let short = |size, end| HookError::TooShort {
        size,
        needed: start + end,
    };
    if function.size != 0 && function.size < start + MOVED_BYTES {
        return Err(short(function.size, MOVED_BYTES));
    }
    if (code.len() as u64) < READ_BYTES {
        return Err(short(start + code.len() as u64, READ_BYTES));
    }
    let mut decoder = Decoder::with_ip(64, &code, plan.window, DecoderOptions::NONE);
    while decoder.ip() < plan.window + MOVED_BYTES {
        let instruction = decoder.decode();
        let mnemonic = instruction.mnemonic();
        // `pop` counts on the stack pointer, which gum moves to make room for a register.
        let odd = mnemonic == Mnemonic::Pop && instruction.is_ip_rel_memory_operand();
        match instruction.flow_control() {
            FlowControl::Next if !odd => {}
            FlowControl::ConditionalBranch if instruction.is_jcc_short_or_near() => {}
            _ => {
                return Err(HookError::ControlFlow {
                    mnemonic,
                    offset: instruction.ip() - function.address,
                });
            }
        }
    }
    Ok(())
}

/// Where gum put the instructions of the window, as far as it moved them one by one: a thread that stands behind one
/// that became several is waited for instead.
fn relocated(plan: &Plan, moved: u64) -> Vec<Relocated> {
    // SAFETY: gum sets aside 256 bytes for a trampoline and begins `moved` with its first; the slice is read before gum
    // is asked for anything else.
    let code = unsafe { std::slice::from_raw_parts(moved as *const u8, TRAMPOLINE_BYTES as usize) };
    let mut decoder = Decoder::with_ip(64, code, moved, DecoderOptions::NONE);
    let mut relocated = Vec::new();
    for instruction in &plan.moved {
        relocated.push(Relocated {
            from: instruction.ip(),
            to: decoder.ip(),
        });
        // The same whatever its address, with operands relative to rip taken as the address that they mean.
        if decoder.decode() != *instruction {
            break;
        }
    }
    relocated
}

/// gum with its transaction open.
struct Open {
    interceptor: Interceptor,
    /// Pages of gum's that were sealed.
    sealed: Vec<Range<u64>>,
}

// SAFETY: gum is not bound to a thread, and the lock around the only instance lets one in at a time.
unsafe impl Send for Open {}

impl Open {
    fn new() -> Result<Self, HookError> {
        allowed()?;
        // gum reads it by itself, and would end the process.
        std::fs::metadata("/proc/self/maps").map_err(|source| HookError::System {
            call: "reading /proc/self/maps",
            source,
        })?;
        let mut interceptor = Interceptor::obtain(&Gum::obtain());
        // SAFETY: gum is initialised, and the handler takes any message.
        unsafe { sys::_frida_g_log_set_default_handler(Some(silent), std::ptr::null_mut()) };
        interceptor.begin_transaction();
        Ok(Self {
            interceptor,
            sealed: Vec::new(),
        })
    }

    /// Has gum move the window; returns where its trampoline stands.
    fn replace(&mut self, window: u64, thunk: u64) -> Result<u64, HookError> {
        for range in std::mem::take(&mut self.sealed) {
            let rights = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
            protect(&range, rights)?;
        }
        let function = NativePointer(window as *mut c_void);
        // Forgets what an earlier attach asked for; the trampoline stays, as the transaction does not end.
        self.interceptor.revert(function);
        let replaced = self
            .interceptor
            .replace_fast(function, NativePointer(thunk as *mut c_void));
        replaced
            .map(|moved| moved.0 as u64)
            .map_err(|error| HookError::NotRelocatable {
                reason: format!("gum says: {error}"),
            })
    }

    fn seal(&mut self) -> Result<(), HookError> {
        let mut own: Vec<Range<u64>> = Vec::new();
        // SAFETY: gum is initialised; `collect` gets the vector that is passed here, and nobody else has it meanwhile.
        unsafe { sys::gum_cloak_enumerate_ranges(Some(collect), (&raw mut own).cast()) };
        for range in writable_code(&own)? {
            protect(&range, libc::PROT_READ | libc::PROT_EXEC)?;
            self.sealed.push(range);
        }
        Ok(())
    }
}

/// Refuses where memory must not be writable and executable at once: gum would crash there.
fn allowed() -> Result<(), HookError> {
    let bytes = 1 << 20;
    // SAFETY: a new anonymous mapping, unmapped again before anybody knows of it.
    let possible = unsafe {
        let page = libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        page != libc::MAP_FAILED && libc::munmap(page, bytes) == 0
    };
    if possible {
        return Ok(());
    }
    Err(HookError::System {
        call: "mapping writable and executable memory for frida-gum",
        source: std::io::Error::last_os_error(),
    })
}

fn protect(range: &Range<u64>, rights: i32) -> Result<(), HookError> {
    // SAFETY: the range is whole pages of gum's own; they stay executable, and nobody writes to them while they cannot
    // be written.
    let done = unsafe {
        libc::mprotect(
            range.start as *mut c_void,
            (range.end - range.start) as usize,
            rights,
        )
    };
    if done == 0 {
        return Ok(());
    }
    Err(HookError::System {
        call: "mprotect",
        source: std::io::Error::last_os_error(),
    })
}

/// Receives gum's own memory ranges.
unsafe extern "C" fn collect(range: *const sys::GumMemoryRange, own: *mut c_void) -> sys::gboolean {
    // SAFETY: gum passes a valid range and the vector that `seal` gave it.
    let (range, own) = unsafe { (&*range, &mut *own.cast::<Vec<Range<u64>>>()) };
    own.push(range.base_address..range.base_address + range.size);
    1
}

/// Takes gum's messages: a payload prints nothing.
unsafe extern "C" fn silent(
    _domain: *const c_char,
    _level: sys::GLogLevelFlags,
    _message: *const c_char,
    _data: *mut c_void,
) {
}
