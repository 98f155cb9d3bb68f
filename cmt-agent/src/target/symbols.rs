//! Dynamic symbols of a library as it stands in a target's memory.
//!
//! Files are not asked: in another mount namespace a path names another file, and a replaced one is gone. The loader has
//! relocated the pointers of the dynamic section (glibc does so in place); both forms are understood.

use std::collections::HashMap;
use std::io;

use object::elf;
use object::pod;
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Sym};

use super::memory::Memory;

type Header = elf::FileHeader64<object::Endianness>;
const ENDIAN: object::Endianness = object::Endianness::Little;
/// No sane library has more dynamic symbols, or longer tables; a hostile one must not make us read without end.
const MOST_SYMBOLS: u64 = 1 << 18;
const MOST_STRINGS: u64 = 16 << 20;
/// No function that we look for has a longer name.
const LONGEST_NAME: usize = 64;

/// Why symbols could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SymbolsError {
    /// The memory could not be read.
    #[error("reading the target's memory at {address:#x}")]
    Memory {
        /// Where.
        address: u64,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// It is no ELF image that we understand.
    #[error("no usable ELF image at {base:#x}: {what}")]
    NotElf {
        /// Load address.
        base: u64,
        /// What is missing.
        what: &'static str,
    },
}

/// An exported function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Address in the target.
    pub address: u64,
    /// Size in bytes by the symbol table; 0 if unknown.
    pub size: u64,
}

/// The exported functions of one loaded library, by name; of several versions of a name the default one.
#[derive(Debug)]
pub struct Symbols {
    by_name: HashMap<String, Symbol>,
}

impl Symbols {
    /// Reads the image loaded at `base` (its ELF header's address).
    pub fn read(memory: &Memory, base: u64) -> Result<Self, SymbolsError> {
        let image = Image::open(memory, base)?;
        let mut by_name = HashMap::new();
        for (index, sym) in image.symbols()?.iter().enumerate() {
            let usable = sym.st_shndx(ENDIAN) != elf::SHN_UNDEF
                && matches!(sym.st_type(), elf::STT_FUNC | elf::STT_GNU_IFUNC);
            if !usable || image.hidden(index) {
                continue;
            }
            let Some(name) = image.name(sym.st_name(ENDIAN)) else {
                continue;
            };
            let symbol = Symbol {
                address: image.bias.wrapping_add(sym.st_value(ENDIAN)),
                size: sym.st_size(ENDIAN),
            };
            by_name.insert(name.to_owned(), symbol);
        }
        Ok(Self { by_name })
    }

    /// The function called `name`.
    pub fn get(&self, name: &str) -> Option<Symbol> {
        self.by_name.get(name).copied()
    }
}

/// Looks up one function without reading all: a few dozen bytes of the target's memory.
pub fn lookup(memory: &Memory, base: u64, name: &str) -> Option<Symbol> {
    let tables = Tables::open(memory, base).ok()?;
    let table = tables.gnu_hash?;
    let hash = elf::gnu_hash(name.as_bytes());
    let buckets = word32(memory, table).ok()?;
    let first = u64::from(word32(memory, table.wrapping_add(4)).ok()?);
    let bloom = u64::from(word32(memory, table.wrapping_add(8)).ok()?);
    let buckets_at = table.wrapping_add(16 + bloom * 8);
    let chains_at = buckets_at.wrapping_add(u64::from(buckets) * 4);
    let slot = u64::from(hash.checked_rem(buckets)?);
    let start = u64::from(word32(memory, buckets_at.wrapping_add(slot * 4)).ok()?);
    if start < first {
        return None;
    }
    for index in start..start + MOST_CHAIN {
        let entry = word32(memory, chains_at.wrapping_add((index - first) * 4)).ok()?;
        if entry | 1 == hash | 1 {
            let raw: [u8; SYMBOL_LEN as usize] = memory
                .array(tables.symtab.wrapping_add(index * SYMBOL_LEN))
                .ok()?;
            let (sym, _) = pod::from_bytes::<elf::Sym64<object::Endianness>>(&raw).ok()?;
            let wanted: Vec<u8> = name.bytes().chain([0]).collect();
            let name_at = tables.strtab.wrapping_add(sym.st_name(ENDIAN).into());
            let found = memory.read_up_to(name_at, wanted.len());
            if found == wanted && sym.st_shndx(ENDIAN) != elf::SHN_UNDEF {
                return Some(Symbol {
                    address: tables.bias.wrapping_add(sym.st_value(ENDIAN)),
                    size: sym.st_size(ENDIAN),
                });
            }
        }
        if entry & 1 == 1 {
            return None;
        }
    }
    None
}

/// Bytes of one symbol.
const SYMBOL_LEN: u64 = size_of::<elf::Sym64<object::Endianness>>() as u64;
/// No sane hash chain is longer.
const MOST_CHAIN: u64 = 4096;

/// Where the tables of a loaded library stand.
struct Tables {
    /// What is added to the file's addresses.
    bias: u64,
    symtab: u64,
    strtab: u64,
    strtab_len: u64,
    versym: Option<u64>,
    gnu_hash: Option<u64>,
    hash: Option<u64>,
}

impl Tables {
    fn open(memory: &Memory, base: u64) -> Result<Self, SymbolsError> {
        let bad = |what| SymbolsError::NotElf { base, what };
        let at = |address| move |source| SymbolsError::Memory { address, source };
        let head: [u8; size_of::<Header>()] = memory.array(base).map_err(at(base))?;
        let (header, _) =
            pod::from_bytes::<Header>(&head).map_err(|()| bad("the header is cut off"))?;
        if header.e_ident.magic != elf::ELFMAG || header.e_ident.class != elf::ELFCLASS64 {
            return Err(bad("no 64-bit ELF header"));
        }
        let phdrs_at = base.wrapping_add(header.e_phoff(ENDIAN));
        let count = usize::from(header.e_phnum(ENDIAN));
        let mut raw = vec![0; count * size_of::<elf::ProgramHeader64<object::Endianness>>()];
        memory.read(phdrs_at, &mut raw).map_err(at(phdrs_at))?;
        let (phdrs, _) =
            pod::slice_from_bytes::<elf::ProgramHeader64<object::Endianness>>(&raw, count)
                .map_err(|()| bad("the program headers are cut off"))?;
        let first = phdrs
            .iter()
            .filter(|p| p.p_type(ENDIAN) == elf::PT_LOAD)
            .map(|p| p.p_vaddr(ENDIAN))
            .min();
        let bias = base.wrapping_sub(first.ok_or(bad("nothing is loaded"))? & !0xfff);
        let dynamic = phdrs
            .iter()
            .find(|p| p.p_type(ENDIAN) == elf::PT_DYNAMIC)
            .ok_or(bad("it is not dynamically linked"))?;
        let tags = dynamic_tags(
            memory,
            bias.wrapping_add(dynamic.p_vaddr(ENDIAN)),
            dynamic.p_memsz(ENDIAN),
        )?;
        let pointer = |tag: elf::DynamicTag| {
            tags.get(&tag).map(|&value| {
                if value >= base {
                    value
                } else {
                    bias.wrapping_add(value)
                }
            })
        };
        Ok(Self {
            bias,
            symtab: pointer(elf::DT_SYMTAB).ok_or(bad("it has no symbol table"))?,
            strtab: pointer(elf::DT_STRTAB).ok_or(bad("it has no string table"))?,
            strtab_len: tags
                .get(&elf::DT_STRSZ)
                .copied()
                .unwrap_or(0)
                .min(MOST_STRINGS),
            versym: pointer(elf::DT_VERSYM),
            gnu_hash: pointer(elf::DT_GNU_HASH),
            hash: pointer(elf::DT_HASH),
        })
    }
}

/// The symbols of a loaded library, copied out of the target.
struct Image {
    base: u64,
    bias: u64,
    symtab: Vec<u8>,
    versym: Vec<u8>,
    strtab: Vec<u8>,
}

impl Image {
    fn open(memory: &Memory, base: u64) -> Result<Self, SymbolsError> {
        let at = |address| move |source| SymbolsError::Memory { address, source };
        let tables = Tables::open(memory, base)?;
        let symbols = match (tables.gnu_hash, tables.hash) {
            (Some(table), _) => gnu_hash_count(memory, table).map_err(at(table))?,
            (None, Some(table)) => {
                u64::from(word32(memory, table.wrapping_add(4)).map_err(at(table))?)
            }
            (None, None) => {
                return Err(SymbolsError::NotElf {
                    base,
                    what: "it has no hash table",
                });
            }
        }
        .min(MOST_SYMBOLS);
        let versym = match tables.versym {
            Some(table) => memory.read_up_to(table, symbols as usize * 2),
            None => Vec::new(),
        };
        Ok(Self {
            base,
            bias: tables.bias,
            symtab: memory.read_up_to(tables.symtab, (symbols * SYMBOL_LEN) as usize),
            versym,
            strtab: memory.read_up_to(tables.strtab, tables.strtab_len as usize),
        })
    }

    fn symbols(&self) -> Result<&[elf::Sym64<object::Endianness>], SymbolsError> {
        let count = self.symtab.len() / size_of::<elf::Sym64<object::Endianness>>();
        pod::slice_from_bytes(&self.symtab, count)
            .map(|(symbols, _)| symbols)
            .map_err(|()| SymbolsError::NotElf {
                base: self.base,
                what: "the symbol table is cut off",
            })
    }

    /// True for a version of a name that is not its default.
    fn hidden(&self, index: usize) -> bool {
        self.versym
            .get(index * 2..index * 2 + 2)
            .is_some_and(|bytes| {
                elf::VersymIndex(u16::from_le_bytes([bytes[0], bytes[1]])).is_hidden()
            })
    }

    fn name(&self, offset: u32) -> Option<&str> {
        let rest = self.strtab.get(offset as usize..)?;
        let end = rest.iter().take(LONGEST_NAME).position(|&byte| byte == 0)?;
        std::str::from_utf8(&rest[..end]).ok()
    }
}

fn dynamic_tags(
    memory: &Memory,
    address: u64,
    bytes: u64,
) -> Result<HashMap<elf::DynamicTag, u64>, SymbolsError> {
    let raw = memory.read_up_to(address, bytes.min(64 << 10) as usize);
    let count = raw.len() / size_of::<elf::Dyn64<object::Endianness>>();
    let (entries, _) = pod::slice_from_bytes::<elf::Dyn64<object::Endianness>>(&raw, count)
        .map_err(|()| SymbolsError::NotElf {
            base: address,
            what: "the dynamic section is cut off",
        })?;
    Ok(entries
        .iter()
        .map(|entry| (entry.d_tag(ENDIAN), entry.d_val(ENDIAN)))
        .take_while(|&(tag, _)| tag != elf::DT_NULL)
        .collect())
}

fn word32(memory: &Memory, address: u64) -> io::Result<u32> {
    Ok(u32::from_le_bytes(memory.array(address)?))
}

/// Number of symbols by a GNU hash table: its last chain ends with the last symbol.
fn gnu_hash_count(memory: &Memory, table: u64) -> io::Result<u64> {
    let buckets = u64::from(word32(memory, table)?);
    let first = u64::from(word32(memory, table.wrapping_add(4))?);
    let bloom = u64::from(word32(memory, table.wrapping_add(8))?);
    let buckets_at = table.wrapping_add(16 + bloom * 8);
    let chains_at = buckets_at.wrapping_add(buckets * 4);
    let raw = memory.read_up_to(buckets_at, (buckets.min(MOST_SYMBOLS) * 4) as usize);
    let last = raw
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .max()
        .unwrap_or(0);
    if u64::from(last) < first {
        return Ok(first);
    }
    let mut index = u64::from(last);
    while index < MOST_SYMBOLS
        && word32(memory, chains_at.wrapping_add((index - first) * 4))? & 1 == 0
    {
        index += 1;
    }
    Ok(index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::file::Access;
    use crate::target::maps;

    #[test]
    fn finds_functions_of_our_own_libc() {
        let pid = std::process::id();
        let memory = Memory::open(pid, Access::ReadWrite).expect("our own memory");
        let maps = procfs::process::Process::myself()
            .and_then(|process| maps::of(&process))
            .expect("our own maps");
        let base = maps
            .iter()
            .find(|map| map.file_name() == Some("libc.so.6"))
            .map(|map| map.start)
            .expect("a libc");
        let symbols = Symbols::read(&memory, base).expect("symbols");
        let address = libc::getpid as *const () as u64;
        assert_eq!(symbols.get("getpid").map(|s| s.address), Some(address));
        assert!(symbols.get("pthread_create").is_some());
        assert!(symbols.get("no_such_function").is_none());
        assert_eq!(
            lookup(&memory, base, "getpid").map(|s| s.address),
            Some(address)
        );
        assert_eq!(lookup(&memory, base, "no_such_function"), None);
    }

    #[test]
    fn endless_names_are_no_names() {
        let image = Image {
            base: 0,
            bias: 0,
            symtab: Vec::new(),
            versym: Vec::new(),
            strtab: [&b"malloc\0"[..], &vec![b'a'; 1 << 20], b"\0"].concat(),
        };
        assert_eq!(image.name(0), Some("malloc"));
        assert_eq!(image.name(7), None);
        assert_eq!(image.name(u32::MAX), None);
    }

    #[test]
    fn refuses_what_is_no_elf() {
        let bytes = vec![0u8; 4096];
        let memory = Memory::open(std::process::id(), Access::Read).expect("our own memory");
        let error = Symbols::read(&memory, bytes.as_ptr() as u64).expect_err("zeros");
        assert!(
            error.to_string().contains("no 64-bit ELF header"),
            "{error}"
        );
    }
}
