//! Short copies to the device as programs make them: by stock, all staged, and as an attached process has them, in turns.

use std::hint::black_box;
use std::time::{Duration, Instant};

use cmt_copy::{Engine, Plan};

use crate::Gpu;
use crate::crowd::median;

/// Copies of one turn, and turns of each side.
const COPIES: usize = 24;
const TURNS: usize = 20;
const PAUSE: Duration = Duration::from_micros(300);

#[derive(Clone, Copy, PartialEq)]
enum Pace {
    /// The device is waited for, then comes the next.
    Waited,
    /// The next follows at once.
    AtOnce,
    /// A pause before each.
    Alone,
    /// The caller writes all of it before each.
    Written,
    /// The caller writes as many buffers as this, then all are copied in a row; then a pause.
    Burst(usize),
}

/// Prints a line for each size and pace, by the rows of `plan`.
pub fn print(gpu: &Gpu, plan: Plan, host: *mut u8) {
    println!("times as fast as stock until the call returns and until the device is idle");
    println!("HtoD                       stock, us     all staged   attached");
    for shift in 16..=21 {
        let bytes = 1usize << shift;
        for (name, pace) in [
            ("waited for", Pace::Waited),
            ("at once", Pace::AtOnce),
            ("alone", Pace::Alone),
            ("written", Pace::Written),
            ("2 written", Pace::Burst(2)),
            ("3 written", Pace::Burst(3)),
            ("4 written", Pace::Burst(4)),
            ("8 written", Pace::Burst(8)),
            ("16 written", Pace::Burst(16)),
        ] {
            let engines = [gpu.engine(plan), gpu.engine(plan).guarded()];
            let sides = [None, Some(&engines[0]), Some(&engines[1])];
            let mut times: [[Vec<f64>; 2]; 3] = Default::default();
            for turn in 0..=TURNS {
                for side in [turn % 3, (turn + 1) % 3, (turn + 2) % 3] {
                    let turns = self::turn(gpu, sides[side], pace, host, bytes);
                    // The first warms up.
                    if turn > 0 {
                        for (times, turn) in times[side].iter_mut().zip(turns) {
                            times.extend(turn);
                        }
                    }
                }
            }
            let [stock, staged, attached] =
                times.map(|both| both.map(|mut times| median(&mut times)));
            let gain = |side: [f64; 2]| {
                let [call, idle] = [stock[0] / side[0], stock[1] / side[1]];
                format!("{call:.2} {idle:.2}")
            };
            println!(
                "{:>5} KiB {name:<10} {:>7.1} {:>7.1}    {}    {}",
                bytes >> 10,
                stock[0],
                stock[1],
                gain(staged),
                gain(attached)
            );
            engines.iter().for_each(Engine::shutdown);
        }
    }
}

/// Microseconds until each call returned, and until the device was idle; of bursts and of copies at once for one copy on
/// average.
fn turn(
    gpu: &Gpu,
    engine: Option<&Engine>,
    pace: Pace,
    host: *mut u8,
    bytes: usize,
) -> [Vec<f64>; 2] {
    let (bursts, length) = match pace {
        Pace::Burst(length) => (COPIES / 2, length),
        Pace::AtOnce => (1, COPIES),
        _ => (COPIES, 1),
    };
    let mut times = [Vec::new(), Vec::new()];
    gpu.wait();
    for burst in 0..bursts {
        if matches!(pace, Pace::Alone | Pace::Burst(_)) {
            spin(PAUSE);
        }
        if matches!(pace, Pace::Written | Pace::Burst(_)) {
            // SAFETY: the buffer is at least as long.
            unsafe { black_box(host).write_bytes(burst as u8, length * bytes) };
        }
        let start = Instant::now();
        for copy in 0..length {
            let host = match pace {
                Pace::Burst(_) => host.wrapping_add(copy * bytes),
                _ => host,
            };
            match engine {
                Some(engine) => _ = gpu.maybe_staged(engine, false, host, bytes, 0),
                None => gpu.stock(false, host, bytes),
            }
        }
        let returned = start.elapsed();
        gpu.wait();
        for (times, time) in times.iter_mut().zip([returned, start.elapsed()]) {
            times.push(time.as_secs_f64() * 1e6 / length as f64);
        }
    }
    times
}

fn spin(pause: Duration) {
    let start = Instant::now();
    while start.elapsed() < pause {
        core::hint::spin_loop();
    }
}
