//! A multithreaded staging copier between pageable host memory and a GPU.
//!
//! It runs inside foreign processes: it never prints, never panics out, never blocks longer than the stock copy, and
//! hands whatever is unclear to the original function. It knows the CUDA driver only as a table of function pointers
//! ([`Driver`]) and knows nothing of hooks.
//!
//! A copy is cut into *slots*, the unit of DMA, and *slices*, the unit of CPU work. The calling thread makes all CUDA
//! calls; helper threads only move bytes between the application's memory and a pinned ring.
#![expect(unsafe_code, reason = "the caller vouches for the copy's addresses")]

mod classify;
mod driver;
mod fresh;
mod guard;
mod lane;
mod layout;
mod pace;
mod patience;
mod pinned;
pub mod plan;
mod pool;
mod protocol;
mod rows;
pub mod signals;
mod staging;
mod store;
mod threads;
mod workers;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cmt_common::api::{COPY_FNS, CopyFn, Direction, DirectionFrom, HOOKED};
use cmt_common::control::CPU_WORDS;
pub use cmt_common::control::{PassReason, Plan, PlanRow};

use crate::classify::Span;
pub use crate::driver::{Driver, DriverError};
use crate::guard::{Guard, Turn};
pub use crate::pace::is_paced;
use crate::plan::{PlanCell, THREADS_MAX};
use crate::pool::{Lanes, Wanted};
use crate::rows::Rectangle;
pub use crate::rows::{Memcpy2D, Side2D};
use crate::staging::Copy;
#[doc(hidden)]
pub use crate::store::Store;

/// How long [`Engine::shutdown`] waits for streams that still read from pinned memory.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(2);

/// Fewer rows that are longer than a slice go to stock: each is moved by one thread.
const LONG_ROWS_MIN: u64 = 3;
/// Where there is a guard, which judges no rectangles, smaller ones to the device go to stock: 256 KiB of short rows lost a tenth
/// (H200, driver 580).
const LEAST_RECTANGLE_TO_DEVICE: u64 = 512 << 10;

/// A copy that may wait does so for a lane that another one is done with soon, for so long and for as long as stock takes for
/// its bytes when several copy at once: stock's copies keep the driver to themselves, and hold the staged ones up.
const LANE_PATIENCE: Duration = Duration::from_micros(200);
const STOCK_BYTES_A_NANOSECOND: u64 = 1;

/// One call of a hooked copy function.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Position of the function in `COPY_FNS`, below `HOOKED`: says direction, flavour and whether it is asynchronous.
    pub function: usize,
    /// Destination address.
    pub dst: u64,
    /// Source address.
    pub src: u64,
    /// Length in bytes.
    pub bytes: usize,
    /// `CUstream` argument; 0 for synchronous functions.
    pub stream: usize,
}

/// What became of a [`Request`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The copy was made, or failed, with this `CUresult`; the hooked function returns it.
    Staged(i32),
    /// Nothing was done; the original function must be called.
    Pass(PassReason),
}

/// The same, and what its caller has to know.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// What became of it.
    pub outcome: Outcome,
    /// Whether the copy went, or goes by stock, to the host, as far as that was found out.
    pub to_host: bool,
    /// Whether it counts for its thread's pace: where it passes, the caller says by [`note_paced`] that the original has
    /// returned.
    pub is_paced: bool,
    /// Whether it was staged and timed for the guard: [`Engine::compared`] may have news.
    pub is_timed: bool,
}

/// The copy engine. Starts no thread and pins no memory before the first copy that it stages.
///
/// Nothing happens when it is dropped: whoever wants its memory back calls [`Engine::shutdown`].
pub struct Engine {
    driver: Driver,
    plan: PlanCell,
    lanes: Arc<Lanes>,
    stopped: AtomicBool,
    guard: Option<Guard>,
}

impl Engine {
    /// An engine on `driver` that follows `plan` with at most `max_threads` threads, callers included; 0 leaves that
    /// number to the process's CPU affinity and its cgroup's CPU quota.
    pub fn new(driver: Driver, plan: Plan, max_threads: u32) -> Self {
        let threads = match max_threads {
            0 => workers::available_cpus(),
            given => given,
        };
        // Whoever copies opens no file.
        fresh::are_given_on_request();
        let threads = threads.clamp(1, THREADS_MAX);
        Self {
            driver,
            plan: PlanCell::new(&plan, threads),
            lanes: Arc::new(Lanes::new(threads - 1)),
            stopped: AtomicBool::new(false),
            guard: None,
        }
    }

    /// The same engine with a guard: some calls pass as [`PassReason::Sampled`], and the caller says by
    /// [`Engine::note_stock`] how long they took; size classes that lose pass, and so do short copies that come one at a
    /// time. Of calls that are paced the caller says by [`note_paced`] that the original has returned.
    pub fn guarded(self) -> Self {
        Self {
            guard: Some(Guard::new()),
            ..self
        }
    }

    /// Whether it has one.
    pub fn is_guarded(&self) -> bool {
        self.guard.is_some()
    }

    /// The original function took so long for a call that has passed as [`PassReason::Sampled`].
    pub fn note_stock(&self, to_host: bool, bytes: usize, took: Duration) {
        if let Some(guard) = &self.guard {
            guard.note(false, to_host, bytes as u64, took);
        }
    }

    /// Median times of copies of a size, in nanoseconds for a MiB: stock's and staged ones. `None` without a guard, and before
    /// it has enough of both.
    pub fn compared(&self, to_host: bool, bytes: usize) -> Option<[u64; 2]> {
        self.guard.as_ref()?.compared(to_host, bytes as u64)
    }

    /// Length in bytes below which [`Engine::copy`] passes every call of a function, under the plan in force.
    pub fn cut_over(&self, function: usize) -> usize {
        let cut_over = match hooked(function).map(direction) {
            None => u64::MAX,
            Some(Direction::HtoD) => self.plan.cut_over(false),
            Some(Direction::DtoH) => self.plan.cut_over(true),
            Some(_) => self.plan.cut_over(false).min(self.plan.cut_over(true)),
        };
        usize::try_from(cut_over).unwrap_or(usize::MAX)
    }

    /// Whether the plan in force has a row that stages copies of `bytes` bytes by a function; for benches.
    #[doc(hidden)]
    pub fn is_staged(&self, function: usize, bytes: u64) -> bool {
        hooked(function).is_some_and(|function| {
            let to_host = direction(function) == Direction::DtoH;
            self.plan.row(to_host, bytes).is_some()
        })
    }

    /// Makes the copy, or does nothing and says why.
    ///
    /// # Safety
    /// The arguments must be those of a call that the application made to that CUDA function on this thread, under the
    /// contract that the function has.
    pub unsafe fn copy(&self, request: &Request) -> Outcome {
        // SAFETY: the caller's promise.
        unsafe { self.copy_and_tell(request) }.outcome
    }

    /// The same, and more of it.
    ///
    /// # Safety
    /// As [`Engine::copy`].
    pub unsafe fn copy_and_tell(&self, request: &Request) -> Told {
        if request.bytes < self.cut_over(request.function) {
            return Told::BELOW_CUT_OVER;
        }
        let bytes = request.bytes as u64;
        let [dst, src] = [request.dst, request.src].map(|start| Span { start, bytes });
        let wish = hooked(request.function).map(|function| Wish {
            function,
            direction: direction(function),
            dst,
            src,
            bytes,
            rectangle: None,
            of_2d: false,
            stream: request.stream,
        });
        // SAFETY: the caller's promise.
        unsafe { self.fulfil(wish.ok_or(PassReason::Unsupported)) }
    }

    /// [`Engine::copy`] for a function that copies a rectangle.
    ///
    /// # Safety
    /// As [`Engine::copy`].
    pub unsafe fn copy_2d(&self, function: usize, copy: &Memcpy2D, stream: usize) -> Outcome {
        // SAFETY: the caller's promise.
        unsafe { self.copy_2d_and_tell(function, copy, stream) }.outcome
    }

    /// The same, and more of it.
    ///
    /// # Safety
    /// As [`Engine::copy`].
    pub unsafe fn copy_2d_and_tell(&self, function: usize, copy: &Memcpy2D, stream: usize) -> Told {
        if copy.bytes() < self.cut_over(function) {
            return Told::BELOW_CUT_OVER;
        }
        // SAFETY: the caller's promise.
        unsafe { self.fulfil(Wish::of_rectangle(function, copy, stream)) }
    }

    /// # Safety
    /// As [`Engine::copy`].
    unsafe fn fulfil(&self, wish: Result<Wish, PassReason>) -> Told {
        let mut told = Told::BELOW_CUT_OVER;
        let prepared = wish.and_then(|wish| Ok((self.prepare(&wish, &mut told)?, wish.bytes)));
        let ((copy, timed_from), bytes) = match prepared {
            Ok(prepared) => prepared,
            Err(reason) => {
                told.outcome = Outcome::Pass(reason);
                return told;
            }
        };
        told.outcome = match told.to_host {
            // SAFETY: the caller's promise: source readable, destination writable, by the function's contract.
            true => unsafe { copy.dtoh() },
            // SAFETY: as above.
            false => unsafe { copy.htod() },
        };
        if let (Some(start), Some(guard), Outcome::Staged(0)) =
            (timed_from, &self.guard, told.outcome)
        {
            guard.note(true, told.to_host, bytes, start.elapsed());
            told.is_timed = true;
        }
        if told.is_paced && matches!(told.outcome, Outcome::Staged(_)) {
            pace::ended(told.to_host);
        }
        told
    }

    /// Everything that may end in a [`Outcome::Pass`]: the copy, and since when, if it is to be timed. `told` gets what is found
    /// out on the way.
    fn prepare(
        &self,
        wish: &Wish,
        told: &mut Told,
    ) -> Result<(Copy<'_>, Option<Instant>), PassReason> {
        if self.stopped.load(Ordering::Relaxed) {
            return Err(PassReason::Disabled);
        }
        if wish.direction != Direction::Unknown {
            self.check_pace(wish.direction == Direction::DtoH, wish.bytes, told)?;
        }
        let function = wish.function;
        let context = self
            .driver
            .current_context()
            .ok_or(PassReason::NotHostToDevice)?;
        let stream = self
            .driver
            .stream(function.flavour, wish.stream)
            .filter(|stream| wish.rectangle.is_none() || stream.copies_rows())
            .ok_or(PassReason::Unsupported)?;
        if stream.may_be_capturing() {
            return Err(PassReason::Capturing);
        }
        let is_async = function.stream.is_some();
        let sides = classify::sides(&self.driver, wish.direction, wish.dst, wish.src, is_async);
        // Whoever copies pinned memory in a row is asked once in a while only.
        if told.is_paced && matches!(sides, Err(PassReason::NotPageable)) {
            pace::forget(told.to_host);
        }
        let sides = sides?;
        if wish.direction == Direction::Unknown {
            self.check_pace(sides.to_host, wish.bytes, told)?;
        }
        let mut row = self
            .plan
            .row(sides.to_host, wish.bytes)
            .ok_or(PassReason::BelowCutOver)?;
        if wish.bytes < staging::HELPED_FROM_BYTES {
            row.threads = 1;
        }
        let (mut rows, mut bytes) = (None, wish.bytes);
        if let Some(rectangle) = &wish.rectangle {
            let lie = rectangle.rows(sides.to_host);
            bytes = lie.ring_pitch * rectangle.height;
            let is_small =
                self.guard.is_some() && !sides.to_host && wish.bytes < LEAST_RECTANGLE_TO_DEVICE;
            let has_few_rows = lie.ring_pitch > row.slice && rectangle.height < LONG_ROWS_MIN;
            if is_small || has_few_rows {
                return Err(PassReason::BelowCutOver);
            }
            row = row.in_whole_rows(lie.ring_pitch);
            rows = Some(lie);
        }
        let is_judged = rows.is_none();
        // Beside other copies a single one by stock has the driver's lock to itself, and looks faster than all by stock are.
        let is_idle =
            || !self.lanes.are_at_work() && stream.query(&self.driver) == driver::code::SUCCESS;
        let turn = match self.guard.as_ref().filter(|_| is_judged) {
            Some(guard) => guard.turn(sides.to_host, wish.bytes, is_idle),
            None => Turn::Stage,
        };
        match turn {
            Turn::Stage | Turn::StageTimed => {}
            Turn::Sample => return Err(PassReason::Sampled),
            Turn::Lost => return Err(PassReason::Slower),
        }
        // Waiting for a lane counts as well; what has been asked until now, stock's samples had to ask, too.
        let timed_from = (turn == Turn::StageTimed).then(Instant::now);
        // Nothing is known of when stock waits with a rectangle.
        let stock_waits_too = !wish.of_2d && bytes >= staging::STOCK_WAITS_FROM_BYTES;
        let must_not_wait = is_async && !sides.to_host && !stock_waits_too;
        let wanted = Wanted {
            context,
            stream_id: stream.id(),
            ring_bytes: row.ring,
            without_waiting: must_not_wait.then_some(bytes),
        };
        let patience = if must_not_wait {
            Duration::ZERO
        } else {
            LANE_PATIENCE + Duration::from_nanos(bytes / STOCK_BYTES_A_NANOSECOND)
        };
        let held = self.lanes.take_within(&self.driver, &wanted, patience)?;
        self.lanes.crew.ensure(&self.lanes, row.threads - 1);
        let row = row.within(held.pinned.bytes() as u64);
        if rows.is_some_and(|rows| rows.ring_pitch > row.slice) {
            return Err(PassReason::NoPinnedMemory); // Not even for two rows.
        }
        let copy = Copy {
            driver: &self.driver,
            lanes: &self.lanes,
            _running: self.lanes.crew.copy_begins(),
            held,
            stream,
            host: sides.host,
            device: sides.device,
            bytes,
            rows,
            row,
            may_wait: !must_not_wait,
            is_async,
            tail: if is_async || sides.syncs_memops || wish.of_2d {
                0
            } else {
                staging::TAIL_BYTES
            },
        };
        Ok((copy, timed_from))
    }

    /// Tells the direction, and passes a copy that is short and comes alone, where there is a guard.
    fn check_pace(&self, to_host: bool, bytes: u64, told: &mut Told) -> Result<(), PassReason> {
        told.to_host = to_host;
        told.is_paced = self.guard.is_some() && is_paced(to_host, bytes);
        match told.is_paced && !pace::begins(to_host, bytes) {
            true => Err(PassReason::Alone),
            false => Ok(()),
        }
    }

    /// Follows `plan` from the next copy on. Copies that run go on with the row they have.
    pub fn set_plan(&self, plan: Plan) {
        self.plan.replace(&plan);
    }

    /// Ends the helpers and gives all pinned memory back. Every copy must have returned; copies asked for afterwards pass.
    ///
    /// Waits up to 2 s for streams that still read from pinned memory; what is in flight then is leaked, not freed.
    pub fn shutdown(&self) {
        if !self.stopped.swap(true, Ordering::AcqRel) {
            self.lanes.crew.stop();
            self.lanes.free_all(&self.driver, SHUTDOWN_PATIENCE);
        }
    }

    /// Helpers run on these CPUs (a bit each) from their next copy on, as far as the process may use them; on all of its
    /// CPUs where it may use none of these.
    pub fn set_helper_cpus(&self, cpus: [u64; CPU_WORDS]) {
        self.lanes.crew.set_cpus(cpus);
    }

    /// Pinned bytes held now.
    pub fn pinned_bytes(&self) -> u64 {
        self.lanes.pinned_bytes()
    }

    /// Helper threads that live now.
    pub fn helpers(&self) -> u32 {
        self.lanes.crew.live()
    }
}

impl Told {
    const BELOW_CUT_OVER: Self = Self {
        outcome: Outcome::Pass(PassReason::BelowCutOver),
        to_host: false,
        is_paced: false,
        is_timed: false,
    };
}

/// One call, with what its arguments mean.
struct Wish {
    function: &'static CopyFn,
    direction: Direction,
    dst: Span,
    src: Span,
    bytes: u64,
    /// Rows with something between them.
    rectangle: Option<Rectangle>,
    /// Whether it was asked for as a rectangle.
    of_2d: bool,
    stream: usize,
}

impl Wish {
    fn of_rectangle(function: usize, copy: &Memcpy2D, stream: usize) -> Result<Self, PassReason> {
        let rectangle = copy.rectangle()?;
        let Rectangle { width, height, .. } = rectangle;
        let span = |start, pitch| {
            let bytes = rows::extent(width, pitch, height).ok_or(PassReason::OutOfRange)?;
            Ok(Span { start, bytes })
        };
        Ok(Self {
            function: hooked(function).ok_or(PassReason::Unsupported)?,
            direction: rectangle.direction,
            dst: span(rectangle.dst, rectangle.dst_pitch)?,
            src: span(rectangle.src, rectangle.src_pitch)?,
            bytes: width * height,
            rectangle: (!rectangle.is_in_one_piece()).then_some(rectangle),
            of_2d: true,
            stream,
        })
    }
}

/// The original function has returned on this thread, for a call in this direction that is paced ([`Told::is_paced`]).
pub fn note_paced(to_host: bool) {
    pace::ended(to_host);
}

/// The hooked function at a position of `COPY_FNS`.
fn hooked(function: usize) -> Option<&'static CopyFn> {
    COPY_FNS.get(..HOOKED)?.get(function)
}

/// The direction that a hooked function's name says; [`Direction::Unknown`] if its addresses decide.
fn direction(function: &CopyFn) -> Direction {
    match function.direction {
        DirectionFrom::Fixed(direction) => direction,
        _ => Direction::Unknown,
    }
}
