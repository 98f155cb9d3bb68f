//! Synchronous and asynchronous copies, on an idle stream and behind a kernel, from and to reused and fresh memory: stock and
//! by a guarded engine in turns.

use std::ffi::{CStr, c_void};
use std::time::Instant;

use cmt_copy::plan::estimate;
use cmt_copy::{Engine, Outcome};

use crate::crowd::{map, median};
use crate::{DTOH, Gpu, HTOD, guard, symbol};

/// A kernel that runs for so many nanoseconds.
const SPIN: &CStr = c"
.version 7.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 ns)
{
    .reg .u64 %now, %end, %ns;
    .reg .pred %p;
    ld.param.u64 %ns, [ns];
    mov.u64 %end, %globaltimer;
    add.u64 %end, %end, %ns;
again:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %p, %now, %end;
    @%p bra again;
    ret;
}
";
const SPIN_NS: u64 = 200_000;
/// Bytes that are copied of each kind, and copies at least and at most.
const BYTES: usize = 1 << 30;
const COPIES: (usize, usize) = (5, 61);

pub struct Spin<'a> {
    pub gpu: &'a Gpu,
    kernel: usize,
}

impl<'a> Spin<'a> {
    pub fn load(gpu: &'a Gpu) -> Self {
        let (mut module, mut kernel) = (0usize, 0usize);
        let out = &raw mut module;
        let loaded =
            cuda!(gpu.library, "cuModuleLoadData", out => *mut usize, SPIN.as_ptr() => *const i8);
        assert_eq!(loaded, 0);
        let out = &raw mut kernel;
        let name = c"spin".as_ptr();
        let found = cuda!(gpu.library, "cuModuleGetFunction", out => *mut usize, module => usize, name => *const i8);
        assert_eq!(found, 0);
        Self { gpu, kernel }
    }

    pub fn launch(&self, stream: usize, mut ns: u64) {
        let mut parameters: [*mut c_void; 1] = [(&raw mut ns).cast()];
        let parameters = parameters.as_mut_ptr();
        let launched = cuda!(self.gpu.library, "cuLaunchKernel", self.kernel => usize,
            1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 0 => u32, stream => usize,
            parameters => *mut *mut c_void, core::ptr::null_mut() => *mut c_void);
        assert_eq!(launched, 0);
    }
}

#[derive(Clone, Copy)]
struct Kind {
    to_host: bool,
    is_async: bool,
    is_busy: bool,
    is_fresh: bool,
    bytes: usize,
}

/// Prints a line for each kind, and the one that gains least; `buffers` are a source and a destination.
pub fn print(gpu: &Gpu, cpus: u32, largest: usize, buffers: [*mut u8; 2]) {
    let engine = gpu.engine(estimate(cpus)).guarded();
    let spin = Spin::load(gpu);
    let mut least: Option<(f64, String)> = None;
    for to_host in [false, true] {
        for shift in [16, 17, 18, 20, 22, 24, 26, 28] {
            let bytes = 1usize << shift;
            let function = if to_host { DTOH } else { HTOD };
            if bytes > largest || !engine.is_staged(function, bytes as u64) {
                continue;
            }
            for flags in 0..8 {
                let [is_async, is_busy, is_fresh] = [1, 2, 4].map(|flag| flags & flag != 0);
                let kind = Kind {
                    to_host,
                    is_async,
                    is_busy,
                    is_fresh,
                    bytes,
                };
                let [stock, staged] = in_turns(gpu, &engine, &spin, kind, buffers);
                let name = format!(
                    "{} {:>6} KiB {} {} {}",
                    if to_host { "DtoH" } else { "HtoD" },
                    bytes >> 10,
                    if is_fresh { " fresh" } else { "reused" },
                    if is_async { "async" } else { " sync" },
                    if is_busy { "busy" } else { "idle" },
                );
                // The kernel's own time is in both.
                let kernel = if is_busy { SPIN_NS as f64 / 1e3 } else { 0.0 };
                let gain = (stock[1] - kernel) / (staged[1] - kernel);
                println!(
                    "{name}: stock returns after {:>9.1}, idle after {:>9.1} us, attached {:>9.1} and {:>9.1}: {gain:.2} times",
                    stock[0], stock[1], staged[0], staged[1]
                );
                if least.as_ref().is_none_or(|(least, _)| gain < *least) {
                    least = Some((gain, name));
                }
            }
        }
    }
    if let Some((gain, name)) = least {
        println!("least: {name}: {gain:.2} times");
    }
    engine.shutdown();
}

/// Median microseconds until the call returned and until the device was idle, by stock and staged.
fn in_turns(
    gpu: &Gpu,
    engine: &Engine,
    spin: &Spin,
    kind: Kind,
    buffers: [*mut u8; 2],
) -> [[f64; 2]; 2] {
    let mut times: [[Vec<f64>; 2]; 2] = Default::default();
    let copies = (BYTES / kind.bytes).clamp(COPIES.0, COPIES.1);
    for turn in 0..=copies {
        // Who is first changes, since the second finds what the first has left in caches.
        for who in [turn % 2, (turn + 1) % 2] {
            let host = match kind.is_fresh {
                true => map(kind.bytes),
                false => buffers[usize::from(kind.to_host)],
            };
            if kind.is_fresh && !kind.to_host {
                // SAFETY: our mapping, and a source that is as long.
                unsafe { host.copy_from_nonoverlapping(buffers[0], kind.bytes) };
            }
            if kind.is_busy {
                spin.launch(if kind.is_async { gpu.stream } else { 0 }, SPIN_NS);
            }
            let start = Instant::now();
            copy(gpu, (who == 1).then_some(engine), kind, host);
            let returned = start.elapsed();
            gpu.wait();
            let idle = start.elapsed();
            // The first warms up.
            if turn > 0 {
                for (times, time) in times[who].iter_mut().zip([returned, idle]) {
                    times.push(time.as_secs_f64() * 1e6);
                }
            }
            if kind.is_fresh {
                // SAFETY: our mapping.
                unsafe { libc::munmap(host.cast(), kind.bytes) };
            }
        }
    }
    times.map(|both| both.map(|mut times| median(&mut times)))
}

/// As a hook does it, or by stock alone.
fn copy(gpu: &Gpu, engine: Option<&Engine>, kind: Kind, host: *mut u8) {
    let Kind {
        to_host,
        is_async,
        bytes,
        ..
    } = kind;
    let request = gpu.request(to_host, is_async, host, bytes, 0);
    // SAFETY: both ranges are as long as the copy.
    let passed = match engine.map(|engine| (engine, unsafe { engine.copy(&request) })) {
        Some((_, Outcome::Staged(code))) => return assert_eq!(code, 0),
        Some((engine, Outcome::Pass(reason))) => Some((engine, reason)),
        None => None,
    };
    let start = Instant::now();
    match is_async {
        true => gpu.stock_async(&request),
        false => gpu.stock(to_host, host, bytes),
    }
    if let Some((engine, reason)) = passed {
        guard::note_passed(engine, reason, &request, start);
    }
}
