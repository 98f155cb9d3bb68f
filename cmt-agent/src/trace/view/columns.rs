//! Columns of fixed widths: where a terminal has no room for all, the least important go as a whole.

use super::figures::{clip, pad};

/// A column.
pub struct Column {
    /// What stands above it.
    pub head: &'static str,
    /// Cells.
    pub width: usize,
    /// Whether it holds figures, which end at the same cell.
    pub right: bool,
    /// The highest goes first where there is no room.
    pub rank: u8,
}

impl Column {
    /// A column of names.
    pub const fn name(head: &'static str, width: usize, rank: u8) -> Self {
        Self {
            head,
            width,
            right: false,
            rank,
        }
    }

    /// A column of figures.
    pub const fn figure(head: &'static str, width: usize, rank: u8) -> Self {
        Self {
            head,
            width,
            right: true,
            rank,
        }
    }
}

/// Positions of the columns that fit `width` cells, a blank between them.
pub fn fitting(columns: &[Column], width: usize) -> Vec<usize> {
    let mut shown: Vec<usize> = (0..columns.len()).collect();
    while self::width(columns, &shown) > width {
        let least = (0..shown.len()).max_by_key(|at| columns[shown[*at]].rank);
        match least {
            Some(at) => drop(shown.remove(at)),
            None => break,
        }
    }
    shown
}

/// Cells that these columns take.
pub fn width(columns: &[Column], shown: &[usize]) -> usize {
    let cells: usize = shown.iter().map(|at| columns[*at].width).sum();
    cells + shown.len().saturating_sub(1)
}

/// One line: the cells of the columns that are shown.
pub fn line<'a>(
    columns: &[Column],
    shown: &[usize],
    cell: impl Fn(usize) -> std::borrow::Cow<'a, str>,
) -> String {
    let cells: Vec<String> = shown
        .iter()
        .map(|at| {
            let column = &columns[*at];
            pad(&clip(&cell(*at), column.width), column.width, column.right)
        })
        .collect();
    cells.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_important_go_first_and_as_a_whole() {
        let columns = [
            Column::figure("pid", 5, 0),
            Column::name("name", 6, 2),
            Column::figure("rate", 5, 1),
        ];
        let text = |width: usize| {
            line(&columns, &fitting(&columns, width), |at| {
                ["12345", "python3", "1.5"][at].into()
            })
        };
        assert_eq!(text(18), "12345 pytho…   1.5");
        assert_eq!(text(17), "12345   1.5");
        assert_eq!(text(10), "12345");
        assert_eq!(text(4), "");
    }
}
