//! What the page tables say of an address of the current process: whether a page is there, whether it is pinned, and what
//! it belongs to.
//!
//! NVIDIA's driver registers memory with `pin_user_pages` (open-gpu-kernel-modules, `os-mlock.c`), which the kernel counts
//! in the page: by 1024 references on a single page, in a count of its own on a larger folio
//! (`Documentation/core-api/pin_user_pages.rst`). Page tables are read without a lock: they may change meanwhile, so all
//! that is read is taken for an answer of the moment and never followed beyond the page itself.

use aya_ebpf::helpers::{
    bpf_get_current_pid_tgid, bpf_get_current_task, bpf_probe_read_kernel,
};
use aya_ebpf::macros::uprobe;
use aya_ebpf::programs::ProbeContext;
use cmt_common::api::Backing;
use cmt_common::kernel::{Layout, Survey, page};

use crate::call::Arguments;
use crate::maps::{foreign, layout, survey_found};

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
/// In an entry that is not present: a page that is there, and is to be faulted on (PROT_NONE, NUMA hints).
const PROT_NONE: u64 = 1 << 8;
/// In a table above the last: a large page instead of a table.
const LEAF: u64 = 1 << 7;
/// Bits of an entry that are a physical address.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Each long-term pin counts so much on a single page (GUP_PIN_COUNTING_BIAS).
const PIN_BIAS: i64 = 1024;
/// PAGE_MAPPING_ANON.
const ANONYMOUS: u64 = 1;
/// PAGE_MAPPING_FLAGS.
const MAPPING_FLAGS: u64 = 3;
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The last entry of a walk.
struct Entry {
    value: u64,
    /// Physical address.
    physical: u64,
    /// A page of 2 MiB or more.
    large: bool,
}

/// How a walk ended.
enum Walk {
    Page(Entry),
    /// Nothing was ever there.
    Absent,
    /// A page that is elsewhere (swapped out, on its way), which no pinned one can be.
    Away,
    /// A page that is hidden, or nothing could be read.
    Unclear,
}

/// What is known of the page at `address`: bits of [`page`]; 0 where nothing is.
#[inline(always)]
pub fn look(address: u64) -> u8 {
    match layout() {
        Some(layout) if layout.ready != 0 && address != 0 => look_by(layout, address),
        _ => 0,
    }
}

#[inline(always)]
fn look_by(layout: &Layout, address: u64) -> u8 {
    const UNCLEAR: u8 = page::LOOKED | page::UNCLEAR;
    let Some(table) = top_table(layout) else {
        return UNCLEAR;
    };
    match walk(layout, table, address) {
        Walk::Page(entry) => classify(layout, &entry).unwrap_or(UNCLEAR),
        Walk::Absent => page::LOOKED | Backing::Untouched as u8,
        Walk::Away => page::LOOKED,
        Walk::Unclear => UNCLEAR,
    }
}

/// The kernel's address of the current process's top page table.
#[inline(always)]
fn top_table(layout: &Layout) -> Option<u64> {
    // SAFETY: the helper has no preconditions.
    let task = unsafe { bpf_get_current_task() };
    let mm = kernel::<u64>(task + layout.task_mm as u64)?;
    kernel(mm + layout.mm_pgd as u64)
}

#[inline(always)]
fn walk(layout: &Layout, top: u64, address: u64) -> Walk {
    let mut table = top;
    if layout.levels == 5 {
        match entry_at(table, address, 48) {
            Some(entry) if entry & PRESENT != 0 => table = below(layout, entry),
            Some(0) => return Walk::Absent,
            _ => return Walk::Unclear,
        }
    }
    match entry_at(table, address, 39) {
        Some(entry) if entry & PRESENT != 0 => table = below(layout, entry),
        Some(0) => return Walk::Absent,
        _ => return Walk::Unclear,
    }
    match entry_at(table, address, 30) {
        Some(entry) if entry & PRESENT == 0 => {
            return not_present(entry);
        }
        Some(entry) if entry & LEAF != 0 => return leaf(entry, address, 30),
        Some(entry) => table = below(layout, entry),
        None => return Walk::Unclear,
    }
    match entry_at(table, address, 21) {
        Some(entry) if entry & PRESENT == 0 => {
            return not_present(entry);
        }
        Some(entry) if entry & LEAF != 0 => return leaf(entry, address, 21),
        Some(entry) => table = below(layout, entry),
        None => return Walk::Unclear,
    }
    match entry_at(table, address, 12) {
        Some(entry) if entry & PRESENT != 0 => Walk::Page(Entry {
            value: entry,
            physical: entry & ADDRESS,
            large: false,
        }),
        Some(entry) => not_present(entry),
        None => Walk::Unclear,
    }
}

#[inline(always)]
fn not_present(entry: u64) -> Walk {
    if entry == 0 {
        Walk::Absent
    } else if entry & PROT_NONE != 0 {
        Walk::Unclear
    } else {
        Walk::Away
    }
}

#[inline(always)]
fn leaf(entry: u64, address: u64, shift: u32) -> Walk {
    let within = (1u64 << shift) - 1;
    Walk::Page(Entry {
        value: entry,
        // Bit 12 of a large page's entry is a flag.
        physical: (entry & ADDRESS & !within) | (address & within & !0xfff),
        large: true,
    })
}

#[inline(always)]
fn entry_at(table: u64, address: u64, shift: u32) -> Option<u64> {
    kernel(table + (address >> shift & 511) * 8)
}

/// The kernel's address of the table that an entry points to.
#[inline(always)]
fn below(layout: &Layout, entry: u64) -> u64 {
    layout.direct_base + (entry & ADDRESS)
}

#[inline(always)]
fn classify(layout: &Layout, entry: &Entry) -> Option<u8> {
    let first = layout.page_base + (entry.physical >> 12) * layout.page_bytes as u64;
    let head: u64 = kernel(first + layout.page_head as u64)?;
    // Bit 0 marks a page that is not the first of its folio, and the rest is the first one's address.
    let folio = if head & 1 == 1 { head - 1 } else { first };
    let mapping: u64 = kernel(folio + layout.page_mapping as u64)?;
    if mapping == 0 {
        // The page of zeros, which stands for what was only read so far; or memory of a driver.
        return Some(if entry.value & WRITABLE == 0 {
            page::LOOKED | Backing::Untouched as u8
        } else {
            page::LOOKED | page::DRIVERS
        });
    }
    let backing = if mapping & ANONYMOUS != 0 {
        if entry.large {
            Backing::Huge
        } else {
            Backing::Anonymous
        }
    } else {
        of_file(layout, mapping & !MAPPING_FLAGS)?
    };
    let mut found = page::LOOKED | backing as u8;
    if pinned(layout, folio)? {
        found |= page::PINNED;
    }
    Some(found)
}

#[inline(always)]
fn of_file(layout: &Layout, mapping: u64) -> Option<Backing> {
    let host: u64 = kernel(mapping + layout.mapping_host as u64)?;
    let sb: u64 = kernel(host + layout.inode_sb as u64)?;
    let magic: u64 = kernel(sb + layout.sb_magic as u64)?;
    Some(match magic {
        TMPFS_MAGIC => Backing::Shared,
        HUGETLBFS_MAGIC => Backing::Huge,
        _ => Backing::File,
    })
}

/// `None` where this kernel keeps no count for a folio of this size that could be read.
#[inline(always)]
fn pinned(layout: &Layout, folio: u64) -> Option<bool> {
    let flags: u64 = kernel(folio + layout.page_flags as u64)?;
    if flags & layout.head_bit != 0 {
        if layout.folio_pincount == 0 {
            return None;
        }
        let count: i32 = kernel(folio + layout.folio_pincount as u64)?;
        return Some(count > 0);
    }
    let references: i32 = kernel(folio + layout.page_refcount as u64)?;
    // Counts from -1. A page that many processes map has as many references, which are no pins.
    let maps: i32 = kernel(folio + layout.page_mapcount as u64)?;
    Some(references as i64 - (maps as i64 + 1) >= PIN_BIAS)
}

/// Reads a value of the kernel's. `None` where nothing is mapped.
#[inline(always)]
fn kernel<T>(address: u64) -> Option<T> {
    // SAFETY: the helper checks the address; the types read here are integers.
    unsafe { bpf_probe_read_kernel(address as *const T).ok() }
}

/// On a function of cmt's own, `ask(address, descriptor)`: says what it finds by the layout of the moment, so that the host
/// can find out the parts of it that BTF does not tell.
#[uprobe]
pub fn survey(context: ProbeContext) -> u32 {
    if foreign(bpf_get_current_pid_tgid()) {
        return 0;
    }
    let arguments = Arguments::read(&context);
    let (Some(address), Some(descriptor)) = (arguments.get(0), arguments.get(1)) else {
        return 0;
    };
    if let Some(layout) = layout() {
        survey_found(&take_survey(layout, address, descriptor).unwrap_or_default());
    }
    0
}

#[inline(always)]
fn take_survey(layout: &Layout, address: u64, descriptor: u64) -> Option<Survey> {
    let pgd = top_table(layout)?;
    let mut found = Survey {
        pgd,
        folio: first_folio(layout, descriptor).unwrap_or(0),
        ..Survey::default()
    };
    if let Walk::Page(entry) = walk(layout, pgd, address) {
        found.physical = entry.physical;
        found.word = kernel(layout.direct_base + entry.physical + (address & 0xfff)).unwrap_or(0);
    }
    found.page = look(address) as u64;
    Some(found)
}

/// The first page of the file behind a descriptor: where a file has no other, the head of its tree of pages is that page.
#[inline(always)]
fn first_folio(layout: &Layout, descriptor: u64) -> Option<u64> {
    // SAFETY: the helper has no preconditions.
    let task = unsafe { bpf_get_current_task() };
    let files: u64 = kernel(task + layout.task_files as u64)?;
    let table: u64 = kernel(files + layout.files_fdt as u64)?;
    let open: u64 = kernel(table + layout.fdt_fd as u64)?;
    let file: u64 = kernel(open + descriptor * 8)?;
    let mapping: u64 = kernel(file + layout.file_mapping as u64)?;
    kernel(mapping + layout.mapping_head as u64)
}
