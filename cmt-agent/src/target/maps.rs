//! `/proc/PID/maps`: what a process maps where.
//!
//! The names in it are the process's choice, in its own mount namespace even that of the root's files: they are bytes, and
//! none of them may keep the rest from being read.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use procfs::ProcResult;
use procfs::process::Process;

/// No sane process has longer maps, in bytes.
const MOST_BYTES: u64 = 256 << 20;

/// Identity of a mapped file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// Major and minor number of its device.
    device: (u32, u32),
    /// 0 where no file is mapped.
    inode: u64,
}

/// One line of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Address of the first byte.
    pub start: u64,
    /// Address behind the last byte; always above `start`.
    pub end: u64,
    /// May be read.
    pub readable: bool,
    /// May be written.
    pub writable: bool,
    /// May be executed.
    pub executable: bool,
    /// Writes reach the file, and others that map it.
    pub shared: bool,
    /// Where in the file it begins, in bytes.
    pub offset: u64,
    /// Which file.
    pub file: FileId,
    /// Path of the file, or the kernel's word for what it is; as the kernel writes it, with `\012` for a line's end.
    name: Box<[u8]>,
}

impl Mapping {
    /// True if `address` lies in it.
    pub fn contains(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }

    /// True if a file is mapped, of whatever kind.
    pub fn is_file(&self) -> bool {
        self.file.inode != 0
    }

    /// Inode of the file; 0 where none is mapped.
    pub fn inode(&self) -> u64 {
        self.file.inode
    }

    /// Path of the file as the kernel writes it, with a mark if it was deleted; `None` for what is no file.
    pub fn path(&self) -> Option<&Path> {
        let path = self.name.first() == Some(&b'/');
        path.then(|| Path::new(OsStr::from_bytes(&self.name)))
    }

    /// File name, without the mark of deleted ones; `None` for what is no file, and for names that are not UTF-8.
    pub fn file_name(&self) -> Option<&str> {
        let name = self.path()?.file_name()?.to_str()?;
        Some(name.strip_suffix(" (deleted)").unwrap_or(name))
    }

    /// True if the kernel calls it by this name: `[stack]`, `[uprobes]`, or nothing for anonymous memory.
    pub fn is_called(&self, name: &str) -> bool {
        *self.name == *name.as_bytes()
    }

    fn parse(line: &[u8]) -> Option<Self> {
        let mut rest = line;
        let (start, end) = field(&mut rest)?.split_once('-')?;
        let (start, end) = (hex(start)?, hex(end)?);
        let &[read, write, execute, share] = field(&mut rest)?.as_bytes() else {
            return None;
        };
        let offset = hex(field(&mut rest)?)?;
        let (major, minor) = field(&mut rest)?.split_once(':')?;
        let device = (hex(major)?.try_into().ok()?, hex(minor)?.try_into().ok()?);
        let inode = field(&mut rest)?.parse().ok()?;
        let name = rest.trim_ascii_start();
        (start < end).then(|| Self {
            start,
            end,
            readable: read == b'r',
            writable: write == b'w',
            executable: execute == b'x',
            shared: share == b's',
            offset,
            file: FileId { device, inode },
            name: name.into(),
        })
    }

    /// The line as the kernel writes it, without the blanks before the name.
    pub fn to_line(&self) -> Vec<u8> {
        let right = |has, letter| if has { letter } else { '-' };
        let mut line = String::new();
        // Writing to a String cannot fail.
        let _ = write!(
            line,
            "{:08x}-{:08x} {}{}{}{} {:08x} {:02x}:{:02x} {} ",
            self.start,
            self.end,
            right(self.readable, 'r'),
            right(self.writable, 'w'),
            right(self.executable, 'x'),
            if self.shared { 's' } else { 'p' },
            self.offset,
            self.file.device.0,
            self.file.device.1,
            self.file.inode,
        );
        [line.as_bytes(), &self.name].concat()
    }
}

/// Takes the text up to the next blank off `rest`.
fn field<'a>(rest: &mut &'a [u8]) -> Option<&'a str> {
    let end = rest.iter().position(|&byte| byte == b' ');
    let (field, behind) = rest.split_at(end.unwrap_or(rest.len()));
    *rest = behind.get(1..).unwrap_or_default();
    std::str::from_utf8(field).ok()
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

/// What `process` maps; empty for a kernel thread and for one that has ended.
pub fn of(process: &Process) -> ProcResult<Vec<Mapping>> {
    Ok(read(process.open_relative("maps")?)?)
}

/// Libraries and programs that the loader has loaded: file name and load address.
///
/// A file that is only mapped to be read, as symbolizers do, has no executable mapping behind its first one.
pub fn loaded(maps: &[Mapping]) -> Vec<(&str, u64)> {
    let mut found = Vec::new();
    // From the end on: whether code of a file was met since its last first mapping.
    let mut code: HashMap<FileId, bool> = HashMap::new();
    for map in maps.iter().rev().filter(|map| map.is_file()) {
        let code = code.entry(map.file).or_default();
        *code |= map.executable;
        if map.offset == 0 && std::mem::take(code) {
            found.extend(map.file_name().map(|name| (name, map.start)));
        }
    }
    found.reverse();
    found
}

/// Reads the text of a maps file. Lines that make no sense are left out.
pub fn read(text: impl Read) -> io::Result<Vec<Mapping>> {
    let mut text = BufReader::with_capacity(64 << 10, text.take(MOST_BYTES));
    let mut maps = Vec::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        if text.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        maps.extend(Mapping::parse(line.strip_suffix(b"\n").unwrap_or(&line)));
    }
    match text.into_inner().limit() {
        0 => Err(io::Error::other("its maps do not end")),
        _ => Ok(maps),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_read() {
        let text = b"00400000-00452000 r-xp 00001000 08:02 173521      /usr/bin/dbus-daemon\n\
            7f53c9e3d000-7f53c9e3e000 rw-s 00000000 00:01 2052                       /dev/zero (deleted)\n\
            35b1a21000-35b1a22000 ---p 00000000 00:00 0 \n\
            7fffb2c0d000-7fffb2c2e000 rw-p 00000000 00:00 0                          [stack]";
        let maps = read(&text[..]).expect("text in memory");
        assert_eq!(maps.len(), 4);
        let code = &maps[0];
        assert_eq!(
            (code.start, code.end, code.offset),
            (0x400000, 0x452000, 0x1000)
        );
        assert!(code.readable && !code.writable && code.executable && !code.shared);
        assert_eq!((code.file.device, code.inode()), ((8, 2), 173_521));
        assert_eq!(code.path(), Some(Path::new("/usr/bin/dbus-daemon")));
        assert_eq!(maps[1].file_name(), Some("zero"));
        assert!(maps[1].shared && maps[1].is_file());
        assert!(maps[2].is_called("") && maps[2].path().is_none() && !maps[2].is_file());
        assert!(maps[3].is_called("[stack]"));
    }

    #[test]
    fn no_name_keeps_the_others_from_being_read() {
        // The first ends a program that takes it for System V shared memory, the second is what a memfd may be called.
        for name in [
            &b"/SYSV1"[..],
            b"/memfd:\xff\xfe (deleted)",
            b"/a\\012b c ",
            b"[stack:x]",
        ] {
            let lines = [
                &b"1000-2000 r--s 00000000 00:27 4                          "[..],
                name,
                b"\n2000-3000 r-xp 00000000 08:02 5                          /lib/libcuda.so.1\n",
            ];
            let maps = read(&lines.concat()[..]).expect("text in memory");
            assert_eq!(maps.len(), 2, "{name:?}");
            assert_eq!(&*maps[0].name, name);
            assert_eq!(maps[1].file_name(), Some("libcuda.so.1"));
        }
    }

    #[test]
    fn what_is_no_line_is_left_out() {
        for line in [
            "",
            "x",
            "2000-1000 r--p 0 0:0 0 ",
            "0-1 r-- 0 0:0 0 ",
            "0-g r--p 0 0:0 0 ",
            "0-1 r--p 0 0 0 ",
        ] {
            assert_eq!(
                read(line.as_bytes()).expect("text in memory"),
                [],
                "{line:?}"
            );
        }
    }

    #[test]
    fn text_without_an_end_is_refused() {
        assert!(read(io::repeat(b'a')).is_err());
    }
}
