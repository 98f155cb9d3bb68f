//! The view on terminals of many sizes, with nothing to show and with too much.

use std::time::Instant;

use cmt_common::api::{Direction, MemoryKind};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::{Color, Style};

use super::super::model::tests::{calls, key, nothing, process};
use super::*;
use crate::trace::Snapshot;

fn subject(targets: Targets) -> Subject {
    Subject {
        targets,
        length: None,
        pair_ns: Some(180),
        link: None,
    }
}

fn terminal(width: u16, height: u16, moment: &Moment, state: &State) -> Terminal<TestBackend> {
    let subject = subject(Targets::All);
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal
        .draw(|frame| draw(frame, &subject, moment, state, Palette::COLOURED))
        .unwrap();
    terminal
}

fn screen(width: u16, height: u16, moment: &Moment, state: &State) -> Vec<String> {
    let terminal = terminal(width, height, moment, state);
    let cells = terminal.backend().buffer().content();
    let mut lines = Vec::new();
    for row in cells.chunks(width.into()) {
        let (mut line, mut at) = (String::new(), 0);
        while at < row.len() {
            line += row[at].symbol();
            // A wide character covers the next cell too.
            at += row[at].symbol().width().max(1);
        }
        lines.push(line.trim_end().to_owned());
    }
    lines
}

/// A trace that saw 20 seconds of two copying processes and an idle one.
fn usual() -> Moment {
    let start = Instant::now();
    let mut moment = Moment::new(nothing(start, 0), None);
    let (up, down) = (Direction::HtoD, Direction::DtoH);
    let (pageable, pinned) = (MemoryKind::Pageable, MemoryKind::Pinned);
    for second in 1..=20u64 {
        let mut whole = nothing(start, second);
        whole.probe_pairs = second * 1000;
        for (pid, name) in [
            (4242, "python3"),
            (4243, "数据加载数据加载数据"),
            (17, "idle"),
        ] {
            whole.processes.insert(pid, process(name));
        }
        for (key, count, ns) in [
            (key(4242, up, pageable, 64 << 20), 10 * second, 7_790_000),
            (key(4242, down, pageable, 64 << 20), 10 * second, 39_200_000),
            (key(4242, up, pinned, 4096), 300 * second, 7_000),
            (key(4243, up, pageable, 1 << 20), second * second, 100_000),
        ] {
            whole
                .rows
                .insert(key, calls(count, 1 << (key.size_class - 1), ns));
        }
        moment = Moment::new(whole, Some(&moment));
    }
    moment
}

/// 300 processes whose counters all stand as high as they can.
fn huge() -> Moment {
    let mut whole = nothing(Instant::now(), 1);
    whole.probe_pairs = u64::MAX;
    whole.lost = [u64::MAX / 8; cmt_common::event::LOST_REASONS];
    whole.warnings = vec!["something".into(); 3];
    for pid in 0..300 {
        let pid = 4_194_304 - pid;
        whole
            .processes
            .insert(pid, process("a-name-that-is-far-longer-than-comms-are"));
        for direction in [Direction::HtoD, Direction::DtoH, Direction::Unknown] {
            let mut stat = calls(1, u64::MAX >> 12, u64::MAX >> 12);
            stat.calls = u64::MAX >> 12;
            stat.errors = u64::MAX >> 12;
            stat.max_ns = u64::MAX >> 1;
            whole
                .rows
                .insert(key(pid, direction, MemoryKind::Pageable, 1 << 63), stat);
        }
    }
    Moment::new(whole, None)
}

#[test]
fn everything_is_there_at_80x24() {
    let moment = usual();
    let lines = screen(80, 24, &moment, &State::default());
    let expected = [
        "cmt trace: every CUDA process  0:00:20",
        "tracing itself: 20.0k probed calls x 180ns = 3.6ms of the targets' time",
        "── 3 processes, GB/s and time by the clock, last second ────────────────────────",
        "      pid process          calls/s   HtoD   DtoH copying▼  pageable last 60 s",
    ];
    assert_eq!(lines[..4], expected, "{lines:#?}");
    let rest = lines.join("\n");
    for words in [
        ">         all                  359   0.71   0.67      48%      100%",
        "     4242 python3              320   0.67   0.67      47%      100%         ████",
        "       17 idle                   0      -      -        -         -         ▁▁▁▁",
        "     4243 数据加载数据加…       39",
        "── all processes, all sizes, last second, GB/s in the calls ",
        "HtoD    pinned      4KiB    300      0   0.59   6.8us",
        "── latency, all processes, all sizes ──",
        "HtoD 349 calls",
        "q quit  ? help  ↑↓ process",
    ] {
        assert!(rest.contains(words), "no {words:?} in\n{rest}");
    }
}

#[test]
fn the_room_of_200x50_is_used() {
    let moment = usual();
    let mut state = State {
        who: Some(4242),
        ..State::default()
    };
    state.window = super::super::model::Window::Start;
    let lines = screen(200, 50, &moment, &state);
    let rest = lines.join("\n");
    // Latencies stand beside the list, and every one has its range.
    assert!(
        lines[2].contains("since the start") && lines[2].contains("── latency, python3 (pid 4242)"),
        "{rest}"
    );
    assert!(
        lines.iter().filter(|line| line.contains(" to ")).count() > 20,
        "{rest}"
    );
    let python = lines
        .iter()
        .find(|line| line.starts_with(">    4242 python3"))
        .unwrap();
    assert!(
        python.contains(&format!("{} ", "█".repeat(20))),
        "a minute of the past: {rest}"
    );
}

#[test]
fn no_number_is_cut_whatever_the_size() {
    let (usual, huge) = (usual(), huge());
    let empty = Moment::new(Snapshot::empty(), None);
    for moment in [&usual, &huge, &empty] {
        let whole = screen(400, 400, moment, &State::default()).join("\n");
        let words: std::collections::BTreeSet<&str> = whole.split_whitespace().collect();
        for (width, height) in [
            (1, 1),
            (10, 3),
            (20, 10),
            (40, 12),
            (60, 16),
            (79, 23),
            (80, 24),
            (132, 43),
            (200, 50),
        ] {
            for who in [None, Some(4242), Some(4_194_304), Some(1)] {
                let state = State {
                    who,
                    ..State::default()
                };
                screen(
                    width,
                    height,
                    moment,
                    &State {
                        help: true,
                        ..State::default()
                    },
                );
                let lines = screen(width, height, moment, &state);
                for line in lines.iter().filter(|_| who.is_none()) {
                    // The list, whose figures are the same at every width.
                    for word in line.split_whitespace().filter(|word| word.ends_with('%')) {
                        assert!(words.contains(word), "{width}x{height}: {word}\n{lines:#?}");
                    }
                }
            }
        }
    }
    let lines = screen(80, 24, &huge, &State::default()).join("\n");
    assert!(
        lines.contains("LOST: 11.5E  WARNINGS: 3  tracing: 18.4E probed calls x 180ns = "),
        "{lines}"
    );
    assert!(lines.contains("processes 1 to 5 of 300"), "{lines}");
}

#[test]
fn the_chosen_process_is_in_sight() {
    let huge = huge();
    let order: Vec<Who> = State::default()
        .rows(&huge)
        .iter()
        .map(|row| row.who)
        .collect();
    for who in [order[1], order[150], order[300]] {
        let state = State {
            who,
            ..State::default()
        };
        let lines = screen(80, 24, &huge, &state);
        let mark = lines
            .iter()
            .find(|line| line.starts_with('>'))
            .expect("a mark");
        assert!(mark.contains(&who.unwrap().to_string()[..7]), "{lines:#?}");
    }
}

#[test]
fn what_is_not_there_is_said() {
    let state = State::default();
    let none = Moment::new(nothing(Instant::now(), 1), None);
    let lines = screen(80, 24, &none, &state).join("\n");
    assert!(lines.contains("no CUDA library is mapped, so there is nothing to probe yet"));
    let mut idle = nothing(Instant::now(), 1);
    idle.processes.insert(7, process("idle"));
    let lines = screen(80, 24, &Moment::new(idle, None), &state).join("\n");
    assert!(lines.contains("no copy, last second"), "{lines}");
    let mut ended = nothing(Instant::now(), 1);
    ended.processes.insert(7, process("gone"));
    ended.processes.entry(7).and_modify(|it| it.ended = true);
    let lines = screen(80, 24, &Moment::new(ended, None), &state);
    assert!(lines[5].starts_with(" †      7 gone "), "{lines:#?}");
    let frozen = State {
        frozen: true,
        ..State::default()
    };
    assert!(screen(80, 24, &none, &frozen)[0].contains("FROZEN"));
}

#[test]
fn colours_are_the_terminals_own_and_can_be_left_out() {
    let moment = usual();
    let subject = subject(Targets::Pids(vec![4242]));
    let mut seen = std::collections::HashSet::new();
    for palette in [Palette::PLAIN, Palette::COLOURED] {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal
            .draw(|frame| draw(frame, &subject, &moment, &State::default(), palette))
            .unwrap();
        let cells = terminal.backend().buffer().content();
        let styles: Vec<Style> = cells.iter().map(|cell| cell.style()).collect();
        assert!(styles.iter().all(|style| style.bg == Some(Color::Reset)));
        let colours: std::collections::HashSet<Color> =
            styles.iter().filter_map(|style| style.fg).collect();
        assert_eq!(colours.len(), if seen.is_empty() { 1 } else { 3 });
        seen.extend(colours);
    }
    assert_eq!(seen, [Color::Reset, Color::Green, Color::Magenta].into());
}

#[test]
fn a_screen_of_200_processes_is_drawn_in_no_time() {
    let huge = huge();
    let begun = Instant::now();
    for _ in 0..10 {
        screen(200, 50, &huge, &State::default());
    }
    let each = begun.elapsed() / 10;
    assert!(each < Duration::from_millis(500), "{each:?}");
}
