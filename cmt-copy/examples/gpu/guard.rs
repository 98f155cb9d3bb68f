//! What the guard costs: the same copies with and without one, in turns.

use std::time::Instant;

use cmt_copy::{Engine, PassReason, Request};

use super::{DTOH, DTOH_ASYNC, Gpu};

/// Copies of one turn.
const COPIES: usize = 1024;
const TURNS: usize = 9;

pub fn print(gpu: &Gpu, cpus: u32, buffers: [*mut u8; 2]) {
    for (bytes, turns) in [(1usize << 20, TURNS), (4 << 20, TURNS), (64 << 20, 3)] {
        for (to_host, host) in [false, true].into_iter().zip(buffers) {
            let plan = cmt_copy::plan::estimate(cpus);
            let engines = [gpu.engine(plan), gpu.engine(plan).guarded()];
            let mut seconds = [Vec::new(), Vec::new()];
            let mut sampled = 0;
            for turn in 0..=turns {
                for (engine, seconds) in engines.iter().zip(&mut seconds) {
                    let start = Instant::now();
                    for _ in 0..COPIES {
                        sampled += u64::from(gpu.maybe_staged(engine, to_host, host, bytes, 0));
                    }
                    // The first warms up.
                    if turn > 0 {
                        seconds.push(start.elapsed().as_secs_f64());
                    }
                }
            }
            let [plain, guarded] = seconds.map(|mut seconds| {
                seconds.sort_by(f64::total_cmp);
                seconds[seconds.len() / 2] / COPIES as f64 * 1e6
            });
            println!(
                "guard {} {:2} MiB: {plain:.1} us a copy without, {guarded:.1} with ({:+.1} %), {sampled} of {} by stock",
                if to_host { "DtoH" } else { "HtoD" },
                bytes >> 20,
                (guarded / plain - 1.0) * 100.0,
                COPIES * (turns + 1),
            );
            engines.iter().for_each(Engine::shutdown);
        }
    }
}

/// As a hook does it when stock has returned from a call that began then.
pub fn note_passed(engine: &Engine, reason: PassReason, request: &Request, began: Instant) {
    let to_host = [DTOH, DTOH_ASYNC].contains(&request.function);
    if reason == PassReason::Sampled {
        engine.note_stock(to_host, request.bytes, began.elapsed());
    }
    if cmt_copy::is_paced(to_host, request.bytes as u64) {
        cmt_copy::note_paced(to_host);
    }
}
