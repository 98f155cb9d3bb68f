//! What `cmt attach` would give back to a process, estimated from what was traced.
//!
//! Careful in several ways. A class of copies counts with the latency that a quarter of its calls stay below, so that time in
//! which a call waited for a busy stream, which no copier saves, is left out as far as it can be told; and never with more
//! than the driver's slowest copies take. Staged copies are
//! taken to be as fast as those that were measured on one machine, scaled by link, less a margin. And only what the plan
//! for this process would stage counts.

use cmt_common::api::{Backing, Direction, MemoryKind};
use cmt_common::control::{Plan, PlanRow};
use cmt_common::event::CopyKey;
use serde::Serialize;

use super::Snapshot;
use crate::commands::status;
use crate::histogram::Stat;
use crate::link::Link;

/// A staged copy takes this long, and its bytes at this share of what pinned ones reach: 1 MiB to 1 GiB took 0.85 to 1.0 of
/// what that says (H200, 16 CPUs, `docs/benchmarks.md`).
const STAGED_START_NS: f64 = 22_000.0;
const STAGED_SHARE: f64 = 0.82;
/// Bytes per nanosecond into memory that nobody has touched yet: its pages have to be made (12 times stock's 1.5, ibid.).
const FRESH_GB_PER_S: f64 = 16.0;
/// Bytes per nanosecond that one CPU copies from memory to memory (ibid.).
const PER_CPU_GB_PER_S: f64 = 6.0;
/// No pageable copy by the driver takes longer than this when nothing else is in its way. The slowest that were measured ran at
/// 7.0 GB/s, and into memory that nobody has touched at 1.25 (ibid.); slower machines are allowed for. What a call took beyond it
/// was spent waiting.
const STOCK_START_NS: f64 = 30_000.0;
const STOCK_GB_PER_S: f64 = 4.0;
const STOCK_FRESH_GB_PER_S: f64 = 1.0;
/// The quantile of a class that stands for a call without waiting.
const UNDISTURBED: f64 = 0.25;
/// Below this share of the traced time there is nothing worth an attach.
const WORTH_SHARE: f64 = 0.005;

/// What the machine and the process allow.
#[derive(Clone, Debug)]
pub struct Means {
    /// None where no GPU's link is known.
    pub link: Option<Link>,
    /// CPUs that the process may use; 0 where not known.
    pub threads: u32,
}

/// The answer for one process.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// GB/s of its pageable copies to the device, in its calls; null without any.
    pub pageable_htod_gb_per_s: Option<f64>,
    /// The same from the device.
    pub pageable_dtoh_gb_per_s: Option<f64>,
    /// Seconds of each minute that attach would save its threads; null where it cannot be said.
    pub saved_s_per_minute: Option<f64>,
    /// The same in a sentence, or why it cannot be said.
    pub advice: String,
}

impl Gain {
    /// The answer for process `pid` of a trace, on a machine with this link. One that is attached to has it already.
    pub fn of_process(snapshot: &Snapshot, pid: u32, link: Option<&Link>) -> Self {
        let means = Means {
            link: link.cloned(),
            threads: snapshot
                .processes
                .get(&pid)
                .map_or(0, |process| process.threads),
        };
        let gain = Self::of(
            snapshot.rows.range(CopyKey::of_process(pid)),
            snapshot.duration.as_secs_f64(),
            &means,
        );
        if snapshot.processes.get(&pid).is_none_or(|it| it.ended) {
            return gain;
        }
        let advice = match status::is_attached(pid) {
            Some(false) => return gain,
            Some(true) => "attached: cmt status shows what is staged",
            None => "no estimate: whether it is attached may not be looked at",
        };
        Self {
            saved_s_per_minute: None,
            advice: advice.into(),
            ..gain
        }
    }

    /// What the copies of one process, traced for `seconds`, say.
    pub fn of<'a>(
        copies: impl Iterator<Item = (&'a CopyKey, &'a Stat)>,
        seconds: f64,
        means: &Means,
    ) -> Self {
        let plan = cmt_copy::plan::estimate(means.threads);
        let speed = means.link.as_ref().map(|link| {
            (link.pinned_gb_per_s() * STAGED_SHARE).min(PER_CPU_GB_PER_S * f64::from(means.threads))
        });
        let mut rates = [(0u64, 0u64); 2];
        let mut saved_ns = 0.0;
        let mut calls = 0;
        let (mut staged, mut paced_ns) = (0, 0u64);
        for (key, stat) in copies {
            let way = match Direction::from_raw(key.direction) {
                Direction::HtoD => 0,
                Direction::DtoH => 1,
                _ => continue,
            };
            calls = stat.count().saturating_add(calls);
            if MemoryKind::from_raw(key.memory) != MemoryKind::Pageable {
                continue;
            }
            // Byte counts are the program's word: any number.
            rates[way].0 = stat.bytes.saturating_add(rates[way].0);
            rates[way].1 = stat.total_ns.saturating_add(rates[way].1);
            let Some(undisturbed) = stat.quantile(UNDISTURBED) else {
                continue;
            };
            let bytes = stat.bytes / stat.count().max(1);
            if !is_staged(&plan, way == 1, bytes) {
                continue;
            }
            // Nobody has seen whether they come in a row, and one at a time short ones are left to the driver.
            if cmt_copy::is_paced(way == 1, bytes) {
                paced_ns = stat.total_ns.saturating_add(paced_ns);
                continue;
            }
            staged += stat.count();
            let Some(mut speed) = speed else {
                continue;
            };
            let mut stock = STOCK_GB_PER_S;
            if way == 1 && Backing::from_raw(key.backing) == Backing::Untouched {
                speed = speed.min(FRESH_GB_PER_S);
                stock = STOCK_FRESH_GB_PER_S;
            }
            let would_take = STAGED_START_NS + bytes as f64 / speed;
            let longest = STOCK_START_NS + bytes as f64 / stock;
            let took = (undisturbed as f64).min(longest);
            saved_ns += (took - would_take).max(0.0) * stat.count() as f64;
        }
        let rate = |way: usize| {
            let (bytes, ns) = rates[way];
            (ns > 0).then(|| bytes as f64 / ns as f64)
        };
        let per_minute = saved_ns / 1e9 / seconds.max(1e-9) * 60.0;
        let is_little = per_minute < WORTH_SHARE * 60.0;
        let paced_matter = paced_ns as f64 / 1e9 >= WORTH_SHARE * seconds;
        let all_ns = rates[0].1.saturating_add(rates[1].1);
        let is_mostly_paced = paced_matter && paced_ns > all_ns / 2;
        let pageable = rates.iter().any(|(bytes, _)| *bytes > 0);
        let (saved, advice) = if calls == 0 {
            (
                Some(0.0),
                "nothing to gain: no copies between host and device".into(),
            )
        } else if !pageable {
            (
                Some(0.0),
                "nothing to gain: no copies of pageable memory".into(),
            )
        } else if means.threads == 1 {
            (
                Some(0.0),
                "nothing to gain: it may use one CPU only, and staging takes two".into(),
            )
        } else if paced_matter
            && means.threads > 1
            && (staged == 0 || is_mostly_paced && speed.is_some() && is_little)
        {
            (
                None,
                "no estimate: its copies are short, and gain only in a row; cmt attach shows it"
                    .into(),
            )
        } else if staged == 0 && means.threads > 1 {
            (
                Some(0.0),
                "nothing to gain: its pageable copies are small, and the driver is fast at those"
                    .into(),
            )
        } else if means.threads == 0 {
            (
                None,
                "no estimate: how many CPUs it may use is not known".into(),
            )
        } else if speed.is_none() {
            (
                None,
                "no estimate: no GPU's link is known here (sysfs); cmt bench measures".into(),
            )
        } else if is_little {
            let advice = match paced_matter {
                true => "little to gain, but where its short copies come in a row",
                false => {
                    "nothing to gain: its pageable copies are as fast already, or take little time"
                }
            };
            (Some(per_minute), advice.into())
        } else {
            let besides = match paced_matter {
                true => ", and more where its short copies come in a row",
                false => "",
            };
            (
                Some(per_minute),
                format!(
                    "estimated gain with cmt attach: {per_minute:.1} s of its threads' time in every minute{besides}"
                ),
            )
        };
        Self {
            pageable_htod_gb_per_s: rate(0),
            pageable_dtoh_gb_per_s: rate(1),
            saved_s_per_minute: saved,
            advice,
        }
    }
}

fn is_staged(plan: &Plan, to_host: bool, bytes: u64) -> bool {
    let rows: &[PlanRow] = if to_host { &plan.dtoh } else { &plan.htod };
    rows.iter()
        .find(|row| bytes <= row.up_to_bytes)
        .is_some_and(|row| row.threads > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cmt_common::histogram::size_class_of;

    fn means(threads: u32) -> Means {
        Means {
            link: Link::parse("32.0 GT/s PCIe".into(), "16"),
            threads,
        }
    }

    fn copies(
        direction: Direction,
        memory: MemoryKind,
        bytes: u64,
        latencies: &[u64],
    ) -> Vec<(CopyKey, Stat)> {
        let mut stat = Stat::default();
        for latency in latencies {
            stat.record(bytes, *latency);
        }
        let key = CopyKey {
            pid: 1,
            function: 0,
            direction: direction as u8,
            memory: memory as u8,
            size_class: size_class_of(bytes),
            backing: 0,
            _pad: [0; 6],
        };
        vec![(key, stat)]
    }

    fn gain(copies: &[(CopyKey, Stat)], means: &Means) -> Gain {
        Gain::of(copies.iter().map(|(key, stat)| (key, stat)), 10.0, means)
    }

    #[test]
    fn slow_pageable_copies_are_worth_an_attach() {
        // 64 MiB at 7.5 GB/s, a hundred times in ten seconds.
        let slow = copies(
            Direction::HtoD,
            MemoryKind::Pageable,
            64 << 20,
            &[9_000_000; 100],
        );
        let found = gain(&slow, &means(16));
        let saved = found.saved_s_per_minute.expect("an estimate");
        // 0.9 s of calls in 10 s; staged, each would take 1.5 ms.
        assert!((4.0..5.0).contains(&saved), "{saved}");
        assert!(found.advice.contains("of its threads' time"), "{found:?}");
        let rate = found.pageable_htod_gb_per_s.expect("a rate");
        assert!((rate - 7.456).abs() < 0.01, "{rate}");
    }

    #[test]
    fn a_busy_stream_is_no_gain() {
        // Half of the calls wait for a kernel of 100 ms; the others are as fast as a staged copy.
        let latencies: Vec<u64> = (0..100)
            .map(|i| if i % 2 == 0 { 1_500_000 } else { 100_000_000 })
            .collect();
        let busy = copies(Direction::HtoD, MemoryKind::Pageable, 64 << 20, &latencies);
        // Nor is it one where every call waits.
        let stuck = copies(
            Direction::HtoD,
            MemoryKind::Pageable,
            2 << 20,
            &[1_000_000_000; 10],
        );
        let of_stuck = gain(&stuck, &means(16)).saved_s_per_minute;
        assert!(of_stuck.is_some_and(|saved| saved < 0.1), "{of_stuck:?}");
        // A model's output behind 200 ms of its kernels, each time.
        let output = copies(
            Direction::DtoH,
            MemoryKind::Pageable,
            16 << 20,
            &[201_100_000; 49],
        );
        let of_output = gain(&output, &means(16)).saved_s_per_minute;
        assert!(of_output.is_some_and(|saved| saved < 1.2), "{of_output:?}");
        let saved = gain(&busy, &means(16))
            .saved_s_per_minute
            .expect("an estimate");
        assert!(saved < 0.3, "{saved}");
    }

    #[test]
    fn short_copies_that_take_time_are_named() {
        let mib = 1 << 20;
        let to_device = |bytes, latencies: &[u64]| {
            copies(Direction::HtoD, MemoryKind::Pageable, bytes, latencies)
        };
        let trickle = copies(
            Direction::DtoH,
            MemoryKind::Pageable,
            128 << 10,
            &[60_000; 4],
        );
        let (many, few) = (
            to_device(mib, &[1_400_000; 2000]),
            to_device(mib, &[100_000; 20]),
        );
        let slow = to_device(64 * mib, &[9_000_000; 100]);
        let fast = to_device(64 * mib, &[1_400_000; 100]);
        let some = to_device(mib, &[100_000; 600]);
        for (mix, saves, words) in [
            ([&many, &trickle], None, "gain only in a row"),
            ([&few, &trickle], Some(false), "take little time"),
            ([&some, &fast], Some(false), "but where its short copies"),
            (
                [&many, &slow],
                Some(true),
                "and more where its short copies",
            ),
            ([&few, &slow], Some(true), "in every minute"),
        ] {
            let mut found = gain(&mix.map(Vec::clone).concat(), &means(16));
            assert_eq!(found.saved_s_per_minute.map(|saved| saved > 1.0), saves);
            assert!(found.advice.contains(words), "{found:?}");
            found.advice.retain(|letter| letter == ',');
            assert_eq!(
                found.advice.is_empty(),
                words == "in every minute",
                "{words}"
            );
        }
    }

    #[test]
    fn what_cannot_gain_says_so_and_what_is_not_known_is_no_figure() {
        let pinned = copies(
            Direction::HtoD,
            MemoryKind::Pinned,
            64 << 20,
            &[2_000_000; 10],
        );
        let small = copies(Direction::HtoD, MemoryKind::Pageable, 4096, &[20_000; 10]);
        let short = copies(
            Direction::HtoD,
            MemoryKind::Pageable,
            1 << 20,
            &[140_000; 1000],
        );
        let seldom = copies(
            Direction::DtoH,
            MemoryKind::Pageable,
            64 << 10,
            &[20_000; 10],
        );
        let slow = copies(
            Direction::DtoH,
            MemoryKind::Pageable,
            64 << 20,
            &[40_000_000; 10],
        );
        for (copies, means, word, saved) in [
            (&pinned, means(16), "no copies of pageable", Some(0.0)),
            (&small, means(16), "small", Some(0.0)),
            (&short, means(16), "in a row", None),
            (&seldom, means(16), "small", Some(0.0)),
            (&slow, means(1), "one CPU", Some(0.0)),
            (
                &slow,
                Means {
                    link: None,
                    threads: 16,
                },
                "link",
                None,
            ),
            (&vec![], means(16), "no copies", Some(0.0)),
        ] {
            let found = gain(copies, &means);
            assert!(found.advice.contains(word), "{found:?}");
            assert_eq!(found.saved_s_per_minute, saved, "{found:?}");
        }
    }
}
