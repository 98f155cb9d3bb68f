//! Loads the BPF programs, in the way that the links need which this kernel has.
#![expect(
    unsafe_code,
    reason = "aya 0.14 cannot name an attach type for a uprobe program, nor try to open one: bare system calls"
)]

use std::collections::HashSet;
use std::ffi::CStr;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::{fs, io, mem};

use aya::Ebpf;
use aya::maps::Map;
use aya::programs::{ProgramError, UProbe};
use aya_obj::generated::{
    bpf_attach_type::BPF_TRACE_UPROBE_MULTI, bpf_attr, bpf_cmd, bpf_insn, bpf_prog_type,
};

pub(super) use super::kernel::Kind;
use super::link::bpf;
use super::programs::{OBJECT, PROGRAMS, system_error};
use super::rights::{self, Deed};
use super::{ProbeError, kernel};

/// Loads the programs for single-site links: aya's own way.
pub(super) fn single(ebpf: &mut Ebpf) -> Result<(), ProbeError> {
    if !kernel::has_cookies() {
        let (major, minor) = kernel::version();
        return Err(ProbeError::TooOld { major, minor });
    }
    for name in PROGRAMS {
        let program: &mut UProbe = ebpf
            .program_mut(name)
            .and_then(|program| program.try_into().ok())
            .ok_or_else(|| ProbeError::Object(format!("no uprobe program {name}")))?;
        match program.load() {
            Ok(()) => {}
            Err(ProgramError::LoadError {
                io_error,
                verifier_log,
            }) if io_error.raw_os_error() != Some(libc::EPERM) => {
                return Err(unfit(name, &io_error, &verifier_log.to_string()));
            }
            Err(error) => return Err(ProbeError::of("BPF programs", system_error(error))),
        }
    }
    open_uprobe().map_err(|error| match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => ProbeError::Denied {
            what: "a uprobe",
            reason: rights::refusal(Deed::TraceBySingleLinks),
        },
        _ => ProbeError::Unsupported {
            what: "a uprobe",
            source: error,
        },
    })
}

/// The start of `struct perf_event_attr` (PERF_ATTR_SIZE_VER1), as a uprobe uses it.
#[repr(C)]
#[derive(Default)]
struct UprobeAttr {
    kind: u32,
    size: u32,
    config: u64,
    unused: [u64; 5],
    path: u64,
    offset: u64,
}

/// Opens a uprobe on the first byte of this program's code without enabling it, and closes it again.
///
/// Where this is refused every single-site link is: since Linux 6.16, and in what older series got of it, it takes
/// CAP_SYS_ADMIN ("perf: Revert to requiring CAP_SYS_ADMIN for uprobes"), which links with many sites do not.
fn open_uprobe() -> io::Result<()> {
    let kind = fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
    let attr = UprobeAttr {
        kind: kind.trim().parse().map_err(io::Error::other)?,
        size: size_of::<UprobeAttr>() as u32,
        path: c"/proc/self/exe".as_ptr() as u64,
        ..UprobeAttr::default()
    };
    const FD_CLOEXEC: u64 = 1 << 3;
    const ANY_CPU: i32 = -1;
    const NO_GROUP: i32 = -1;
    // SAFETY: the kernel reads `size` bytes of `attr` and the NUL-terminated path; both live until it returns.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attr,
            libc::getpid(),
            ANY_CPU,
            NO_GROUP,
            FD_CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
    Ok(())
}

/// Loads the programs for links with many sites, which aya 0.14 cannot do: their attach type has to be named at load time.
pub(super) fn multi(ebpf: &Ebpf) -> Result<Vec<OwnedFd>, ProbeError> {
    let broken = |error: &dyn std::fmt::Display| ProbeError::Object(error.to_string());
    let mut object = aya_obj::Object::parse(OBJECT).map_err(|error| broken(&error))?;
    let texts: HashSet<usize> = object
        .functions
        .keys()
        .map(|(section, _)| *section)
        .collect();
    let maps = mem::take(&mut object.maps);
    let with_fds: Vec<(&str, RawFd, &aya_obj::Map)> = maps
        .iter()
        .filter_map(|(name, map)| Some((name.as_str(), map_fd(ebpf.map(name)?)?.as_raw_fd(), map)))
        .collect();
    object
        .relocate_maps(with_fds.into_iter(), &texts)
        .map_err(|error| broken(&error))?;
    object
        .relocate_calls(&texts)
        .map_err(|error| broken(&error))?;
    PROGRAMS
        .iter()
        .map(|name| {
            let program = object
                .programs
                .get(*name)
                .ok_or_else(|| broken(&format!("no program {name}")))?;
            let function = &object.functions[&program.function_key()];
            load_program(name, &function.instructions, &program.license)
        })
        .collect()
}

fn load_program(
    name: &'static str,
    instructions: &[bpf_insn],
    license: &CStr,
) -> Result<OwnedFd, ProbeError> {
    let mut log = Vec::new();
    loop {
        // SAFETY: all-zero bytes are a value of this union of integers.
        let mut attr: bpf_attr = unsafe { mem::zeroed() };
        // SAFETY: every member of the union is plain integers, so this view of it is valid.
        let load = unsafe { &mut attr.__bindgen_anon_3 };
        load.prog_type = bpf_prog_type::BPF_PROG_TYPE_KPROBE as u32;
        load.expected_attach_type = BPF_TRACE_UPROBE_MULTI as u32;
        load.insns = instructions.as_ptr() as u64;
        load.insn_cnt = instructions.len() as u32;
        load.license = license.as_ptr() as u64;
        for (to, from) in load.prog_name.iter_mut().zip(name.bytes()).take(15) {
            *to = from as _;
        }
        if !log.is_empty() {
            load.log_level = 1;
            load.log_buf = log.as_mut_ptr() as u64;
            load.log_size = log.len() as u32;
        }
        match bpf(bpf_cmd::BPF_PROG_LOAD, &mut attr) {
            Ok(fd) => return Ok(fd),
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                return Err(ProbeError::of("BPF programs", error));
            }
            // Once more, for the verifier's words.
            Err(_) if log.is_empty() => log = vec![0u8; 1 << 20],
            Err(error) => {
                let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
                return Err(unfit(name, &error, &String::from_utf8_lossy(&log[..end])));
            }
        }
    }
}

/// The error for a program that the verifier refuses. Lockdown takes helpers away, and the verifier then says the same as of
/// a program that is wrong.
fn unfit(program: &'static str, error: &io::Error, log: &str) -> ProbeError {
    if kernel::lockdown() == "confidentiality" {
        return ProbeError::of("BPF programs", io::Error::from_raw_os_error(libc::EPERM));
    }
    let log = format!("{error} {}", tail(log));
    ProbeError::Verifier { program, log }
}

fn tail(log: &str) -> String {
    const LINES: usize = 12;
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

fn map_fd(map: &Map) -> Option<BorrowedFd<'_>> {
    let (Map::Array(data)
    | Map::HashMap(data)
    | Map::LruHashMap(data)
    | Map::LpmTrie(data)
    | Map::PerCpuArray(data)
    | Map::RingBuf(data)) = map
    else {
        return None;
    };
    Some(data.fd().as_fd())
}
