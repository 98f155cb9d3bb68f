//! Attaching to a live process: bringing the payload in, patching, and taking both out again.
//!
//! If `cmt` dies at any point the target goes on: threads that it holds are released by the kernel, the stub needs no
//! help to finish, and each function is patched by one write that is whole in itself.

mod commit;
pub(crate) mod control;
mod descriptors;
mod error;
mod hijack;
mod load;
pub(crate) mod seccomp;
mod stub;
pub(crate) mod threads;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cmt_common::api::{COPY_FNS, HOOKED};
pub use cmt_common::control::flag;
use cmt_common::control::{MAGIC, Plan, VERSION, command, hook, state};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

pub use commit::{Committed, Patch};
pub use control::{CommandError, ControlMap, HookState};
pub use error::InjectError;
use hijack::Cave;
pub use load::PAYLOAD;
use load::{load, restart};
pub use threads::{ThreadError, reap_the_ended};

use crate::compare::StagedBytes;
use crate::probes::rights::{self, Deed};
use crate::target::{Target, TargetError, text};

/// Longest wait for a step of the bootstrap and for commands that do not drain copies.
const STEP_LIMIT: Duration = Duration::from_secs(5);
/// Control blocks of one target that are looked at: attaches that were given up leave some behind.
const MOST_BLOCKS: usize = 64;
/// Longest wait for copies in flight and for streams that still read staged bytes.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);

/// What an attach did, with its costs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attached {
    /// Functions that now go through the payload.
    pub patched: Vec<String>,
    /// Functions that could not be patched, and why.
    pub refused: Vec<(String, String)>,
    /// The hook engine's name.
    pub engine: String,
    /// The whole attach.
    pub took: Duration,
    /// How long the hijacked thread was held; zero if the payload was there already.
    pub held: Duration,
    /// The commit.
    pub commit: Committed,
}

/// What a detach did.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Detached {
    /// The whole detach.
    pub took: Duration,
    /// How many functions got their bytes back.
    pub restored: usize,
    /// How long all threads were stopped for that.
    pub pause: Duration,
}

/// Refuses a deed that takes what this process lacks.
fn check_allowed(pid: u32, what: &'static str, deed: Deed) -> Result<(), InjectError> {
    if rights::may(deed) {
        return Ok(());
    }
    let reason = rights::refusal(deed);
    Err(InjectError::NotAllowed { pid, what, reason })
}

/// Keeps a second `cmt` away from the same target; released when dropped, or when this process dies.
fn lock(pid: u32) -> Result<Flock<std::fs::File>, InjectError> {
    let file = std::fs::File::open(format!("/proc/{pid}/status"))
        .map_err(|_| TargetError::NoSuchProcess { pid })?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|_| InjectError::Busy { pid })
}

/// The control block of a target into which a payload was loaded, now or earlier; its own before one that its parent had at
/// the fork, a running one before a stopped one.
pub fn find_control(target: &mut Target) -> Result<Option<ControlMap>, InjectError> {
    let pid = target.pid;
    let own_pid = target.own_pid();
    let mut best: Option<((bool, bool), ControlMap)> = None;
    for address in target.control_addresses().into_iter().take(MOST_BLOCKS) {
        check_allowed(pid, "inspected", Deed::OpenControl)?;
        let control = ControlMap::open(target, address)?;
        // A bootstrap that was given up leaves a block without an entry.
        if control.magic.load(Ordering::Acquire) != MAGIC
            || control.entry.load(Ordering::Acquire) == 0
        {
            continue;
        }
        let found = control.version.load(Ordering::Acquire);
        if found != VERSION {
            return Err(InjectError::OtherVersion { pid, found });
        }
        let is_own = own_pid == Some(control.pid.load(Ordering::Acquire));
        let is_running = control.state.load(Ordering::Acquire) != state::STOPPED;
        let rank = (is_own, is_running);
        if best.as_ref().is_none_or(|(other, _)| *other < rank) {
            best = Some((rank, control));
        }
    }
    Ok(best.map(|(_, control)| control))
}

/// Refuses what cannot be attached to for what an earlier attach left in it. Changes nothing.
pub fn check_attachable(target: &mut Target) -> Result<(), InjectError> {
    let to_load = match target.sees_proc() {
        true => Deed::OpenControl,
        false => Deed::AttachWithoutProc,
    };
    if !rights::may(Deed::OpenControl) {
        return check_allowed(target.pid, "attached to", to_load);
    }
    let Some(control) = find_control(target)? else {
        if target.was_launched() {
            return Err(InjectError::Launched { pid: target.pid });
        }
        return check_allowed(target.pid, "attached to", to_load);
    };
    check_owner(target, &control)?;
    let enabled = control.state.load(Ordering::Acquire) == state::ENABLED;
    if enabled && has_control_thread(target, &control) {
        return Err(InjectError::AlreadyAttached { pid: target.pid });
    }
    Ok(())
}

/// Attaches: loads the payload, patches all functions that can be patched, and starts staging by `plan`.
///
/// `max_threads` bounds the threads that move bytes; 0 leaves it to the payload. `flags` are those of [`flag`]. On any
/// error the target's copies are as they were.
pub fn attach(
    target: &mut Target,
    plan: &Plan,
    max_threads: u32,
    flags: u32,
) -> Result<Attached, InjectError> {
    let started = Instant::now();
    let pid = target.pid;
    let _lock = lock(pid)?;
    target.refresh_maps()?;
    check_attachable(target)?;
    threads::check_stoppable(|| target.threads().ok())?;
    clear_leftovers(target);
    let libc = target.libc()?;
    let cuda = target.cuda()?;
    let (control, cave, held) = match find_control(target)? {
        None => {
            let (cave, held) = load(target, &libc, &cuda)?;
            (cave.0, Some(cave.1), held)
        }
        Some(control) => {
            settle(target, &control)?;
            if has_control_thread(target, &control) {
                (control, None, Duration::ZERO) // An earlier cmt died on its way; go on from there.
            } else {
                let (cave, held) = restart(target, &libc, &control)?;
                (control, Some(cave), held)
            }
        }
    };
    control.flags.store(flags, Ordering::Release);
    let result = patch_and_enable(target, &control, plan, max_threads, cave);
    match result {
        Ok(commit) => {
            let hooks = || (0..HOOKED).map(|index| (index, control.hook(index)));
            Ok(Attached {
                patched: hooks()
                    .filter(|(_, hook)| hook.status == hook::PREPARED)
                    .map(|(index, _)| COPY_FNS[index].name.to_owned())
                    .collect(),
                refused: hooks()
                    .filter(|(_, hook)| hook.status == hook::REFUSED)
                    .map(|(index, hook)| (COPY_FNS[index].name.to_owned(), hook.reason))
                    .collect(),
                engine: control.engine(),
                took: started.elapsed(),
                held,
                commit,
            })
        }
        Err(error) => {
            // The payload is inside but must not stay: take out what was written and let its thread end.
            let _ = unpatch_and_stop(target, &control);
            if let Some(cave) = cave {
                let _ = commit::commit(target, &[], Some(cave));
            }
            Err(error)
        }
    }
}

/// Takes out the stubs that a `cmt` which was killed has left behind, unless a thread is still in one.
fn clear_leftovers(target: &Target) {
    for cave in hijack::leftovers(target) {
        // What stays is tried again by the next attach or detach.
        let _ = commit::commit(target, &[], Some(cave));
    }
}

/// Detaches: drains, restores the original bytes, stops the helpers and frees pinned memory.
pub fn detach(target: &mut Target) -> Result<Detached, InjectError> {
    let started = Instant::now();
    let pid = target.pid;
    let _lock = lock(pid)?;
    target.refresh_maps()?;
    let control = find_control(target)?.ok_or(InjectError::NotAttached { pid })?;
    check_owner(target, &control)?;
    settle(target, &control)?;
    // An attach that was killed early may have left a control thread that was told nothing yet.
    if control.state.load(Ordering::Acquire) == state::STOPPED
        && !has_control_thread(target, &control)
    {
        return Err(InjectError::NotAttached { pid });
    }
    let (restored, pause) = unpatch_and_stop(target, &control)?;
    clear_leftovers(target);
    Ok(Detached {
        took: started.elapsed(),
        restored,
        pause,
    })
}

/// Gives the payload of an attached process another plan; copies that run finish by the old one.
pub fn set_plan(target: &mut Target, plan: &Plan) -> Result<(), InjectError> {
    Steering::take(target)?.set_plan(target, plan)
}

/// The plan of an attached process in the hands of one `cmt`: no other changes anything until this is dropped.
pub struct Steering {
    control: ControlMap,
    /// None where nobody else knows of the process.
    _lock: Option<Flock<std::fs::File>>,
}

impl Steering {
    /// Takes hold of it.
    pub fn take(target: &mut Target) -> Result<Self, InjectError> {
        let pid = target.pid;
        let lock = lock(pid)?;
        target.refresh_maps()?;
        let control = find_control(target)?.ok_or(InjectError::NotAttached { pid })?;
        check_owner(target, &control)?;
        settle(target, &control)?;
        Ok(Self {
            control,
            _lock: Some(lock),
        })
    }

    /// Takes hold of a process that has handed its block over.
    pub fn of(control: ControlMap) -> Self {
        Self {
            control,
            _lock: None,
        }
    }

    /// Puts a plan in force.
    pub fn set_plan(&self, target: &Target, plan: &Plan) -> Result<(), InjectError> {
        self.control.set_plan(plan);
        let done = self.control.command(target, command::SET_PLAN, STEP_LIMIT);
        Ok(done?)
    }

    /// Copies that were staged so far: HtoD, DtoH.
    pub fn staged_calls(&self) -> [u64; 2] {
        let calls = &self.control.counters.staged_calls;
        [0, 1].map(|direction: usize| calls[direction].load(Ordering::Relaxed))
    }
}

/// Whether the process is attached to at this moment.
pub fn is_attached(target: &mut Target) -> bool {
    target.refresh_maps().is_ok()
        && find_control(target)
            .ok()
            .flatten()
            .is_some_and(|control| control.state.load(Ordering::Acquire) == state::ENABLED)
}

/// How it stands with a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nobody has ever attached to it.
    Untouched,
    /// It is attached to.
    Attached,
    /// It was attached to, and is no longer, or only halfway.
    Left,
}

/// How it stands with a process that may only be looked at.
pub fn standing(target: &mut Target) -> Result<Standing, InjectError> {
    target.refresh_maps()?;
    let Some(control) = find_control(target)? else {
        return Ok(Standing::Untouched);
    };
    check_owner(target, &control)?;
    Ok(match control.state.load(Ordering::Acquire) {
        state::ENABLED => Standing::Attached,
        _ => Standing::Left,
    })
}

/// How many staged copies returned an error of the driver since the process was attached.
pub fn staged_errors(target: &mut Target) -> Result<u64, InjectError> {
    target.refresh_maps()?;
    let control = find_control(target)?;
    Ok(control.map_or(0, |control| {
        let errors = &control.counters.staged_errors;
        errors
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .fold(0, u64::saturating_add)
    }))
}

/// What was staged since the process was attached; `None` where it is not.
pub fn staged_bytes(target: &mut Target) -> Result<Option<StagedBytes>, InjectError> {
    target.refresh_maps()?;
    let control = find_control(target)?;
    Ok(control.map(|control| {
        let classes = &control.counters.classes;
        std::array::from_fn(|way| {
            std::array::from_fn(|class| classes[way][class].bytes.load(Ordering::Relaxed))
        })
    }))
}

/// Whether the payload's control thread lives.
pub fn has_control_thread(target: &Target, control: &ControlMap) -> bool {
    control.control_tid.load(Ordering::Acquire) != 0
        && has_thread(target, |name| name == "cmt-control")
}

/// Waits until the control thread has carried out what an earlier `cmt`, killed since, told it: it may be about to end.
fn settle(target: &Target, control: &ControlMap) -> Result<(), InjectError> {
    let deadline = Instant::now() + DRAIN_LIMIT;
    while control.is_at_work() && has_control_thread(target, control) {
        if Instant::now() >= deadline {
            return Err(InjectError::Busy { pid: target.pid });
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Refuses a forked child: it shares the parent's control block but not its threads.
pub fn check_owner(target: &Target, control: &ControlMap) -> Result<(), InjectError> {
    let owner = control.pid.load(Ordering::Acquire);
    if owner != 0 && target.own_pid() != Some(owner) {
        return Err(InjectError::ForkedChild { pid: target.pid });
    }
    Ok(())
}

fn patch_and_enable(
    target: &Target,
    control: &ControlMap,
    plan: &Plan,
    max_threads: u32,
    cave: Option<Cave>,
) -> Result<Committed, InjectError> {
    control.command(target, command::PREPARE, STEP_LIMIT)?;
    let hooks: Vec<HookState> = (0..HOOKED).map(|index| control.hook(index)).collect();
    let ready: Vec<usize> = (0..HOOKED)
        .filter(|&index| hooks[index].status == hook::PREPARED)
        .collect();
    if ready.is_empty() {
        let first = hooks
            .into_iter()
            .find(|hook| hook.status == hook::REFUSED)
            .map_or("libcuda exports none of them".to_owned(), |hook| {
                hook.reason
            });
        return Err(InjectError::NothingToPatch { first });
    }
    let patches: Vec<Patch> = ready
        .iter()
        .filter(|&&index| !is_patched(target, &hooks[index]))
        .map(|&index| Patch {
            window: hooks[index].window,
            from: hooks[index].original.clone(),
            to: hooks[index].patched.clone(),
            moves: hooks[index].relocated.clone(),
        })
        .collect();
    let committed = commit::commit(target, &patches, cave)?;
    for &index in &ready {
        control.hooks[index].committed.store(1, Ordering::Release);
    }
    control.set_plan(plan);
    control.max_threads.store(max_threads, Ordering::Release);
    control.command(target, command::ENABLE, STEP_LIMIT)?;
    Ok(committed)
}

fn unpatch_and_stop(
    target: &Target,
    control: &ControlMap,
) -> Result<(usize, Duration), InjectError> {
    let alive = has_control_thread(target, control);
    if alive {
        control.command(target, command::DISABLE, DRAIN_LIMIT)?;
    }
    let patches: Vec<Patch> = (0..HOOKED)
        .map(|index| control.hook(index))
        .filter(|hook| hook.status == hook::PREPARED && is_patched(target, hook))
        .map(|hook| Patch {
            window: hook.window,
            from: hook.patched,
            to: hook.original,
            moves: Vec::new(),
        })
        .collect();
    // Where nothing was patched yet, nothing needs to stand still.
    let pause = match patches.is_empty() {
        true => Duration::ZERO,
        false => commit::commit(target, &patches, None)?.pause,
    };
    for slot in &control.hooks {
        slot.committed.store(0, Ordering::Release);
    }
    if alive {
        control.command(target, command::STOP, DRAIN_LIMIT)?;
        let deadline = Instant::now() + STEP_LIMIT;
        while has_thread(target, is_ours) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(200));
        }
    } else {
        control.state.store(state::STOPPED, Ordering::Release);
    }
    Ok((patches.len(), pause))
}

fn is_patched(target: &Target, hook: &HookState) -> bool {
    target.memory.read_up_to(hook.window, hook.patched.len()) == hook.patched
}

fn has_thread(target: &Target, named: impl Fn(&str) -> bool) -> bool {
    target
        .threads()
        .unwrap_or_default()
        .into_iter()
        .any(|tid| named(&thread_name(target.pid, tid)))
}

/// Whether a thread of this name is one that attaching made.
fn is_ours(name: &str) -> bool {
    [stub::THREAD_NAME, "cmt-control"].contains(&name) || name.starts_with("cmt-copy-")
}

/// Name of a thread; empty if it has ended.
fn thread_name(pid: u32, tid: i32) -> String {
    text::read(format!("/proc/{pid}/task/{tid}/comm"))
        .map(|name| name.trim_end().to_owned())
        .unwrap_or_default()
}
