//! `cmt trace` while it runs: a screen on a terminal, lines for other programs, and what it leaves behind.
#![expect(unsafe_code, reason = "sends signals, resizes a terminal")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use cmt_tests::{Finished, Rung, Victim, cmt, cmt_command, require};
use nix::pty::{Winsize, openpty};
use nix::sys::termios::{Termios, tcgetattr};
use serde_json::Value;

/// What opens and closes the screen that programs draw on.
const ENTER: &str = "\x1b[?1049h";
const LEAVE: &str = "\x1b[?1049l";
/// Anything that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// A `cmt` on a terminal of 80x24.
struct OnTerminal {
    child: Child,
    keyboard: File,
    /// Our hold on the terminal, which outlives `cmt`.
    terminal: File,
    before: Termios,
    seen: Arc<Mutex<Vec<u8>>>,
    columns: u16,
    rows: u16,
}

impl OnTerminal {
    fn start(args: &[&str]) -> Self {
        let pty = openpty(&size(80, 24), None).expect("a terminal");
        let terminal = File::from(pty.slave);
        let copy = || Stdio::from(terminal.try_clone().expect("a descriptor"));
        let before = tcgetattr(&terminal).expect("read its modes");
        let child = cmt_command(args)
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR")
            .stdin(copy())
            .stdout(copy())
            .stderr(copy())
            .spawn()
            .expect("start cmt");
        let keyboard = File::from(pty.master);
        let mut screen = keyboard.try_clone().expect("a descriptor");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let filled = Arc::clone(&seen);
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                filled.lock().expect("it").extend(&bytes[..count]);
            }
        });
        Self {
            child,
            keyboard,
            terminal,
            before,
            seen,
            columns: 80,
            rows: 24,
        }
    }

    /// Everything written to the terminal so far.
    fn seen(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().expect("it")).into_owned()
    }

    /// What a user sees now.
    fn screen(&self) -> vt100::Parser {
        let [rows, columns] =
            [self.rows, self.columns].map(|cells| cells.try_into().expect("some"));
        let mut screen = vt100::Parser::new(rows, columns, 0);
        screen.process(&self.seen.lock().expect("it"));
        screen
    }

    /// Waits until the screen shows `text`.
    #[track_caller]
    fn wait_for(&self, text: &str) {
        let start = Instant::now();
        loop {
            let screen = self.screen().screen().contents();
            if screen.contains(text) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "no {text:?}:\n{screen}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard
            .write_all(keys.as_bytes())
            .expect("press keys");
    }

    fn resize(&mut self, columns: u16, rows: u16) {
        (self.columns, self.rows) = (columns, rows);
        let size = size(columns, rows);
        // SAFETY: the descriptor is open, and the request reads one structure of this type.
        let result = unsafe { libc::ioctl(self.terminal.as_raw_fd(), libc::TIOCSWINSZ, &size) };
        assert_eq!(result, 0);
        // The kernel tells those whose controlling terminal it is; it is nobody's.
        self.signal(libc::SIGWINCH);
    }

    fn signal(&self, signal: i32) {
        // SAFETY: no memory is touched; the process is our child and not yet waited for, so the id is its own.
        let result = unsafe { libc::kill(self.child.id() as i32, signal) };
        assert_eq!(result, 0);
    }

    /// Waits for its end; checks that it succeeded and has left the terminal as it was; returns all that it wrote.
    #[track_caller]
    fn finish(mut self) -> String {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("wait for cmt") {
                break status;
            }
            assert!(start.elapsed() < PATIENCE, "cmt hangs: {}", self.seen());
            thread::sleep(Duration::from_millis(5));
        };
        let after = tcgetattr(&self.terminal).expect("read its modes");
        thread::sleep(Duration::from_millis(50));
        let seen = self.seen();
        assert_eq!(status.code(), Some(0), "{seen}");
        assert_eq!(after, self.before, "the terminal is as it was");
        let parser = self.screen();
        assert!(!parser.screen().alternate_screen() && !parser.screen().hide_cursor());
        seen
    }
}

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

/// Checks that a screen was opened and closed, and that the plain report came after that.
#[track_caller]
fn assert_report_after_screen(seen: &str) {
    let (screen, report) = seen.split_once(LEAVE).expect("it left its screen");
    assert!(screen.contains(ENTER), "{seen}");
    assert!(
        !report.contains(ENTER) && !report.contains("^C"),
        "{report:?}"
    );
    for words in ["cudaMemcpy", "HtoD", "tracing itself: "] {
        assert!(report.contains(words), "no {words}: {report}");
    }
    assert!(!screen.contains("tracing; Ctrl-C"), "{screen}");
}

#[test]
fn keys_and_signals_end_the_view_and_the_report_follows() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-rt", ["--bytes", "64K", "--pause-ms", "1"]);
    let pid = victim.pid.to_string();
    for end in ["q", "\x1b", "\x03", "SIGTERM", "SIGINT", "time"] {
        let time = if end == "time" { "2s" } else { "10m" };
        let mut cmt = OnTerminal::start(&["trace", &pid, "--for", time]);
        cmt.wait_for(&format!("victim-rt (pid {pid})"));
        // A line of the table is there once something has been counted.
        cmt.wait_for("64KiB");
        match end {
            "SIGTERM" => cmt.signal(libc::SIGTERM),
            "SIGINT" => cmt.signal(libc::SIGINT),
            "time" => {}
            key => cmt.press(key),
        }
        assert_report_after_screen(&cmt.finish());
    }
    // So does the end of the process itself.
    let cmt = OnTerminal::start(&["trace", &pid]);
    cmt.wait_for("64KiB");
    victim.stop();
    let seen = cmt.finish();
    assert_report_after_screen(&seen);
    assert!(
        seen.contains(&format!("ended during the trace: {pid}")),
        "{seen}"
    );
}

#[test]
fn keys_change_what_is_shown_at_once() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-rt", ["--bytes", "64K,1M", "--pause-ms", "1"]);
    let mut cmt = OnTerminal::start(&["trace", &victim.pid.to_string()]);
    cmt.wait_for("1MiB");
    for (key, shown) in [
        ("?", "any key goes back"),
        ("x", "HtoD"),
        ("f", "FROZEN"),
        ("t", "since the start"),
        ("f", "f freeze"),
        ("s", "pageable▼"),
        ("S", "pageable▲"),
        ("\x1b[C", "all processes, 64KiB and more, since the start"),
        ("\x1b[B", "(pid "),
    ] {
        let pressed = Instant::now();
        cmt.press(key);
        cmt.wait_for(shown);
        // The next look at the counters may be a second away.
        assert!(pressed.elapsed() < Duration::from_millis(700), "{key:?}");
    }
    cmt.resize(200, 50);
    cmt.wait_for(&"─".repeat(65));
    let line = format!(">   {:>5} victim-rt", victim.pid);
    cmt.wait_for(&line);
    cmt.press("q");
    assert_report_after_screen(&cmt.finish());
    victim.stop();
}

#[test]
fn records_and_plain_text_open_no_screen() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-rt", ["--bytes", "64K", "--pause-ms", "1"]);
    let pid = victim.pid.to_string();
    for (option, shown) in [
        (&["--no-live"][..], "tracing itself: "),
        (&["--json"], "\"schema\":\"cmt/trace/1\""),
        (&["--interval", "200ms"], "  interval 1, 0.2s: "),
    ] {
        let mut args = vec!["trace", &pid, "--for", "500ms"];
        args.extend(option);
        let seen = OnTerminal::start(&args).finish();
        assert!(!seen.contains('\x1b'), "{option:?}: {seen:?}");
        assert!(seen.contains(shown), "{option:?}: {seen:?}");
    }
    victim.stop();
}

/// Calls, errors and bytes of every function of a process, over all lines.
fn sums(lines: &[Value], pid: u32) -> BTreeMap<String, [u64; 3]> {
    let processes = lines
        .iter()
        .flat_map(|line| line["processes"].as_array().expect("processes"));
    let copies = processes
        .filter(|process| process["pid"] == pid)
        .flat_map(|process| process["copies"].as_array().expect("copies"));
    let mut sums = BTreeMap::<String, [u64; 3]>::new();
    for copy in copies {
        let function = copy["function"].as_str().expect("a name").to_owned();
        let sum = sums.entry(function).or_default();
        for (sum, field) in sum.iter_mut().zip(["calls", "errors", "bytes"]) {
            *sum += copy[field].as_u64().expect("a number");
        }
    }
    sums
}

#[test]
fn lines_add_up_to_what_the_program_counted() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start(
        "victim-rt",
        [
            "--threads",
            "2",
            "--bytes",
            "4K,64K",
            "--seconds",
            "2.3",
            "--fail-every",
            "50",
            "--allow-errors",
            "--hold",
        ],
    );
    let pid = victim.pid;
    let mut cmt = cmt_command(["trace", &pid.to_string(), "--json", "--interval", "1s"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start cmt");
    let mut stderr = BufReader::new(cmt.stderr.take().expect("piped"));
    let mut said = String::new();
    stderr.read_line(&mut said).expect("read what cmt says");
    assert_eq!(said, "tracing; Ctrl-C ends it\n");
    victim.signal(libc::SIGUSR1);

    let mut stdout = BufReader::new(cmt.stdout.take().expect("piped"));
    let mut first = String::new();
    stdout.read_line(&mut first).expect("a line");
    assert!(
        cmt.try_wait().expect("look at cmt").is_none(),
        "it is written at once"
    );
    let account = victim.finish();
    let lines: Vec<Value> = [first]
        .into_iter()
        .chain(stdout.lines().map(|line| line.expect("a line")))
        .map(|line| serde_json::from_str(&line).expect("an object a line"))
        .collect();
    assert!(cmt.wait().expect("wait for cmt").success());

    // The last is a short one, with copies in it.
    assert!(lines.len() >= 3, "{} lines", lines.len());
    let mut times = Vec::new();
    for (line, number) in lines.iter().zip(1..) {
        assert_eq!(line["schema"], "cmt/trace/1");
        assert_eq!(line["interval"], number);
        assert_eq!(line["lost"], 0);
        times.push(line["time"].as_str().expect("a time"));
    }
    assert!(times.is_sorted() && times[0].ends_with('Z'), "{times:?}");
    let some = sums(&lines[..1], pid)
        .values()
        .map(|sum| sum[0])
        .sum::<u64>();
    let all = sums(&lines, pid);
    let own = account["functions"].as_object().expect("functions");
    assert_eq!(all.len(), own.len(), "{all:?}");
    for (function, counts) in own {
        let counts =
            ["calls", "errors", "bytes"].map(|field| counts[field].as_u64().expect("a number"));
        assert_eq!(all[function], counts, "{function}");
        assert!(counts[1] > 0 && some < counts[0], "{function}");
    }
}

#[test]
fn intervals_end_with_the_trace() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-rt", ["--bytes", "64K", "--pause-ms", "1"]);
    let pid = victim.pid.to_string();
    let json = cmt([
        "trace",
        &pid,
        "--json",
        "--interval",
        "500ms",
        "--for",
        "1200ms",
    ]);
    let durations: Vec<f64> = json
        .stdout
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("an object"))
        .map(|line| line["duration_s"].as_f64().expect("a number"))
        .collect();
    assert_eq!(durations.len(), 3, "{json:?}");
    assert!(
        durations[2] < durations[1] && durations.iter().sum::<f64>() >= 1.2,
        "{durations:?}"
    );

    let text = cmt(["trace", &pid, "--interval", "500ms", "--for", "1200ms"]);
    assert_eq!(text.code, Some(0));
    let times = text
        .stdout
        .lines()
        .filter(|line| line.contains("Z  interval "));
    assert_eq!(times.count(), 3, "{text:?}");
    assert!(text.stdout.lines().all(|line| line.chars().count() <= 80));
    let (_, whole) = text.stdout.split_once("interval 3").expect("the last");
    assert!(
        whole.contains("traced 1.2s") && whole.contains("tracing itself: "),
        "{whole}"
    );
    victim.stop();
}

#[test]
fn a_reader_that_goes_away_ends_the_trace_quietly() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let victim = Victim::start("victim-rt", ["--bytes", "64K", "--pause-ms", "1"]);
    for form in [&["--json"][..], &[]] {
        let mut cmt = cmt_command(["trace", &victim.pid.to_string(), "--interval", "100ms"])
            .args(form)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start cmt");
        let mut stdout = BufReader::new(cmt.stdout.take().expect("piped"));
        stdout.read_line(&mut String::new()).expect("a line");
        drop(stdout);
        let finished = Finished::from(cmt.wait_with_output().expect("wait for cmt"));
        assert_eq!(finished.code, Some(0), "{finished:?}");
        assert_eq!(finished.stderr, "tracing; Ctrl-C ends it\n");
    }
    victim.stop();
}

#[test]
fn a_command_line_that_names_no_process_is_told_both_ways() {
    let Some(_turn) = require(Rung::Kernel) else {
        return;
    };
    let nothing = cmt(["trace", "--for", "1s"]);
    assert_eq!(nothing.code, Some(2), "{nothing:?}");
    for words in [
        "cmt trace PID",
        "cmt trace --all",
        "Example: cmt trace 4242 --for 10s",
    ] {
        assert!(nothing.stderr.contains(words), "{nothing:?}");
    }
    let short = cmt(["trace", "1", "--interval", "1ms"]);
    assert_eq!(short.code, Some(2), "{short:?}");
}
