//! Measures what a pair of probes costs on this machine, so that every report can say what tracing took.

use std::fs;
use std::io;
use std::time::Instant;

use cmt_common::event::{CopyCookie, CopyKey, phase};
use procfs::process::Process;

use super::link::Links;
use super::programs::Probes;
use crate::target::maps;

/// Calls of one measurement.
const CALLS: u32 = 300;

/// Takes arguments like a copy and does nothing. Starts with `push rbp` as every CUDA function does: the kernel emulates
/// that instruction, while it single-steps others.
#[unsafe(naked)]
extern "C" fn nothing(_dst: u64, _src: u64, _bytes: u64) -> u32 {
    core::arch::naked_asm!("push rbp", "mov rbp, rsp", "xor eax, eax", "pop rbp", "ret")
}

/// Nanoseconds that the probes add to one call: the difference between a loop of empty calls with probes and without.
/// `None` where this process cannot probe itself. The probes it needs are returned, to be taken away with the others: by
/// itself that would take as long as all of them.
pub fn pair_ns(probes: &mut Probes) -> (Option<u64>, Links) {
    let without = run();
    let placed = own_offset(nothing as *const () as u64)
        .ok_or_else(|| io::Error::other("no mapping of this program's file"))
        .and_then(|offset| {
            probes.attach_copy_pair("/proc/self/exe".as_ref(), offset, CopyCookie::new(0))
        });
    let links = match placed {
        Ok(links) => links,
        Err(error) => {
            log::debug!("cannot measure the cost of a probe: {error}");
            return (None, Links::default());
        }
    };
    if probes.maps.enter_phase(phase::COUNTING).is_err() {
        return (None, links);
    }
    run();
    let with = run();
    let counted: Vec<CopyKey> = probes
        .maps
        .copies()
        .unwrap_or_default()
        .into_iter()
        .map(|(key, _)| key)
        .collect();
    for key in &counted {
        probes.maps.forget(key);
    }
    if let Some(events) = &mut probes.events {
        while events.take_next().is_some() {}
    }
    let reset =
        probes.maps.enter_phase(phase::PLACING).is_ok() && probes.maps.reset_pairs().is_ok();
    let cost =
        (reset && !counted.is_empty()).then(|| with.saturating_sub(without) / u64::from(CALLS));
    (cost, links)
}

fn run() -> u64 {
    let start = Instant::now();
    for call in 0..u64::from(CALLS) {
        // An address of ours, so that the programs look at its page as they do for a real copy.
        std::hint::black_box(nothing(call, (&raw const start) as u64, 0));
    }
    start.elapsed().as_nanos() as u64
}

/// The offset in this program's own file of the code at `address`.
pub(super) fn own_offset(address: u64) -> Option<u64> {
    let exe = fs::read_link("/proc/self/exe").ok()?;
    let maps = maps::of(&Process::myself().ok()?).ok()?;
    maps.iter().find_map(|map| {
        let own = map.path() == Some(&*exe);
        (own && map.contains(address)).then(|| address - map.start + map.offset)
    })
}
