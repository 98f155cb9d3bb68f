//! Files that a target names. It may name anything, and exchange it at any time.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To read.
    Read,
    /// To read and write.
    ReadWrite,
}

/// Opens what stands at `path` if it is a regular file: opening a FIFO would wait for its other end, and opening some
/// devices does something.
pub fn open_regular(path: &Path, access: Access) -> io::Result<File> {
    let place = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(path)?;
    if !place.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    OpenOptions::new()
        .read(true)
        .write(access == Access::ReadWrite)
        .open(path_of(&place))
}

/// A path to this very file as long as it is open, whatever becomes of the path by which it was found.
pub fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read as _;

    use nix::sys::stat::Mode;

    use super::*;

    #[test]
    fn a_fifo_is_not_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("libcuda.so.1");
        nix::unistd::mkfifo(&path, Mode::S_IRWXU).expect("a FIFO");
        let error = open_regular(&path, Access::Read).expect_err("a FIFO");
        assert!(error.to_string().contains("no regular file"), "{error}");
    }

    #[test]
    fn an_open_file_stays_the_same_when_its_path_is_exchanged() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        fs::write(&path, "mine").expect("a file");
        let file = open_regular(&path, Access::Read).expect("a file");
        fs::remove_file(&path).expect("remove it");
        fs::write(&path, "another's").expect("another file");
        let mut text = String::new();
        File::open(path_of(&file))
            .and_then(|mut again| again.read_to_string(&mut text))
            .expect("the first file");
        assert_eq!(text, "mine");
    }
}
