//! Builds the stand-in and the victims, once for all test processes.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

/// Where the stand-in's libraries and the victims lie.
#[derive(Debug)]
pub struct Built {
    /// The folder that holds them all.
    pub folder: PathBuf,
}

impl Built {
    /// The path of a victim.
    pub fn victim(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// Builds what is older than its sources.
///
/// # Panics
/// When a build script fails: no test on that rung can say anything then.
pub fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = crate::target().join("stand-in");
        fs::create_dir_all(&folder).expect("create the folder for the stand-in");
        // Other test processes wait here, and find everything built.
        let lock = File::create(folder.join(".lock")).expect("create the lock");
        lock.lock().expect("lock the folder");
        for part in ["stand-in", "victims"] {
            build(&crate::workspace().join("tests").join(part), &folder);
        }
        Built { folder }
    })
}

fn build(sources: &Path, into: &Path) {
    let name = sources.file_name().expect("a folder").to_string_lossy();
    let stamp = into.join(format!(".{name}.built"));
    let built_at = fs::metadata(&stamp).and_then(|file| file.modified()).ok();
    if built_at.is_some_and(|built_at| newest(sources) < built_at) {
        return;
    }
    let script = sources.join("build.sh");
    let status = Command::new("bash")
        .arg(&script)
        .arg(into)
        .status()
        .expect("run bash");
    assert!(status.success(), "{} failed: {status}", script.display());
    File::create(&stamp).expect("write the stamp");
}

fn newest(folder: &Path) -> SystemTime {
    let files = fs::read_dir(folder).expect("read the sources");
    files
        .map(|file| file.and_then(|file| file.metadata()?.modified()))
        .map(|time| time.expect("read a source's time"))
        .max()
        .expect("there are sources")
}
