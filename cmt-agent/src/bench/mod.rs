//! `cmt bench`: the driver's pageable copies, the same while attached, and pinned ones, side by side.
//!
//! A process of its own copies, an ordinary CUDA program; it is attached to and detached from as any other would be. So
//! what is measured is what applications get. Stock is measured before and after, so that drift of the machine shows; copies that
//! stay stock's are measured again, attached and detached in turns.

mod chart;
pub mod copier;
mod cpu;
mod device;
mod machine;
mod mapping;
mod page;
mod report;
pub(crate) mod session;
mod table;
mod turns;
pub(crate) mod wire;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use cmt_common::control::Plan;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use procfs::Current as _;

pub use page::page;
pub use report::Report;
pub use table::text;

use crate::compare;
use crate::cpus::Cpus;
use crate::origin::Origin;
use crate::target::Target;
use crate::{injector, keeper, profile};
use machine::Machine;
use report::{Attach, Batches, Cell};
use session::Session;
use wire::{Batch, Device, Direction, Memory, Reply, Request};

/// The smallest copy.
pub const SMALLEST_BYTES: u64 = 4 << 10;
/// The largest copy, unless another is asked for.
const LARGEST_BYTES: u64 = 1 << 30;
/// The same with fewer samples.
const LARGEST_QUICK_BYTES: u64 = 256 << 20;
/// Host memory that a copy takes for each of its bytes: four buffers, and as much for a stand-in's device.
const BUFFERS: u64 = 5;

/// What to measure.
pub struct Settings {
    /// Fewer samples and sizes.
    pub quick: bool,
    /// The largest copy; none for the default.
    pub largest: Option<u64>,
    /// The plan to copy by; none for the estimate.
    pub plan: Option<Plan>,
}

impl Settings {
    fn sizes(&self, largest: u64) -> Vec<u64> {
        let factor = if self.quick { 4 } else { 2 };
        std::iter::successors(Some(SMALLEST_BYTES), |size| Some(size * factor))
            .take_while(|&size| size <= largest)
            .collect()
    }

    fn wanted(&self) -> u64 {
        self.largest.unwrap_or(match self.quick {
            true => LARGEST_QUICK_BYTES,
            false => LARGEST_BYTES,
        })
    }

    /// One cell's orders: samples at least and at most, and the time within.
    fn cell(&self, direction: Direction, memory: Memory, bytes: u64) -> wire::Cell {
        let (least, most, budget_ms) = if self.quick {
            (3, 30, 60)
        } else {
            (5, 100, 400)
        };
        wire::Cell {
            direction,
            memory,
            bytes: bytes as usize,
            least,
            most,
            budget_ms,
        }
    }
}

type Key = (Direction, Memory, u64);

/// Batches by cell, of one pass.
type Pass = BTreeMap<Key, Batch>;

/// Measures everything. Ctrl-C ends it early with what there is.
///
/// # Errors
/// Without libcuda, device, rights or a second CPU; when the process to measure fails; and when a byte was wrong.
pub fn run(settings: &Settings) -> anyhow::Result<Report> {
    let Some((mut session, device)) = Session::start(&[])? else {
        bail!("interrupted before anything was measured");
    };
    measure(settings, &mut session, &device).map_err(|why| session.explain(why))
}

fn measure(settings: &Settings, session: &mut Session, device: &Device) -> anyhow::Result<Report> {
    let mut target = Target::open(session.pid())?;
    target.cuda()?;
    injector::check_attachable(&mut target)?;
    let threads = Cpus::of(session.pid())
        .context("reading CPU limits")?
        .threads();
    let plan = settings
        .plan
        .unwrap_or_else(|| cmt_copy::plan::estimate(threads));
    ensure!(
        plan.htod
            .iter()
            .chain(&plan.dtoh)
            .any(|row| row.threads > 0),
        "nothing would be staged by this plan ({threads} CPUs may be used, and staging takes two)"
    );
    let (largest, limited_by) = largest(settings.wanted(), device)?;
    let sizes = settings.sizes(largest);
    let mut run = Run {
        session,
        settings,
        sizes: &sizes,
        bar: bar(sizes.len() as u64 * 6 * 3 + cpu::steps(threads as usize))?,
    };
    let mut machine = Machine::describe(device);

    let mut attach = None;
    let mut tuned = (Pass::new(), BTreeMap::new());
    let mut again = Pass::new();
    let mut turns = Vec::new();
    run.allocate(largest)?;
    let stock = run.pass("stock", |_| Ok(()))?;
    machine.look_at_link();
    if !run.session.is_interrupted() {
        run.bar.set_message("attaching");
        let attached = keeper::attach(&target, &plan, threads)?;
        attach = Some(Attach {
            threads,
            patched: attached.patched.len(),
            attach_ms: attached.took.as_secs_f64() * 1e3,
            commit_pause_us: attached.commit.pause.as_micros() as u64,
            plan: profile::File::of(&plan),
        });
        let mut before = 0;
        let mut staged = BTreeMap::new();
        let batches = run.pass("tuned", |key| {
            let now = staged_calls(&mut target)?;
            staged.insert(key, now - std::mem::replace(&mut before, now));
            Ok(())
        })?;
        tuned = (batches, staged);
        if !run.session.is_interrupted() {
            keeper::detach(&target)?;
            again = run.pass("stock again", |_| Ok(()))?;
        }
        if !run.session.is_interrupted() {
            turns = turns::measure(&mut run, &target, (&plan, threads), &tuned.1)?;
        }
    }
    let budget = Duration::from_millis(if settings.quick { 20 } else { 150 });
    let cpu_copies = cpu::measure(threads as usize, budget, |step| {
        run.bar.set_message(step.to_owned());
        run.bar.inc(1);
        !run.session.is_interrupted()
    })?;
    run.bar.finish_and_clear();
    let interrupted = run.session.is_interrupted();
    ensure!(
        !stock.is_empty(),
        "interrupted before anything was measured"
    );
    Ok(Report {
        schema: report::SCHEMA.to_owned(),
        stand_in: device.name.starts_with("Stand-in"),
        quick: settings.quick,
        interrupted,
        largest_bytes: largest,
        limited_by: limited_by.map(str::to_owned),
        idle_synchronize_ns: device.idle_synchronize_ns,
        origin: Some(Origin::now()),
        machine,
        attach,
        cells: cells(&stock, &tuned, &again),
        turns,
        cpu_copies,
    })
}

/// The largest power of two that fits, and what limits it.
pub(crate) fn largest(wanted: u64, device: &Device) -> anyhow::Result<(u64, Option<&'static str>)> {
    let host = procfs::Meminfo::current()
        .ok()
        .and_then(|info| info.mem_available)
        .context("reading how much memory is available")?
        / BUFFERS;
    let on_device = device.free_bytes / 2;
    let (room, limit) = match host < on_device {
        true => (host, "host memory"),
        false => (on_device, "device memory"),
    };
    ensure!(
        room >= SMALLEST_BYTES,
        "there is not enough {limit} to copy anything"
    );
    Ok(match wanted <= room {
        true => (wanted, None),
        false => (1 << room.ilog2(), Some(limit)),
    })
}

fn bar(steps: u64) -> anyhow::Result<ProgressBar> {
    let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{msg:32} {wide_bar} {eta}")?);
    Ok(bar)
}

/// Copies that the payload has staged so far.
fn staged_calls(target: &mut Target) -> anyhow::Result<u64> {
    target.refresh_maps()?;
    let control = injector::find_control(target)?.context("the payload has gone")?;
    let calls = &control.counters.staged_calls;
    Ok(calls
        .iter()
        .map(|calls| calls.load(Ordering::Relaxed))
        .sum())
}

struct Run<'a> {
    session: &'a mut Session,
    settings: &'a Settings,
    sizes: &'a [u64],
    bar: ProgressBar,
}

impl Run<'_> {
    fn allocate(&mut self, largest: u64) -> anyhow::Result<()> {
        self.bar.set_message("allocating");
        self.session.ask(&Request::Allocate {
            bytes: largest as usize,
        })?;
        Ok(())
    }

    /// Measures all cells once, `after` each of them; stops early when interrupted.
    fn pass(
        &mut self,
        name: &str,
        mut after: impl FnMut(Key) -> anyhow::Result<()>,
    ) -> anyhow::Result<Pass> {
        let mut pass = Pass::new();
        for &bytes in self.sizes {
            for direction in [Direction::HtoD, Direction::DtoH] {
                for memory in [Memory::Reused, Memory::Fresh, Memory::Pinned] {
                    let cell = self.settings.cell(direction, memory, bytes);
                    let Some(batch) = self.batch(name, cell)? else {
                        return Ok(pass);
                    };
                    let key = (direction, memory, bytes);
                    after(key)?;
                    pass.insert(key, batch);
                }
            }
        }
        Ok(pass)
    }

    /// Measures one kind of copy; none when interrupted.
    fn batch(&mut self, name: &str, cell: wire::Cell) -> anyhow::Result<Option<Batch>> {
        let (direction, memory) = (cell.direction.name(), cell.memory);
        let what = format!("{direction} {}", compare::bytes(cell.bytes as u64));
        self.bar.set_message(format!("{name}, {what}, {memory:?}"));
        let Some(reply) = self.session.ask(&Request::Measure(cell))? else {
            return Ok(None);
        };
        let Reply::Measured(batch) = reply else {
            bail!("the process to measure answered something else");
        };
        if let Some(at) = batch.wrong_at {
            bail!("WRONG DATA: byte {at} of {what} ({memory:?} memory, {name}) did not arrive");
        }
        self.bar.inc(1);
        Ok(Some(batch))
    }
}

/// Puts the passes together; `tuned` comes with the number of copies that were staged.
fn cells(stock: &Pass, tuned: &(Pass, BTreeMap<Key, u64>), again: &Pass) -> Vec<Cell> {
    let staged = |key: &Key, batch: &Batch| {
        let &(direction, memory, bytes) = key;
        let made = batch.idle_ns.len() + wire::copies_to_check(direction, memory, bytes);
        tuned
            .1
            .get(key)
            .map_or(0.0, |&calls| calls as f64 / made as f64)
    };
    let pageable = stock
        .keys()
        .filter(|(_, memory, _)| *memory != Memory::Pinned);
    let mut keys: Vec<Key> = pageable.copied().collect();
    keys.sort();
    keys.into_iter()
        .map(|key| {
            let (direction, memory, bytes) = key;
            let pinned = (direction, Memory::Pinned, bytes);
            let batches = Batches {
                stock: stock.get(&key),
                tuned: tuned.0.get(&key).map(|batch| (batch, staged(&key, batch))),
                again: again.get(&key),
                pinned: [stock.get(&pinned), tuned.0.get(&pinned), again.get(&pinned)],
            };
            Cell::of(direction, memory, bytes, &batches)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_go_from_4_kib_to_the_largest() {
        let settings = |quick| Settings {
            quick,
            largest: None,
            plan: None,
        };
        let full = settings(false).sizes(1 << 30);
        assert_eq!((full.len(), full[0], full[18]), (19, 4 << 10, 1 << 30));
        let quick = settings(true).sizes(256 << 20);
        assert_eq!(quick.last(), Some(&(256 << 20)));
        assert_eq!(quick.len(), 9);
    }

    #[test]
    fn the_largest_copy_leaves_room_and_says_what_limits_it() {
        let device = |free_bytes| Device {
            name: String::new(),
            pci_bus_id: String::new(),
            cuda_version: 0,
            free_bytes,
            idle_synchronize_ns: 0,
        };
        assert_eq!(
            largest(8 << 10, &device(16 << 10)).expect("room"),
            (8 << 10, None)
        );
        assert_eq!(
            largest(1 << 30, &device(10 << 20)).expect("room"),
            (4 << 20, Some("device memory"))
        );
        assert!(largest(1 << 30, &device(100)).is_err());
    }
}
