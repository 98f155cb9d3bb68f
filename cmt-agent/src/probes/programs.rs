//! The BPF programs and maps of one tracer: loading them, placing them, reading what they counted.
#![expect(
    unsafe_code,
    reason = "map keys and values are passed to the kernel as bytes, and one program load is a bare system call"
)]

use std::collections::HashSet;
use std::io;
use std::mem;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

use aya::maps::{
    Array, HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, PerCpuValues, lpm_trie,
};
use aya::programs::uprobe::UProbeScope;
use aya::programs::uprobe::{UProbeAttachLocation, UProbeAttachPoint};
use aya::programs::{ProgramError, UProbe};
use aya::{Ebpf, EbpfError, EbpfLoader, Pod};
use aya_log::EbpfLogger;
use aya_obj::generated::{
    bpf_attach_type::BPF_TRACE_UPROBE_MULTI, bpf_attr, bpf_cmd, bpf_prog_type,
};
use cmt_common::api::{ALLOC_FNS, MemoryKind};
use cmt_common::event::{
    AllocCookie, Call, CopyCookie, CopyKey, CopyStat, LOST_REASONS, Lost, MOST_NESTED,
};
use cmt_common::range::{PID_BITS, RESERVED, RangeKey, RangePrefix, RangeValue, next_part};

use super::ProbeError;
use super::library::{Library, Site};
use super::link::{Link, Links, Point, Target, bpf, multi};

static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../cmt-ebpf/cmt.bpf.o");

const COPY_ENTER: &str = "copy_enter";
const COPY_LEAVE: &str = "copy_leave";
const ALLOC_ENTER: &str = "alloc_enter";
const ALLOC_LEAVE: &str = "alloc_leave";
const PROGRAMS: [&str; 4] = [COPY_ENTER, COPY_LEAVE, ALLOC_ENTER, ALLOC_LEAVE];

/// Makes any kernel behave like an old one, for tests: `single` as before 6.6, `filter` as before 6.10.
const PRETEND: &str = "CMT_PRETEND_KERNEL";

/// Whose calls the probes are to see; decides which kind of link works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Chosen processes.
    Chosen,
    /// All processes that map a library.
    All,
}

macro_rules! pod {
    ($($name:ident($inner:ty)),*) => {$(
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        struct $name($inner);
        // SAFETY: a repr(C) structure of integers without padding: any bytes are a value, and all bytes are initialised.
        unsafe impl Pod for $name {}
    )*};
}
pod!(
    CallPod(Call),
    KeyPod(CopyKey),
    StatPod(CopyStat),
    RangeKeyPod(RangeKey),
    RangeValuePod(RangeValue),
    PrefixPod(RangePrefix)
);

/// What the kernel has counted so far.
pub type CopyStats = Vec<(CopyKey, CopyStat)>;

/// Loaded programs and their maps.
pub struct Probes {
    ebpf: Ebpf,
    /// Programs for links with many sites, in the order of [`PROGRAMS`]; none where single-site links must do.
    multi: Option<Vec<OwnedFd>>,
    /// Links fire for all processes, and the programs pick the chosen ones.
    picking: bool,
    chosen: HashMap<MapData, u32, u8>,
    copies: HashMap<MapData, KeyPod, StatPod>,
    calls: HashMap<MapData, u64, CallPod>,
    comms: HashMap<MapData, u32, [u8; 16]>,
    pairs: PerCpuArray<MapData, u64>,
    phase: Array<MapData, u32>,
    lost: Array<MapData, u64>,
    targets: Array<MapData, u32>,
    prefixes: LpmTrie<MapData, PrefixPod, u32>,
    ranges: HashMap<MapData, RangeKeyPod, RangeValuePod>,
    logger: Option<EbpfLogger<&'static dyn log::Log>>,
}

impl Probes {
    /// Loads the embedded object.
    pub fn load(reach: Reach) -> Result<Self, ProbeError> {
        let level = log_level();
        let links = Kind::of_links(reach);
        let picking = links == Kind::ManySitesPicking;
        let mut ebpf = EbpfLoader::new()
            // The programs read nothing of the kernel's, so its types need not be looked up, which takes a while.
            .btf(None)
            .override_global(aya_log::LEVEL, &level, true)
            .override_global("PICKING", &u8::from(picking), true)
            .load(OBJECT)
            .map_err(load_error)?;
        let multi = match links {
            Kind::SingleSite => None,
            Kind::ManySites | Kind::ManySitesPicking => Some(load_multi(&ebpf)?),
        };
        if multi.is_none() {
            load_single(&mut ebpf)?;
        }
        let logger = match EbpfLogger::init(&mut ebpf) {
            Ok(logger) => Some(logger),
            Err(error) => {
                log::debug!("no log of the BPF programs: {error}");
                None
            }
        };
        Ok(Self {
            copies: take(&mut ebpf, "COPIES")?,
            calls: take(&mut ebpf, "CALLS")?,
            comms: take(&mut ebpf, "COMMS")?,
            pairs: take(&mut ebpf, "PAIRS")?,
            phase: take(&mut ebpf, "PHASE")?,
            lost: take(&mut ebpf, "LOST")?,
            targets: take(&mut ebpf, "TARGETS")?,
            prefixes: take(&mut ebpf, "PREFIXES")?,
            ranges: take(&mut ebpf, "RANGES")?,
            chosen: take(&mut ebpf, "CHOSEN")?,
            picking,
            logger,
            multi,
            ebpf,
        })
    }

    /// Places probes on every function of `library` that the API table knows, for one process or for all.
    pub fn attach(
        &mut self,
        library: &Library,
        target: Option<Target>,
    ) -> Result<Links, ProbeError> {
        let number = target.map_or(0, |target| target.number);
        let pid = target.map(|target| target.pid);
        let copies = points(&library.copies, |function| {
            CopyCookie::new(function).with_target(number).0
        });
        let allocations = points(&library.allocations, |function| {
            AllocCookie::new(&ALLOC_FNS[function], number).0
        });
        let mut links = Links::default();
        // Returns first: a call that was entered in between returns to a probe that does not know it, which is harmless.
        for (program, points) in [
            (ALLOC_LEAVE, &allocations),
            (ALLOC_ENTER, &allocations),
            (COPY_LEAVE, &copies),
            (COPY_ENTER, &copies),
        ] {
            self.place(program, &library.open, points, pid, &mut links)
                .map_err(|source| match source.raw_os_error() {
                    Some(libc::EPERM | libc::EACCES) => ProbeError::of("a uprobe", source),
                    _ => ProbeError::Attach {
                        path: library.mapped.path.display().to_string(),
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
        let mut links = Links::default();
        let points = [Point {
            offset,
            cookie: cookie.0,
        }];
        let own = Some(std::process::id());
        self.place(COPY_LEAVE, path, &points, own, &mut links)?;
        self.place(COPY_ENTER, path, &points, own, &mut links)?;
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
                    self.chosen.insert(pid, 1, 0).map_err(io::Error::other)?;
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
        let scope = match pid.and_then(std::num::NonZeroU32::new) {
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

    /// Everything counted so far. Single values are exact; values that change while they are read may be of different
    /// moments.
    pub fn copies(&self) -> Result<CopyStats, ProbeError> {
        let mut found = Vec::new();
        for entry in self.copies.iter() {
            let (key, stat) = entry.map_err(|error| map_error("COPIES", error))?;
            found.push((key.0, stat.0));
        }
        Ok(found)
    }

    /// Removes what was counted under `key`.
    pub fn forget(&mut self, key: &CopyKey) {
        // It may have gone already; there is nothing else to do then.
        let _ = self.copies.remove(&KeyPod(*key));
    }

    /// Times that a pair of probes has fired so far.
    pub fn pairs(&self) -> Result<u64, ProbeError> {
        let each = self
            .pairs
            .get(&0, 0)
            .map_err(|error| map_error("PAIRS", error))?;
        Ok(each.iter().sum())
    }

    /// Makes [`Probes::pairs`] start from 0 again.
    pub(super) fn reset_pairs(&mut self) -> Result<(), ProbeError> {
        let cpus = aya::util::nr_cpus()
            .map_err(|(path, error)| map_error("PAIRS", format!("{path}: {error}")))?;
        let zeros =
            PerCpuValues::try_from(vec![0; cpus]).map_err(|error| map_error("PAIRS", error))?;
        self.pairs
            .set(0, zeros, 0)
            .map_err(|error| map_error("PAIRS", error))
    }

    /// The name under which the kernel knew process `pid` when it made its first copy.
    pub fn comm(&self, pid: u32) -> Option<String> {
        let comm = self.comms.get(&pid, 0).ok()?;
        let end = comm
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(comm.len());
        Some(String::from_utf8_lossy(&comm[..end]).into_owned())
    }

    /// Makes room that threads hold which ended within a copy.
    pub fn drop_dead_calls(&mut self) {
        let threads: Vec<u64> = self.calls.keys().filter_map(Result::ok).collect();
        for thread in threads {
            let (pid, tid) = (thread >> 32, thread as u32);
            if !Path::new(&format!("/proc/{pid}/task/{tid}")).exists() {
                // It may have gone already.
                let _ = self.calls.remove(&thread);
            }
        }
    }

    /// What could not be recorded so far, by [`Lost`].
    pub fn lost(&self) -> Result<[u64; LOST_REASONS], ProbeError> {
        let mut lost = [0; LOST_REASONS];
        for (index, count) in lost.iter_mut().enumerate() {
            *count = self
                .lost
                .get(&(index as u32), 0)
                .map_err(|error| map_error("LOST", error))?;
        }
        // Calls that were taken for nested ones in a call that nobody is in any more; no later call has told so yet.
        for entry in self.calls.iter() {
            let (_, call) = entry.map_err(|error| map_error("CALLS", error))?;
            if call.0.nested > MOST_NESTED {
                lost[Lost::NoReturn as usize] += u64::from(call.0.nested);
            }
        }
        Ok(lost)
    }

    /// Tells the programs which part of a trace this is: one of [`cmt_common::event::phase`].
    pub fn enter_phase(&mut self, phase: u32) -> Result<(), ProbeError> {
        self.phase
            .set(0, phase, 0)
            .map_err(|error| map_error("PHASE", error))
    }

    /// Makes target `number` count under `pid`.
    pub fn name_target(&mut self, number: u16, pid: u32) -> Result<(), ProbeError> {
        self.targets
            .set(number as u32, pid, 0)
            .map_err(|error| map_error("TARGETS", error))
    }

    /// Tells the programs what a range of a process's memory is.
    pub fn remember(
        &mut self,
        pid: u32,
        start: u64,
        bytes: u64,
        kind: MemoryKind,
    ) -> Result<(), ProbeError> {
        let value = RangeValue {
            bytes,
            kind: kind as u32,
            _pad: 0,
        };
        self.ranges
            .insert(
                RangeKeyPod(RangeKey::new(pid, start)),
                RangeValuePod(value),
                0,
            )
            .map_err(|error| map_error("RANGES", error))?;
        let mut at = start;
        while let Some((bits, next)) = next_part(at, start + bytes) {
            self.prefixes
                .insert(&prefix(pid, at, bits), kind as u32, 0)
                .map_err(|error| map_error("PREFIXES", error))?;
            at = next;
        }
        Ok(())
    }

    /// Undoes [`Probes::remember`], whatever has become of the range since.
    pub fn forget_range(&mut self, pid: u32, start: u64) {
        let key = RangeKeyPod(RangeKey::new(pid, start));
        let Ok(value) = self.ranges.get(&key, 0) else {
            return;
        };
        // Each may have gone already.
        let _ = self.ranges.remove(&key);
        let mut at = start;
        while let Some((bits, next)) = next_part(at, start + value.0.bytes) {
            let _ = self.prefixes.remove(&prefix(pid, at, bits));
            at = next;
        }
    }

    /// Tells the programs that a range is out of the processor's reach, as far as nothing better is known of it.
    pub fn reserve(&mut self, pid: u32, start: u64, bytes: u64) -> Result<(), ProbeError> {
        const NO_EXIST: u64 = 1;
        let mut at = start;
        while let Some((bits, next)) = next_part(at, start + bytes) {
            match self
                .prefixes
                .insert(&prefix(pid, at, bits), RESERVED, NO_EXIST)
            {
                Ok(()) => {}
                Err(MapError::SyscallError(error))
                    if error.io_error.raw_os_error() == Some(libc::EEXIST) => {}
                Err(error) => return Err(map_error("PREFIXES", error)),
            }
            at = next;
        }
        Ok(())
    }

    /// Undoes [`Probes::reserve`].
    pub fn release(&mut self, pid: u32, start: u64, bytes: u64) {
        let mut at = start;
        while let Some((bits, next)) = next_part(at, start + bytes) {
            let key = prefix(pid, at, bits);
            // A map of prefixes finds the longest that fits: at its own first address, this one or something better.
            if self
                .prefixes
                .get(&key, 0)
                .is_ok_and(|kind| kind == RESERVED)
            {
                // It may have gone already.
                let _ = self.prefixes.remove(&key);
            }
            at = next;
        }
    }

    /// Forgets all ranges of a process.
    pub fn forget_process(&mut self, pid: u32) {
        let starts: Vec<u64> = self
            .ranges
            .keys()
            .filter_map(Result::ok)
            .filter(|key| key.0.pid == pid)
            .map(|key| key.0.start)
            .collect();
        for start in starts {
            self.forget_range(pid, start);
        }
    }

    /// Passes on what the programs logged.
    pub fn flush_log(&mut self) {
        if let Some(logger) = &mut self.logger {
            logger.flush();
        }
    }
}

fn prefix(pid: u32, at: u64, bits: u32) -> lpm_trie::Key<PrefixPod> {
    lpm_trie::Key::new(PID_BITS + bits, PrefixPod(RangePrefix::new(pid, at)))
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

/// The links that work here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// One link a function: the only ones before Linux 6.6.
    SingleSite,
    /// Links with many sites whose process filter lets one thread through only, as from 6.6 to 6.9. So they fire for all
    /// processes, and the programs pick.
    ManySitesPicking,
    /// Links with many sites.
    ManySites,
}

impl Kind {
    fn of_links(reach: Reach) -> Self {
        let version = match std::env::var(PRETEND).as_deref() {
            Ok("single") => (5, 15),
            Ok("filter") => (6, 8),
            _ => kernel_version(),
        };
        match reach {
            _ if version < (6, 6) => Self::SingleSite,
            Reach::All => Self::ManySites,
            Reach::Chosen if version >= (6, 10) => Self::ManySites,
            Reach::Chosen if in_first_pid_namespace() => Self::ManySitesPicking,
            // The programs would not know the chosen ones by the ids that they have here.
            Reach::Chosen => Self::SingleSite,
        }
    }
}

fn kernel_version() -> (u32, u32) {
    let release = nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|part| part.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// True where process ids here are those that the kernel counts by.
pub fn in_first_pid_namespace() -> bool {
    // PROC_PID_INIT_INO of the kernel.
    const FIRST: &str = "pid:[4026531836]";
    std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() == FIRST)
}

fn take<M: TryFrom<Map>>(ebpf: &mut Ebpf, name: &'static str) -> Result<M, ProbeError> {
    ebpf.take_map(name)
        .and_then(|map| map.try_into().ok())
        .ok_or_else(|| ProbeError::Object(format!("no map {name} of the expected type")))
}

fn map_error(map: &'static str, error: impl std::fmt::Display) -> ProbeError {
    ProbeError::Map {
        map,
        reason: error.to_string(),
    }
}

/// The system error at the root of one of aya's.
fn system_error(error: ProgramError) -> io::Error {
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

/// Loads the programs for single-site links: aya's own way.
fn load_single(ebpf: &mut Ebpf) -> Result<(), ProbeError> {
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
                return Err(ProbeError::Verifier {
                    program: name,
                    log: format!("{io_error} {}", tail(&verifier_log.to_string())),
                });
            }
            Err(error) => return Err(ProbeError::of("BPF programs", system_error(error))),
        }
    }
    Ok(())
}

/// Loads the programs for links with many sites, which aya 0.14 cannot do: their attach type has to be named at load time.
fn load_multi(ebpf: &Ebpf) -> Result<Vec<OwnedFd>, ProbeError> {
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
    instructions: &[aya_obj::generated::bpf_insn],
    license: &std::ffi::CStr,
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
                return Err(ProbeError::Verifier {
                    program: name,
                    log: format!("{error} {}", tail(&String::from_utf8_lossy(&log[..end]))),
                });
            }
        }
    }
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
