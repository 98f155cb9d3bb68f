//! What the kernel is and what it lets us do: each facility is tried, not looked up.
#![expect(unsafe_code, reason = "makes system calls that no crate wraps")]

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use aya::maps::MapType;
use aya::programs::ProgramType;
use aya::sys::{is_map_supported, is_program_supported};

use super::Need::{Attach, Trace};
use super::{Check, State};
use crate::probes::kernel::{self, Kind};
use crate::probes::rights::{self, Deed};
use crate::probes::{self, ProbeError, Probes, Reach};

pub(super) fn version() -> Check {
    const NAME: &str = "kernel";
    if kernel::has_cookies() {
        return Check::ok(NAME, Trace, kernel::release());
    }
    Check::new(NAME, Trace, State::Failed, kernel::release()).but(
        "probes carry BPF cookies, which came with Linux 5.15",
        "use a newer kernel",
    )
}

pub(super) fn btf() -> Check {
    const NAME: &str = "BTF";
    const PATH: &str = "/sys/kernel/btf/vmlinux";
    match fs::metadata(PATH) {
        Ok(file) => Check::ok(NAME, Trace, format!("{} KiB", file.len() >> 10)),
        Err(error) => Check::new(NAME, Trace, State::Warning, format!("{PATH}: {error}")).but(
            "the kernel does not describe its types, so its page tables cannot be read",
            "use a kernel built with CONFIG_DEBUG_INFO_BTF; copies are counted without it, too",
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
            rights::refusal(Deed::Trace),
        ),
    }
}

pub(super) fn links() -> Check {
    const NAME: &str = "probe links";
    match Kind::of_links(Reach::Chosen) {
        Kind::ManySites => Check::ok(NAME, Trace, "one for many functions (Linux 6.10 or newer)"),
        Kind::ManySitesPicking => Check::ok(
            NAME,
            Trace,
            "one for many functions and all processes (Linux 6.6 to 6.9)",
        ),
        Kind::SingleSite => Check::info(NAME, Trace, "one for each function").but(
            "older than Linux 6.6, or than 6.10 in a container: takes CAP_SYS_ADMIN, and longer to end",
            "nothing, as long as uprobes below is ok",
        ),
    }
}

/// Does what a trace does, to this process: places probes, and reads page tables.
pub(super) fn uprobes() -> Vec<Check> {
    const NAME: &str = "uprobes";
    let failed = |found: String, remedy: String| {
        vec![Check::new(NAME, Trace, State::Failed, found).but("no copy can be counted", remedy)]
    };
    let mut probes = match Probes::load(Reach::Chosen, false) {
        Ok(probes) => probes,
        Err(ProbeError::Denied { what, reason }) => {
            return failed(format!("the kernel refuses {what}"), reason);
        }
        Err(error) => return failed(error.to_string(), "see the kernel's checks above".into()),
    };
    let (pages, survey) = probes::learn(&mut probes);
    let (cost, links) = probes::pair_ns(&mut probes);
    let placed = !links.is_empty();
    probes::detach([links, survey]);
    let found = match cost {
        Some(ns) => format!("can be placed; {:.1} µs for each call", ns as f64 / 1e3),
        None if placed => "can be placed; their cost is not known".to_owned(),
        None => return failed("cannot be placed".into(), rights::refusal(Deed::Trace)),
    };
    vec![Check::ok(NAME, Trace, found), page_tables(pages)]
}

fn page_tables(pages: Result<(), String>) -> Check {
    const NAME: &str = "page tables";
    match pages {
        Ok(()) => Check::ok(NAME, Trace, "readable: kinds of memory are told apart"),
        Err(why) => Check::new(NAME, Trace, State::Warning, why).but(
            "memory that was registered before a trace shows as unknown",
            "trace from the program's start, or use a kernel with BTF",
        ),
    }
}

pub(super) fn lockdown() -> Check {
    const NAME: &str = "lockdown";
    let mode = kernel::lockdown();
    if mode != "confidentiality" {
        return Check::ok(NAME, Trace, mode);
    }
    Check::new(NAME, Trace, State::Warning, mode).but(
        "BPF programs may be kept from reading memory",
        "boot with lockdown=integrity if BPF or uprobes fail here",
    )
}

pub(super) fn sysctls() -> Check {
    let value = |name: &str| {
        fs::read_to_string(format!("/proc/sys/kernel/{name}"))
            .map_or("unknown".to_owned(), |text| text.trim().to_owned())
    };
    Check::info(
        "sysctl",
        Trace,
        format!(
            "perf_event_paranoid {}, unprivileged_bpf_disabled {}",
            value("perf_event_paranoid"),
            value("unprivileged_bpf_disabled")
        ),
    )
    .means("both restrict only who lacks CAP_PERFMON and CAP_BPF, which tracing takes anyway")
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
