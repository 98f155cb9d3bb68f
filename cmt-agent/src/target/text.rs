//! Text of `/proc/PID` that holds names. A process calls itself what it likes: the bytes may be no text, or text that
//! moves a terminal's cursor.

use std::fs;
use std::io::{self, Read as _};
use std::path::Path;

use procfs::process::{Process, Status};
use procfs::{FromBufRead as _, ProcResult};

/// Reads a file of `/proc`; bytes that are no UTF-8 become U+FFFD.
pub fn read(path: impl AsRef<Path>) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
}

/// `/proc/PID/status` of a process; its name there is not for printing, [`comm`] is.
pub fn status(process: &Process) -> ProcResult<Status> {
    Status::from_buf_read(relative(process, "status")?.as_bytes())
}

/// What a process is called, for printing.
pub fn comm(process: &Process) -> ProcResult<String> {
    Ok(printable(relative(process, "comm")?.trim_end()))
}

/// A file of a process's folder in `/proc`, which stays that process's whoever gets its id later.
pub fn relative(process: &Process, name: &str) -> ProcResult<String> {
    let mut bytes = Vec::new();
    process.open_relative(name)?.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A foreign text with `?` for every character that a terminal would not just show.
pub fn printable(text: &str) -> String {
    /// Embeddings, overrides and isolates, which reorder the text around them, and separators of lines.
    fn reorders(c: char) -> bool {
        matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    }
    text.chars()
        .map(|c| {
            if c.is_control() || reorders(c) {
                '?'
            } else {
                c
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_foreign_moves_the_cursor() {
        assert_eq!(printable("\x1b[31mred\x1b]0;x\x07"), "?[31mred?]0;x?");
        assert_eq!(printable("a\nb\u{9b}c\u{202e}d"), "a?b?c?d");
        assert_eq!(printable("Bäcker 复制"), "Bäcker 复制");
    }
}
