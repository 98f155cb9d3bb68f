//! Finds out how this kernel lays out what the BPF programs read of it: page tables and the counts in its pages.
//!
//! Offsets come from BTF. Where physical memory and the array of pages begin is random from boot to boot and told to
//! nobody, so it is found out by looking: a page of our own holds a random word, and a program looks for that word through
//! our own page table, with one base after the other, until it finds it. A base that is wrong leads to addresses that are
//! not mapped, which the kernel's read answers with an error.
#![expect(
    unsafe_code,
    reason = "maps a page of a memory file, whose content the programs are to find"
)]

use std::fs::File;
use std::io::{self, Write as _};
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::ptr::NonNull;

use cmt_common::api::Backing;
use cmt_common::kernel::{Layout, Survey, page};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use procfs::{Current as _, Meminfo};

use super::btf::Btf;
use super::cost::own_offset;
use super::kernel;
use super::link::Links;
use super::programs::Probes;

const BTF: &str = "/sys/kernel/btf/vmlinux";
const PAGE: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");
/// The bases are chosen at multiples of this (PUD_SIZE, `arch/x86/mm/kaslr.c`).
const GIB: u64 = 1 << 30;
/// Physical memory may have holes: so much more of it than there is memory is looked through.
const HOLES: u64 = 128;

/// Takes what [`cmt_ebpf`](super)'s surveying program reads.
#[unsafe(naked)]
extern "C" fn ask(_address: u64, _descriptor: u64) -> u32 {
    core::arch::naked_asm!("push rbp", "mov rbp, rsp", "xor eax, eax", "pop rbp", "ret")
}

/// Tells the programs what this kernel looks like, once that has been found and tried; until then they read nothing of it.
/// The links are probes on this process, to be taken away with the others.
///
/// # Errors
/// Why page tables cannot be read here, in words for the user.
pub fn learn(probes: &mut Probes) -> (Result<(), String>, Links) {
    let mut links = Links::default();
    if !kernel::lets_read() {
        let why = "kernel lockdown is in confidentiality mode";
        return (Err(why.into()), links);
    }
    let learnt = Btf::read(Path::new(BTF))
        .and_then(|btf| offsets(&btf))
        .and_then(|layout| {
            links = place(probes).map_err(|error| format!("no probe on cmt itself: {error}"))?;
            find_bases(probes, layout)
        });
    (learnt, links)
}

fn offsets(btf: &Btf) -> Result<Layout, String> {
    let of = |structure: &str, members: &[&str]| {
        members
            .iter()
            .find_map(|member| btf.offset(structure, member))
            .ok_or_else(|| format!("BTF has no {structure}.{}", members[0]))
    };
    let head = btf
        .constant("pageflags", "PG_head")
        .filter(|bit| *bit < 64)
        .ok_or("BTF has no PG_head")?;
    let page_bytes = btf.size("page").ok_or("BTF has no struct page")?;
    Ok(Layout {
        direct_base: 0,
        page_base: 0,
        task_mm: of("task_struct", &["mm"])?,
        task_files: of("task_struct", &["files"])?,
        files_fdt: of("files_struct", &["fdt"])?,
        fdt_fd: of("fdtable", &["fd"])?,
        file_mapping: of("file", &["f_mapping"])?,
        mapping_head: of("address_space", &["i_pages.xa_head"])?,
        mapping_host: of("address_space", &["host"])?,
        inode_sb: of("inode", &["i_sb"])?,
        sb_magic: of("super_block", &["s_magic"])?,
        mm_pgd: of("mm_struct", &["pgd"])?,
        page_head: of("page", &["compound_head"])?,
        page_flags: of("page", &["flags"])?,
        page_mapping: of("folio", &["mapping"]).or_else(|_| of("page", &["mapping"]))?,
        page_mapcount: of("page", &["_mapcount"])?,
        page_refcount: of("page", &["_refcount"])?,
        folio_pincount: pincount(btf, page_bytes).unwrap_or(0),
        head_bit: 1 << head,
        page_bytes,
        levels: levels()?,
        ready: 0,
        _pad: 0,
    })
}

/// Where a folio of several pages counts its pins: in itself from Linux 6.1 on, before in its first or second tail page.
fn pincount(btf: &Btf, page_bytes: u32) -> Option<u32> {
    let in_tail = |member, tail| Some(btf.offset("page", member)? + tail * page_bytes);
    btf.offset("folio", "_pincount")
        .or_else(|| in_tail("compound_pincount", 1))
        .or_else(|| in_tail("hpage_pinned_refcount", 2))
}

/// The kernel takes the flag away where it does not use the fifth level.
fn levels() -> Result<u32, String> {
    let cpus = procfs::CpuInfo::current().map_err(|error| error.to_string())?;
    let five = cpus.flags(0).is_some_and(|flags| flags.contains(&"la57"));
    Ok(if five { 5 } else { 4 })
}

fn place(probes: &mut Probes) -> io::Result<Links> {
    let offset = own_offset(ask as *const () as u64)
        .ok_or_else(|| io::Error::other("no mapping of this program's file"))?;
    probes.attach_survey(Path::new("/proc/self/exe"), offset)
}

/// A page of this process's memory.
struct Page {
    at: NonNull<libc::c_void>,
    /// What is in it; 0 for nothing yet.
    word: u64,
    /// The memory file it is a page of.
    file: Option<File>,
}

impl Page {
    /// Of a file in memory, with a random word in it.
    fn of_file() -> io::Result<Self> {
        let mut file = File::from(memfd_create(c"cmt-survey", MFdFlags::MFD_CLOEXEC)?);
        let mut word = [0; 8];
        getrandom(&mut word)?;
        let mut content = [0; PAGE.get()];
        content[..8].copy_from_slice(&word);
        file.write_all(&content)?;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the kernel chooses free address space, so no memory in use changes.
        let at = unsafe { mmap(None, PAGE, prot, MapFlags::MAP_SHARED, &file, 0) }?;
        // SAFETY: mapped above, one page, and read before anything else uses it. The read brings it into the page table.
        let word = unsafe { at.cast::<u64>().read_volatile() };
        Ok(Self {
            at,
            word,
            file: Some(file),
        })
    }

    /// Without any file, never touched.
    fn fresh() -> io::Result<Self> {
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the kernel chooses free address space, so no memory in use changes.
        let at = unsafe { mmap_anonymous(None, PAGE, prot, MapFlags::MAP_PRIVATE) }?;
        // SAFETY: a page of our own. Part of a huge one it would not be untouched.
        let _ = unsafe { madvise(at, PAGE.get(), MmapAdvise::MADV_NOHUGEPAGE) };
        Ok(Self {
            at,
            word: 0,
            file: None,
        })
    }

    fn touch(&mut self) {
        self.word = 1;
        // SAFETY: a page of our own that nothing else uses.
        unsafe { self.at.cast::<u64>().write_volatile(self.word) };
    }

    /// What the programs see at it, by the layout of the moment.
    fn survey(&self, probes: &Probes) -> Result<Survey, String> {
        let descriptor = self.file.as_ref().map_or(0, File::as_raw_fd);
        std::hint::black_box(ask(self.at.as_ptr() as u64, descriptor as u64));
        probes.maps.survey().map_err(|error| error.to_string())
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: one whole mapping of ours, to which nothing refers any more. It cannot fail for one.
        let _ = unsafe { munmap(self.at, PAGE.get()) };
    }
}

fn find_bases(probes: &mut Probes, mut layout: Layout) -> Result<(), String> {
    let told = |error: super::ProbeError| error.to_string();
    let page = Page::of_file().map_err(|error| format!("no page to look for: {error}"))?;
    probes.maps.set_layout(&layout).map_err(told)?;
    let first = page.survey(probes)?;
    if first.pgd == 0 || first.folio == 0 {
        return Err("the kernel's structures are not where BTF says".into());
    }
    let memory = Meminfo::current()
        .map_err(|error| error.to_string())?
        .mem_total
        / GIB;
    let highest = first.pgd & !(GIB - 1);
    let seen = (0..=memory * 2 + HOLES)
        .map_while(|gib| highest.checked_sub(gib * GIB))
        .find_map(|base| {
            layout.direct_base = base;
            probes.maps.set_layout(&layout).ok()?;
            let seen = page.survey(probes).ok()?;
            (seen.word == page.word).then_some(seen)
        })
        .ok_or("the kernel's map of physical memory was not found")?;
    layout.page_base = seen
        .folio
        .wrapping_sub((seen.physical >> 12) * u64::from(layout.page_bytes));
    if !layout.page_base.is_multiple_of(GIB) {
        return Err("the kernel's array of pages was not found".into());
    }
    layout.ready = 1;
    probes.maps.set_layout(&layout).map_err(told)?;
    let tried = try_out(probes, &page);
    if tried.is_err() {
        layout.ready = 0;
        probes.maps.set_layout(&layout).map_err(told)?;
    }
    tried
}

/// Looks at pages of which everything is known.
fn try_out(probes: &Probes, of_file: &Page) -> Result<(), String> {
    let mut own = Page::fresh().map_err(|error| format!("no page to look at: {error}"))?;
    let untouched = own.survey(probes)?.page;
    own.touch();
    let touched = own.survey(probes)?.page;
    let shared = of_file.survey(probes)?.page;
    let wanted = [Backing::Untouched, Backing::Anonymous, Backing::Shared]
        .map(|backing| u64::from(page::LOOKED | backing as u8));
    match [untouched, touched, shared] == wanted {
        true => Ok(()),
        false => Err(format!(
            "pages of cmt's own were misread: {untouched:#x}, {touched:#x}, {shared:#x}"
        )),
    }
}

fn getrandom(word: &mut [u8; 8]) -> io::Result<()> {
    // SAFETY: the kernel writes at most so many bytes to the array.
    let got = unsafe { libc::getrandom(word.as_mut_ptr().cast(), word.len(), 0) };
    match got {
        8 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
