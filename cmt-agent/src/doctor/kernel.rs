//! What the kernel is and what it lets us do: each facility is tried, not looked up.
#![expect(unsafe_code, reason = "makes system calls that no crate wraps")]

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use aya::maps::MapType;
use aya::programs::ProgramType;
use aya::sys::{is_map_supported, is_program_supported};
use procfs::KernelVersion;

use super::Need::{Attach, Trace};
use super::{Check, State};

/// BPF cookies on uprobes came with it.
const OLDEST: (u8, u8) = (5, 15);

pub(super) fn version() -> Check {
    const NAME: &str = "kernel";
    match KernelVersion::current() {
        Ok(KernelVersion {
            major,
            minor,
            patch,
        }) => {
            let found = format!("{major}.{minor}.{patch}");
            if (major, minor) >= OLDEST {
                Check::ok(NAME, Trace, found)
            } else {
                Check::new(NAME, Trace, State::Failed, found).but(
                    "probes carry BPF cookies, which came with Linux 5.15",
                    "use a newer kernel",
                )
            }
        }
        Err(error) => Check::new(NAME, Trace, State::Warning, error.to_string()),
    }
}

pub(super) fn btf() -> Check {
    const NAME: &str = "BTF";
    const PATH: &str = "/sys/kernel/btf/vmlinux";
    match fs::metadata(PATH) {
        Ok(file) => Check::ok(NAME, Trace, format!("{} KiB", file.len() >> 10)),
        Err(error) => Check::new(NAME, Trace, State::Warning, format!("{PATH}: {error}")).but(
            "the kernel does not describe its types; cmt's programs do without",
            "nothing, as long as BPF below is ok",
        ),
    }
}

pub(super) fn bpf() -> Check {
    const NAME: &str = "BPF";
    let tried = || -> Result<bool, String> {
        let maps = [MapType::PerCpuHash, MapType::RingBuf];
        for map in maps {
            if !is_map_supported(map).map_err(|error| chain(&error))? {
                return Ok(false);
            }
        }
        is_program_supported(ProgramType::KProbe).map_err(|error| chain(&error))
    };
    match tried() {
        Ok(true) => Check::ok(NAME, Trace, "maps and probe programs can be created"),
        Ok(false) => Check::new(NAME, Trace, State::Failed, "not supported").but(
            "no program can count copies in the kernel",
            "use a kernel built with CONFIG_BPF_SYSCALL and CONFIG_BPF_EVENTS",
        ),
        Err(error) => Check::new(NAME, Trace, State::Failed, error).but(
            "the kernel does not let this user load BPF programs",
            "run cmt as root, or give it CAP_BPF and CAP_PERFMON; in a container see its seccomp profile",
        ),
    }
}

pub(super) fn uprobes() -> Check {
    const NAME: &str = "uprobes";
    const TYPE: &str = "/sys/bus/event_source/devices/uprobe/type";
    let kind = fs::read_to_string(TYPE)
        .ok()
        .and_then(|text| text.trim().parse().ok());
    let Some(kind) = kind else {
        return Check::new(NAME, Trace, State::Failed, format!("{TYPE} is missing")).but(
            "the kernel cannot put probes into programs",
            "use a kernel built with CONFIG_UPROBE_EVENTS; mount /sys if it is not there",
        );
    };
    match open_uprobe(kind, c"/proc/self/exe") {
        Ok(_) => Check::ok(NAME, Trace, "a probe can be opened"),
        // Newer kernels place probes by BPF links, which is what a trace uses where it can.
        Err(error) => Check::new(
            NAME,
            Trace,
            State::Warning,
            format!("perf_event_open: {error}"),
        )
        .but(
            "before Linux 6.6 the kernel does not let this user probe programs",
            "run cmt as root; in a container see its seccomp profile",
        ),
    }
}

pub(super) fn lockdown() -> Check {
    const NAME: &str = "lockdown";
    // One word stands in brackets: none, integrity or confidentiality.
    let text = fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    let mode = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map_or("none", |(mode, _)| mode);
    if mode != "confidentiality" {
        return Check::ok(NAME, Trace, mode);
    }
    Check::new(NAME, Trace, State::Warning, mode).but(
        "BPF programs may be kept from reading memory",
        "boot with lockdown=integrity if BPF or uprobes fail here",
    )
}

pub(super) fn memory_files() -> Check {
    const NAME: &str = "memfd";
    match run_from_memory() {
        Ok(()) => Check::ok(NAME, Attach, "code can be run from memory files"),
        Err(error) => Check::new(NAME, Attach, State::Failed, error.to_string()).but(
            "the payload is loaded from a memory file, which is forbidden here",
            "allow memfd_create and PROT_EXEC (vm.memfd_noexec, SELinux, seccomp)",
        ),
    }
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

/// Opens a uprobe on the first byte of a file's code without enabling it; it is gone when the descriptor is closed.
fn open_uprobe(kind: u32, path: &CStr) -> io::Result<OwnedFd> {
    let attr = UprobeAttr {
        kind,
        size: size_of::<UprobeAttr>() as u32,
        path: path.as_ptr() as u64,
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
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Does what loading the payload takes: a memory file, written, and mapped executable.
fn run_from_memory() -> io::Result<()> {
    const BYTES: usize = 4096;
    // SAFETY: the name is NUL-terminated, and the call touches no other memory.
    let fd = unsafe { libc::memfd_create(c"cmt-doctor".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let file = fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(BYTES as u64)?;
    let rights = libc::PROT_READ | libc::PROT_EXEC;
    let anywhere = std::ptr::null_mut();
    // SAFETY: the kernel chooses free address space, so no memory in use changes.
    let page = unsafe {
        libc::mmap(
            anywhere,
            BYTES,
            rights,
            libc::MAP_PRIVATE,
            file.as_raw_fd(),
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: mapped above, and nothing refers to it.
    unsafe { libc::munmap(page, BYTES) };
    Ok(())
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
