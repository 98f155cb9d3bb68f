//! Runs `cmt trace` in the background.
#![expect(unsafe_code, reason = "sends a signal")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};

use serde_json::Value;

use crate::cmt_command;

/// A `cmt trace --json` whose probes are in place.
#[derive(Debug)]
pub struct Trace {
    child: Child,
    stderr: BufReader<ChildStderr>,
}

impl Trace {
    /// Starts `cmt trace --json` with more arguments, and waits until the probes are in place.
    #[track_caller]
    pub fn start<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Self {
        Self::start_as(&[], args)
    }

    /// The same in another environment.
    #[track_caller]
    pub fn start_as<S: AsRef<OsStr>>(
        env: &[(&str, &str)],
        args: impl IntoIterator<Item = S>,
    ) -> Self {
        let mut command = cmt_command(["trace", "--json"]);
        command.args(args).envs(env.iter().copied());
        Self::spawn(command)
    }

    /// The same by a command line of the caller's.
    #[track_caller]
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start cmt");
        let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("read what cmt says");
        assert_eq!(line, "tracing; Ctrl-C ends it\n");
        Self { child, stderr }
    }

    /// Ctrl-C, then the report.
    #[track_caller]
    pub fn interrupt(self) -> Value {
        // SAFETY: no memory is touched; the process is our child and not yet waited for, so the id is its own.
        let result = unsafe { libc::kill(self.child.id() as i32, libc::SIGINT) };
        assert_eq!(result, 0);
        self.finish().0
    }

    /// The report and what it said on stderr, once all targets have ended.
    #[track_caller]
    pub fn finish(mut self) -> (Value, String) {
        let mut said = String::new();
        self.stderr
            .read_to_string(&mut said)
            .expect("read what cmt says");
        let output = self.child.wait_with_output().expect("wait for cmt");
        assert!(output.status.success(), "{}: {said}", output.status);
        let report = serde_json::from_slice(&output.stdout).expect("a JSON object");
        (report, said)
    }
}
