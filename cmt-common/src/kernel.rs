//! What the BPF programs read of the kernel itself, to tell what a copy's host memory is made of.

/// What the page tables said of an address: a [`crate::api::Backing`] in the low three bits, and these.
pub mod page {
    /// The kernel counts a long-term pin of the page.
    pub const PINNED: u8 = 0x08;
    /// A driver's page: no anonymous memory, no file's.
    pub const DRIVERS: u8 = 0x10;
    /// There is a page, and whether it is pinned cannot be told.
    pub const UNCLEAR: u8 = 0x20;
    /// The page tables could be read.
    pub const LOOKED: u8 = 0x80;
    /// The backing.
    pub const BACKING: u8 = 0x07;
}

/// How this kernel lays out what the programs read of it. Offsets in bytes, from the kernel's own description of its types
/// (BTF); addresses found out by looking, see the host's `kernel` module.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Layout {
    /// Where physical memory begins in the kernel's address space.
    pub direct_base: u64,
    /// Where the array of `struct page` begins.
    pub page_base: u64,
    /// `task_struct.mm`
    pub task_mm: u32,
    /// `task_struct.files`
    pub task_files: u32,
    /// `files_struct.fdt`
    pub files_fdt: u32,
    /// `fdtable.fd`
    pub fdt_fd: u32,
    /// `file.f_mapping`
    pub file_mapping: u32,
    /// `address_space.i_pages.xa_head`
    pub mapping_head: u32,
    /// `address_space.host`
    pub mapping_host: u32,
    /// `inode.i_sb`
    pub inode_sb: u32,
    /// `super_block.s_magic`
    pub sb_magic: u32,
    /// `mm_struct.pgd`
    pub mm_pgd: u32,
    /// `page.compound_head`
    pub page_head: u32,
    /// `page.flags`
    pub page_flags: u32,
    /// `page.mapping`
    pub page_mapping: u32,
    /// `page._mapcount`
    pub page_mapcount: u32,
    /// `page._refcount`
    pub page_refcount: u32,
    /// `folio._pincount`, or what older kernels have in its place; 0 where there is none.
    pub folio_pincount: u32,
    /// `1 << PG_head`
    pub head_bit: u64,
    /// Size of `struct page`.
    pub page_bytes: u32,
    /// Levels of page tables: 4 or 5.
    pub levels: u32,
    /// 1 once all of this is known to be right.
    pub ready: u32,
    /// Zero.
    pub _pad: u32,
}

/// What the surveying program found at an address of the asking process, by the [`Layout`] of the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Survey {
    /// Where the process's top page table is, in the kernel's address space.
    pub pgd: u64,
    /// The first page of the file behind the descriptor: a `struct folio *`.
    pub folio: u64,
    /// Physical address of the page.
    pub physical: u64,
    /// The word at the address, read through the kernel's map of physical memory.
    pub word: u64,
    /// What [`page`] says of it.
    pub page: u64,
}
