//! Times copies in a process of its own that is attached to, under one plan after another.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cmt_common::control::{Plan, PlanRow};

use super::search::{Copier, Subject, Timer, median};
use crate::bench;
use crate::bench::session::Session;
use crate::bench::wire::{Batch, Cell, Device, Direction, Memory, Reply, Request};
use crate::compare;
use crate::cores::Cores;
use crate::injector::{self, Steering};
use crate::keeper;
use crate::launch::{self, Desk};
use crate::target::Target;

/// Copies up to here are repeated in a visit, and the first is not counted: it wakes the helpers.
const REPEATED_BYTES: u64 = 8 << 20;
/// One visit moves about so much.
const VISIT_BYTES: u64 = 4 << 20;
const VISIT_COPIES: u64 = 5;

/// Why there is no plan at all, not even an estimate.
#[derive(Debug, thiserror::Error)]
pub enum Halt {
    /// A byte was wrong.
    #[error(
        "WRONG DATA: byte {at} of {direction} {size} ({memory:?} memory, tuned) did not arrive; nothing was saved"
    )]
    WrongData {
        /// Which.
        at: usize,
        /// `HtoD` or `DtoH`.
        direction: &'static str,
        /// Of the copy, for people.
        size: String,
        /// The host's side.
        memory: Memory,
    },
    /// Ctrl-C has come.
    #[error("interrupted before anything was measured; nothing was saved")]
    Interrupted,
}

/// A process that copies and is attached to.
pub struct Rig {
    session: Session,
    device: Device,
    target: Target,
    steering: Steering,
    started: Instant,
    /// What copies of the size and direction of now are made by.
    direction: Direction,
    bytes: u64,
    /// Where helpers run.
    pub cores: Cores,
    in_force: Plan,
}

impl Rig {
    /// Starts it with the payload inside, which takes no rights; `None` if interrupted meanwhile. Where that is not possible
    /// (a `cmt` that has capabilities of its file, whose programs preload nothing), it is attached to.
    ///
    /// # Errors
    /// Without libcuda or device, or, where it has to be attached to, rights.
    pub fn start(threads: u32) -> anyhow::Result<Option<Self>> {
        let started = Instant::now();
        let files = launch::place()?;
        let desk = Desk::open(&Plan::NONE, injector::flag::UNGUARDED)
            .context("opening a socket for the process to measure")?;
        let environment = launch::environment(&files, desk.path());
        let Some((mut session, device)) = Session::start(&environment)? else {
            return Ok(None);
        };
        if begin(&mut session)?.is_none() {
            return Ok(None);
        }
        let steered = match desk.take(session.pid()) {
            Some(block) => Target::open(session.pid())
                .map(|target| (target, Steering::of(block)))
                .map_err(Into::into),
            None => attach(&session, threads),
        };
        let (target, steering) = steered.map_err(|why| session.explain(why))?;
        Ok(Some(Self {
            session,
            device,
            target,
            steering,
            started,
            direction: Direction::HtoD,
            bytes: 0,
            cores: Cores::All,
            in_force: Plan::NONE,
        }))
    }

    /// The device as the driver names it.
    pub fn device(&self) -> &str {
        &self.device.name
    }

    /// Makes room for copies of `wanted` bytes, or fewer where that is too much: returns how many. `None` once
    /// interrupted.
    pub fn allocate(&mut self, wanted: u64) -> anyhow::Result<Option<u64>> {
        let (bytes, _) = bench::largest(wanted, &self.device)?;
        let request = Request::Allocate {
            bytes: bytes as usize,
        };
        Ok(self.session.ask(&request)?.map(|_| bytes))
    }

    /// Measures copies of this kind from now on.
    pub fn turn_to(&mut self, direction: Direction, bytes: u64) {
        (self.direction, self.bytes) = (direction, bytes);
    }

    /// Whether Ctrl-C has come.
    pub fn is_interrupted(&mut self) -> bool {
        self.session.is_interrupted()
    }

    /// Whether copies of this kind are staged by `row` at all: the payload leaves all to the driver on some machines.
    pub fn is_staged(&mut self, row: PlanRow) -> anyhow::Result<Option<bool>> {
        let before = self.staged();
        let visited = self.visit(Copier::Row(row).into())?;
        Ok(visited.map(|_| self.staged() > before))
    }

    fn staged(&self) -> u64 {
        self.steering.staged_calls()[usize::from(self.direction == Direction::DtoH)]
    }

    /// Makes one copy by `plan` and compares every byte. `None` once interrupted.
    pub fn check(&mut self, plan: &Plan) -> anyhow::Result<Option<()>> {
        self.force(*plan)?;
        for memory in [Memory::Reused, Memory::Fresh] {
            let cell = self.cell(memory, 1);
            let Some(reply) = self.ask(&Request::Measure(cell))? else {
                return Ok(None);
            };
            let Reply::Measured(batch) = reply else {
                bail!("the process to measure answered something else");
            };
            if let Some(at) = batch.wrong_at {
                bail!(Halt::WrongData {
                    at,
                    direction: self.direction.name(),
                    size: compare::bytes(self.bytes),
                    memory,
                });
            }
        }
        Ok(Some(()))
    }

    fn cell(&self, memory: Memory, copies: usize) -> Cell {
        Cell {
            direction: self.direction,
            memory,
            bytes: self.bytes as usize,
            least: copies,
            most: copies,
            budget_ms: 0,
        }
    }

    fn ask(&mut self, request: &Request) -> anyhow::Result<Option<Reply>> {
        self.session
            .ask(request)
            .map_err(|why| self.session.explain(why))
    }

    fn force(&mut self, plan: Plan) -> anyhow::Result<()> {
        let plan = Plan {
            cores: self.cores.number(),
            ..plan
        };
        if plan != self.in_force {
            let taken = self.steering.set_plan(&self.target, &plan);
            taken.map_err(|why| self.session.explain(why.into()))?;
            self.in_force = plan;
        }
        Ok(())
    }
}

/// Has the process make a copy, the smallest there is; `None` once interrupted.
fn begin(session: &mut Session) -> anyhow::Result<Option<Reply>> {
    const BYTES: usize = 8;
    let cell = Cell {
        direction: Direction::HtoD,
        memory: Memory::Reused,
        bytes: BYTES,
        least: 1,
        most: 1,
        budget_ms: 0,
    };
    session.ask(&Request::Allocate { bytes: BYTES })?;
    session.ask(&Request::Time(cell, 0))
}

fn attach(session: &Session, threads: u32) -> anyhow::Result<(Target, Steering)> {
    let mut target = Target::open(session.pid())?;
    target.cuda()?;
    injector::check_attachable(&mut target)?;
    keeper::attach_unguarded(&target, &Plan::NONE, threads)?;
    let steering = Steering::take(&mut target).context("taking hold of the payload")?;
    Ok((target, steering))
}

impl Timer for Rig {
    fn visit(&mut self, subject: Subject) -> anyhow::Result<Option<f64>> {
        let mut plan = Plan::NONE;
        if let Copier::Row(row) = subject.copier {
            let row = PlanRow {
                up_to_bytes: u64::MAX,
                ..row
            };
            match self.direction {
                Direction::HtoD => plan.htod[0] = row,
                Direction::DtoH => plan.dtoh[0] = row,
            }
        }
        // Pinned copies are left to the driver by any plan.
        if subject.copier != Copier::Pinned {
            self.force(plan)?;
        }
        let memory = match (subject.copier, subject.fresh) {
            (Copier::Pinned, _) => Memory::Pinned,
            (_, true) => Memory::Fresh,
            (_, false) => Memory::Reused,
        };
        let (before, copies) = match self.bytes <= REPEATED_BYTES {
            true => (1, (VISIT_BYTES / self.bytes).clamp(2, VISIT_COPIES)),
            false => (0, 1),
        };
        let request = Request::Time(self.cell(memory, copies as usize), before);
        match self.ask(&request)? {
            None => Ok(None),
            Some(Reply::Timed(Batch { idle_ns: times, .. })) => {
                let times: Vec<f64> = times.into_iter().map(|time| time as f64).collect();
                Ok(Some(median(&times)))
            }
            Some(_) => bail!("the process to measure answered something else"),
        }
    }

    fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}
