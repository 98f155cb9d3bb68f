//! Runs the real `cmt`.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// What a `cmt` that has ended left.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl From<Output> for Finished {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Finished {
    /// The object on standard output of a `cmt` that succeeded.
    #[track_caller]
    pub fn json(&self) -> Value {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.parse()
    }

    /// The object on standard output, however it ended.
    #[track_caller]
    pub fn parse(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("stdout is no JSON object: {error}\n{self:#?}"))
    }

    /// The sentence with which it refused: exit code 1, nothing on standard output, one line on standard error.
    #[track_caller]
    pub fn refusal(&self) -> &str {
        assert_eq!(self.code, Some(1), "{self:#?}");
        assert_eq!(self.stdout, "", "a refusal prints no result");
        let mut lines = self.stderr.lines();
        let sentence = lines.next().expect("a refusal says why");
        assert_eq!(lines.next(), None, "one sentence: {self:#?}");
        sentence.strip_prefix("cmt: ").expect("it says who speaks")
    }
}

/// A `cmt` that runs in the background; killed if it is dropped before it ends.
#[derive(Debug)]
pub struct Running {
    child: Option<Child>,
}

impl Running {
    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("still there").id()
    }

    /// The process that stops and patches for it, while there is one.
    pub fn keeper(&self) -> Option<u32> {
        let pid = self.pid();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        let child = children.split_ascii_whitespace().next()?.parse().ok()?;
        // Until it is the keeper it is a copy of its parent; once it has ended it has no command line.
        let line = fs::read_to_string(format!("/proc/{child}/cmdline")).ok()?;
        (line.split('\0').nth(1) == Some("keeper")).then_some(child)
    }

    /// Waits for its end, but not for ever: for a `cmt` that says little.
    #[track_caller]
    pub fn finish_within(mut self, limit: Duration) -> Finished {
        let started = Instant::now();
        let child = self.child.as_mut().expect("still there");
        while child.try_wait().expect("look at cmt").is_none() {
            assert!(started.elapsed() < limit, "cmt hangs");
            thread::sleep(Duration::from_millis(2));
        }
        self.finish()
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Finished {
        let child = self.child.take().expect("still there");
        child.wait_with_output().expect("wait for cmt").into()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The binary under test: `CMT_BIN`, else the release build, else the debug build.
///
/// # Panics
/// When there is none.
fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("CMT_BIN") {
        return path.into();
    }
    ["release/cmt", "debug/cmt"]
        .map(|path| crate::target().join(path))
        .into_iter()
        .find(|path| path.exists())
        .expect("build it first: cargo build --release -p cmt-agent")
}

/// A command line of `cmt`, for tests that change how it is started.
pub fn cmt_command<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(binary());
    command.args(args).env_remove("RUST_LOG");
    command
}

/// Runs `cmt` to its end.
pub fn cmt<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Finished {
    cmt_command(args).output().expect("start cmt").into()
}

/// Starts `cmt` in the background.
pub fn spawn_cmt<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Running {
    let child = cmt_command(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start cmt");
    Running { child: Some(child) }
}
