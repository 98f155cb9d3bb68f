//! Stopping and resuming threads of a target with ptrace.
//!
//! A thread that is dropped while stopped goes on: [`Stopped`] detaches on drop, and the kernel does the same if `cmt`
//! dies. All calls for one thread must come from the thread of ours that seized it.

mod held;

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::target::text;
use held::poll_stop;
pub use held::{Seized, Stopped};

/// Why a thread could not be stopped or read.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    /// It has ended: nothing to do.
    #[error("thread {tid} has ended")]
    Gone {
        /// Which.
        tid: i32,
    },
    /// Something else traces it, or we may not.
    #[error(
        "thread {tid} cannot be traced: {errno}; is a debugger, strace or another cmt attached?"
    )]
    Refused {
        /// Which.
        tid: i32,
        /// What the kernel said.
        errno: Errno,
    },
    /// It did not stop in time, as threads in uninterruptible sleep do not.
    #[error(
        "thread {tid} did not stop within {waited_ms} ms (uninterruptible sleep?); nothing was changed, try again"
    )]
    DoesNotStop {
        /// Which.
        tid: i32,
        /// How long we waited.
        waited_ms: u128,
    },
    /// The threads could not be listed.
    #[error("its threads cannot be listed; has it ended? Nothing was changed")]
    NoList,
    /// A ptrace request failed.
    #[error("ptrace {request} on thread {tid}: {errno}")]
    Ptrace {
        /// Which thread.
        tid: i32,
        /// Which request.
        request: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
}

/// How often somebody looks who waits for a stop: all the time at first, since most threads stop within microseconds.
struct Pace {
    started: Instant,
    deadline: Instant,
    looks: u32,
}

impl Pace {
    fn new(deadline: Instant) -> Self {
        Self {
            started: Instant::now(),
            deadline,
            looks: 0,
        }
    }

    /// Passes the time until the next look; fails at the deadline. `tid` is the thread to blame.
    fn pause(&mut self, tid: i32) -> Result<(), ThreadError> {
        if Instant::now() >= self.deadline {
            let waited_ms = self.started.elapsed().as_millis();
            return Err(ThreadError::DoesNotStop { tid, waited_ms });
        }
        self.looks += 1;
        if self.looks > 200 {
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}

/// Stops every thread of a process: those that `list` names, again and again until it names no new one.
///
/// Nothing is stopped if the threads cannot be listed. Returns them with the moment at which the first was told to stop. On failure all threads run on.
pub fn stop_all(
    list: impl Fn() -> Option<Vec<i32>>,
    limit: Duration,
) -> Result<(Vec<Stopped>, Instant), ThreadError> {
    let deadline = Instant::now() + limit;
    let mut pace = Pace::new(deadline);
    let mut stopped: Vec<Stopped> = Vec::new();
    let mut since = None;
    loop {
        let mut fresh = Vec::new();
        let tids = list().filter(|tids| !tids.is_empty());
        let tids = tids.ok_or(ThreadError::NoList)?;
        // One that starts new threads as fast as they are stopped must not keep us for ever.
        if Instant::now() >= deadline
            && let Some(&tid) = tids
                .iter()
                .find(|&&tid| stopped.iter().all(|it| it.tid != tid))
        {
            let waited_ms = limit.as_millis();
            return Err(ThreadError::DoesNotStop { tid, waited_ms });
        }
        for &tid in &tids {
            if stopped.iter().any(|thread| thread.tid == tid) {
                continue;
            }
            match Seized::seize(tid) {
                Ok(seized) => fresh.push(seized),
                Err(ThreadError::Gone { .. }) => {}
                // A thread that is exiting refuses too, and a main thread that has called pthread_exit stays as a zombie.
                Err(_) if has_ended(tid) => {}
                Err(error) => return Err(error),
            }
        }
        let since = *since.get_or_insert_with(Instant::now);
        if fresh.is_empty() {
            // Some may have ended before they were seized, and another process's threads have got their ids. While they
            // stand still they keep them.
            stopped.retain(|thread| tids.contains(&thread.tid));
            return Ok((stopped, since));
        }
        fresh.retain(|seized| seized.interrupt().is_ok());
        while !fresh.is_empty() {
            let mut outcome = Ok(());
            // Each as soon as it stops: until an interrupted call is rewritten, our death would leave it with EINTR.
            fresh.retain_mut(|seized| match seized.look() {
                Ok(Some(thread)) => {
                    stopped.push(thread);
                    false
                }
                Ok(None) => true,
                Err(ThreadError::Gone { .. }) => false,
                Err(error) => {
                    outcome = Err(error);
                    true
                }
            });
            if let Some(seized) = fresh.last() {
                outcome = outcome.and_then(|()| pace.pause(seized.tid));
            }
            if let Err(error) = outcome {
                // Before those that do not stop are waited for.
                drop((stopped, fresh));
                return Err(error);
            }
        }
    }
}

/// Refuses a process with a thread that will not stop: one that has been in uninterruptible sleep for as long as we
/// looked, as the parent of a vfork is. Nothing is stopped for this.
pub fn check_stoppable(list: impl Fn() -> Option<Vec<i32>>) -> Result<(), ThreadError> {
    const LOOKS: u32 = 100;
    const PAUSE: Duration = Duration::from_millis(20);
    // One that wakes now and then can be stopped then.
    let mut asleep: Vec<_> = list()
        .ok_or(ThreadError::NoList)?
        .into_iter()
        .map(|tid| (tid, switches_of(tid)))
        .collect();
    for _ in 0..LOOKS {
        asleep
            .retain(|&(tid, switches)| state_of(tid) == Some('D') && switches_of(tid) == switches);
        if asleep.is_empty() {
            return Ok(());
        }
        std::thread::sleep(PAUSE);
    }
    Err(ThreadError::DoesNotStop {
        tid: asleep[0].0,
        waited_ms: u128::from(LOOKS) * PAUSE.as_millis(),
    })
}

/// How often a thread went to sleep so far.
fn switches_of(tid: i32) -> Option<u64> {
    let status = text::read(format!("/proc/{tid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

/// Reaps traced threads that have ended, from a thread of its own for as long as this process lives.
///
/// A thread that execs waits until all others of its process are reaped, and whoever seizes it waits for the exec:
/// a target that execs while we stop it and we would wait for each other for ever.
///
/// Only zombies are waited for: a wait for any would take the stops of the others, too.
pub fn reap_the_ended() {
    std::thread::spawn(|| {
        loop {
            std::thread::sleep(Duration::from_millis(10));
            let seized = SEIZED
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            for tid in seized {
                if state_of(tid) == Some('Z') {
                    let _ = poll_stop(tid);
                }
            }
        }
    });
}

/// Threads that this process has ever seized.
static SEIZED: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

/// Has the thread reaped once it has ended.
fn remember(tid: i32) {
    SEIZED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(tid);
}

/// The thread that traces `tid`, if one does.
fn tracer_of(tid: i32) -> Option<i32> {
    let status = text::read(format!("/proc/{tid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("TracerPid:"))?;
    line.trim().parse().ok().filter(|&tracer| tracer != 0)
}

fn has_ended(tid: i32) -> bool {
    matches!(state_of(tid), None | Some('Z' | 'X'))
}

/// The kernel's letter for what a thread does; `None` if there is no such thread.
fn state_of(tid: i32) -> Option<char> {
    state_in(&text::read(format!("/proc/{tid}/stat")).ok()?)
}

/// The same, from the text of `/proc/TID/stat`.
pub(crate) fn state_in(stat: &str) -> Option<char> {
    // It follows the name, which is in brackets and may hold anything.
    stat.rsplit(')').next()?.trim_start().chars().next()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::{BufRead as _, BufReader};
    use std::process::{Child, Command, Stdio};

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;

    struct Sleepers(RefCell<Vec<Child>>);

    impl Sleepers {
        fn one_more(&self) -> i32 {
            let child = Command::new("sleep").arg("60").spawn().expect("a child");
            let tid = child.id() as i32;
            self.0.borrow_mut().push(child);
            tid
        }
    }

    impl Drop for Sleepers {
        fn drop(&mut self) {
            for child in self.0.get_mut() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }

    #[test]
    fn what_is_no_thread_of_the_target_is_let_go() {
        let sleepers = Sleepers(RefCell::default());
        let (ours, strange) = (sleepers.one_more(), sleepers.one_more());
        // As if the second had ended and its id been taken before it was seized.
        let lists = RefCell::new(vec![vec![ours], vec![ours, strange]]);
        let list = || lists.borrow_mut().pop();
        let (stopped, _) = stop_all(list, Duration::from_secs(5)).expect("they sleep");
        let tids: Vec<i32> = stopped.iter().map(|thread| thread.tid).collect();
        assert_eq!(tids, [ours]);
        assert_eq!(
            (tracer_of(ours).is_some(), tracer_of(strange)),
            (true, None)
        );
    }

    #[test]
    fn what_ended_while_it_was_traced_is_reaped() {
        let mut parent = Command::new("sh")
            .args(["-c", "sleep 60 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut line = String::new();
        BufReader::new(parent.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("a line");
        let tid: i32 = line.trim().parse().expect("a process id");
        let _seized = Seized::seize(tid).expect("it sleeps");
        kill(Pid::from_raw(tid), Signal::SIGKILL).expect("it lives");
        reap_the_ended();
        // Its own parent learns of the end only then.
        let deadline = Instant::now() + Duration::from_secs(20);
        while parent.try_wait().expect("our child").is_none() {
            if Instant::now() > deadline {
                parent.kill().expect("our child");
                panic!("nobody reaped it");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn threads_without_end_are_given_up() {
        let sleepers = Sleepers(RefCell::default());
        let tids = RefCell::new(Vec::new());
        let list = || {
            tids.borrow_mut().push(sleepers.one_more());
            Some(tids.borrow().clone())
        };
        let given_up = stop_all(list, Duration::from_millis(100)).expect_err("there are ever more");
        assert!(
            matches!(given_up, ThreadError::DoesNotStop { .. }),
            "{given_up}"
        );
        assert!(tids.borrow().iter().all(|&tid| tracer_of(tid).is_none()));
    }
}
