//! Short copies as programs make them: by stock, all staged, and as an attached process has them, in turns.

use std::hint::black_box;
use std::time::{Duration, Instant};

use cmt_copy::{Engine, Plan};

use crate::Gpu;
use crate::crowd::{map, median};
use crate::flavours::Spin;

/// Copies of one turn, and turns of each side.
const COPIES: usize = 24;
const TURNS: usize = 20;
const PAUSE: Duration = Duration::from_micros(300);
const KERNEL_NS: u64 = 300_000;

#[derive(Clone, Copy, PartialEq)]
enum Pace {
    /// The device is waited for, then comes the next.
    Waited,
    /// The next follows at once.
    AtOnce,
    /// A pause before each.
    Alone,
    /// The caller writes all of it before each copy to the device, and reads all of it after each to the host.
    Used,
    /// The caller uses as many buffers as this, then all are copied in a row; then a pause.
    Burst(usize),
    /// A kernel before each, which is waited for.
    Kernel,
    /// A pause before each, and memory that is mapped anew.
    Fresh,
}

/// Prints a line for each size and pace, by the rows of `plan`.
pub fn print(gpu: &Gpu, plan: Plan, largest: usize, buffers: [*mut u8; 2]) {
    assert!(largest >= 16 << 20, "16 buffers of 1 MiB");
    let spin = Spin::load(gpu);
    println!("times as fast as stock until the call returns and until the device is idle");
    println!("                           stock, us     all staged   attached");
    let sizes = (16..=20).map(|shift| (false, 1usize << shift));
    for (to_host, bytes) in sizes.chain((16..=20).map(|shift| (true, 1 << shift))) {
        for (name, pace) in [
            ("waited for", Pace::Waited),
            ("at once", Pace::AtOnce),
            ("alone", Pace::Alone),
            ("kernel", Pace::Kernel),
            ("used", Pace::Used),
            ("2 used", Pace::Burst(2)),
            ("4 used", Pace::Burst(4)),
            ("8 used", Pace::Burst(8)),
            ("16 used", Pace::Burst(16)),
            ("fresh", Pace::Fresh),
        ] {
            if pace == Pace::Fresh && !to_host {
                continue;
            }
            let host = buffers[usize::from(to_host)];
            let engines = [gpu.engine(plan), gpu.engine(plan).guarded()];
            let sides = [None, Some(&engines[0]), Some(&engines[1])];
            let mut times: [[Vec<f64>; 2]; 3] = Default::default();
            for turn in 0..=TURNS {
                for side in [turn % 3, (turn + 1) % 3, (turn + 2) % 3] {
                    let turns = self::turn(&spin, sides[side], pace, to_host, host, bytes);
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
                "{} {:>5} KiB {name:<10} {:>7.1} {:>7.1}    {}    {}",
                if to_host { "DtoH" } else { "HtoD" },
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
    kernel: &Spin<'_>,
    engine: Option<&Engine>,
    pace: Pace,
    to_host: bool,
    host: *mut u8,
    bytes: usize,
) -> [Vec<f64>; 2] {
    let gpu = kernel.gpu;
    let (bursts, length) = match pace {
        Pace::Burst(length) => (COPIES / 2, length),
        Pace::AtOnce => (1, COPIES),
        _ => (COPIES, 1),
    };
    let mut times = [Vec::new(), Vec::new()];
    gpu.wait();
    for burst in 0..bursts {
        if matches!(pace, Pace::Alone | Pace::Burst(_) | Pace::Fresh) {
            spin(PAUSE);
        }
        if pace == Pace::Kernel {
            kernel.launch(0, KERNEL_NS);
            gpu.wait();
        }
        if matches!(pace, Pace::Used | Pace::Burst(_)) {
            // SAFETY: the buffer is at least as long.
            unsafe { use_all(to_host, host, length * bytes, burst as u8) };
        }
        let host = match pace {
            Pace::Fresh => map(bytes),
            _ => host,
        };
        let start = Instant::now();
        for copy in 0..length {
            let host = match pace {
                Pace::Burst(_) => host.wrapping_add(copy * bytes),
                _ => host,
            };
            match engine {
                Some(engine) => _ = gpu.maybe_staged(engine, to_host, host, bytes, 0),
                None => gpu.stock(to_host, host, bytes),
            }
        }
        let returned = start.elapsed();
        gpu.wait();
        for (times, time) in times.iter_mut().zip([returned, start.elapsed()]) {
            times.push(time.as_secs_f64() * 1e6 / length as f64);
        }
        if pace == Pace::Fresh {
            // SAFETY: our mapping.
            unsafe { libc::munmap(host.cast(), bytes) };
        }
    }
    times
}

/// Reads what has come, or writes what is to go.
///
/// # Safety
/// The buffer must be at least as long.
unsafe fn use_all(to_host: bool, host: *mut u8, bytes: usize, value: u8) {
    // SAFETY: the caller's promise; nobody else uses it now.
    let all = unsafe { std::slice::from_raw_parts_mut(black_box(host), bytes) };
    match to_host {
        true => _ = black_box(all.iter().fold(0, |sum, byte| sum ^ byte)),
        false => all.fill(value),
    }
}

fn spin(pause: Duration) {
    let start = Instant::now();
    while start.elapsed() < pause {
        core::hint::spin_loop();
    }
}
