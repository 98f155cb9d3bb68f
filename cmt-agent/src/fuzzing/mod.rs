//! What reads foreign bytes, fed with any bytes: one function a reader. It panics where what must hold does not.
//!
//! The fuzz targets of `fuzz/` call these, and so do the tests below, with the inputs that `fuzz/seeds` keeps. No part of
//! the product.

mod seccomp;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use cmt_common::api::{COPY_FNS, HOOKED};
use cmt_common::control::{CONTROL_BYTES, RELOCATED_MAX, WINDOW_MAX, hook};
use nix::sys::memfd::{MFdFlags, memfd_create};
use object::read::elf::{FileHeader as _, ProgramHeader as _, Sym as _};
use object::{Endianness, elf};
use procfs::process::{Stat, Status};
use procfs::{FromBufRead as _, FromRead as _};

use crate::commands::status;
use crate::injector::{ControlMap, threads};
use crate::probes::Mapped;
use crate::probes::library::{self, Site};
use crate::target::maps::{self, Mapping};
use crate::target::memory::Memory;
use crate::target::symbols::{self, Symbols};
use crate::target::text::printable;
use crate::trace::memory;
use crate::{cpus, profile, tune};

pub use seccomp::seccomp;

/// The text of `/proc/PID/maps`.
pub fn proc_maps(data: &[u8]) {
    let found = maps::read(data).expect("a slice can be read");
    let text: Vec<u8> = found
        .iter()
        .flat_map(|map| [&map.to_line()[..], b"\n"].concat())
        .collect();
    assert_eq!(maps::read(&text[..]).expect("as above"), found);
    for map in &found {
        assert!(map.start < map.end);
        if let Some(mapped) = Mapped::executable(1, map) {
            assert_printable(&mapped.name());
            assert_printable(&mapped.shown());
        }
    }
    let ranges = memory::ranges(&found);
    assert!(ranges.len() <= found.len());
    assert_eq!(maps::loaded(&found), loaded_by_definition(&found));
}

/// What the loader has loaded, by the words of [`maps::loaded`]: from each first mapping of a file up to the next.
fn loaded_by_definition(maps: &[Mapping]) -> Vec<(&str, u64)> {
    let has_code = |index: usize| {
        let first = &maps[index];
        let later = maps[index + 1..].iter().filter(|it| it.file == first.file);
        first.executable
            || later
                .take_while(|it| it.offset != 0)
                .any(|it| it.executable)
    };
    (0..maps.len())
        .filter(|&index| maps[index].offset == 0 && maps[index].is_file() && has_code(index))
        .filter_map(|index| Some((maps[index].file_name()?, maps[index].start)))
        .collect()
}

/// A file that a process maps as code.
pub fn elf_file(data: &[u8]) {
    let Ok(found) = library::exports(&file(data, 0)) else {
        return;
    };
    for sites in [&found.copies, &found.allocations, &found.waits] {
        let versions = |of: &Site| sites.iter().filter(|it| it.function == of.function).count();
        assert!(sites.iter().all(|site| versions(site) <= 4));
    }
    // Where the plain way through finds less than what is a version too many, both find the same.
    if let Ok(plain) = copies_by_the_crate(data)
        && plain.len() <= 4
    {
        let read: Vec<_> = found
            .copies
            .iter()
            .map(|site| (site.function, site.offset))
            .collect();
        assert_eq!(read, plain);
    }
}

/// The same by `object`'s own tables: position in `COPY_FNS` and file offset.
fn copies_by_the_crate(data: &[u8]) -> object::Result<Vec<(usize, u64)>> {
    let header = elf::FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    if header.e_machine(endian) != elf::EM_X86_64 {
        return Ok(Vec::new());
    }
    let segments = header.program_headers(endian, data)?;
    let symbols = header
        .sections(endian, data)?
        .symbols(endian, data, elf::SHT_DYNSYM)?;
    let mut found = Vec::new();
    for symbol in symbols.iter() {
        let Ok(name) = symbols.symbol_name(endian, symbol) else {
            continue;
        };
        let function = COPY_FNS.iter().position(|it| it.name.as_bytes() == name);
        let address = symbol.st_value(endian);
        let offset = segments
            .iter()
            .filter(|segment| segment.p_type(endian) == elf::PT_LOAD)
            .find_map(|segment| {
                let start = u128::from(segment.p_vaddr(endian));
                let end = start + u128::from(segment.p_filesz(endian));
                let inside = (start..end).contains(&u128::from(address));
                let within = address.wrapping_sub(segment.p_vaddr(endian));
                segment
                    .p_offset(endian)
                    .checked_add(within)
                    .filter(|_| inside)
            });
        if symbol.st_type() == elf::STT_FUNC && !symbol.is_undefined(endian) {
            found.extend(function.zip(offset));
        }
    }
    Ok(found)
}

/// A library as it stands in memory.
pub fn elf_memory(data: &[u8]) {
    let memory = Memory::of_file(file(data, BASE));
    let symbols = Symbols::read(&memory, BASE);
    for name in ["malloc", "pthread_create", "cuMemcpyHtoD_v2"] {
        let _ = symbols::lookup(&memory, BASE, name);
        if let Ok(symbols) = &symbols {
            let _ = symbols.get(name);
        }
    }
}

/// Where a library stands in memory: above all addresses in its file.
const BASE: u64 = 1 << 32;

/// A control block that the target has written.
pub fn control_block(data: &[u8]) {
    let mut block = [0; CONTROL_BYTES];
    let len = data.len().min(CONTROL_BYTES);
    block[..len].copy_from_slice(&data[..len]);
    let control = ControlMap::copy_of(&block);
    for text in [control.boot_message(), control.message(), control.engine()] {
        assert_printable(&text);
    }
    for index in 0..HOOKED {
        let hook = control.hook(index);
        assert_printable(&hook.reason);
        assert!(hook.reason.chars().count() <= 96 && hook.relocated.len() <= RELOCATED_MAX);
        assert_eq!(hook.original.len(), hook.patched.len());
        if hook.status == hook::PREPARED {
            // What is written lies in one page, within reach of the function, and is a window.
            let len = hook.original.len() as u64;
            let start = control.hooks[index]
                .address
                .load(std::sync::atomic::Ordering::Relaxed);
            assert!((1..=WINDOW_MAX as u64).contains(&len));
            assert!(hook.window - start < 32);
            assert_eq!(hook.window >> 12, (hook.window + (len - 1)) >> 12);
        }
    }
    let (text, object) = status::both(&control);
    for line in text.lines() {
        assert_printable(line);
    }
    assert!(text.len() < 16 << 10 && object.len() < 32 << 10);
    serde_json::from_str::<serde_json::Value>(&object).expect("an object");
}

/// A profile.
pub fn profile(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok((file, plan)) = profile::parse_file(&text, Path::new("profile")) {
        for written in [profile::to_json(&plan), file.to_text()] {
            let again = profile::parse(&written, Path::new("profile"));
            assert_eq!(again.expect("what was read can be written"), plan);
        }
        let machine = file.machine.as_ref().map(tune::machine_text);
        let shown = [
            machine.unwrap_or_default(),
            tune::plan_text(&file),
            tune::classes_text(&file),
        ];
        for line in shown.iter().flat_map(|text| text.lines()) {
            assert_printable(line);
        }
    }
}

/// Names that a process and its cgroup give themselves, where `/proc` shows them among other things.
pub fn proc_names(data: &[u8]) {
    let name = String::from_utf8_lossy(data);
    assert_printable(&printable(&name));
    // The kernel escapes ends of lines, and cuts off behind 15 bytes.
    let escaped = name.replace('\\', "\\\\").replace('\n', "\\n");
    let zeros = "0 ".repeat(48);
    let stat = format!("7 ({escaped}) S 1 {zeros}\n");
    assert_eq!(threads::state_in(&stat), Some('S'));
    assert_eq!(
        Stat::from_read(stat.as_bytes()).map(|it| it.pid).ok(),
        Some(7)
    );
    let own = std::fs::read_to_string("/proc/self/status").expect("our own status");
    let (_, rest) = own.split_once('\n').expect("some lines");
    let status = format!("Name:\t{escaped}\n{rest}");
    let status = Status::from_buf_read(status.as_bytes()).expect("a status");
    assert_eq!(status.pid, std::process::id() as i32);
    let group = format!("3:cpu,cpuacct:/{escaped}\n0::/{escaped}\n");
    for (folder, _) in cpus::folders(&group).expect("two cgroups") {
        assert!(folder.starts_with("/sys/fs/cgroup"), "{folder:?}");
    }
}

/// Nothing in it moves the cursor.
#[track_caller]
fn assert_printable(text: &str) {
    assert!(!text.contains(char::is_control), "{text:?}");
}

/// A file that holds `data` from `offset` on, and nothing before.
fn file(data: &[u8], offset: u64) -> File {
    let fd = memfd_create(c"fuzzing", MFdFlags::MFD_CLOEXEC).expect("a memfd");
    let file = File::from(fd);
    file.write_all_at(data, offset).expect("some memory");
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds a reader with the inputs that are kept for it.
    #[track_caller]
    fn replay(target: &str, reader: fn(&[u8])) {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds");
        let mut count = 0;
        for entry in std::fs::read_dir(seeds.join(target)).expect("the seeds") {
            reader(&std::fs::read(entry.expect("a seed").path()).expect("a seed"));
            count += 1;
        }
        assert!(count > 0, "no seeds of {target}");
    }

    macro_rules! replayed {
        ($($reader:ident)*) => {$(
            #[test]
            fn $reader() {
                replay(stringify!($reader), super::$reader);
            }
        )*};
    }

    #[test]
    fn a_library_in_memory_is_read() {
        for library in ["gnu.so", "sysv.so"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/elf_memory");
            let data = std::fs::read(path.join(library)).expect("a seed");
            let memory = Memory::of_file(file(&data, BASE));
            let symbols = Symbols::read(&memory, BASE).expect("symbols");
            let copies = library::exports(&file(&data, 0)).expect("exports").copies;
            let name = "cuMemcpyHtoD_v2";
            let copy = symbols.get(name).expect("a copy function");
            let site = copies
                .iter()
                .find(|site| COPY_FNS[site.function].name == name)
                .expect("the same one");
            assert_eq!((copies.len(), copy.address), (2, BASE + site.offset));
            let looked_up = symbols::lookup(&memory, BASE, name);
            assert_eq!(looked_up, (library == "gnu.so").then_some(copy));
        }
    }

    replayed! { proc_maps elf_file elf_memory control_block profile proc_names seccomp }
}
