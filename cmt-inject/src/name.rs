//! The name under which the loader knows this library.
//!
//! It was loaded as `/proc/self/fd/./N`, which means another file to everybody else: a debugger that opens the libraries of
//! the target by their names would read from a descriptor of its own (gdb hung in a pipe).
#![expect(unsafe_code, reason = "writes to the loader's copy of the name")]

use core::ffi::{CStr, c_int, c_void};

/// No longer than the name that it replaces.
const NAME: &[u8] = b"memfd:cmt\0";
/// How the host spells the folder, with and without `/proc`.
const LOADED_AS: [&[u8]; 2] = [b"/proc/self/fd/./", b"./././././././"];

/// Overwrites the loader's name of the library in which `address` lies.
pub fn change(address: u64) {
    let mut address = address;
    // SAFETY: the callback gets a pointer to a local of its type, and is called before this returns.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut address).cast()) };
}

unsafe extern "C" fn look(
    info: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    address: *mut c_void,
) -> c_int {
    // SAFETY: the loader passes a filled structure whose name is NUL-terminated and its own, and `change` an address.
    // Those who compare names meanwhile see one that is not theirs, before and after.
    unsafe {
        let (info, address) = (&*info, *address.cast::<u64>());
        if info.dlpi_phdr.is_null() || info.dlpi_name.is_null() {
            return 0;
        }
        let headers = core::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum));
        let is_here = headers.iter().any(|header| {
            let start = info.dlpi_addr.wrapping_add(header.p_vaddr);
            header.p_type == libc::PT_LOAD && address.wrapping_sub(start) < header.p_memsz
        });
        if !is_here {
            return 0;
        }
        let name = CStr::from_ptr(info.dlpi_name);
        if LOADED_AS
            .iter()
            .any(|folder| name.to_bytes().starts_with(folder))
        {
            let name = info.dlpi_name.cast_mut().cast::<u8>();
            name.copy_from_nonoverlapping(NAME.as_ptr(), NAME.len());
        }
        1
    }
}

const _: () = assert!(NAME.len() <= LOADED_AS[0].len() && NAME.len() <= LOADED_AS[1].len());
