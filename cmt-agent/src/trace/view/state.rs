//! What the user has chosen, and what a key changes of it.

use std::cmp::Ordering;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::model::{Moment, Row, Who, Window};

/// How far a page is.
const PAGE: isize = 10;

/// What a key asks of the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// To go on.
    Stay,
    /// To end the trace.
    Quit,
}

/// What processes are sorted by, in the order in which `s` goes through them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// Share of time in copies.
    Copying,
    /// Pageable share.
    Pageable,
    /// Process id.
    Pid,
    /// Name.
    Name,
    /// Calls a second.
    Calls,
    /// Rate to the GPU.
    HtoD,
    /// Rate from the GPU.
    DtoH,
}

impl Sort {
    fn next(self) -> Self {
        match self {
            Self::Copying => Self::Pageable,
            Self::Pageable => Self::Pid,
            Self::Pid => Self::Name,
            Self::Name => Self::Calls,
            Self::Calls => Self::HtoD,
            Self::HtoD => Self::DtoH,
            Self::DtoH => Self::Copying,
        }
    }

    /// The order that is asked for first: of rates the highest on top.
    fn compare(self, one: &Row, other: &Row) -> Ordering {
        match self {
            Self::Pid => one.who.cmp(&other.who),
            Self::Name => one.comm.cmp(&other.comm),
            Self::Calls => other.calls_per_s.total_cmp(&one.calls_per_s),
            Self::HtoD => other.htod_gb_per_s.total_cmp(&one.htod_gb_per_s),
            Self::DtoH => other.dtoh_gb_per_s.total_cmp(&one.dtoh_gb_per_s),
            Self::Copying => other.copying.total_cmp(&one.copying),
            Self::Pageable => other.pageable.total_cmp(&one.pageable),
        }
    }
}

/// The user's choices.
#[derive(Debug)]
pub struct State {
    /// The process whose classes are shown.
    pub who: Who,
    /// The size class that is shown; all where there is none.
    pub size: Option<u8>,
    /// The time that figures are of.
    pub window: Window,
    /// The column that processes are sorted by.
    pub sort: Sort,
    /// Whether the other way round.
    pub reversed: bool,
    /// Whether the display stands still.
    pub frozen: bool,
    /// Whether the keys are explained.
    pub help: bool,
}

impl Default for State {
    fn default() -> Self {
        Self {
            who: None,
            size: None,
            window: Window::Second,
            sort: Sort::Copying,
            reversed: false,
            frozen: false,
            help: false,
        }
    }
}

impl State {
    /// The list in the order that was chosen, the sum of all first.
    pub fn rows(&self, moment: &Moment) -> Vec<Row> {
        let mut rows = moment.rows(self.window);
        rows[1..].sort_by(|one, other| {
            let order = self.sort.compare(one, other);
            let order = if self.reversed {
                order.reverse()
            } else {
                order
            };
            order.then(one.who.cmp(&other.who))
        });
        rows
    }

    /// Does what a key is for. `moment` is what the user sees.
    pub fn press(&mut self, key: KeyEvent, moment: &Moment) -> Wish {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c' | 'd') if control => return Wish::Quit,
            _ if control => return Wish::Stay,
            KeyCode::Char('q' | 'Q') => return Wish::Quit,
            _ if self.help => self.help = false,
            KeyCode::Esc => return Wish::Quit,
            KeyCode::Char('?' | 'h') => self.help = true,
            KeyCode::Up | KeyCode::Char('k') => self.go(moment, -1),
            KeyCode::Down | KeyCode::Char('j') => self.go(moment, 1),
            KeyCode::PageUp => self.go(moment, -PAGE),
            KeyCode::PageDown => self.go(moment, PAGE),
            KeyCode::Home => self.go(moment, isize::MIN),
            KeyCode::End => self.go(moment, isize::MAX),
            KeyCode::Left => self.size = step(self.size, &moment.sizes(self.who), -1),
            KeyCode::Right => self.size = step(self.size, &moment.sizes(self.who), 1),
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('S') => self.reversed = !self.reversed,
            KeyCode::Char('f' | ' ') => self.frozen = !self.frozen,
            KeyCode::Char('t') => {
                self.window = match self.window {
                    Window::Second => Window::Start,
                    Window::Start => Window::Second,
                }
            }
            _ => {}
        }
        Wish::Stay
    }

    /// Goes to another line of the list.
    fn go(&mut self, moment: &Moment, steps: isize) {
        let rows = self.rows(moment);
        let at = rows.iter().position(|row| row.who == self.who);
        let to = (at.unwrap_or(0) as isize).saturating_add(steps);
        let to = to.clamp(0, rows.len() as isize - 1);
        self.who = rows[to as usize].who;
        // Another process may never have copied so much at once.
        self.size = self
            .size
            .filter(|size| moment.sizes(self.who).contains(size));
    }
}

/// The next size class of those there are, or none of them in particular at either end.
fn step(size: Option<u8>, sizes: &[u8], steps: isize) -> Option<u8> {
    let stops: Vec<Option<u8>> = [None]
        .into_iter()
        .chain(sizes.iter().copied().map(Some))
        .collect();
    let at = stops.iter().position(|stop| *stop == size).unwrap_or(0) as isize;
    stops[(at + steps).rem_euclid(stops.len() as isize) as usize]
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::{calls, key, nothing, process};
    use super::*;
    use std::time::Instant;

    use cmt_common::api::{Direction, MemoryKind};
    use cmt_common::histogram::size_class_of;

    /// Process 1 copies most to the GPU, 3 from it, and 2 not at all.
    fn moment() -> Moment {
        let mut whole = nothing(Instant::now(), 2);
        for (pid, name) in [(1, "up"), (2, "idle"), (3, "down")] {
            whole.processes.insert(pid, process(name));
        }
        let pageable = MemoryKind::Pageable;
        let up = key(1, Direction::HtoD, pageable, 1 << 20);
        let down = key(3, Direction::DtoH, pageable, 1 << 12);
        whole.rows.insert(up, calls(10, 1 << 20, 1_000));
        whole.rows.insert(down, calls(20, 1 << 12, 1_000));
        Moment::new(whole, None)
    }

    fn press(state: &mut State, keys: &str) -> Wish {
        let mut wish = Wish::Stay;
        for letter in keys.chars() {
            let code = match letter {
                '<' => KeyCode::Left,
                '>' => KeyCode::Right,
                '$' => KeyCode::End,
                '^' => KeyCode::Home,
                letter => KeyCode::Char(letter),
            };
            wish = state.press(code.into(), &moment());
        }
        wish
    }

    fn order(state: &State) -> Vec<Who> {
        let rows = state.rows(&moment());
        assert_eq!(rows[0].who, None, "the sum stays on top");
        rows[1..].iter().map(|row| row.who).collect()
    }

    #[test]
    fn every_column_sorts_and_reverses() {
        let mut state = State::default();
        assert_eq!(order(&state), [Some(3), Some(1), Some(2)], "time in copies");
        let mut seen = Vec::new();
        for _ in 0..7 {
            seen.push(order(&state));
            press(&mut state, "s");
        }
        assert_eq!(state.sort, Sort::Copying, "and round again");
        assert_eq!(seen[2], [Some(1), Some(2), Some(3)], "ids");
        assert_eq!(seen[3], [Some(3), Some(2), Some(1)], "names");
        assert_eq!(seen[5], [Some(1), Some(2), Some(3)], "HtoD");
        press(&mut state, "S");
        assert_eq!(order(&state), [Some(2), Some(1), Some(3)]);
    }

    #[test]
    fn the_chosen_process_stays_chosen_and_the_list_has_ends() {
        let mut state = State::default();
        press(&mut state, "kj");
        assert_eq!(state.who, Some(3));
        press(&mut state, "s");
        assert_eq!(state.who, Some(3), "wherever it is now");
        press(&mut state, "$j");
        assert_eq!(state.who, Some(2));
        press(&mut state, "^");
        assert_eq!(state.who, None);
    }

    #[test]
    fn sizes_are_those_of_the_process() {
        let mut state = State::default();
        let (small, large) = (size_class_of(1 << 12), size_class_of(1 << 20));
        press(&mut state, ">");
        assert_eq!(state.size, Some(small));
        press(&mut state, ">");
        assert_eq!(state.size, Some(large));
        press(&mut state, "j");
        assert_eq!(
            (state.who, state.size),
            (Some(3), None),
            "it has no such copies"
        );
        press(&mut state, "<");
        assert_eq!(state.size, Some(small));
        press(&mut state, ">");
        assert_eq!(state.size, None);
    }

    #[test]
    fn keys_toggle_and_end() {
        let mut state = State::default();
        press(&mut state, "f");
        assert!(state.frozen);
        press(&mut state, " t");
        assert!(!state.frozen && state.window == Window::Start);
        press(&mut state, "?");
        assert!(state.help);
        assert_eq!(press(&mut state, "x"), Wish::Stay);
        assert!(!state.help, "any key closes it");
        assert_eq!(press(&mut state, "q"), Wish::Quit);
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(state.press(control_c, &moment()), Wish::Quit);
        assert_eq!(state.press(KeyCode::Esc.into(), &moment()), Wish::Quit);
    }
}
