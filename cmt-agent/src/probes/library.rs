//! Finds the CUDA functions in what a process maps.
//!
//! A library counts by what it exports, not by its name, and is read through the mapping itself
//! (`/proc/PID/map_files`): so containers, deleted files and several copies are right.
//!
//! The file is the target's: it may be anything, of any size, and be exchanged at any moment. So it is opened once, and
//! the kernel is given what was opened, not the path; and no more of it is read than a library can have to say.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use cmt_common::api::{ALLOC_FNS, COPY_FNS, SYNC_FNS};
use object::read::elf::{FileHeader as _, ProgramHeader as _, SectionHeader as _, Sym as _};
use object::{Endianness, ReadCache, ReadRef, elf};

use super::ProbeError;
use super::first::probe_at;
use crate::target::file::{Access, open_regular, path_of};
use crate::target::maps::{FileId, Mapping};
use crate::target::text::printable;

/// No sane library has longer tables of dynamic symbols and of their names, in bytes: those of libtorch_cpu.so take some
/// 10 and 60 MiB.
const MOST_SYMBOLS: u64 = 64 << 20;
const MOST_NAMES: u64 = 256 << 20;
/// No sane library exports one name more often, in several versions.
const MOST_VERSIONS: usize = 4;

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
pub(crate) struct Site {
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
    /// The file that was read.
    file: Arc<File>,
    pub(super) copies: Vec<Site>,
    pub(super) allocations: Vec<Site>,
    pub(super) waits: Vec<Site>,
    /// True where the kernel has to single-step an instruction below a probe, which costs several times as much as one that
    /// it emulates.
    pub single_stepped: bool,
}

/// The functions that a file exports, by table.
#[derive(Default)]
pub(crate) struct Exports {
    pub copies: Vec<Site>,
    pub allocations: Vec<Site>,
    pub waits: Vec<Site>,
}

impl Exports {
    fn tables(&mut self) -> [&mut Vec<Site>; 3] {
        [&mut self.copies, &mut self.allocations, &mut self.waits]
    }
}

impl Mapped {
    /// The file behind `map` in process `pid`, if it is an executable mapping of a file.
    pub fn executable(pid: u32, map: &Mapping) -> Option<Self> {
        let path = map.path()?;
        if !map.executable || !map.is_file() {
            return None;
        }
        let (start, end) = (map.start, map.end);
        let mut below_root = format!("/proc/{pid}/root").into_bytes();
        below_root.extend_from_slice(path.as_os_str().as_bytes());
        Some(Self {
            id: map.file,
            path: path.to_owned(),
            open: [
                format!("/proc/{pid}/map_files/{start:x}-{end:x}").into(),
                OsString::from_vec(below_root).into(),
            ],
        })
    }

    /// File name, for messages.
    pub fn name(&self) -> String {
        match self.path.file_name() {
            Some(name) => printable(&name.to_string_lossy()),
            None => self.shown(),
        }
    }

    /// Its path, for messages.
    pub fn shown(&self) -> String {
        printable(&self.path.to_string_lossy())
    }
}

impl Library {
    /// Reads the exports of a mapped file; `None` if none of them is in the API table or the file is no ELF library for
    /// this machine.
    pub fn read(mapped: &Mapped) -> Result<Option<Self>, ProbeError> {
        let failed = |source| ProbeError::Library {
            path: mapped.shown(),
            source,
        };
        let mut opened = None;
        let mut error = io::Error::from_raw_os_error(libc::ENOENT);
        for path in &mapped.open {
            match open_regular(path, Access::Read) {
                Ok(file) => {
                    opened = Some(file);
                    break;
                }
                // That it may not be opened says more than that its path names nothing.
                Err(_) if error.kind() == io::ErrorKind::PermissionDenied => {}
                Err(found) => error = found,
            }
        }
        let file = opened.ok_or_else(|| failed(error))?;
        let mut found = match exports(&file) {
            Ok(found) => found,
            // Not an ELF file of this machine: a JIT's cache, a Java archive.
            Err(_) => return Ok(None),
        };
        if found.copies.is_empty() {
            return Ok(None);
        }
        let mut single_stepped = false;
        for sites in found.tables() {
            for site in &mut *sites {
                let place = probe_at(&file, site.offset).map_err(failed)?;
                site.offset = place.offset;
                single_stepped |= place.single_stepped;
            }
            // Two names of one address would count each call twice.
            sites.sort_by_key(|site| (site.offset, site.function));
            sites.dedup_by_key(|site| site.offset);
        }
        Ok(Some(Self {
            mapped: mapped.clone(),
            file: Arc::new(file),
            copies: found.copies,
            allocations: found.allocations,
            waits: found.waits,
            single_stepped,
        }))
    }

    /// The same library as another process maps it.
    pub fn through(&self, mapped: &Mapped) -> Self {
        Self {
            mapped: mapped.clone(),
            ..self.clone()
        }
    }

    /// The path to give to the kernel: of the very file that was read, as long as this library lives.
    pub(super) fn open(&self) -> PathBuf {
        path_of(&self.file)
    }

    /// Number of functions that get probes.
    pub fn functions(&self) -> usize {
        self.copies.len() + self.allocations.len() + self.waits.len()
    }
}

/// A function's place in the tables.
#[derive(Clone, Copy)]
enum Known {
    Copy(usize),
    Allocation(usize),
    Wait(usize),
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
    let waits = SYNC_FNS
        .iter()
        .enumerate()
        .map(|(index, function)| (function.name.as_bytes(), Known::Wait(index)));
    copies.chain(allocations).chain(waits).collect()
});

/// Bytes of the longest name in the tables.
static LONGEST: LazyLock<usize> =
    LazyLock::new(|| KNOWN.keys().map(|name| name.len()).max().unwrap_or(0));

/// File offsets of the exported functions that the tables know.
///
/// The numbers of segments and sections are taken from the header alone: files that are no libraries have wider ones.
pub(crate) fn exports(file: &File) -> object::Result<Exports> {
    let data = &ReadCache::new(file);
    let header = elf::FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let mut found = Exports::default();
    if header.e_machine(endian) != elf::EM_X86_64 {
        return Ok(found);
    }
    let segments: &[elf::ProgramHeader64<Endianness>] = data
        .read_slice_at(header.e_phoff(endian), header.e_phnum(endian).into())
        .unwrap_or_default();
    let sections: &[elf::SectionHeader64<Endianness>] = data
        .read_slice_at(header.e_shoff(endian), header.e_shnum(endian).into())
        .unwrap_or_default();
    let Some(symbols) = sections
        .iter()
        .find(|section| section.sh_type(endian) == elf::SHT_DYNSYM)
    else {
        return Ok(found);
    };
    let Some(names) = sections.get(symbols.sh_link(endian) as usize) else {
        return Ok(found);
    };
    if symbols.sh_size(endian) > MOST_SYMBOLS || names.sh_size(endian) > MOST_NAMES {
        return Ok(found);
    }
    let names = names.data(endian, data)?;
    let symbols: &[elf::Sym64<Endianness>] = symbols.data_as_array(endian, data)?;
    let mut versions = HashMap::new();
    for symbol in symbols {
        if symbol.st_type() != elf::STT_FUNC || symbol.is_undefined(endian) {
            continue;
        }
        let Some((name, known)) = known_at(names, symbol.st_name(endian)) else {
            continue;
        };
        let Some(offset) = file_offset(segments, endian, symbol.st_value(endian)) else {
            continue;
        };
        let version = versions.entry(name).or_insert(0);
        *version += 1;
        if *version > MOST_VERSIONS {
            continue;
        }
        let (table, function) = match known {
            Known::Copy(function) => (&mut found.copies, function),
            Known::Allocation(function) => (&mut found.allocations, function),
            Known::Wait(function) => (&mut found.waits, function),
        };
        table.push(Site { function, offset });
    }
    Ok(found)
}

/// The name that begins at `offset`, if the tables know it.
fn known_at(names: &[u8], offset: u32) -> Option<(&[u8], Known)> {
    let rest = names.get(offset as usize..)?;
    let end = rest.iter().take(*LONGEST + 1).position(|&byte| byte == 0)?;
    let name = &rest[..end];
    Some((name, *KNOWN.get(name)?))
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
            if within >= segment.p_filesz(endian) {
                return None;
            }
            segment.p_offset(endian).checked_add(within)
        })
}
