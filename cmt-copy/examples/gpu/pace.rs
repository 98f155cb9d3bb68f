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

/// Microseconds until each call returned, and until the device was idle.
fn turn(
    gpu: &Gpu,
    engine: Option<&Engine>,
    pace: Pace,
    host: *mut u8,
    bytes: usize,
) -> [Vec<f64>; 2] {
    let mut times = [Vec::new(), Vec::new()];
    gpu.wait();
    let all = Instant::now();
    for copy in 0..COPIES {
        match pace {
            Pace::Alone => spin(PAUSE),
            // SAFETY: the buffer is at least as long.
            Pace::Written => unsafe { black_box(host).write_bytes(copy as u8, bytes) },
            Pace::Waited | Pace::AtOnce => {}
        }
        let start = Instant::now();
        match engine {
            Some(engine) => _ = gpu.maybe_staged(engine, false, host, bytes, 0),
            None => gpu.stock(false, host, bytes),
        }
        times[0].push(start.elapsed().as_secs_f64() * 1e6);
        if pace != Pace::AtOnce {
            gpu.wait();
            times[1].push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    if pace == Pace::AtOnce {
        gpu.wait();
        times[1].push(all.elapsed().as_secs_f64() * 1e6 / COPIES as f64);
    }
    times
}

fn spin(pause: Duration) {
    let start = Instant::now();
    while start.elapsed() < pause {
        core::hint::spin_loop();
    }
}
