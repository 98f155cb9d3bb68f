//! The functions that a mapped library exports, by its dynamic section.
//!
//! Asking the loader (`dlsym`) is not possible while it is at work.
#![expect(unsafe_code, reason = "reads a library's own tables")]

use core::ffi::{CStr, c_char};

use libc::Elf64_Sym;

use super::loader::Library;

/// Tags of the dynamic section and types of symbols, by the ELF specification; the GNU hash table by glibc's elf.h.
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_GNU_HASH: u64 = 0x6FFF_FEF5;
const STT_FUNC: u8 = 2;

/// Calls `found` for each function that `library` defines: name, address, and bytes of it.
pub fn each(library: &Library, mut found: impl FnMut(&[u8], u64, u64)) {
    let base = library.base();
    let table = |wanted: u64| {
        let [_, value] = library.dynamic().find(|entry| entry[0] == wanted)?;
        // The loader turns these into addresses where it may write to the section.
        Some(if value < base { base + value } else { value })
    };
    let (Some(symbols), Some(names)) = (table(DT_SYMTAB), table(DT_STRTAB)) else {
        return;
    };
    // SAFETY: tables of a library that the loader has mapped and keeps mapped while it calls us.
    let count = unsafe {
        match (table(DT_HASH), table(DT_GNU_HASH)) {
            // The number of chains is that of symbols.
            (Some(hash), _) => word(hash, 1),
            (None, Some(hash)) => counted_by_gnu_hash(hash),
            (None, None) => 0,
        }
    };
    for index in 0..count as usize {
        // SAFETY: the table has that many entries, and names are NUL-terminated strings in the string table.
        let (symbol, name) = unsafe {
            let symbol = (symbols as *const Elf64_Sym).add(index).read();
            let name = CStr::from_ptr((names as *const c_char).add(symbol.st_name as usize));
            (symbol, name)
        };
        if symbol.st_info & 0xF == STT_FUNC && symbol.st_shndx != 0 {
            found(name.to_bytes(), base + symbol.st_value, symbol.st_size);
        }
    }
}

/// One more than the last symbol that a GNU hash table leads to.
///
/// # Safety
/// `hash` is the address of such a table.
unsafe fn counted_by_gnu_hash(hash: u64) -> u32 {
    // SAFETY: the table's header: buckets, first symbol, words of the filter; then filter, buckets and chains. A chain
    // ends with an entry whose lowest bit is set.
    unsafe {
        let (buckets, first, filter) = (word(hash, 0), word(hash, 1), word(hash, 2));
        let buckets_at = hash + 16 + u64::from(filter) * 8;
        let chains_at = buckets_at + u64::from(buckets) * 4;
        let last = (0..buckets).map(|index| word(buckets_at, index)).max();
        let Some(mut last) = last.filter(|&last| last >= first) else {
            return first;
        };
        while word(chains_at, last - first) & 1 == 0 {
            last += 1;
        }
        last + 1
    }
}

/// # Safety
/// A 32-bit word stands there.
unsafe fn word(table: u64, index: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { (table as *const u32).add(index as usize).read() }
}
