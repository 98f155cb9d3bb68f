//! The process that is measured: an ordinary CUDA program that copies when it is told to.
//!
//! It knows nothing of attaching: to the payload it is a target like any other.

use std::io::{BufRead as _, Write as _};
use std::os::unix::process::parent_id;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sched::sched_getcpu;
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::time::{ClockId, clock_gettime};

use super::cpu;
use super::device::{self, CudaError, DeviceBuffer};
use super::mapping::Mapping;
use super::wire::{self, Batch, Cell, Direction, Memory, Reply, Request};

/// Helpers of the payload spin for a while after a copy. It counts as the copy's processor time.
const UNTIL_HELPERS_SLEEP: Duration = Duration::from_millis(6);

/// The process that `cmt bench` measures; not for users.
#[derive(clap::Args)]
pub struct Args {
    /// Process id of the bench
    parent: u32,
}

/// Serves requests from stdin until it ends.
pub fn run(args: Args) -> anyhow::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL).context("asking to end with the bench")?;
    anyhow::ensure!(parent_id() == args.parent, "the bench has ended");
    if !device::is_present() {
        return answer(&Reply::Failed(
            "no libcuda was found: measuring copies needs NVIDIA's driver, or the stand-in (tests/stand-in) on LD_LIBRARY_PATH"
                .to_owned(),
        ));
    }
    match device::open() {
        Ok(device) => answer(&Reply::Ready(device))?,
        Err(error) => return answer(&Reply::Failed(format!("no GPU can be used: {error}"))),
    }
    let mut buffers = None;
    for line in std::io::stdin().lock().lines() {
        let reply = match serde_json::from_str(&line?)? {
            Request::Allocate { bytes } => Buffers::new(bytes).map(|made| {
                buffers = Some(made);
                Reply::Allocated
            }),
            Request::Measure(cell) => buffers
                .as_mut()
                .context("nothing was allocated")
                .and_then(|buffers| buffers.measure(&cell))
                .map(Reply::Measured),
            Request::Time(cell, before) => buffers
                .as_mut()
                .context("nothing was allocated")
                .and_then(|buffers| buffers.time(&cell, before))
                .map(Reply::Timed),
            Request::Bind => {
                cpu::bind_to(sched_getcpu().ok());
                Ok(Reply::Bound)
            }
        };
        answer(&reply.unwrap_or_else(|error| Reply::Failed(format!("{error:#}"))))?;
    }
    Ok(())
}

fn answer(reply: &Reply) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", serde_json::to_string(reply)?)?;
    Ok(stdout.flush()?)
}

/// All memory that copies use, but for the fresh.
struct Buffers {
    device: DeviceBuffer,
    pinned: &'static mut [u8],
    /// Source of pageable HtoD copies, and what every copy is checked against.
    pattern: Mapping,
    /// Destination of pageable DtoH copies into reused memory.
    sink: Mapping,
}

impl Buffers {
    fn new(bytes: usize) -> anyhow::Result<Self> {
        let mut pattern = Mapping::new(bytes).context("mapping host memory")?;
        // Weyl's sequence: no two words are alike, so a slice at the wrong place shows.
        let mut word = 0u64;
        for chunk in pattern.chunks_exact_mut(8) {
            word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        let mut sink = Mapping::new(bytes).context("mapping host memory")?;
        sink.fill(0);
        Ok(Self {
            device: DeviceBuffer::new(bytes)?,
            pinned: device::pinned(bytes)?,
            pattern,
            sink,
        })
    }

    /// Copies that are checked and not counted, which also start what there is to start, then the timed ones.
    fn measure(&mut self, cell: &Cell) -> anyhow::Result<Batch> {
        let wrong_at = self.check(cell)?;
        thread::sleep(UNTIL_HELPERS_SLEEP);
        let mut batch = Batch {
            wrong_at,
            ..Batch::default()
        };
        let mut preparing = Duration::ZERO;
        let cpu = cpu_time(ClockId::CLOCK_PROCESS_CPUTIME_ID)?;
        let started = Instant::now();
        while is_wanted(cell, batch.idle_ns.len(), started) {
            preparing += self.time_one(cell, &mut batch)?;
        }
        thread::sleep(UNTIL_HELPERS_SLEEP);
        let spent = cpu_time(ClockId::CLOCK_PROCESS_CPUTIME_ID)?.saturating_sub(cpu);
        batch.cpu_ns = spent.saturating_sub(preparing).as_nanos() as u64;
        Ok(batch)
    }

    /// `before` copies that are not timed, which wake the helpers, then the timed ones.
    fn time(&mut self, cell: &Cell, before: usize) -> anyhow::Result<Batch> {
        let mut batch = Batch::default();
        for _ in 0..before {
            self.time_one(cell, &mut batch)?;
        }
        batch = Batch::default();
        let started = Instant::now();
        while is_wanted(cell, batch.idle_ns.len(), started) {
            self.time_one(cell, &mut batch)?;
        }
        Ok(batch)
    }

    /// Makes one copy and adds its times; returns the processor time of making fresh memory and giving it back.
    fn time_one(&mut self, cell: &Cell, batch: &mut Batch) -> anyhow::Result<Duration> {
        let own_cpu = || cpu_time(ClockId::CLOCK_THREAD_CPUTIME_ID);
        let before = own_cpu()?;
        let mut fresh = self.fresh(cell)?;
        let made = own_cpu()?.saturating_sub(before);
        let begun = Instant::now();
        self.copy(cell, fresh.as_deref_mut())?;
        let called = begun.elapsed();
        device::synchronize()?;
        let idle = begun.elapsed();
        batch.call_ns.push(called.as_nanos() as u64);
        batch.idle_ns.push(idle.as_nanos() as u64);
        let before = own_cpu()?;
        drop(fresh);
        Ok(made + own_cpu()?.saturating_sub(before))
    }

    /// The new mapping for a copy with fresh memory.
    fn fresh(&self, cell: &Cell) -> anyhow::Result<Option<Mapping>> {
        if cell.memory != Memory::Fresh {
            return Ok(None);
        }
        let mut mapping = Mapping::new(cell.bytes).context("mapping fresh memory")?;
        if cell.direction == Direction::HtoD {
            mapping.copy_from_slice(&self.pattern[..cell.bytes]);
        }
        Ok(Some(mapping))
    }

    fn copy(&mut self, cell: &Cell, fresh: Option<&mut [u8]>) -> Result<(), CudaError> {
        let end = cell.bytes;
        match (cell.direction, cell.memory) {
            (Direction::HtoD, Memory::Pinned) => self.device.write(&self.pinned[..end]),
            (Direction::DtoH, Memory::Pinned) => self.device.read(&mut self.pinned[..end]),
            (Direction::HtoD, _) => self
                .device
                .write(fresh.as_deref().unwrap_or(&self.pattern[..end])),
            (Direction::DtoH, _) => self.device.read(fresh.unwrap_or(&mut self.sink[..end])),
        }
    }

    /// Makes a few copies and finds the first byte of the last one that did not arrive. The other half of its way goes through
    /// pinned memory, which the payload leaves to the driver.
    fn check(&mut self, cell: &Cell) -> anyhow::Result<Option<usize>> {
        let end = cell.bytes;
        let before = wire::copies_to_check(cell.direction, cell.memory, end as u64) - 1;
        match cell.direction {
            Direction::HtoD => {
                self.device.clear(end)?;
                let mut fresh = self.fresh(cell)?;
                self.pinned[..end].copy_from_slice(&self.pattern[..end]);
                if before > 0 {
                    self.sink[..end].fill(0);
                }
                for _ in 0..before {
                    self.device.write(&self.sink[..end])?;
                }
                self.copy(cell, fresh.as_deref_mut())?;
                device::synchronize()?;
                self.pinned[..end].fill(0);
                self.device.read(&mut self.pinned[..end])?;
                Ok(first_difference(&self.pinned[..end], &self.pattern[..end]))
            }
            Direction::DtoH => {
                self.pinned[..end].copy_from_slice(&self.pattern[..end]);
                self.device.write(&self.pinned[..end])?;
                device::synchronize()?;
                for _ in 0..before {
                    self.copy(cell, None)?;
                }
                match cell.memory {
                    Memory::Pinned => self.pinned[..end].fill(0),
                    Memory::Reused => self.sink[..end].fill(0),
                    Memory::Fresh => {}
                }
                let mut fresh = self.fresh(cell)?;
                self.copy(cell, fresh.as_deref_mut())?;
                let got = match (&fresh, cell.memory) {
                    (Some(fresh), _) => &fresh[..],
                    (None, Memory::Pinned) => &self.pinned[..end],
                    (None, _) => &self.sink[..end],
                };
                Ok(first_difference(got, &self.pattern[..end]))
            }
        }
    }
}

/// Whether one more copy is to be timed.
fn is_wanted(cell: &Cell, made: usize, started: Instant) -> bool {
    let in_time = || started.elapsed().as_millis() < u128::from(cell.budget_ms);
    made < cell.least || (made < cell.most && in_time())
}

fn first_difference(got: &[u8], wanted: &[u8]) -> Option<usize> {
    if got == wanted {
        return None;
    }
    got.iter()
        .zip(wanted)
        .position(|(got, wanted)| got != wanted)
}

fn cpu_time(clock: ClockId) -> nix::Result<Duration> {
    Ok(Duration::from(clock_gettime(clock)?))
}
