//! Links: probes that are in place as long as their value lives.
//!
//! Where the kernel has them (6.6 and later), one link holds all probes of a library that run one program: quick to make
//! and to undo. Otherwise each probe is a link of its own, and each takes about 0.1 s to undo, so many threads do it.
#![expect(
    unsafe_code,
    reason = "BPF_LINK_CREATE is a bare system call here: aya 0.14 has no uprobe_multi links"
)]

use std::ffi::CString;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::thread;
use std::time::Instant;

use aya::programs::uprobe::UProbeLink;
use aya_obj::generated::{
    BPF_F_UPROBE_MULTI_RETURN, bpf_attach_type::BPF_TRACE_UPROBE_MULTI, bpf_attr, bpf_cmd,
};

/// Threads that undo links at the same time.
const DETACHERS: usize = 64;

/// A process whose calls are to be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Process id as this process counts.
    pub pid: u32,
    /// Its number in the map of targets; 0 where the kernel's process ids are ours.
    pub number: u16,
}

/// The probes on one library.
#[derive(Default)]
pub struct Links {
    pub(super) links: Vec<Link>,
}

impl Links {
    /// True if there is no probe in them.
    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }
}

/// Undone when it is dropped.
#[expect(dead_code, reason = "the values are held for their drop only")]
pub(super) enum Link {
    /// All sites of one program.
    Multi(OwnedFd),
    /// One site.
    Single(UProbeLink),
}

/// One place and the cookie of its probe.
#[derive(Clone, Copy)]
pub(super) struct Point {
    pub offset: u64,
    pub cookie: u64,
}

/// Takes all probes away; returns when the last one has gone.
///
/// Each link waits for the kernel to be sure that no processor runs its program any more: many wait at once.
pub fn detach(all: impl IntoIterator<Item = Links>) {
    let begun = Instant::now();
    let mut links: Vec<Link> = all.into_iter().flat_map(|links| links.links).collect();
    let each = links.len().div_ceil(DETACHERS).max(1);
    thread::scope(|scope| {
        while !links.is_empty() {
            let part = links.split_off(links.len().saturating_sub(each));
            scope.spawn(move || drop(part));
        }
    });
    log::debug!("probes taken away in {:?}", begun.elapsed());
}

/// Links a program, loaded for `BPF_TRACE_UPROBE_MULTI`, to many places of one file at once. `pid` 0 means all processes.
pub(super) fn multi(
    program: BorrowedFd<'_>,
    path: &Path,
    points: &[Point],
    pid: u32,
    at_return: bool,
) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)?;
    let offsets: Vec<u64> = points.iter().map(|point| point.offset).collect();
    let cookies: Vec<u64> = points.iter().map(|point| point.cookie).collect();
    // SAFETY: all-zero bytes are a value of this union of integers.
    let mut attr: bpf_attr = unsafe { mem::zeroed() };
    attr.link_create.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    attr.link_create.attach_type = BPF_TRACE_UPROBE_MULTI as u32;
    attr.link_create.__bindgen_anon_3.uprobe_multi.path = path.as_ptr() as u64;
    attr.link_create.__bindgen_anon_3.uprobe_multi.offsets = offsets.as_ptr() as u64;
    attr.link_create.__bindgen_anon_3.uprobe_multi.cookies = cookies.as_ptr() as u64;
    attr.link_create.__bindgen_anon_3.uprobe_multi.cnt = points.len() as u32;
    attr.link_create.__bindgen_anon_3.uprobe_multi.flags = if at_return {
        BPF_F_UPROBE_MULTI_RETURN
    } else {
        0
    };
    attr.link_create.__bindgen_anon_3.uprobe_multi.pid = pid;
    bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr)
}

/// The system call bpf(2), for the commands that return a descriptor.
pub(super) fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    // SAFETY: `attr` is a whole union whose pointers the caller keeps alive during the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command as libc::c_long,
            std::ptr::from_mut(attr),
            mem::size_of::<bpf_attr>(),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call returned a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
