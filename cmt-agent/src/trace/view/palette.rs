//! Colours of the view: some of the 16 that the user's terminal has chosen itself, on whatever background it has. Each only
//! repeats what a word, a sign or a place already says.

use ratatui::style::{Color, Modifier, Style};

use cmt_common::api::Direction;

/// The styles in use.
#[derive(Clone, Copy, Debug)]
pub struct Palette {
    coloured: bool,
}

impl Palette {
    /// With colours, unless `NO_COLOR` is set (no-color.org).
    pub fn from_environment() -> Self {
        Self {
            coloured: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        }
    }

    /// Copies of one direction.
    pub fn direction(self, direction: Direction) -> Style {
        match direction {
            Direction::HtoD => self.colour(Color::Green),
            Direction::DtoH => self.colour(Color::Magenta),
            _ => Style::new(),
        }
    }

    /// What somebody should look at.
    pub fn warning(self) -> Style {
        self.colour(Color::Red).add_modifier(Modifier::BOLD)
    }

    /// What stands above columns, and names of parts.
    pub fn head(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// The line that was chosen.
    pub fn chosen(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    fn colour(self, colour: Color) -> Style {
        match self.coloured {
            true => Style::new().fg(colour),
            false => Style::new(),
        }
    }
}

#[cfg(test)]
impl Palette {
    pub const PLAIN: Self = Self { coloured: false };
    pub const COLOURED: Self = Self { coloured: true };
}
