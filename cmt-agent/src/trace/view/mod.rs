//! The live view of a trace: a screen that shows the last second, until a key ends it.
//!
//! Knows the terminal and what a snapshot holds; knows nothing of where snapshots come from.

mod classes;
mod columns;
mod draw;
mod figures;
mod latencies;
mod list;
mod model;
mod palette;
mod state;

use std::future::poll_fn;
use std::io::{self, IsTerminal as _};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use crossterm::event::{Event, EventStream, KeyEventKind};
use futures_core::Stream as _;
use nix::unistd::{getpgrp, tcgetpgrp};
use ratatui::DefaultTerminal;

use super::{Snapshot, Targets};
use crate::link::Link;
use draw::Subject;
use model::Moment;
use palette::Palette;
use state::State;
pub use state::Wish;

/// Whether there is a terminal to draw on and to read keys from, and it is ours to use: not while a shell has this program in
/// its background.
pub fn is_possible() -> bool {
    let (stdin, stdout) = (io::stdin(), io::stdout());
    let terminal = stdin.is_terminal() && stdout.is_terminal();
    let able = std::env::var_os("TERM").is_some_and(|name| !name.is_empty() && name != "dumb");
    // A terminal that is not the controlling one has no background.
    let foreground = tcgetpgrp(&stdin).map_or(true, |group| group == getpgrp());
    terminal && able && foreground
}

/// The view. Dropping it leaves the terminal as it was before, as does a panic.
pub struct View {
    // Keys stop before the terminal is given back.
    keys: EventStream,
    screen: Screen,
    subject: Subject,
    palette: Palette,
    state: State,
    /// The latest, and what is shown: not the same while the display is frozen.
    latest: Rc<Moment>,
    shown: Rc<Moment>,
}

impl View {
    /// Takes the terminal.
    ///
    /// # Errors
    /// When it cannot be used; then it is as it was.
    pub fn open(
        targets: Targets,
        length: Option<Duration>,
        pair_ns: Option<u64>,
    ) -> io::Result<Self> {
        let latest = Rc::new(Moment::new(Snapshot::empty(), None));
        Ok(Self {
            screen: Screen::open()?,
            keys: EventStream::new(),
            subject: Subject {
                targets,
                length,
                pair_ns,
                link: Link::best(),
            },
            palette: Palette::from_environment(),
            state: State::default(),
            shown: Rc::clone(&latest),
            latest,
        })
    }

    /// Takes in what was counted up to now, and draws it unless the display is frozen.
    ///
    /// # Errors
    /// When the terminal has gone.
    pub fn update(&mut self, whole: Snapshot) -> io::Result<()> {
        self.latest = Rc::new(Moment::new(whole, Some(&self.latest)));
        self.draw()
    }

    /// Waits for the next event of the terminal. Nothing is lost if the wait is given up.
    ///
    /// # Errors
    /// When the terminal has gone.
    pub async fn event(&mut self) -> io::Result<Event> {
        let next = poll_fn(|context| Pin::new(&mut self.keys).poll_next(context)).await;
        next.unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))
    }

    /// Does what an event asks for.
    ///
    /// # Errors
    /// When the terminal has gone.
    pub fn react(&mut self, event: &Event) -> io::Result<Wish> {
        let wish = match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                self.state.press(*key, &self.shown)
            }
            _ => Wish::Stay,
        };
        if wish == Wish::Stay {
            self.draw()?;
        }
        Ok(wish)
    }

    fn draw(&mut self) -> io::Result<()> {
        if !self.state.frozen {
            self.shown = Rc::clone(&self.latest);
        }
        self.screen.terminal.draw(|frame| {
            draw::draw(frame, &self.subject, &self.shown, &self.state, self.palette);
        })?;
        Ok(())
    }
}

/// The terminal while it is ours.
struct Screen {
    terminal: DefaultTerminal,
}

impl Screen {
    fn open() -> io::Result<Self> {
        // Half of it may have been done when it fails.
        let terminal = ratatui::try_init().inspect_err(|_| ratatui::restore())?;
        Ok(Self { terminal })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that has gone cannot be put right.
        let _ = self.terminal.show_cursor();
        // A panic has done the rest before it said what it is.
        if !std::thread::panicking() {
            let _ = ratatui::try_restore();
        }
    }
}
