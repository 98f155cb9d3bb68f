//! What a trace says of each process beyond its table: what its host memory is made of, what its callers waited for, and
//! what could be gained. Lines of at most 80 columns.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use cmt_common::api::{Backing, Direction, MemoryKind};
use cmt_common::event::CopyKey;

use super::Snapshot;
use super::report::ProcessReport;
use super::table::{grouped, size, time};
use crate::histogram::Stat;

/// The lines of one process.
pub fn of(process: &ProcessReport, snapshot: &Snapshot) -> String {
    let mut text = String::new();
    if process.copies.is_empty() {
        return text;
    }
    // Writing to a String cannot fail, here and below.
    let _ = writeln!(text, "\n{} (pid {})", process.comm, process.pid);
    if !process.workload.is_empty() {
        let _ = writeln!(text, "  {}", process.workload);
    }
    let gain = &process.gain;
    let rates: Vec<String> = [
        ("HtoD", gain.pageable_htod_gb_per_s),
        ("DtoH", gain.pageable_dtoh_gb_per_s),
    ]
    .into_iter()
    .filter_map(|(direction, rate)| Some(format!("{direction} {:.1} GB/s", rate?)))
    .collect();
    if !rates.is_empty() {
        let _ = writeln!(text, "  pageable {}", rates.join(", "));
    }
    let _ = writeln!(text, "  {}", gain.advice);
    waits(&mut text, process);
    memory(&mut text, process.pid, snapshot);
    text
}

/// Asynchronous copies cost the wait that follows, too.
fn waits(text: &mut String, process: &ProcessReport) {
    let sum =
        |of: fn(&super::report::CopyReport) -> u64| -> u64 { process.copies.iter().map(of).sum() };
    let (waited, wait_ns) = (sum(|copy| copy.waited), sum(|copy| copy.wait_ns));
    if waited > 0 {
        let _ = writeln!(
            text,
            "  felt: {} in copies, and {} in {} waits behind async ones",
            time(sum(|copy| copy.total_ns)),
            time(wait_ns),
            grouped(waited),
        );
    }
}

/// What the host side of pageable copies is made of.
fn memory(text: &mut String, pid: u32, snapshot: &Snapshot) {
    let mut kinds: BTreeMap<(u8, u8), Stat> = BTreeMap::new();
    for (key, stat) in snapshot.rows.range(CopyKey::of_process(pid)) {
        if key.memory == MemoryKind::Pageable as u8 {
            kinds
                .entry((key.direction, key.backing))
                .or_default()
                .merge(stat);
        }
    }
    if kinds
        .keys()
        .all(|(_, backing)| *backing == Backing::Unknown as u8)
    {
        return;
    }
    let _ = writeln!(
        text,
        "  {:<22} {:>9} {:>9} {:>6}",
        "pageable memory", "calls", "bytes", "GB/s"
    );
    for ((direction, backing), stat) in kinds {
        let rate = stat
            .gb_per_s()
            .map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
        let _ = writeln!(
            text,
            "    {:<7} {:<12} {:>9} {:>9} {:>6}",
            Direction::from_raw(direction).name(),
            Backing::from_raw(backing).name(),
            stat.calls,
            size(stat.bytes as f64),
            rate,
        );
    }
}
