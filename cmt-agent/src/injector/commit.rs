//! Writing patches into the target's code, and taking them out, with all threads stopped.

use std::time::{Duration, Instant};

use cmt_common::control::WINDOW_MAX;
use serde::{Deserialize, Serialize};

use super::InjectError;
use super::hijack::Cave;
use super::threads::{self, Stopped, ThreadError};
use crate::target::Target;

/// Longest that threads may take to stop.
const STOP_LIMIT: Duration = Duration::from_millis(200);
/// How many of the tries only hold threads for as long as a stop takes that meets no obstacle.
const SHORT_TRIES: u32 = 5;
/// How often a commit is tried when a thread stands where it cannot be moved from.
const TRIES: u32 = 50;
/// How long a thread that does not stop is given, all threads running on in between.
const PATIENCE: Duration = Duration::from_secs(5);
/// How much of each stack is looked through for a program counter that a signal handler will return to.
const STACK_SCAN: usize = 16 << 10;

/// A change of one function's code.
#[derive(Clone, Debug)]
pub struct Patch {
    /// First byte.
    pub window: u64,
    /// What stands there.
    pub from: Vec<u8>,
    /// What is to stand there.
    pub to: Vec<u8>,
    /// Program counters inside the window and where a thread that stands there goes on.
    pub moves: Vec<(u64, u64)>,
}

impl Patch {
    /// True if a thread cannot stay at `address` while the window changes. Its first byte is safe: an instruction
    /// begins there before and after.
    fn breaks(&self, address: u64) -> bool {
        (1..self.from.len() as u64).contains(&address.wrapping_sub(self.window))
    }
}

/// What a commit did.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Committed {
    /// From the first thread stopped to the last one running again; of several tries the longest.
    pub pause: Duration,
    /// How many threads were stopped.
    pub threads: usize,
}

/// Applies all `patches` while no thread runs; then clears `cave` if no thread is in it.
///
/// Each window is checked before any is written: if one does not hold what it should, nothing is changed.
pub fn commit(
    target: &Target,
    patches: &[Patch],
    cave: Option<Cave>,
) -> Result<Committed, InjectError> {
    let deadline = Instant::now() + PATIENCE;
    // Threads of ours have computed addresses in the windows and may still have them on their stacks.
    let ours: Vec<i32> = target
        .threads()?
        .into_iter()
        .filter(|&tid| super::is_ours(&super::thread_name(target.pid, tid)))
        .collect();
    let mut longest = Duration::ZERO;
    for attempt in 0..TRIES {
        let list = || target.threads().ok();
        // A thread deep in the kernel stops late: at first the others are let go again rather than held until then.
        let limit = match attempt {
            0..SHORT_TRIES => short_limit(target.threads()?.len()),
            _ => STOP_LIMIT,
        };
        let (mut stopped, since) = match threads::stop_all(list, limit) {
            Ok(stopped) => stopped,
            // Perhaps it only waits for a processor.
            Err(ThreadError::DoesNotStop { .. })
                if attempt < SHORT_TRIES || Instant::now() < deadline =>
            {
                longest = longest.max(limit);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        if try_commit(target, patches, cave, &ours, &mut stopped)? {
            let threads = stopped.len();
            for thread in stopped {
                thread.resume();
            }
            return Ok(Committed {
                pause: longest.max(since.elapsed()),
                threads,
            });
        }
        drop(stopped);
        std::thread::sleep(Duration::from_micros(500));
    }
    Err(InjectError::WindowBusy { tries: TRIES })
}

/// How long stopping this many threads takes where none of them is deep in the kernel, with room to spare.
fn short_limit(threads: usize) -> Duration {
    Duration::from_micros(1500 + 40 * threads as u64)
}

/// False, and nothing written, if a thread stands in the way.
fn try_commit(
    target: &Target,
    patches: &[Patch],
    cave: Option<Cave>,
    ours: &[i32],
    stopped: &mut [Stopped],
) -> Result<bool, InjectError> {
    let write_error = |source| InjectError::Write {
        pid: target.pid,
        source,
    };
    // Code that was looked at belongs to the program that ran then. All its threads stand still: it stays what it is.
    target.check_same_program()?;
    let mut cave_in_use = false;
    // Most words on a stack are far from every window.
    let first = patches.iter().map(|patch| patch.window).min().unwrap_or(0);
    let end = patches
        .iter()
        .map(|patch| patch.window + patch.from.len() as u64)
        .max();
    let near = first..end.unwrap_or(0);
    for thread in stopped.iter() {
        let stack = target.memory.read_up_to(thread.regs.rsp, STACK_SCAN);
        for bytes in stack.chunks_exact(8) {
            let word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            let breaks = near.contains(&word) && patches.iter().any(|patch| patch.breaks(word));
            if breaks && !ours.contains(&thread.tid) {
                return Ok(false);
            }
            cave_in_use |= cave.is_some_and(|cave| cave.contains(word));
        }
        cave_in_use |= cave.is_some_and(|cave| cave.contains(thread.regs.rip));
    }
    for patch in patches {
        let mut found = [0u8; WINDOW_MAX];
        let found = &mut found[..patch.from.len()];
        target
            .memory
            .read(patch.window, found)
            .map_err(write_error)?;
        if *found != *patch.from {
            return Err(InjectError::UnexpectedCode {
                address: patch.window,
            });
        }
    }
    for thread in stopped.iter_mut() {
        let rip = thread.regs.rip;
        if let Some(patch) = patches.iter().find(|patch| patch.breaks(rip)) {
            let Some(&(_, to)) = patch
                .moves
                .iter()
                .find(|&&(from, _)| from == thread.regs.rip)
            else {
                return Ok(false);
            };
            thread.regs.rip = to;
            thread.set_regs()?;
        }
    }
    for patch in patches {
        target
            .memory
            .write(patch.window, &patch.to)
            .map_err(write_error)?;
    }
    if let Some(cave) = cave.filter(|_| !cave_in_use) {
        cave.clear(target).map_err(write_error)?;
    }
    Ok(true)
}
