//! The BPF programs of one tracer: where they are placed.

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use aya::programs::uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeScope};
use aya::programs::{ProgramError, UProbe};
use aya::{Ebpf, EbpfError, EbpfLoader};
use aya_log::EbpfLogger;
use cmt_common::api::{ALLOC_FNS, SYNC_FNS};
use cmt_common::event::{AllocCookie, CopyCookie, sync_cookie};

use super::ProbeError;
use super::kernel;
use super::library::{Library, Site};
use super::link::{Link, Links, Point, Target, multi};
use super::load::{self, Kind};
use super::maps::{Events, Maps};

pub(super) static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../cmt-ebpf/cmt.bpf.o");

const COPY_ENTER: &str = "copy_enter";
const COPY_LEAVE: &str = "copy_leave";
const ALLOC_ENTER: &str = "alloc_enter";
const ALLOC_LEAVE: &str = "alloc_leave";
const SYNC_ENTER: &str = "sync_enter";
const SYNC_LEAVE: &str = "sync_leave";
const SURVEY: &str = "survey";
/// All of them.
pub(super) const PROGRAMS: [&str; 7] = [
    COPY_ENTER,
    COPY_LEAVE,
    ALLOC_ENTER,
    ALLOC_LEAVE,
    SYNC_ENTER,
    SYNC_LEAVE,
    SURVEY,
];

/// Whose calls the probes are to see; decides which kind of link works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Chosen processes.
    Chosen,
    /// Chosen processes, of one of which the first thread has ended: the kernel's own filter looks at that one's memory, which
    /// it no longer has (`uprobe_multi_link_filter`).
    Picked,
    /// All processes that map a library.
    All,
}

/// Bytes of the ring that single copies go through, where they are wanted: some 180,000 of them.
const RING_BYTES: u32 = 16 << 20;

/// Whose calls a set of probes is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// One process's.
    One(Target),
    /// All processes'. The number tells this set from another on the same file.
    All {
        /// Below [`cmt_common::event::MAX_TARGETS`], not 0.
        number: u16,
    },
}

/// Loaded programs and their maps.
pub struct Probes {
    ebpf: Ebpf,
    /// Programs for links with many sites, in the order of [`PROGRAMS`]; none where single-site links must do.
    multi: Option<Vec<OwnedFd>>,
    /// Links fire for all processes, and the programs pick the chosen ones.
    picking: bool,
    /// What the programs share with us.
    pub maps: Maps,
    /// Single copies, where they are wanted and nobody has taken this yet.
    pub events: Option<Events>,
    logger: Option<EbpfLogger<&'static dyn log::Log>>,
}

impl Probes {
    /// Loads the embedded object. `telling` makes the programs hand over single copies, too.
    pub fn load(reach: Reach, telling: bool) -> Result<Self, ProbeError> {
        let level = log_level();
        let ring_bytes = if telling { RING_BYTES } else { 4096 };
        let links = Kind::of_links(reach);
        let picking = links == Kind::ManySitesPicking;
        let mut ebpf = EbpfLoader::new()
            // The programs read nothing of the kernel's, so its types need not be looked up, which takes a while.
            .btf(None)
            .override_global(aya_log::LEVEL, &level, true)
            .override_global("PICKING", &u8::from(picking), true)
            .override_global("SEEING", &u8::from(kernel::lets_read()), true)
            .override_global("TELLING", &u8::from(telling), true)
            .map_max_entries("EVENTS", ring_bytes)
            .load(OBJECT)
            .map_err(load_error)?;
        let multi = match links {
            Kind::SingleSite => None,
            Kind::ManySites | Kind::ManySitesPicking => Some(load::multi(&ebpf)?),
        };
        if multi.is_none() {
            load::single(&mut ebpf)?;
        }
        let logger = match EbpfLogger::init(&mut ebpf) {
            Ok(logger) => Some(logger),
            Err(error) => {
                log::debug!("no log of the BPF programs: {error}");
                None
            }
        };
        let events = telling.then(|| Events::take(&mut ebpf)).transpose()?;
        Ok(Self {
            maps: Maps::take(&mut ebpf)?,
            events,
            picking,
            logger,
            multi,
            ebpf,
        })
    }

    /// Whether probes fire for all processes and the programs pick the chosen ones: one set of probes for each library then.
    pub fn picks(&self) -> bool {
        self.picking
    }

    /// Places probes on every function of `library` that the API table knows.
    pub fn attach(&mut self, library: &Library, whose: Whose) -> Result<Links, ProbeError> {
        let (pid, number) = match whose {
            Whose::One(target) => (Some(target.pid), target.number),
            Whose::All { number } => (None, number),
        };
        let copies = points(&library.copies, |function| {
            CopyCookie::new(function).with_target(number).0
        });
        let allocations = points(&library.allocations, |function| {
            AllocCookie::new(&ALLOC_FNS[function], number).0
        });
        let file = library.open();
        let waits = points(&library.waits, |function| sync_cookie(&SYNC_FNS[function]));
        let mut links = Links::default();
        // Returns first: a call that was entered in between returns to a probe that does not know it, which is harmless.
        for (program, points) in [
            (ALLOC_LEAVE, &allocations),
            (ALLOC_ENTER, &allocations),
            (SYNC_LEAVE, &waits),
            (SYNC_ENTER, &waits),
            (COPY_LEAVE, &copies),
            (COPY_ENTER, &copies),
        ] {
            self.place(program, &file, points, pid, &mut links)
                .map_err(|source| match source.raw_os_error() {
                    Some(libc::EPERM | libc::EACCES) => ProbeError::of("a uprobe", source),
                    _ => ProbeError::Attach {
                        path: library.mapped.shown(),
                        source,
                    },
                })?;
        }
        Ok(links)
    }

    /// Places the copy programs on one place of a file of this process, for measuring what they cost.
    pub(super) fn attach_copy_pair(
        &mut self,
        path: &Path,
        offset: u64,
        cookie: CopyCookie,
    ) -> io::Result<Links> {
        self.attach_own(&[COPY_LEAVE, COPY_ENTER], path, offset, cookie.0)
    }

    /// Places the surveying program on one place of a file of this process.
    pub(super) fn attach_survey(&mut self, path: &Path, offset: u64) -> io::Result<Links> {
        self.attach_own(&[SURVEY], path, offset, 0)
    }

    fn attach_own(
        &mut self,
        programs: &[&'static str],
        path: &Path,
        offset: u64,
        cookie: u64,
    ) -> io::Result<Links> {
        let mut links = Links::default();
        let own = Some(std::process::id());
        for program in programs {
            self.place(program, path, &[Point { offset, cookie }], own, &mut links)?;
        }
        Ok(links)
    }

    fn place(
        &mut self,
        program: &'static str,
        path: &Path,
        points: &[Point],
        pid: Option<u32>,
        links: &mut Links,
    ) -> io::Result<()> {
        if points.is_empty() {
            return Ok(());
        }
        if let Some(programs) = &self.multi {
            let filter = match pid {
                Some(pid) if self.picking => {
                    self.maps.choose(pid).map_err(io::Error::other)?;
                    0
                }
                Some(pid) => pid,
                None => 0,
            };
            let index = PROGRAMS
                .iter()
                .position(|name| *name == program)
                .unwrap_or(0);
            let at_return = program.ends_with("leave");
            let fd = multi(programs[index].as_fd(), path, points, filter, at_return)?;
            links.links.push(Link::Multi(fd));
            return Ok(());
        }
        let scope = match pid.and_then(NonZeroU32::new) {
            Some(pid) => UProbeScope::OneProcess(pid),
            None => UProbeScope::AllProcesses,
        };
        let uprobe: &mut UProbe = self
            .ebpf
            .program_mut(program)
            .ok_or_else(|| io::Error::other(format!("no program {program}")))?
            .try_into()
            .map_err(io::Error::other)?;
        for point in points {
            let point = UProbeAttachPoint {
                location: UProbeAttachLocation::AbsoluteOffset(point.offset),
                cookie: Some(point.cookie),
            };
            let id = uprobe.attach(point, path, scope).map_err(system_error)?;
            links
                .links
                .push(Link::Single(uprobe.take_link(id).map_err(system_error)?));
        }
        Ok(())
    }

    /// Passes on what the programs logged.
    pub fn flush_log(&mut self) {
        if let Some(logger) = &mut self.logger {
            logger.flush();
        }
    }
}

fn points(sites: &[Site], cookie: impl Fn(usize) -> u64) -> Vec<Point> {
    sites
        .iter()
        .map(|site| Point {
            offset: site.offset,
            cookie: cookie(site.function),
        })
        .collect()
}

/// The level up to which the programs log: what RUST_LOG lets through. aya-log counts as `log` does, from 1.
fn log_level() -> u8 {
    log::max_level() as u8
}

/// The system error at the root of one of aya's.
pub(super) fn system_error(error: ProgramError) -> io::Error {
    os_error(&error).unwrap_or_else(|| io::Error::other(error))
}

fn os_error(error: &(dyn std::error::Error + 'static)) -> Option<io::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(code) = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::raw_os_error)
        {
            return Some(io::Error::from_raw_os_error(code));
        }
        next = error.source();
    }
    None
}

fn load_error(error: EbpfError) -> ProbeError {
    match os_error(&error) {
        Some(source) => ProbeError::of("BPF maps", source),
        None => ProbeError::Object(error.to_string()),
    }
}
