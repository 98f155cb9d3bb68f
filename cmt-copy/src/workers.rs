//! The helper threads: they move slices and make no CUDA call.
//!
//! They start with the first staged copy, spin for a moment when there is nothing to do, then sleep on a futex. A short
//! copy wakes one, or a few while its first bytes are on their way, and each that wakes and finds more wakes two more, so the
//! caller pays little; a long copy, which pays for every helper that comes late, wakes all that it wants at once.
#![expect(unsafe_code, reason = "threads, signal masks and futexes by libc")]

use core::ffi::{CStr, c_void};
use core::mem::MaybeUninit;
use core::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cmt_common::control::CPU_WORDS;

use crate::pool::Lanes;
use crate::protocol::Line;
use crate::signals;

/// How long a helper looks for work before it sleeps: while a copy runs (its next slot may be on its way), and after.
const SPIN_BUSY: Duration = Duration::from_micros(100);
const SPIN_IDLE: Duration = Duration::from_micros(50);
/// Looks at the boards between two looks at the clock.
const LOOKS: u32 = 32;
/// Enough for a memcpy and for a handler of the application's that a fault in its memory may call. The larger one is for
/// programs whose thread-local variables, which lie on the stack, do not fit into the smaller.
const STACK_BYTES: [usize; 2] = [256 << 10, 4 << 20];

/// After a thread could not be had, nobody asks for one for so long.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// The helpers and what they share with callers.
pub(crate) struct Crew {
    /// Copies that run now.
    copies: Line<AtomicU32>,
    /// Helpers that sleep or are about to, and the word they sleep on.
    sleepers: Line<AtomicU32>,
    epoch: AtomicU32,
    stop: AtomicBool,
    live: AtomicU32,
    /// No more than this.
    most: u32,
    threads: Mutex<Threads>,
    /// CPUs that the process may use, as its main thread sees it: a helper must not inherit the binding of whichever
    /// thread makes the first copy.
    cpus: Option<libc::cpu_set_t>,
    /// Those of them that helpers are to run on, and how often that has changed.
    wanted_cpus: [AtomicU64; CPU_WORDS],
    cpus_changed: AtomicU32,
}

#[derive(Default)]
struct Threads {
    handles: Vec<libc::pthread_t>,
    none_before: Option<Instant>,
}

/// What a helper thread gets.
struct Start {
    lanes: Arc<Lanes>,
    number: u32,
}

impl Crew {
    /// Starts nothing. At most `most` helpers will live.
    pub(crate) fn new(most: u32) -> Self {
        Self {
            copies: Line(AtomicU32::new(0)),
            sleepers: Line(AtomicU32::new(0)),
            epoch: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            live: AtomicU32::new(0),
            most,
            threads: Mutex::default(),
            cpus: main_thread_cpus(),
            wanted_cpus: core::array::from_fn(|_| AtomicU64::new(0)),
            cpus_changed: AtomicU32::new(1),
        }
    }

    /// Helpers go to these CPUs before they next look for work.
    pub(crate) fn set_cpus(&self, cpus: [u64; CPU_WORDS]) {
        for (wanted, cpus) in self.wanted_cpus.iter().zip(cpus) {
            wanted.store(cpus, Ordering::Relaxed);
        }
        self.cpus_changed.fetch_add(1, Ordering::Release);
    }

    /// The CPUs that helpers run on: those wanted that the process may use, else all that it may use.
    fn helper_cpus(&self) -> Option<libc::cpu_set_t> {
        let allowed = self.cpus?;
        // SAFETY: a set is an array of bits, and `cpu` stays below their number.
        unsafe {
            let mut chosen = core::mem::zeroed::<libc::cpu_set_t>();
            for cpu in 0..64 * CPU_WORDS {
                let wanted = self.wanted_cpus[cpu / 64].load(Ordering::Relaxed) >> (cpu % 64) & 1;
                if wanted == 1 && libc::CPU_ISSET(cpu, &allowed) {
                    libc::CPU_SET(cpu, &mut chosen);
                }
            }
            Some(match libc::CPU_COUNT(&chosen) {
                0 => allowed,
                _ => chosen,
            })
        }
    }

    /// Binds the calling helper anew if that has changed since it did so last.
    fn follow_cpus(&self, seen: &mut u32) {
        let changed = self.cpus_changed.load(Ordering::Acquire);
        if changed == *seen {
            return;
        }
        *seen = changed;
        if let Some(cpus) = self.helper_cpus() {
            // SAFETY: a whole set, for this thread. Where it fails, the set that it had stays.
            unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &cpus) };
        }
    }

    /// Helpers that live now.
    pub(crate) fn live(&self) -> u32 {
        self.live.load(Ordering::Relaxed)
    }

    /// Copies that run now.
    pub(crate) fn copies(&self) -> u32 {
        self.copies.0.load(Ordering::Relaxed)
    }

    /// A copy begins: helpers spin longer until the result is dropped.
    pub(crate) fn copy_begins(&self) -> CopyRuns<'_> {
        self.copies.0.fetch_add(1, Ordering::Relaxed);
        CopyRuns(self)
    }

    /// There is more to do for a copy that wants `wanted` helpers: wakes as many as are missing for all copies that run, but
    /// `most` at a time.
    pub(crate) fn wake_for(&self, wanted: u32, most: u32) {
        // Pairs with the fence in `sleep`: either this sees the sleeper, or the sleeper sees the work.
        fence(Ordering::SeqCst);
        let sleepers = self.sleepers.0.load(Ordering::Relaxed);
        if sleepers > 0 {
            let awake = self.live().saturating_sub(sleepers);
            let all = wanted.saturating_mul(self.copies());
            let missing = all.saturating_sub(awake).min(sleepers).min(most);
            if missing > 0 {
                self.wake(missing.cast_signed());
            }
        }
    }

    /// Whether there are helpers to wake.
    pub(crate) fn has_sleepers(&self) -> bool {
        self.sleepers.0.load(Ordering::Relaxed) > 0
    }

    /// Those woken sleep no longer from now on, though they may run later.
    fn wake(&self, count: i32) {
        self.epoch.fetch_add(1, Ordering::Release);
        let woken = futex(&self.epoch, libc::FUTEX_WAKE, count);
        self.sleepers
            .0
            .fetch_sub(woken.max(0) as u32, Ordering::Relaxed);
    }

    /// Sleeps until there may be work.
    fn sleep(&self, lanes: &Lanes) {
        self.sleepers.0.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let epoch = self.epoch.load(Ordering::Acquire);
        // The kernel compares; a wake since the load above ends it at once. It returns 0 to those that `wake` has counted.
        let was_woken = !self.stop.load(Ordering::Relaxed)
            && !lanes.any_wants_helper()
            && futex(&self.epoch, libc::FUTEX_WAIT, epoch.cast_signed()) == 0;
        if !was_woken {
            self.sleepers.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Sees to it that `wanted` helpers live, as far as they can be had. Never waits for another thread.
    pub(crate) fn ensure(&self, lanes: &Arc<Lanes>, wanted: u32) {
        let wanted = wanted.min(self.most);
        if self.live() >= wanted {
            return;
        }
        let Ok(mut threads) = self.threads.try_lock() else {
            return;
        };
        if threads
            .none_before
            .is_some_and(|time| Instant::now() < time)
        {
            return;
        }
        while self.live() < wanted && !self.stop.load(Ordering::Relaxed) {
            let number = self.live();
            let start = Box::new(Start {
                lanes: Arc::clone(lanes),
                number,
            });
            match spawn(start) {
                Some(thread) => {
                    threads.handles.push(thread);
                    self.live.store(number + 1, Ordering::Relaxed);
                }
                None => {
                    threads.none_before = Some(Instant::now() + RETRY_AFTER);
                    break;
                }
            }
        }
    }

    /// Ends the helpers and waits for them. No copy may run.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake(i32::MAX);
        let Ok(mut threads) = self.threads.lock() else {
            return;
        };
        for thread in threads.handles.drain(..) {
            // SAFETY: each was created joinable by `spawn` and is joined once.
            unsafe { libc::pthread_join(thread, null_mut()) };
        }
        self.live.store(0, Ordering::Relaxed);
    }
}

/// Ends with the copy.
pub(crate) struct CopyRuns<'a>(&'a Crew);

impl Drop for CopyRuns<'_> {
    fn drop(&mut self) {
        self.0.copies.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The life of a helper.
fn help(lanes: &Lanes, number: u32) {
    let crew = &lanes.crew;
    let mut idle_since = None;
    let mut woken = false;
    let mut turn = number as usize;
    let mut cpus_seen = 0;
    loop {
        crew.follow_cpus(&mut cpus_seen);
        if lanes.help_once(turn, &mut woken) {
            turn = turn.wrapping_add(1);
            idle_since = None;
            continue;
        }
        if crew.stop.load(Ordering::Relaxed) {
            return;
        }
        for _ in 0..LOOKS {
            core::hint::spin_loop();
            if lanes.any_wants_helper() {
                break;
            }
        }
        let spin = if crew.copies() > 0 {
            SPIN_BUSY
        } else {
            SPIN_IDLE
        };
        if idle_since.get_or_insert_with(Instant::now).elapsed() > spin {
            crew.sleep(lanes);
            idle_since = None;
            woken = true;
        }
    }
}

impl Lanes {
    /// Whether any board has a slice for one more helper.
    fn any_wants_helper(&self) -> bool {
        self.all().iter().any(|lane| lane.board.wants_helper())
    }

    /// Moves slices of a lane that has some and wants a helper; false if none does. Of several such lanes each has its turn.
    fn help_once(&self, turn: usize, woken: &mut bool) -> bool {
        let wanting = || self.all().iter().filter(|lane| lane.board.wants_helper());
        let first = turn % wanting().count().max(1);
        for lane in wanting().skip(first).chain(wanting().take(first)) {
            if !lane.board.join() {
                continue;
            }
            if core::mem::take(woken) && lane.board.wants_helper() {
                self.crew.wake_for(lane.board.wanted(), 2);
            }
            let mut worked = false;
            while lane.board.work() {
                worked = true;
            }
            lane.board.leave();
            if worked {
                return true;
            }
        }
        false
    }
}

/// Starts a helper, which takes none of the application's signals.
fn spawn(start: Box<Start>) -> Option<libc::pthread_t> {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
    let start = Box::into_raw(start);
    // SAFETY: every structure is initialised by the call that comes before its use; the box belongs to the new thread, or is
    // taken back where there is none.
    unsafe {
        if libc::pthread_attr_init(attributes.as_mut_ptr()) != 0 {
            drop(Box::from_raw(start));
            return None;
        }
        let created = signals::blocked(|| {
            STACK_BYTES.into_iter().any(|bytes| {
                libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), bytes);
                let (thread, start) = (thread.as_mut_ptr(), start.cast::<c_void>());
                libc::pthread_create(thread, attributes.as_ptr(), run, start) == 0
            })
        });
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        if !created {
            drop(Box::from_raw(start));
            return None;
        }
        Some(thread.assume_init())
    }
}

/// First function of a helper thread.
extern "C" fn run(start: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` made this pointer from a box and gave it away.
    let start = unsafe { Box::from_raw(start.cast::<Start>()) };
    name_thread(start.number);
    schedule_as_main_thread();
    help(&start.lanes, start.number);
    null_mut()
}

/// Gives this thread the policy and niceness of the process's main thread, but never a real-time policy: it must inherit
/// neither from whichever thread makes the first copy. What the process may not do stays as inherited.
fn schedule_as_main_thread() {
    // SAFETY: numbers, and a structure of plain numbers for which zeros are right in all policies used here.
    unsafe {
        let pid = libc::getpid();
        let policy = match libc::sched_getscheduler(pid) {
            own @ (libc::SCHED_BATCH | libc::SCHED_IDLE) => own,
            _ => libc::SCHED_OTHER,
        };
        let parameters = core::mem::zeroed::<libc::sched_param>();
        libc::sched_setscheduler(0, policy, &parameters);
        let nice = libc::getpriority(libc::PRIO_PROCESS, pid.cast_unsigned());
        libc::setpriority(libc::PRIO_PROCESS, 0, nice);
    }
}

/// Names the thread `cmt-copy-N`.
fn name_thread(number: u32) {
    let mut name = *b"cmt-copy-\0\0\0\0";
    let (tens, ones) = (number / 10 % 10, number % 10);
    if number < 10 {
        name[9] = b'0' + ones as u8;
    } else {
        name[9] = b'0' + tens as u8;
        name[10] = b'0' + ones as u8;
    }
    if let Ok(name) = CStr::from_bytes_until_nul(&name) {
        // SAFETY: a NUL-terminated string of less than 16 bytes.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    }
}

/// The CPUs that the process's main thread may run on.
fn main_thread_cpus() -> Option<libc::cpu_set_t> {
    let mut cpus = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: the set is as large as the size says; a main thread that is gone makes the call fail.
    unsafe {
        let pid = libc::getpid();
        (libc::sched_getaffinity(pid, size_of::<libc::cpu_set_t>(), cpus.as_mut_ptr()) == 0)
            .then(|| cpus.assume_init())
    }
}

/// Threads that may move bytes: what the main thread's affinity and the cgroup's CPU quota allow.
pub(crate) fn available_cpus() -> u32 {
    let by_quota = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    main_thread_cpus().map_or(by_quota, |cpus| {
        // SAFETY: counts the bits of a whole set.
        let by_affinity = unsafe { libc::CPU_COUNT(&cpus) }.cast_unsigned();
        by_quota.min(by_affinity).max(1)
    })
}

/// `futex(2)` on a word of this process, without a timeout. Negative where it failed.
fn futex(word: &AtomicU32, operation: i32, value: i32) -> libc::c_long {
    // SAFETY: the word lives through the call; no timeout, no second word.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            operation | libc::FUTEX_PRIVATE_FLAG,
            value,
            null::<libc::timespec>(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "starts threads by libc")]
    fn a_thread_that_could_not_be_had_is_asked_for_again_later() {
        let lanes = Arc::new(Lanes::new(2));
        let crew = &lanes.crew;
        let none_before = |time| crew.threads.lock().expect("no panic inside").none_before = time;
        none_before(Some(Instant::now() + RETRY_AFTER));
        crew.ensure(&lanes, 2);
        assert_eq!(crew.live(), 0);
        none_before(Some(Instant::now()));
        crew.ensure(&lanes, 5);
        assert_eq!(crew.live(), 2);
        crew.stop();
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel for CPUs")]
    fn helpers_run_on_the_wanted_cpus_that_the_process_may_use() {
        let lanes = Arc::new(Lanes::new(1));
        let crew = &lanes.crew;
        let allowed = crew.cpus.expect("our CPUs");
        // SAFETY: looks at bits within the set.
        let is_set = |cpus: &libc::cpu_set_t, cpu| unsafe { libc::CPU_ISSET(cpu, cpus) };
        let of = |cpus: libc::cpu_set_t| -> Vec<usize> {
            (0..1024).filter(|&cpu| is_set(&cpus, cpu)).collect()
        };
        let ours = of(allowed);
        assert_eq!(of(crew.helper_cpus().expect("a set")), ours, "no wish");
        let last = *ours.last().expect("one at least");
        let mut wanted = [0; CPU_WORDS];
        wanted[last / 64] = 1 << (last % 64);
        let foreign = (0..1024)
            .find(|cpu| !ours.contains(cpu))
            .expect("not all of 1024");
        let mut none_of_ours = [0; CPU_WORDS];
        none_of_ours[foreign / 64] = 1 << (foreign % 64);
        crew.set_cpus(none_of_ours);
        assert_eq!(of(crew.helper_cpus().expect("a set")), ours, "none of ours");
        wanted[foreign / 64] |= 1 << (foreign % 64);
        crew.set_cpus(wanted);
        assert_eq!(of(crew.helper_cpus().expect("a set")), [last]);
        // And a thread that follows is bound.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                crew.follow_cpus(&mut 0);
                // SAFETY: a whole set, of this thread.
                let bound = unsafe {
                    let mut set = core::mem::zeroed::<libc::cpu_set_t>();
                    libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set);
                    set
                };
                assert_eq!(of(bound), [last]);
            });
        });
    }
}
