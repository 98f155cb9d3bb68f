//! Reads from a finished `cmt` what it needs of the machine it will run on, and that it does not name the one it was
//! built on. The libraries that it carries are found inside it, so what is looked at is what users get.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use object::Endianness;
use object::elf::{DT_NEEDED, EM_X86_64, FileHeader64, SHF_ALLOC, SHT_DYNSYM, SHT_SYMTAB};
use object::read::elf::{Dyn as _, FileHeader as _, SectionHeader as _, Sym as _};

/// Parts of glibc; the loader counts as one.
const GLIBC_PARTS: [&str; 6] = [
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
];
/// What the payload may ask for: what every process with a libcuda has loaded.
const PAYLOAD_PARTS: [&str; 4] = [
    "libc.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "ld-linux-x86-64.so.2",
];
const MAGIC: &[u8] = b"\x7fELF\x02\x01\x01";

/// Fails unless `cmt` and the libraries in it are stripped, need nothing but glibc up to this version, and hold none of the
/// paths.
pub fn inspect(cmt: &[u8], glibc: (u32, u32), paths: &[PathBuf]) -> Result<()> {
    examine(cmt, glibc, &GLIBC_PARTS).context("cmt")?;
    let Libraries { payload, preload } = Libraries::inside(cmt)?;
    examine(payload, glibc, &PAYLOAD_PARTS).context("the payload")?;
    // Other libcs must be able to load it, too.
    examine(preload, glibc, &[]).context("the preloaded library")?;
    for path in paths {
        ensure!(
            find(cmt, path.as_os_str().as_bytes()).is_none(),
            "it names {}",
            path.display()
        );
    }
    Ok(())
}

/// The two x86-64 libraries inside.
struct Libraries<'a> {
    /// What lives in targets.
    payload: &'a [u8],
    /// What brings it into programs that `cmt` starts; it needs no library.
    preload: &'a [u8],
}

impl<'a> Libraries<'a> {
    fn inside(cmt: &'a [u8]) -> Result<Self> {
        let (mut payloads, mut preloads) = (Vec::new(), Vec::new());
        let mut start = MAGIC.len();
        while let Some(offset) = find(&cmt[start..], MAGIC) {
            start += offset;
            let data = &cmt[start..];
            // The BPF object is the third.
            if FileHeader64::<Endianness>::parse(data).is_ok_and(is_x86) {
                match Needs::of(data)?.libraries.is_empty() {
                    true => preloads.push(data),
                    false => payloads.push(data),
                }
            }
            start += MAGIC.len();
        }
        match (&payloads[..], &preloads[..]) {
            (&[payload], &[preload]) => Ok(Self { payload, preload }),
            _ => bail!(
                "{} payloads and {} preloaded libraries inside",
                payloads.len(),
                preloads.len()
            ),
        }
    }
}

fn is_x86(header: &FileHeader64<Endianness>) -> bool {
    header
        .endian()
        .is_ok_and(|endian| header.e_machine(endian) == EM_X86_64)
}

fn examine(data: &[u8], glibc: (u32, u32), allowed: &[&str]) -> Result<()> {
    is_stripped(data)?;
    let needs = Needs::of(data)?;
    for library in &needs.libraries {
        ensure!(allowed.contains(&library.as_str()), "needs {library}");
    }
    for version in &needs.versions {
        match number(version) {
            Some(number) if number <= glibc => {}
            _ => bail!("needs {version}, past glibc {}.{}", glibc.0, glibc.1),
        }
    }
    // The linker lets a library have symbols that it finds nowhere; the loader does not.
    if let Some(symbol) = needs.unversioned.first() {
        bail!("needs {symbol}, which glibc {}.{} lacks", glibc.0, glibc.1);
    }
    Ok(())
}

fn is_stripped(data: &[u8]) -> Result<()> {
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    for section in sections.iter() {
        let name = sections.section_name(endian, section)?;
        // `.debug_gdb_scripts` is loaded with the program, and says nothing of where that was built.
        let debug = name.starts_with(b".debug") && !section.sh_flags(endian).contains(SHF_ALLOC);
        ensure!(
            section.sh_type(endian) != SHT_SYMTAB && !debug,
            "not stripped: has {}",
            text(name)
        );
    }
    Ok(())
}

/// What the loader looks for.
struct Needs {
    libraries: BTreeSet<String>,
    /// Of symbols, as `GLIBC_2.28`.
    versions: BTreeSet<String>,
    /// Symbols that no library was seen to have. All of glibc's have versions.
    unversioned: BTreeSet<String>,
}

impl Needs {
    fn of(data: &[u8]) -> Result<Self> {
        let header = FileHeader64::<Endianness>::parse(data)?;
        let endian = header.endian()?;
        let sections = header.sections(endian, data)?;
        let (mut libraries, mut versions) = (BTreeSet::new(), BTreeSet::new());
        let (entries, link) = sections.dynamic(endian, data)?.context("is static")?;
        let strings = sections.strings(endian, data, link)?;
        for entry in entries {
            if entry.tag(endian) == DT_NEEDED {
                libraries.insert(text(entry.string(endian, strings)?));
            }
        }
        if let Some((mut files, link)) = sections.gnu_verneed(endian, data)? {
            let strings = sections.strings(endian, data, link)?;
            while let Some((_, mut needed)) = files.next()? {
                while let Some(version) = needed.next()? {
                    versions.insert(text(version.name(endian, strings)?));
                }
            }
        }
        let mut unversioned = BTreeSet::new();
        let symbols = sections.symbols(endian, data, SHT_DYNSYM)?;
        let table = sections.versions(endian, data)?;
        for (index, symbol) in symbols.enumerate() {
            // The first entry is none, and what is weak may be missing.
            let must_be_found = index.0 > 0 && symbol.is_undefined(endian) && !symbol.is_weak();
            let version = match &table {
                Some(table) => table.version(table.version_index(endian, index).index())?,
                None => None,
            };
            if must_be_found && version.is_none() {
                unversioned.insert(text(symbols.symbol_name(endian, symbol)?));
            }
        }
        Ok(Self {
            libraries,
            versions,
            unversioned,
        })
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// `GLIBC_2.3.4` is (2, 3): within 2.28 the third part never decides.
fn number(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.strip_prefix("GLIBC_")?.split('.');
    let (major, minor) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    Some((major, minor))
}

fn find(bytes: &[u8], pattern: &[u8]) -> Option<usize> {
    bytes
        .windows(pattern.len())
        .position(|window| window == pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file at hand: this test itself.
    fn this_test() -> Vec<u8> {
        std::fs::read(std::env::current_exe().expect("it has a path")).expect("read it")
    }

    #[test]
    fn what_is_not_stripped_is_refused() {
        let error = examine(&this_test(), (2, 28), &GLIBC_PARTS).expect_err("it has symbols");
        assert!(error.to_string().starts_with("not stripped"), "{error}");
    }

    #[test]
    fn needs_are_read() {
        let needs = Needs::of(&this_test()).expect("it is an ELF file");
        assert!(needs.libraries.contains("libc.so.6"));
        assert!(needs.versions.contains("GLIBC_2.2.5"));
    }

    #[test]
    fn a_file_without_a_payload_is_no_cmt() {
        let test = this_test();
        let error = Libraries::inside(&test).err().expect("it is one ELF file");
        assert!(error.to_string().starts_with("0 payloads"), "{error}");
    }

    #[test]
    fn versions_are_numbers() {
        assert_eq!(number("GLIBC_2.3.4"), Some((2, 3)));
        assert!(number("GLIBC_2.4") < number("GLIBC_2.28"));
        assert_eq!(number("GLIBC_PRIVATE"), None);
        assert_eq!(number("GCC_3.0"), None);
    }
}
