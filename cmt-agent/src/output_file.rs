//! Files that a command writes at its end and opens at its beginning: one that cannot be written is refused before anything
//! else is done, and what it held stays until there is something to write.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// A file that will be written. One that was made for this goes again when there is nothing to write.
pub struct OutputFile {
    /// Until it is written.
    file: Option<File>,
    path: PathBuf,
    is_new: bool,
}

impl OutputFile {
    /// Opens it, or makes it. `untouched` ends the refusal: what has not been done.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn open(path: &Path, untouched: &str) -> anyhow::Result<Self> {
        let made = OpenOptions::new().write(true).create_new(true).open(path);
        let is_new = made.is_ok();
        let mut either = OpenOptions::new();
        either.write(true).create(true).truncate(false);
        let file = made
            .or_else(|_| either.open(path))
            .with_context(|| format!("{} cannot be written; {untouched}", path.display()))?;
        Ok(Self {
            file: Some(file),
            path: path.to_owned(),
            is_new,
        })
    }

    /// Empties it, to be written bit by bit.
    pub fn begin(mut self) -> io::Result<File> {
        let file = self.file.take().ok_or(io::ErrorKind::NotFound)?;
        // Pipes and devices have no length.
        if file.metadata()?.is_file() {
            file.set_len(0)?;
        }
        Ok(file)
    }

    /// Writes all of it.
    pub fn write(self, text: &str) -> anyhow::Result<()> {
        let path = self.path.clone();
        self.begin()
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("writing {}", path.display()))
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if self.is_new && self.file.is_some() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_held_stays_until_something_is_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("page.html");
        fs::write(&path, "an older and longer page").expect("a file");
        let output = OutputFile::open(&path, "nothing was done").expect("it can be written");
        drop(output);
        let held = |path: &Path| fs::read_to_string(path).expect("a file");
        assert_eq!(held(&path), "an older and longer page");
        let output = OutputFile::open(&path, "nothing was done").expect("it can be written");
        output.write("a page").expect("write");
        assert_eq!(held(&path), "a page");
        let new = folder.path().join("new.json");
        drop(OutputFile::open(&new, "nothing was done").expect("it can be made"));
        assert!(!new.exists(), "nothing was written");
        let output = OutputFile::open(&new, "nothing was done").expect("it can be made");
        output.write("{}").expect("write");
        assert_eq!(held(&new), "{}");
        let device =
            OutputFile::open(Path::new("/dev/null"), "nothing was done").expect("a device");
        device.write("a page").expect("write");
        let refused = OutputFile::open(folder.path(), "nothing was done").err();
        let refused = format!("{:#}", refused.expect("it is a folder"));
        assert!(
            refused.contains("cannot be written; nothing was done"),
            "{refused}"
        );
    }
}
