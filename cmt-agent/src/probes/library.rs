//! Finds the CUDA functions in what a process maps.
//!
//! A library counts by what it exports, not by its name, and is read through the mapping itself
//! (`/proc/PID/map_files`): so containers, deleted files and several copies are right.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::LazyLock;

use cmt_common::api::{ALLOC_FNS, COPY_FNS};
use object::read::elf::{FileHeader as _, ProgramHeader as _, Sym as _};
use object::{Endianness, ReadCache, elf};
use procfs::process::{MMPermissions, MMapPath, MemoryMap};

use super::ProbeError;

/// Identity of a mapped file: device and inode as `/proc/PID/maps` shows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    device: (i32, i32),
    inode: u64,
}

/// An executable file mapping of a process.
#[derive(Clone, Debug)]
pub struct Mapped {
    /// Which file.
    pub id: FileId,
    /// Its path as the target sees it.
    pub path: PathBuf,
    /// Paths through which this process can open it, best first.
    open: [PathBuf; 2],
}

/// What a probe goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Site {
    /// Position in the table of functions.
    pub function: usize,
    /// Offset in the file.
    pub offset: u64,
}

/// A mapped file that exports functions of the API table.
#[derive(Clone, Debug)]
pub struct Library {
    /// Where it was found.
    pub mapped: Mapped,
    /// The path by which it could be opened.
    pub(super) open: PathBuf,
    pub(super) copies: Vec<Site>,
    pub(super) allocations: Vec<Site>,
}

impl Mapped {
    /// The file behind `map` in process `pid`, if it is an executable mapping of a file.
    pub fn executable(pid: u32, map: &MemoryMap) -> Option<Self> {
        let MMapPath::Path(path) = &map.pathname else {
            return None;
        };
        if !map.perms.contains(MMPermissions::EXECUTE) || map.inode == 0 {
            return None;
        }
        let (start, end) = map.address;
        Some(Self {
            id: FileId {
                device: map.dev,
                inode: map.inode,
            },
            path: path.clone(),
            open: [
                format!("/proc/{pid}/map_files/{start:x}-{end:x}").into(),
                format!("/proc/{pid}/root{}", path.display()).into(),
            ],
        })
    }

    /// File name, for messages.
    pub fn name(&self) -> String {
        self.path.file_name().map_or_else(
            || self.path.display().to_string(),
            |name| name.to_string_lossy().into_owned(),
        )
    }
}

impl Library {
    /// Reads the exports of a mapped file; `None` if none of them is in the API table or the file is no ELF library for
    /// this machine.
    pub fn read(mapped: &Mapped) -> Result<Option<Self>, ProbeError> {
        let failed = |source| ProbeError::Library {
            path: mapped.path.display().to_string(),
            source,
        };
        let mut opened = None;
        let mut error = io::Error::from_raw_os_error(libc::ENOENT);
        for path in &mapped.open {
            match File::open(path) {
                Ok(file) => {
                    opened = Some((file, path.clone()));
                    break;
                }
                Err(found) => error = found,
            }
        }
        let Some((file, open)) = opened else {
            return Err(failed(error));
        };
        let (mut copies, mut allocations) = match exports(&file) {
            Ok(found) => found,
            // Not an ELF file of this machine: a JIT's cache, a Java archive.
            Err(_) => return Ok(None),
        };
        if copies.is_empty() {
            return Ok(None);
        }
        for site in copies.iter_mut().chain(&mut allocations) {
            site.offset = behind_endbr(&file, site.offset).map_err(failed)?;
        }
        // Two names of one address would count each call twice.
        for sites in [&mut copies, &mut allocations] {
            sites.sort_by_key(|site| (site.offset, site.function));
            sites.dedup_by_key(|site| site.offset);
        }
        Ok(Some(Self {
            mapped: mapped.clone(),
            open,
            copies,
            allocations,
        }))
    }

    /// The same library, opened through another process that maps it.
    pub fn through(&self, mapped: &Mapped) -> Self {
        let way = self
            .mapped
            .open
            .iter()
            .position(|path| *path == self.open)
            .unwrap_or(0);
        Self {
            mapped: mapped.clone(),
            open: mapped.open[way].clone(),
            ..self.clone()
        }
    }

    /// Number of functions that get probes.
    pub fn functions(&self) -> usize {
        self.copies.len() + self.allocations.len()
    }
}

/// A function's place in the tables.
#[derive(Clone, Copy)]
enum Known {
    Copy(usize),
    Allocation(usize),
}

static KNOWN: LazyLock<HashMap<&'static [u8], Known>> = LazyLock::new(|| {
    let copies = COPY_FNS
        .iter()
        .enumerate()
        .map(|(index, function)| (function.name.as_bytes(), Known::Copy(index)));
    let allocations = ALLOC_FNS
        .iter()
        .enumerate()
        .map(|(index, function)| (function.name.as_bytes(), Known::Allocation(index)));
    copies.chain(allocations).collect()
});

/// File offsets of the exported functions that the tables know: copies, allocations.
fn exports(file: &File) -> object::Result<(Vec<Site>, Vec<Site>)> {
    let data = ReadCache::new(file);
    let data = &data;
    let header = elf::FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let (mut copies, mut allocations) = (Vec::new(), Vec::new());
    if header.e_machine(endian) != elf::EM_X86_64 {
        return Ok((copies, allocations));
    }
    let segments = header.program_headers(endian, data)?;
    let sections = header.sections(endian, data)?;
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
    for symbol in symbols.iter() {
        if symbol.st_type() != elf::STT_FUNC || symbol.is_undefined(endian) {
            continue;
        }
        let Some(known) = KNOWN.get(symbols.symbol_name(endian, symbol)?) else {
            continue;
        };
        let Some(offset) = file_offset(segments, endian, symbol.st_value(endian)) else {
            continue;
        };
        match *known {
            Known::Copy(function) => copies.push(Site { function, offset }),
            Known::Allocation(function) => allocations.push(Site { function, offset }),
        }
    }
    Ok((copies, allocations))
}

fn file_offset(
    segments: &[elf::ProgramHeader64<Endianness>],
    endian: Endianness,
    address: u64,
) -> Option<u64> {
    segments
        .iter()
        .filter(|segment| segment.p_type(endian) == elf::PT_LOAD)
        .find_map(|segment| {
            let within = address.checked_sub(segment.p_vaddr(endian))?;
            (within < segment.p_filesz(endian)).then(|| segment.p_offset(endian) + within)
        })
}

/// Where to probe a function that starts at `offset`: behind an `endbr64`. The kernel emulates the usual first
/// instructions but has to single-step this one, which makes a probe seven times as expensive.
fn behind_endbr(file: &File, offset: u64) -> io::Result<u64> {
    const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
    let mut first = [0; 4];
    file.read_exact_at(&mut first, offset)?;
    Ok(if first == ENDBR64 { offset + 4 } else { offset })
}
