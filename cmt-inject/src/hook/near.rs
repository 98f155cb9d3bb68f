//! Memory near code: what is mapped where, and pages for trampolines within reach of a 32-bit displacement.
//!
//! The pages are a memfd that is mapped readable and executable and written through its descriptor, so no page is
//! ever writable and executable, which also works under `PR_SET_MDWE`. They are never unmapped: a thread may be in them
//! at any time.
#![expect(
    unsafe_code,
    reason = "maps pages and reads code at addresses found in /proc/self/maps"
)]

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Seek};
#[cfg(feature = "frida")]
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use super::HookError;

/// Bytes of one region: room for the hooks of one library.
const REGION_BYTES: u64 = 4096;
/// More than a trampoline and a thunk take together: two kept instructions, a window and their undoing.
const HOOK_BYTES: u64 = 256;
/// How far a region may be from the code: 2 GiB less room for the library's own data behind or before the code.
const REACH_BYTES: u64 = (2 << 30) - (256 << 20);
/// What the heap is left to grow into, and a stack without a limit.
const ROOM_BYTES: u64 = 64 << 30;
/// What a stack is left at least, whatever its limit is now. More would make libraries unreachable that the kernel has
/// placed right below: it keeps the limit at exec, or 128 MiB, and a random distance of up to 1 TiB (`mmap_base` in the
/// kernel's arch/x86/mm/mmap.c).
const LEAST_STACK_ROOM_BYTES: u64 = 1 << 30;
/// How far from the ends of a gap a page is looked for: at its ends the target's own next mappings go, and may be faster.
const STEPS: [u64; 4] = [0, 1 << 20, 16 << 20, 256 << 20];
/// Nothing is placed below: `vm.mmap_min_addr` is at most this where it is set as usual.
const LOWEST: u64 = 64 << 10;
/// Blocks of code start on such a boundary.
const ALIGN: u64 = 16;

/// One line of `/proc/self/maps`.
struct Mapping {
    start: u64,
    end: u64,
    /// Readable and executable.
    code: bool,
    #[cfg_attr(
        not(feature = "frida"),
        expect(dead_code, reason = "only gum leaves pages writable")
    )]
    writable: bool,
    grows: Grows,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Grows {
    No,
    /// The heap.
    Up,
    /// The stack of the first thread; the others have theirs mapped as a whole.
    Down,
}

/// Our memory map as the host has opened it, for where there is no `/proc`.
static GIVEN_MAPS: Mutex<Option<File>> = Mutex::new(None);

/// Takes the memory map to read in place of `/proc/self/maps`, or takes it away.
pub fn set_maps(file: Option<File>) {
    *GIVEN_MAPS.lock().unwrap_or_else(PoisonError::into_inner) = file;
}

fn mappings() -> Result<Vec<Mapping>, HookError> {
    let mut text = Vec::new();
    let read = match &mut *GIVEN_MAPS.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(file) => file.rewind().and_then(|()| file.read_to_end(&mut text)),
        None => File::open("/proc/self/maps").and_then(|mut file| file.read_to_end(&mut text)),
    };
    read.map_err(|source| HookError::System {
        call: "reading /proc/self/maps",
        source,
    })?;
    // File names may be any bytes.
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().filter_map(parse).collect())
}

fn parse(line: &str) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let rights = fields.next()?.as_bytes();
    let name = fields.nth(3).unwrap_or("");
    Some(Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        code: rights.first() == Some(&b'r') && rights.get(2) == Some(&b'x'),
        writable: rights.get(1) == Some(&b'w'),
        grows: match name {
            "[heap]" => Grows::Up,
            "[stack]" => Grows::Down,
            _ => Grows::No,
        },
    })
}

/// A copy of the code at `address`: `max_bytes`, or less where its mapping ends before.
pub(super) fn read_code(address: u64, max_bytes: u64) -> Result<Vec<u8>, HookError> {
    let mappings = mappings()?;
    let mapping = mappings
        .iter()
        .find(|mapping| mapping.code && (mapping.start..mapping.end).contains(&address))
        .ok_or(HookError::NotCode { address })?;
    let bytes = max_bytes.min(mapping.end - address) as usize;
    // SAFETY: the range lies in one mapping that was readable a moment ago; it belongs to a library whose functions the
    // process may call at any time, so it stays mapped. Nobody writes to it while no hook is being committed.
    Ok(unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }.to_vec())
}

/// The parts of `own` that are writable and executable.
#[cfg(feature = "frida")]
pub(super) fn writable_code(own: &[Range<u64>]) -> Result<Vec<Range<u64>>, HookError> {
    let mut parts = Vec::new();
    for mapping in mappings()?.iter().filter(|it| it.code && it.writable) {
        for range in own {
            let part = range.start.max(mapping.start)..range.end.min(mapping.end);
            if !part.is_empty() {
                parts.push(part);
            }
        }
    }
    Ok(parts)
}

/// Pages near code that are open for more hooks.
#[derive(Default)]
pub(super) struct Regions(Vec<Region>);

impl Regions {
    /// A region that has room for a hook and that code at `address` reaches.
    pub(super) fn near(&mut self, address: u64) -> Result<&mut Region, HookError> {
        let fits = |region: &Region| region.reaches(address) && region.has_room(HOOK_BYTES);
        let index = match self.0.iter().position(fits) {
            Some(index) => index,
            None => {
                self.0.push(Region::near(address)?);
                self.0.len() - 1
            }
        };
        Ok(&mut self.0[index])
    }

    /// Closes the only way to write the regions; they were mapped executable all along, and stay so for good.
    pub(super) fn close(&mut self) {
        self.0.clear();
    }
}

/// A page of executable memory near some code, filled from the front.
pub(super) struct Region {
    memory: File,
    base: u64,
    used: u64,
}

impl Region {
    /// A new region near `address`.
    fn near(address: u64) -> Result<Self, HookError> {
        // SAFETY: the name is NUL-terminated, and the call touches no other memory.
        let fd = unsafe { libc::memfd_create(c"cmt-thunks".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(system("memfd_create"));
        }
        // SAFETY: the descriptor is new and nobody else's.
        let memory = unsafe { File::from_raw_fd(fd) };
        memory
            .set_len(REGION_BYTES)
            .map_err(|source| HookError::System {
                call: "ftruncate",
                source,
            })?;
        for base in candidates(&mappings()?, address, stack_room()) {
            if map_at(&memory, base)? {
                return Ok(Self {
                    memory,
                    base,
                    used: 0,
                });
            }
        }
        Err(HookError::NoRoom { address })
    }

    /// Whether code at `address` and this region reach each other.
    fn reaches(&self, address: u64) -> bool {
        self.base.abs_diff(address) <= REACH_BYTES
    }

    /// Whether `bytes` more fit in.
    fn has_room(&self, bytes: u64) -> bool {
        self.used + bytes <= REGION_BYTES
    }

    /// The address at which the next block will stand.
    pub(super) fn next_address(&self) -> u64 {
        self.base + self.used
    }

    /// Writes a block at [`Self::next_address`].
    pub(super) fn append(&mut self, block: &[u8]) -> Result<(), HookError> {
        self.memory
            .write_all_at(block, self.used)
            .map_err(|source| HookError::System {
                call: "pwrite",
                source,
            })?;
        self.used = (self.used + block.len() as u64).next_multiple_of(ALIGN);
        Ok(())
    }
}

/// How many bytes below the stack are left to it.
fn stack_room() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the call writes to nothing but `limit`; if it fails, the stack counts as unlimited.
    unsafe { libc::getrlimit(libc::RLIMIT_STACK, &mut limit) };
    limit.rlim_cur.clamp(LEAST_STACK_ROOM_BYTES, ROOM_BYTES)
}

/// Page addresses in the gaps around `address`, the nearest first; none in the `stack_room` bytes below the stack.
fn candidates(mappings: &[Mapping], address: u64, stack_room: u64) -> Vec<u64> {
    let mut low = LOWEST;
    let mut bases = Vec::new();
    for mapping in mappings {
        let high = match mapping.grows {
            Grows::Down => mapping.start.saturating_sub(stack_room),
            _ => mapping.start,
        };
        for step in STEPS {
            if low + step + REGION_BYTES <= high {
                bases.extend([low + step, high - REGION_BYTES - step]);
            }
        }
        low = match mapping.grows {
            Grows::Up => mapping.end + ROOM_BYTES,
            _ => mapping.end,
        };
    }
    bases.retain(|base| base.abs_diff(address) <= REACH_BYTES);
    bases.sort_by_key(|base| base.abs_diff(address));
    bases
}

/// Maps the region at `base`; false if something else is there by now.
fn map_at(memory: &File, base: u64) -> Result<bool, HookError> {
    // SAFETY: MAP_FIXED_NOREPLACE replaces no mapping, so no memory that anybody uses changes.
    let mapped = unsafe {
        libc::mmap(
            base as *mut libc::c_void,
            REGION_BYTES as usize,
            libc::PROT_READ | libc::PROT_EXEC,
            libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE,
            memory.as_raw_fd(),
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        let source = Error::last_os_error();
        // EPERM: below vm.mmap_min_addr; ENOMEM: beyond what this address space allows.
        return match source.raw_os_error() {
            Some(libc::EEXIST) => Ok(false),
            Some(libc::EPERM | libc::ENOMEM) if base < 1 << 20 => Ok(false),
            _ => Err(HookError::System {
                call: "mmap of executable memory",
                source,
            }),
        };
    }
    if mapped as u64 == base {
        return Ok(true);
    }
    // A kernel before 4.17 takes the flag for a hint.
    // SAFETY: the mapping was made just now and nobody knows its address.
    unsafe { libc::munmap(mapped, REGION_BYTES as usize) };
    Err(HookError::System {
        call: "mmap at a fixed address",
        source: ErrorKind::Unsupported.into(),
    })
}

fn system(call: &'static str) -> HookError {
    HookError::System {
        call,
        source: Error::last_os_error(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: u64, end: u64, grows: Grows) -> Mapping {
        Mapping {
            start,
            end,
            code: true,
            writable: false,
            grows,
        }
    }

    #[test]
    fn a_maps_line_is_read() {
        let line = "7f12a000-7f12b000 r-xp 00000000 08:01 77 /usr/lib/libcuda.so.1";
        let mapping = parse(line).unwrap();
        assert_eq!((mapping.start, mapping.end), (0x7f12a000, 0x7f12b000));
        assert!(mapping.code && mapping.grows == Grows::No);
        let heap = parse("55d0-55f0 rw-p 00000000 00:00 0   [heap]").unwrap();
        assert!(heap.grows == Grows::Up && !heap.code);
    }

    #[test]
    fn the_nearest_free_page_comes_first_and_nothing_is_beyond_reach() {
        let code = 0x7000_0000_0000;
        let maps = [
            mapping(code - 0x10_0000, code - 0x8_0000, Grows::No),
            mapping(code - 0x1000, code + 0x5000, Grows::No),
            mapping(code + (3 << 30), code + (4 << 30), Grows::No),
        ];
        let found = candidates(&maps, code, LEAST_STACK_ROOM_BYTES);
        assert_eq!(found[0], code - 0x2000);
        assert!(found.iter().all(|base| base.abs_diff(code) <= REACH_BYTES));
        assert!(found.contains(&(code + 0x5000)));
    }

    #[test]
    fn room_for_heap_and_stack_is_left_alone() {
        let code = 0x7000_0000_0000;
        let maps = [
            mapping(code, code + 0x1000, Grows::No),
            mapping(code + 0x1000, code + 0x3000, Grows::Up),
            mapping(code + 0x8000, code + 0x9000, Grows::Down),
            mapping(code + 0x9000, code + 0xa000, Grows::No),
        ];
        assert!(
            candidates(&maps, code, LEAST_STACK_ROOM_BYTES)
                .iter()
                .all(|&base| base < code)
        );
    }

    #[test]
    fn a_page_is_found_between_libraries_and_a_stack_that_is_not_far() {
        // As seen: the libraries 30 GiB below the stack, and the driver's reservation of addresses right below them.
        let code = 0x7ffc_0000_0000;
        let stack = code + (30 << 30);
        let maps = [
            mapping(code - (16 << 30), code, Grows::No),
            mapping(code, code + 0x8000, Grows::No),
            mapping(stack, stack + 0x2_0000, Grows::Down),
        ];
        let found = candidates(&maps, code, LEAST_STACK_ROOM_BYTES);
        assert_eq!(found[0], code + 0x8000);
        assert!(
            found
                .iter()
                .all(|base| base + REGION_BYTES <= stack - LEAST_STACK_ROOM_BYTES)
        );
        let unlimited = candidates(&maps, code, ROOM_BYTES);
        assert!(unlimited.is_empty(), "{unlimited:x?}");
    }

    #[test]
    fn the_far_end_of_the_gap_above_the_heap_is_used() {
        let code = 0x7000_0000_0000;
        let maps = [
            mapping(0x5500_0000_0000, 0x5500_0010_0000, Grows::Up),
            mapping(code, code + 0x1000, Grows::No),
            mapping(code + 0x1000, code + 0x8000_0000, Grows::No),
        ];
        assert_eq!(
            candidates(&maps, code, LEAST_STACK_ROOM_BYTES)[0],
            code - REGION_BYTES
        );
    }

    #[test]
    fn a_page_is_found_while_others_map_memory() {
        // Pages that are never given back, each where the next free one is; few enough to stay near.
        let storm = || {
            for _ in 0..20_000 {
                // SAFETY: a new mapping that nobody uses.
                let page = unsafe { map_anywhere() };
                assert_ne!(page, libc::MAP_FAILED);
            }
        };
        // SAFETY: a new mapping that nobody uses.
        let code = unsafe { map_anywhere() } as u64;
        std::thread::scope(|scope| {
            let storms = [(); 4].map(|()| scope.spawn(storm));
            while storms.iter().any(|storm| !storm.is_finished()) {
                Region::near(code).expect("a page");
            }
        });
    }

    unsafe fn map_anywhere() -> *mut libc::c_void {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: replaces no mapping.
        unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_NONE, flags, -1, 0) }
    }
}
