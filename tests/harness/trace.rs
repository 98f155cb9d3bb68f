//! Runs `cmt trace` in the background.
#![expect(unsafe_code, reason = "sends a signal")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread;

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
    pub fn finish(self) -> (Value, String) {
        let (report, said) = self.finish_as_text();
        (serde_json::from_str(&report).expect("a JSON object"), said)
    }

    /// The same, where the report is no JSON object.
    #[track_caller]
    pub fn finish_as_text(mut self) -> (String, String) {
        // Both at once: a pipe that is full holds up the other end.
        let mut stdout = self.child.stdout.take().expect("its stdout");
        let report = thread::spawn(move || {
            let mut report = String::new();
            stdout.read_to_string(&mut report).map(|_| report)
        });
        let mut said = String::new();
        self.stderr
            .read_to_string(&mut said)
            .expect("read what cmt says");
        let status = self.child.wait().expect("wait for cmt");
        assert!(status.success(), "{status}: {said}");
        let report = report
            .join()
            .expect("the thread that reads")
            .expect("text on stdout");
        (report, said)
    }
}
