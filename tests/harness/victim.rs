//! Programs that copy, check every byte and count their own calls.
#![expect(unsafe_code, reason = "sends signals")]

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::built;

/// A victim that takes longer to start or stop hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running victim; killed if it is dropped before it ends.
#[derive(Debug)]
pub struct Victim {
    child: Child,
    lines: Receiver<String>,
    /// Process id.
    pub pid: u32,
}

impl Victim {
    /// Starts a victim on the stand-in and waits until it copies.
    #[track_caller]
    pub fn start<S: AsRef<OsStr>>(name: &str, args: impl IntoIterator<Item = S>) -> Self {
        let mut command = Self::command(name);
        command.args(args);
        Self::spawn(command)
    }

    /// The command line of a victim on the stand-in, for tests that change how it is started.
    pub fn command(name: &str) -> Command {
        let mut command = Command::new(built().victim(name));
        command.env("LD_LIBRARY_PATH", &built().folder);
        command
    }

    /// Starts a command that prints `ready PID` once it copies.
    #[track_caller]
    pub fn spawn(command: Command) -> Self {
        let program = format!("{command:?}");
        let victim = Self::spawn_unready(command);
        let ready = victim
            .next_line()
            .unwrap_or_else(|| panic!("{program} ended before it was ready"));
        assert_eq!(ready, format!("ready {}", victim.pid), "{program}");
        victim
    }

    fn spawn_unready(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("start {command:?}: {error}"));
        let stdout = child.stdout.take().expect("piped");
        let (send, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let pid = child.id();
        Self { child, lines, pid }
    }

    /// Starts a command that forks a program into a pid namespace of its own, where that counts as process 1, and ends
    /// with it.
    #[track_caller]
    pub fn spawn_in_pid_namespace(command: Command) -> Self {
        let mut victim = Self::spawn_unready(command);
        assert_eq!(victim.next_line().as_deref(), Some("ready 1"));
        let outer = victim.pid;
        let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"));
        let children = children.expect("read its children");
        victim.pid = children.trim().parse().expect("it has one child");
        victim
    }

    /// The next line that it prints; `None` once it has closed its output.
    #[track_caller]
    pub fn next_line(&self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("victim {} says nothing", self.pid),
        }
    }

    /// Asks it to end, and reads its account: the last line that it prints.
    #[track_caller]
    pub fn stop(self) -> Value {
        self.signal(libc::SIGTERM);
        self.finish()
    }

    /// Waits for its end, and reads its account: the last line that it prints.
    #[track_caller]
    pub fn finish(mut self) -> Value {
        let mut last = String::new();
        while let Some(line) = self.next_line() {
            last = line;
        }
        let status = self.wait();
        assert!(status.success(), "victim {}: {status}; {last}", self.pid);
        serde_json::from_str(&last).unwrap_or_else(|error| panic!("no account: {error}: {last}"))
    }

    /// Reads all lines that it prints until it ends; `each` is called after every one of them.
    #[track_caller]
    pub fn transcript(mut self, mut each: impl FnMut(&Self)) -> (Vec<String>, ExitStatus) {
        let mut lines = Vec::new();
        while let Some(line) = self.next_line() {
            lines.push(line);
            each(&self);
        }
        (lines, self.wait())
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("wait for the victim") {
                return status;
            }
            assert!(start.elapsed() < PATIENCE, "victim {} hangs", self.pid);
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends it a signal.
    #[track_caller]
    pub fn signal(&self, signal: i32) {
        // SAFETY: no memory is touched; the process, or the one that waits for it, is our child and not yet waited for, so
        // the id is its own.
        let result = unsafe { libc::kill(self.pid as i32, signal) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("look at the victim").is_none()
    }

    /// Names of its threads.
    pub fn threads(&self) -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).expect("read its threads");
        let mut names: Vec<String> = tasks
            .map(|task| task.expect("read a thread").path().join("comm"))
            .filter_map(|comm| fs::read_to_string(comm).ok())
            .map(|comm| comm.trim().to_string())
            .collect();
        names.sort();
        names
    }

    /// Whether it has a thread of this name.
    pub fn has_thread(&self, name: &str) -> bool {
        self.threads().iter().any(|thread| thread == name)
    }

    /// The code of a library as it stands in memory: all its executable mappings, in order.
    #[track_caller]
    pub fn code(&self, library: &str) -> Vec<u8> {
        let footprint = self.footprint();
        let mappings = footprint.code.into_iter().filter(|(path, _)| {
            path.rsplit('/')
                .next()
                .is_some_and(|name| name.starts_with(library))
        });
        let code: Vec<u8> = mappings.flat_map(|(_, bytes)| bytes).collect();
        assert!(!code.is_empty(), "{library} has no code in {}", self.pid);
        code
    }

    /// Its threads and all its code, as they are now.
    #[track_caller]
    pub fn footprint(&self) -> Footprint {
        let maps = fs::read(format!("/proc/{}/maps", self.pid)).expect("read its maps");
        let maps = String::from_utf8_lossy(&maps);
        let memory = File::open(format!("/proc/{}/mem", self.pid)).expect("open its memory");
        let mut code = Vec::new();
        for line in maps.lines() {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let path = fields.get(5).copied().unwrap_or_default();
            // The kernel's own pages ([vdso], [vsyscall]) are not the process's.
            if !fields[1].contains('x') || path.starts_with('[') {
                continue;
            }
            let (start, end) = fields[0].split_once('-').expect("a range");
            let [start, end] = [start, end].map(|at| u64::from_str_radix(at, 16).expect("hex"));
            let mut bytes = vec![0; (end - start) as usize];
            memory
                .read_exact_at(&mut bytes, start)
                .expect("read its memory");
            code.push((path.to_string(), bytes));
        }
        Footprint {
            threads: self.threads(),
            code,
        }
    }

    /// The same once it has started all its threads.
    #[track_caller]
    pub fn settled(&self) -> Footprint {
        let mut before = self.threads();
        loop {
            thread::sleep(Duration::from_millis(300));
            let now = self.threads();
            if now == before {
                return self.footprint();
            }
            before = now;
        }
    }

    /// Checks that it still runs and that neither its threads nor its code differ from what they were.
    #[track_caller]
    pub fn assert_untouched(&mut self, before: &Footprint) {
        assert!(self.is_alive(), "victim {} has ended", self.pid);
        let now = self.footprint();
        assert_eq!(now.threads, before.threads, "threads of {}", self.pid);
        let paths = |footprint: &Footprint| -> Vec<String> {
            footprint
                .code
                .iter()
                .map(|(path, _)| path.clone())
                .collect()
        };
        assert_eq!(paths(&now), paths(before), "code mappings of {}", self.pid);
        for ((path, now), (_, before)) in now.code.iter().zip(&before.code) {
            // Too long to print.
            assert!(now == before, "code of {path} in {} differs", self.pid);
        }
    }
}

/// What a refused attach must leave as it was.
#[derive(Debug)]
pub struct Footprint {
    threads: Vec<String>,
    /// Path and bytes of every executable mapping.
    code: Vec<(String, Vec<u8>)>,
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
