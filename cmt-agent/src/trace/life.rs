//! What `/proc` says of a process: whether it lives, and what it maps.

use std::fs;

use procfs::process::Process as Proc;

use super::TraceError;
use crate::probes::rights::{self, Deed};
use crate::target::maps::{self, Mapping};
use crate::target::text;

/// How it stands with a process.
pub(super) enum Life {
    /// No thread of it runs any more.
    Ended,
    /// It runs.
    Alive(Alive),
    /// It could not be looked at, for want of descriptors for example: nothing is known of it.
    Unclear(String),
}

/// A process that runs.
pub(super) struct Alive {
    /// Start time in clock ticks since boot: tells a process from a later one with the same id.
    pub start_time: u64,
    /// Size of its address space, in bytes.
    pub size: u64,
    /// Its name.
    pub name: String,
    /// The thread through which its memory can be looked at: the first one, unless that alone has ended.
    pub tid: u32,
}

impl Life {
    /// That of process `pid`.
    pub fn of(pid: u32) -> Self {
        let stat = match Proc::new(pid as i32).and_then(|process| process.stat()) {
            Ok(stat) => stat,
            Err(procfs::ProcError::NotFound(_)) => return Self::Ended,
            Err(error) => return Self::Unclear(error.to_string()),
        };
        let tid = match stat.state {
            'Z' | 'X' if stat.num_threads <= 1 => None,
            'Z' | 'X' => live_thread(pid),
            _ => Some(pid),
        };
        match tid {
            None => Self::Ended,
            Some(tid) => Self::Alive(Alive {
                start_time: stat.starttime,
                size: stat.vsize,
                name: text::printable(&stat.comm),
                tid,
            }),
        }
    }

    /// Whether it is known to have ended.
    pub fn has_ended(&self) -> bool {
        matches!(self, Self::Ended)
    }
}

/// A thread of a process whose first thread has ended.
fn live_thread(pid: u32) -> Option<u32> {
    fs::read_dir(format!("/proc/{pid}/task"))
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .find(|tid| {
            // `/proc` has a folder for every thread, though it lists only the first.
            Proc::new(*tid as i32)
                .and_then(|thread| thread.stat())
                .is_ok_and(|stat| !matches!(stat.state, 'Z' | 'X'))
        })
}

/// Checks that `pid` names a process whose memory can be looked at.
pub(super) fn named(pid: u32) -> Result<Alive, TraceError> {
    let gone = TraceError::NoSuchProcess { pid };
    let Ok(status) = text::read(format!("/proc/{pid}/status")) else {
        return Err(match rights::is_hidden(pid) {
            true => TraceError::Inspect {
                pid,
                reason: rights::refusal(Deed::Inspect),
            },
            false => gone,
        });
    };
    let leader = status
        .lines()
        .find_map(|line| line.strip_prefix("Tgid:"))
        .and_then(|id| id.trim().parse().ok());
    if let Some(leader) = leader
        && leader != pid
    {
        return Err(TraceError::Thread {
            tid: pid,
            pid: leader,
        });
    }
    let alive = match Life::of(pid) {
        Life::Alive(alive) => alive,
        Life::Ended => return Err(gone),
        Life::Unclear(reason) => return Err(TraceError::Inspect { pid, reason }),
    };
    match read_maps(alive.tid) {
        Ok(maps) if maps.is_empty() => Err(TraceError::NoMemory { pid }),
        Ok(_) => Ok(alive),
        Err(reason) => Err(TraceError::Inspect { pid, reason }),
    }
}

/// The maps of a process, by a thread of it that lives; empty for a kernel thread and for one that has ended.
pub(super) fn read_maps(tid: u32) -> Result<Vec<Mapping>, String> {
    match Proc::new(tid as i32).and_then(|process| maps::of(&process)) {
        // The kernel shows no mapping at all of a process that we may not look at, or all of them but no file.
        Ok(maps) if maps.is_empty() && has_memory(tid) || !rights::may_inspect(tid) => {
            Err(rights::refusal(Deed::Inspect))
        }
        Ok(maps) => Ok(maps),
        Err(procfs::ProcError::NotFound(_)) => Ok(Vec::new()),
        Err(procfs::ProcError::PermissionDenied(_)) => Err(rights::refusal(Deed::Inspect)),
        Err(error) => Err(error.to_string()),
    }
}

/// False for a kernel thread and for a process that has ended.
fn has_memory(tid: u32) -> bool {
    Proc::new(tid as i32)
        .and_then(|process| process.stat())
        .is_ok_and(|stat| stat.vsize > 0)
}

/// The name of a process.
pub(super) fn comm(pid: u32) -> Option<String> {
    text::comm(&Proc::new(pid as i32).ok()?).ok()
}

/// The program that a process runs: changes with exec. `None` where it may not be seen.
pub(super) fn program(tid: u32) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    let file = fs::metadata(format!("/proc/{tid}/exe")).ok()?;
    Some((file.dev(), file.ino()))
}
