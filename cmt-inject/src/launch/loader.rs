//! The loader: what it has mapped, and being called when that changes.
//!
//! It calls a function that does nothing, `_dl_debug_state`, for debuggers to set a breakpoint on (`r_brk` of `struct r_debug`,
//! glibc's link.h). Its `ret` becomes a jump to us. Debuggers of today use glibc's probes instead, and are not disturbed.
#![expect(
    unsafe_code,
    reason = "the loader's structures, and a jump into this library"
)]

use core::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use iced_x86::{Decoder, DecoderOptions, Mnemonic};

use super::code;

/// `RT_CONSISTENT`: the list of libraries is whole.
const CONSISTENT: c_int = 0;
const ENDBR64: [u8; 4] = [0xF3, 0x0F, 0x1E, 0xFA];
const RET: u8 = 0xC3;
const JUMP: u8 = 0xE9;
const JUMP_BYTES: usize = 5;
/// Functions of the loader start on such a boundary.
const ALIGN: u64 = 16;

/// `struct r_debug`.
#[repr(C)]
struct Debug {
    version: c_int,
    libraries: *const Library,
    notify: u64,
    state: c_int,
}

/// `struct link_map`, as far as it is public: a library.
#[repr(C)]
pub struct Library {
    base: u64,
    name: *const c_char,
    dynamic: *const [u64; 2],
    next: *const Library,
}

impl Library {
    /// What is added to the addresses in its file.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The last part of its path.
    pub fn file_name(&self) -> &[u8] {
        if self.name.is_null() {
            return b"";
        }
        // SAFETY: the loader's own string, NUL-terminated, for as long as the library is listed.
        let path = unsafe { CStr::from_ptr(self.name) }.to_bytes();
        path.rsplit(|&byte| byte == b'/').next().unwrap_or(path)
    }

    /// Its dynamic section: tags and values, up to the first tag 0.
    pub fn dynamic(&self) -> impl Iterator<Item = [u64; 2]> {
        let mut at = self.dynamic;
        std::iter::from_fn(move || {
            // SAFETY: the section is mapped, and ends with a tag 0, behind which nothing is read.
            let entry = unsafe { at.as_ref() }.filter(|entry| entry[0] != 0)?;
            // SAFETY: the tag is not 0, so another entry follows.
            at = unsafe { at.add(1) };
            Some(*entry)
        })
    }
}

/// All libraries of the program's own namespace.
pub struct Libraries(*const Library);

impl Iterator for Libraries {
    type Item = &'static Library;

    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: the list is consistent, and whoever holds it runs on the thread that holds the loader's lock, or, at the
        // program's start, on its only one.
        let library = unsafe { self.0.as_ref() }?;
        self.0 = library.next;
        Some(library)
    }
}

static WATCHED: OnceLock<(Watch, usize)> = OnceLock::new();

type Watch = fn(Libraries);

/// Has `changed` called whenever a library was mapped or unmapped, with the loader's lock held, and returns what is mapped now.
///
/// `None` if this loader's notification looks otherwise than expected. Nothing was changed then.
pub fn watch(changed: Watch) -> Option<Libraries> {
    // SAFETY: looks a symbol up.
    let debug = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_r_debug".as_ptr()) }.cast::<Debug>();
    // SAFETY: the loader's structure, which lives as long as the process.
    let (notify, libraries) =
        unsafe { debug.as_ref() }.map(|debug| (debug.notify, debug.libraries))?;
    WATCHED.set((changed, debug.addr())).ok()?;
    let ours = notified as *const () as u64;
    // SAFETY: code of the loader, which is never unmapped; the function ends before the next one that is so aligned.
    let found = unsafe { std::slice::from_raw_parts(notify as *const u8, ALIGN as usize) };
    let at = return_with_room(found, notify)?;
    let distance = i32::try_from(
        ours.wrapping_sub(notify + at + JUMP_BYTES as u64)
            .cast_signed(),
    )
    .ok()?;
    let mut jump = [JUMP; JUMP_BYTES];
    jump[1..].copy_from_slice(&distance.to_le_bytes());
    code::write(notify + at, &jump).then_some(Libraries(libraries))
}

/// Where in a function that does nothing its `ret` stands, if padding for a jump follows.
fn return_with_room(function: &[u8], address: u64) -> Option<u64> {
    let at = match function.strip_prefix(&ENDBR64) {
        Some(_) => ENDBR64.len(),
        None => 0,
    };
    let rest = function
        .get(at..)
        .filter(|rest| rest.first() == Some(&RET))?;
    let padding: usize = Decoder::with_ip(64, &rest[1..], address, DecoderOptions::NONE)
        .into_iter()
        .take_while(|it| matches!(it.mnemonic(), Mnemonic::Nop | Mnemonic::Int3))
        .map(|it| it.len())
        .sum();
    // A last instruction that goes over the end of what was read is invalid, and not counted.
    (1 + padding >= JUMP_BYTES && address.is_multiple_of(ALIGN)).then_some(at as u64)
}

/// Stands in for the loader's function that does nothing.
extern "C" fn notified() {
    let Some(&(changed, debug)) = WATCHED.get() else {
        return;
    };
    // SAFETY: this thread's own errno, which whoever loads a library may look at.
    let errno = unsafe { *libc::__errno_location() };
    let debug = std::ptr::with_exposed_provenance::<Debug>(debug);
    // SAFETY: as in `watch`; volatile, since the loader writes to it.
    let (state, libraries) = unsafe {
        (
            (&raw const (*debug).state).read_volatile(),
            (&raw const (*debug).libraries).read_volatile(),
        )
    };
    if state == CONSISTENT {
        changed(Libraries(libraries));
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_return_with_padding_behind_it_makes_room() {
        let plain = [
            RET, 0x66, 0x66, 0x2E, 0x0F, 0x1F, 0x84, 0, 0, 0, 0, 0, 0x0F, 0x1F, 0x40, 0,
        ];
        assert_eq!(return_with_room(&plain, 0x1000), Some(0));
        let marked = [
            0xF3, 0x0F, 0x1E, 0xFA, RET, 0x66, 0x66, 0x2E, 0x0F, 0x1F, 0x84, 0, 0, 0, 0, 0,
        ];
        assert_eq!(return_with_room(&marked, 0x1000), Some(4));
        let traps = [RET, 0xCC, 0xCC, 0xCC, 0xCC, 0x55];
        assert_eq!(return_with_room(&traps, 0x1000), Some(0));
        // Another function follows at once, a debugger's breakpoint, and a function that does something.
        assert_eq!(
            return_with_room(&[RET, 0x90, 0x90, 0x90, 0x55, 0x90], 0x1000),
            None
        );
        assert_eq!(
            return_with_room(&[0xCC, 0x90, 0x90, 0x90, 0x90, 0x90], 0x1000),
            None
        );
        assert_eq!(
            return_with_room(&[0x55, RET, 0x90, 0x90, 0x90, 0x90], 0x1000),
            None
        );
    }
}
