//! Writes single copies down while a trace runs: as JSON Lines on stdout, and to a Perfetto file.

use std::fs::File;
use std::io::{self, BufWriter, StdoutLock, Write as _};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::events::Event;
use super::life;
use super::perfetto::Perfetto;
use crate::output_file::OutputFile;
use crate::probes::Events;

/// How often the ring is emptied: it holds what all processors can copy in many times that.
const EMPTY_EVERY: Duration = Duration::from_millis(5);

/// A thread that writes down what comes.
pub struct Recorder {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<io::Result<Written>>,
}

/// What was written down.
struct Written {
    events: Events,
    copies: u64,
}

/// How many copies were written down, and how many came too fast for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Written.
    pub copies: u64,
    /// Found no room in the ring. The report counts them all the same.
    pub dropped: u64,
}

impl Recorder {
    /// Starts to write: `lines` on stdout, and to `perfetto`.
    pub fn start(events: Events, lines: bool, perfetto: Option<OutputFile>) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut to = Sinks {
                lines: lines.then(|| BufWriter::new(io::stdout().lock())),
                perfetto: perfetto
                    .map(|file| Perfetto::new(BufWriter::new(file.begin()?)))
                    .transpose()?,
            };
            let mut written = Written { events, copies: 0 };
            loop {
                let last = stopped.recv_timeout(EMPTY_EVERY) != Err(RecvTimeoutError::Timeout);
                while let Some(event) = written.events.take_next() {
                    to.write(&Event::from(&event))?;
                    written.copies += 1;
                }
                if let Some(lines) = &mut to.lines {
                    lines.flush()?;
                }
                if last {
                    break;
                }
            }
            if let Some(perfetto) = to.perfetto {
                perfetto.finish()?;
            }
            Ok(written)
        });
        Self { stop, thread }
    }

    /// True once it has ended by itself: what it writes to takes no more.
    pub fn has_failed(&self) -> bool {
        self.thread.is_finished()
    }

    /// Writes what is left; after the probes have been taken away.
    ///
    /// # Errors
    /// When something could not be written.
    pub fn finish(self) -> anyhow::Result<Recorded> {
        drop(self.stop);
        let written = self
            .thread
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that writes single copies has panicked"))??;
        let dropped = written.events.dropped()?;
        Ok(Recorded {
            copies: written.copies,
            dropped,
        })
    }
}

struct Sinks {
    lines: Option<BufWriter<StdoutLock<'static>>>,
    perfetto: Option<Perfetto<BufWriter<File>>>,
}

impl Sinks {
    fn write(&mut self, event: &Event) -> io::Result<()> {
        if let Some(lines) = &mut self.lines {
            serde_json::to_writer(&mut *lines, event)?;
            lines.write_all(b"\n")?;
        }
        if let Some(perfetto) = &mut self.perfetto {
            perfetto.add(event, || name(event.pid))?;
        }
        Ok(())
    }
}

/// The name of a process, or its id where it has ended already.
fn name(pid: u32) -> String {
    life::comm(pid).unwrap_or_else(|| format!("process {pid}"))
}
