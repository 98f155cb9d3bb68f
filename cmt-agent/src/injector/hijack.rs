//! Making one thread of a target run the stub: choosing it, finding a cave, sending it off.

use std::time::{Duration, Instant};

use cmt_common::control::{CONTROL_NAME, PAYLOAD_NAME};

use super::seccomp;
use super::stub::{self, HIJACK_OFFSET, SavedRegisters, StubData};
use super::threads::{Seized, Stopped, ThreadError};
use super::{InjectError, thread_name};
use crate::target::symbols::{self, Symbols};
use crate::target::{Libc, Target, is_library};

/// Bytes below the stack pointer that leaf functions may use without reserving them (System V ABI, x86-64).
const RED_ZONE: u64 = 128;
/// How much of a stack is looked through for signs of malloc or the loader. Their frames are small and innermost: neither
/// calls out while it holds a lock that `pthread_create` takes.
const STACK_SCAN: usize = 1 << 10;
/// How much of a stack is looked through for the frame of a signal handler, which may have interrupted anything.
const HANDLER_SCAN: usize = 16 << 10;
/// How long we look for a thread that can be hijacked.
const PATIENCE: Duration = Duration::from_secs(5);

/// Unused bytes at the end of a code page that hold the stub for a moment.
#[derive(Clone, Copy, Debug)]
pub struct Cave {
    /// First byte.
    pub address: u64,
    /// Bytes in use.
    pub len: usize,
}

impl Cave {
    /// True if a thread that stands at `address` runs the stub.
    pub fn contains(&self, address: u64) -> bool {
        (self.address..self.address + self.len as u64).contains(&address)
    }

    /// Puts the unused bytes back.
    pub fn clear(&self, target: &Target) -> std::io::Result<()> {
        target.memory.write(self.address, &vec![0; self.len])
    }
}

/// Finds a run of zero bytes behind the last instruction of a library's code.
///
/// Code segments are filled up to a page with zeros that no program uses.
pub fn find_cave(target: &Target) -> Result<Cave, InjectError> {
    // A margin: the zeros right behind the code may be its last instruction's operand.
    const MARGIN: u64 = 32;
    code_ends(target)
        .find(|cave| {
            let from = cave.address - MARGIN;
            let end = target.memory.read_up_to(from, cave.len + MARGIN as usize);
            end.len() == cave.len + MARGIN as usize && end.iter().all(|&byte| byte == 0)
        })
        .ok_or(InjectError::NoCave)
}

/// Stubs that a `cmt` which was killed has left behind.
pub fn leftovers(target: &Target) -> Vec<Cave> {
    let stub = stub::image(empty_data());
    code_ends(target)
        .filter(|cave| {
            let found = target.memory.read_up_to(cave.address, cave.len);
            found.get(HIJACK_OFFSET..) == Some(&stub[HIJACK_OFFSET..])
        })
        .collect()
}

/// Where the stub would stand at the end of each code segment.
fn code_ends(target: &Target) -> impl Iterator<Item = Cave> {
    let len = stub::image(empty_data()).len();
    target
        .maps
        .iter()
        .filter(move |map| {
            map.readable
                && map.executable
                && !map.writable
                && !map.shared
                && target.stays_loaded(map)
        })
        .map(move |map| Cave {
            address: (map.end - len as u64) & !15,
            len,
        })
}

/// What the new thread is to do.
#[derive(Clone, Copy, Debug)]
pub enum Job {
    /// Make the control block and load the payload.
    Load {
        /// The target sees no `/proc` that it could load it from.
        without_proc: bool,
    },
    /// Call the entry of a payload that is there already.
    Restart {
        /// The payload's entry.
        entry: u64,
        /// The control block.
        control: u64,
    },
}

impl Job {
    fn without_proc(self) -> bool {
        matches!(self, Self::Load { without_proc: true })
    }
}

/// Writes the stub and points one thread at it. Returns the cave, the thread's id and how long it was held.
pub fn launch(
    target: &Target,
    libc: &Libc,
    job: Job,
) -> Result<(Cave, i32, Duration), InjectError> {
    let cave = find_cave(target)?;
    let danger = DangerZones::new(target);
    let deadline = Instant::now() + PATIENCE;
    let mut last_error = None;
    loop {
        for tid in candidates(target)? {
            if Instant::now() >= deadline {
                break;
            }
            let started = Instant::now();
            match stop_if_safe(target, &danger, tid) {
                Ok(Some(thread)) => {
                    if let Some(call) = seccomp::forbidden(&thread, job.without_proc()) {
                        return Err(InjectError::Seccomp {
                            pid: target.pid,
                            call,
                        });
                    }
                    send_off(target, libc, job, cave, thread)?;
                    return Ok((cave, tid, started.elapsed()));
                }
                Ok(None) => {}
                Err(error) => last_error = Some(error),
            }
        }
        if Instant::now() >= deadline {
            return Err(match last_error {
                Some(error @ ThreadError::Refused { .. }) => error.into(),
                _ => InjectError::NoSafeThread {
                    waited_ms: PATIENCE.as_millis(),
                },
            });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// System calls in which a thread holds no lock of libc, the loader or the driver.
const PARKED_IN: &[i64] = &[
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_pause,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_futex,
];

/// Threads in the order in which they should be tried: parked ones first, best system call first.
fn candidates(target: &Target) -> Result<Vec<i32>, InjectError> {
    let mut ranked: Vec<(usize, i32)> = target
        .threads()?
        .into_iter()
        .filter(|&tid| !super::is_ours(&thread_name(target.pid, tid)))
        .map(|tid| (rank(target.pid, tid), tid))
        .filter(|&(rank, _)| rank < usize::MAX)
        .collect();
    ranked.sort_unstable();
    Ok(ranked.into_iter().map(|(_, tid)| tid).collect())
}

fn rank(pid: u32, tid: i32) -> usize {
    let Ok(text) = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")) else {
        return usize::MAX;
    };
    let number = text.split_whitespace().next().unwrap_or_default();
    match number.parse::<i64>() {
        Ok(number) => PARKED_IN
            .iter()
            .position(|&call| call == number)
            .unwrap_or(usize::MAX),
        // "running": the last choice.
        Err(_) => PARKED_IN.len(),
    }
}

/// Stops a thread and keeps it if it can take a detour now: it holds no lock that `pthread_create` needs.
fn stop_if_safe(
    target: &Target,
    danger: &DangerZones,
    tid: i32,
) -> Result<Option<Stopped>, ThreadError> {
    let mut seized = Seized::seize(tid)?;
    seized.interrupt()?;
    let thread = seized.wait(Instant::now() + Duration::from_millis(50))?;
    // A thread that stands still keeps its id; until now it may have ended, and another process's have got it.
    if !target.has_thread(tid) || !target.is_same_program() {
        return Err(ThreadError::Gone { tid });
    }
    if thread.has_signal() || thread.will_run_handler() || !has_room(target, &thread)? {
        return Ok(None);
    }
    let call = thread.regs.orig_rax as i64;
    let parked = call >= 0;
    if parked && !PARKED_IN.contains(&call) {
        return Ok(None);
    }
    if !parked
        && (danger.forbids_running_at(thread.regs.rip)
            || thread.in_rseq(|at| target.memory.word(at).ok()))
    {
        return Ok(None);
    }
    let stack = target.memory.read_up_to(thread.regs.rsp, HANDLER_SCAN);
    let suspicious = danger.on_stack(&stack, parked.then_some(call));
    Ok((!suspicious).then_some(thread))
}

/// Whether the thread stands on a stack of libc's making with room below for the frame and for `pthread_create`.
///
/// Writing through `/proc/PID/mem` would go through guard pages, so a fibre's or a signal handler's small stack must be
/// told from a thread's: libc keeps the thread's control block (fs) at the top of the same mapping.
fn has_room(target: &Target, thread: &Stopped) -> Result<bool, ThreadError> {
    const FOR_LIBC: u64 = 16 << 10;
    let regs = &thread.regs;
    let Some(stack) = target.maps.iter().find(|map| map.contains(regs.rsp)) else {
        return Ok(false);
    };
    let writable = stack.readable && stack.writable;
    let of_libc = stack.is_called("[stack]") || (regs.rsp..stack.end).contains(&regs.fs_base);
    let frame = RED_ZONE + thread.extended_state()?.len() as u64 + 256;
    Ok(writable && of_libc && regs.rsp - stack.start >= frame + FOR_LIBC)
}

/// Code in which a thread may hold a lock that `pthread_create` takes: allocators, the loader, thread creation.
struct DangerZones {
    /// libc's functions that take such locks, and the loader.
    locking: Vec<(u64, u64)>,
    /// Allocators that stand in for libc's. They may sleep while they hold a lock.
    allocators: Vec<(u64, u64)>,
    /// Where signal handlers return to.
    handlers: Vec<(u64, u64)>,
    /// Where a running thread must not stand: the above with their local helpers, and single-stepped probes.
    running: Vec<(u64, u64)>,
}

/// libc functions that take such locks.
const LOCKING: &[&str] = &[
    "malloc",
    "free",
    "calloc",
    "realloc",
    "memalign",
    "posix_memalign",
    "malloc_trim",
    "mallinfo2",
    "pthread_create",
    "pthread_join",
    "pthread_detach",
    "pthread_exit",
    "pthread_getattr_np",
    "fork",
    "vfork",
    "posix_spawn",
    "exit",
    "_exit",
    "setuid",
    "setgid",
    "seteuid",
    "setegid",
    "setreuid",
    "setregid",
    "setresuid",
    "setresgid",
    "setgroups",
];
/// Code mappings of libc that are looked through; a program has one or two.
const MOST_LIBC: usize = 8;
/// Libraries that are asked whether they export malloc.
const MOST_LIBRARIES: usize = 4096;
/// Local functions of the same source file lie this near to an exported one.
const NEARBY: u64 = 32 << 10;
/// An allocator that is part of a larger library lies within this distance of its malloc.
const ALLOCATOR: u64 = 256 << 10;

impl DangerZones {
    fn new(target: &Target) -> Self {
        let code_of = |names: &'static [&'static str]| {
            target
                .maps
                .iter()
                .filter(move |map| {
                    map.executable
                        && map
                            .file_name()
                            .is_some_and(|found| names.iter().any(|name| found.starts_with(name)))
                })
                .map(|map| (map.start, map.end))
        };
        let mut locking = Vec::new();
        for base in ["libc.so.6", "libpthread.so.0"]
            .iter()
            .filter_map(|&name| target.library(|found| is_library(found, name)))
        {
            let Ok(symbols) = Symbols::read(&target.memory, base) else {
                continue;
            };
            locking.extend(
                LOCKING
                    .iter()
                    .filter_map(|name| symbols.get(name))
                    .map(|symbol| {
                        let size = symbol.size.max(16);
                        (symbol.address, symbol.address.saturating_add(size))
                    }),
            );
        }
        let mut running: Vec<_> = locking
            .iter()
            .map(|&(start, end)| (start.saturating_sub(NEARBY), end.saturating_add(NEARBY)))
            .collect();
        locking.extend(code_of(&["ld-linux", "ld-2."]));
        let mut allocators: Vec<_> =
            code_of(&["libjemalloc", "libtcmalloc", "libmimalloc"]).collect();
        // Whoever else exports malloc stands in for libc's.
        allocators.extend(
            target
                .loaded()
                .take(MOST_LIBRARIES)
                .filter(|&(name, _)| !is_library(name, "libc.so.6"))
                .filter_map(|(_, base)| symbols::lookup(&target.memory, base, "malloc"))
                .map(|malloc| {
                    (
                        malloc.address.saturating_sub(ALLOCATOR),
                        malloc.address.saturating_add(ALLOCATOR),
                    )
                }),
        );
        running.extend(locking.iter().chain(&allocators));
        running.extend(
            target
                .maps
                .iter()
                .filter(|map| map.is_called("[uprobes]"))
                .map(|map| (map.start, map.end)),
        );
        let handlers = code_of(&["libc.so", "libc-2.", "libpthread"])
            .take(MOST_LIBC)
            .flat_map(|code| find_restorers(target, code))
            .collect();
        Self {
            locking,
            allocators,
            handlers,
            running,
        }
    }

    /// True if `stack`, from the stack pointer up, shows that a lock may be held by a thread in system call `call`.
    fn on_stack(&self, stack: &[u8], call: Option<i64>) -> bool {
        let within = |ranges: &[(u64, u64)], word| {
            ranges
                .iter()
                .any(|&(start, end)| (start..end).contains(&word))
        };
        // Neither libc's malloc nor the loader makes these calls, so old words on the stack mean nothing.
        let waits_only = call.is_some_and(|call| {
            ![
                libc::SYS_futex,
                libc::SYS_read,
                libc::SYS_recvfrom,
                libc::SYS_recvmsg,
            ]
            .contains(&call)
        });
        let words = || {
            stack
                .chunks_exact(8)
                .map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
        };
        let top = STACK_SCAN / 8;
        words().take(top).any(|word| {
            within(&self.allocators, word) || (!waits_only && within(&self.locking, word))
        }) || words().any(|word| within(&self.handlers, word))
    }

    fn forbids_running_at(&self, rip: u64) -> bool {
        self.running
            .iter()
            .any(|&(start, end)| (start..end).contains(&rip))
    }
}

/// libc's `__restore_rt`, to which every signal handler returns: `mov rax, 15; syscall`.
fn find_restorers(target: &Target, code: (u64, u64)) -> Vec<(u64, u64)> {
    const RESTORE: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
    const MOST_CODE: u64 = 8 << 20;
    // There is one; each is compared with each word of a stack.
    const MOST: usize = 8;
    let bytes = target
        .memory
        .read_up_to(code.0, (code.1 - code.0).min(MOST_CODE) as usize);
    bytes
        .windows(RESTORE.len())
        .enumerate()
        .filter(|(_, window)| *window == RESTORE)
        .map(|(offset, _)| code.0 + offset as u64)
        .map(|start| (start, start + RESTORE.len() as u64))
        .take(MOST)
        .collect()
}

fn empty_data() -> StubData {
    StubData {
        resume_rip: 0,
        resume_rsp: 0,
        pthread_create: 0,
        pthread_detach: 0,
        errno_location: 0,
        entry: 0,
        control: 0,
        without_proc: 0,
        control_name: [0; 16],
        payload_name: [0; 16],
        thread_name: [0; 16],
    }
}

fn send_off(
    target: &Target,
    libc: &Libc,
    job: Job,
    cave: Cave,
    mut thread: Stopped,
) -> Result<(), InjectError> {
    let memory_error = |source| InjectError::Write {
        pid: target.pid,
        source,
    };
    let (resume_rip, rax) = thread.resume_point();
    let (entry, control) = match job {
        Job::Load { .. } => (0, 0),
        Job::Restart { entry, control } => (entry, control),
    };
    let data = StubData {
        resume_rip,
        resume_rsp: thread.regs.rsp,
        pthread_create: libc.pthread_create,
        pthread_detach: libc.pthread_detach,
        errno_location: libc.errno_location,
        entry,
        control,
        without_proc: job.without_proc().into(),
        control_name: padded(CONTROL_NAME),
        payload_name: padded(PAYLOAD_NAME),
        thread_name: padded(stub::THREAD_NAME),
    };
    // Below the red zone: the saved registers, below them the extended state at a multiple of 64.
    let registers = SavedRegisters::new(&thread.regs, rax).to_bytes();
    let extended = thread.extended_state()?;
    let registers_at = (thread.regs.rsp - RED_ZONE - registers.len() as u64) & !63;
    let extended_at = (registers_at - extended.len() as u64) & !63;
    target
        .memory
        .write(registers_at, &registers)
        .map_err(memory_error)?;
    target
        .memory
        .write(extended_at, &extended)
        .map_err(memory_error)?;
    target
        .memory
        .write(cave.address, &stub::image(data))
        .map_err(memory_error)?;
    thread.regs.rip = cave.address + HIJACK_OFFSET as u64;
    thread.regs.rsp = extended_at;
    thread.regs.rbx = extended_at;
    thread.regs.rbp = registers_at;
    thread.regs.orig_rax = u64::MAX; // No system call to restart: the stub does that.
    thread.set_regs()?;
    thread.resume();
    Ok(())
}

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    bytes
}
