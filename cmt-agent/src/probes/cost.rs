//! Measures what a pair of probes costs on this machine, so that every report can say what tracing took.

use std::fs;
use std::time::Instant;

use cmt_common::event::{CopyCookie, CopyKey, phase};

use super::link::detach;
use super::programs::Probes;

/// Calls of one measurement.
const CALLS: u32 = 300;

/// Takes arguments like a copy and does nothing. Starts with `push rbp` as every CUDA function does: the kernel emulates
/// that instruction, while it single-steps others.
#[unsafe(naked)]
extern "C" fn nothing(_dst: u64, _src: u64, _bytes: u64) -> u32 {
    core::arch::naked_asm!("push rbp", "mov rbp, rsp", "xor eax, eax", "pop rbp", "ret")
}

/// Nanoseconds that the probes add to one call: the difference between a loop of empty calls with probes and without.
/// `None` where this process cannot probe itself.
pub fn pair_ns(probes: &mut Probes) -> Option<u64> {
    let address = nothing as *const () as u64;
    let offset = own_offset(address)?;
    let links = probes
        .attach_copy_pair("/proc/self/exe".as_ref(), offset, CopyCookie::new(0))
        .map_err(|error| log::debug!("cannot measure the cost of a probe: {error}"))
        .ok()?;
    probes.enter_phase(phase::COUNTING).ok()?;
    run();
    let with = run();
    detach([links]);
    probes.enter_phase(phase::PLACING).ok()?;
    let without = run();
    let own: Vec<CopyKey> = probes
        .copies()
        .unwrap_or_default()
        .into_iter()
        .map(|(key, _)| key)
        .collect();
    let counted = !own.is_empty();
    for key in own {
        probes.forget(&key);
    }
    counted.then(|| with.saturating_sub(without) / u64::from(CALLS))
}

fn run() -> u64 {
    let start = Instant::now();
    for call in 0..u64::from(CALLS) {
        std::hint::black_box(nothing(call, 0, 4096));
    }
    start.elapsed().as_nanos() as u64
}

/// The offset in this program's own file of the code at `address`.
fn own_offset(address: u64) -> Option<u64> {
    let exe = fs::read_link("/proc/self/exe").ok()?;
    let maps = procfs::process::Process::myself().ok()?.maps().ok()?;
    maps.iter().find_map(|map| {
        let (start, end) = map.address;
        let own = matches!(&map.pathname, procfs::process::MMapPath::Path(path) if *path == exe);
        (own && (start..end).contains(&address)).then(|| address - start + map.offset)
    })
}
