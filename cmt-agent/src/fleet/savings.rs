//! What shorter stops are worth: how often something happens, the seconds that tuning saves in it, the GPUs that stand still
//! meanwhile, and their price. Arithmetic with assumptions, all of which are shown and can be changed.
//!
//! The model is one line: of a GPU's time, `saved seconds / seconds from one event to the next` is given back, on all GPUs of
//! the fleet. The defaults are from "cudamemcpy-tuner: cudaMemcpying 5x faster on a B300" (Zhu, November 2026), which takes
//! the frequencies from the sources named there. That article names no price; its dollars by its GPU-hours are $9 an hour
//! throughout ($435,000 for each second of 5,316 interruptions a year of a job of 32,768 GPUs).

use std::fmt::Write as _;
use std::ops::RangeInclusive;

use anyhow::Context as _;
use serde::Serialize;

use super::prometheus::Prometheus;
use super::query::Window;
use super::report::{RECOVERABLE, change};
use super::time::length;
use crate::trace::table::grouped;

/// A GPU-hour, in dollars.
pub const PRICE: f64 = 9.0;
/// The fleet of the article.
pub const GPUS: u64 = 32_768;
const HOURS_A_YEAR: f64 = 8760.0;
const HOUR_S: f64 = 3600.0;
const DAY_S: f64 = 24.0 * HOUR_S;

/// Something that happens again and again, for which GPUs stand still.
#[derive(Clone, Debug)]
pub struct Event {
    /// As the command line names it.
    pub name: &'static str,
    /// In words.
    pub what: &'static str,
    /// From one to the next, of each GPU: the shortest and the longest that are assumed.
    pub every_s: RangeInclusive<f64>,
    /// What tuning saves each time.
    pub saved_s: f64,
    /// Where the frequency comes from.
    pub often: &'static str,
    /// Where the saving comes from.
    pub saves: &'static str,
}

/// What stands for a source where the user gave a figure.
pub const SAID: &str = "as said on the command line";
/// The load of a model that three events wait for.
const LOAD: &str = "28% of 31 s to load 117 GB";

/// The events of the article.
pub fn events() -> [Event; 6] {
    let gpus = GPUS as f64;
    [
        Event {
            name: "resume",
            what: "a training job resumes after an interruption",
            every_s: 47_000.0 / gpus * HOUR_S..=54_000.0 / gpus * HOUR_S,
            saved_s: 8.7,
            often: "an interruption every 47,000 to 54,000 GPU-hours of a job of 32,768 GPUs",
            saves: LOAD,
        },
        Event {
            name: "weight-sync",
            what: "trainers hand their weights over by disk",
            every_s: 1000.0..=1000.0,
            saved_s: 7.3,
            often: "3% of the time of an RL run (Kimi-K2), here 30 s of every 1000 s",
            saves: "24% of those 30 s",
        },
        Event {
            name: "engine-start",
            what: "an inference engine starts on a spot machine",
            every_s: DAY_S / 0.98..=DAY_S / 0.98,
            saved_s: 8.7,
            often: "0.98 starts a day of each machine",
            saves: LOAD,
        },
        Event {
            name: "wake",
            what: "a model wakes from vLLM's sleep, level 2",
            every_s: DAY_S / 5.0..=DAY_S,
            saved_s: 3.9,
            often: "1 to 5 a day of each model",
            saves: "49% of 7.9 s for a 9B model",
        },
        Event {
            name: "checkpoint",
            what: "training stops for an asynchronous checkpoint",
            every_s: HOUR_S..=HOUR_S,
            saved_s: 0.652,
            often: "one an hour",
            saves: "84% of 0.78 s (Llama 3 70B)",
        },
        Event {
            name: "replica-restart",
            what: "a serving replica restarts",
            every_s: DAY_S / 0.31..=DAY_S / 0.31,
            saved_s: 8.7,
            often: "0.31 a day of each replica",
            saves: LOAD,
        },
    ]
}

/// What one event's savings come to. Pairs are from the rarest to the most frequent that is assumed.
#[derive(Clone, Debug, Serialize)]
pub struct Saving {
    /// As the command line names it.
    pub event: String,
    /// In words.
    pub what: String,
    /// From one to the next: the longest and the shortest.
    pub every_s: [f64; 2],
    /// Saved each time.
    pub saved_s: f64,
    /// Where the frequency comes from.
    pub often: String,
    /// Where the saving comes from.
    pub saves: String,
    /// Of all GPUs' time.
    pub share: [f64; 2],
    /// A year.
    pub gpu_hours: [f64; 2],
    /// A year.
    pub dollars: [f64; 2],
}

/// The whole answer, `cmt/fleet-savings/1`.
#[derive(Clone, Debug, Serialize)]
pub struct Savings {
    /// `cmt/fleet-savings/1`.
    pub schema: &'static str,
    /// GPUs of the fleet.
    pub gpus: u64,
    /// Dollars of a GPU-hour.
    pub price: f64,
    /// By event.
    pub events: Vec<Saving>,
    /// What a fleet's own nodes estimate; null where none was asked.
    pub measured: Option<Saving>,
}

impl Savings {
    /// Those of these events.
    pub fn new(gpus: u64, price: f64, events: &[Event]) -> Self {
        let of = |event: &Event| {
            let every_s = [*event.every_s.end(), *event.every_s.start()];
            let share = every_s.map(|every_s| event.saved_s / every_s);
            saving(event, gpus, price, every_s, share)
        };
        Self {
            schema: "cmt/fleet-savings/1",
            gpus,
            price,
            events: events.iter().map(of).collect(),
            measured: None,
        }
    }

    /// Asks a fleet what its nodes estimate that attach would have given back.
    ///
    /// # Errors
    /// When Prometheus does not answer, or knows no node there.
    pub fn ask(
        &mut self,
        prometheus: &Prometheus,
        window: Window,
        matchers: &str,
    ) -> anyhow::Result<()> {
        let sums = change(prometheus, window, matchers, false)?.sums(RECOVERABLE, &[])?;
        let recoverable_s = sums.values().next().copied().context(
            "no node estimates what attach would give back: nothing is measured; without --prometheus assumptions are shown",
        )?;
        self.measure(recoverable_s, window.seconds());
        Ok(())
    }

    fn measure(&mut self, recoverable_s: f64, range_s: f64) {
        let event = Event {
            name: "measured",
            what: "pageable copies that attach would speed up",
            every_s: range_s..=range_s,
            saved_s: recoverable_s,
            often: "the range that was asked about",
            saves: "all nodes' estimate (docs/trace.md), as if a GPU stood still while a thread of its process copies",
        };
        let share = recoverable_s / range_s / self.gpus as f64;
        self.measured = Some(saving(
            &event,
            self.gpus,
            self.price,
            [range_s; 2],
            [share; 2],
        ));
    }

    /// The answer as text of at most 80 columns.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{} GPUs (--gpus), ${:.2} a GPU-hour (--price), {HOURS_A_YEAR} hours a year\n",
            grouped(self.gpus),
            self.price
        );
        for saving in self.events.iter().chain(&self.measured) {
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "\n{}: {}\n  {:<22} {}\n  {:<22} {}\n  {:<22} {} of the fleet's time\n  {:<22} {}\n  {:<22} {}\n",
                saving.event,
                saving.what,
                "happens every",
                pair(saving.every_s, length),
                "saved each time",
                length(saving.saved_s),
                "given back",
                pair(saving.share, percent),
                "GPU-hours a year",
                pair(saving.gpu_hours, |hours| grouped(hours.round() as u64)),
                "a year",
                pair(saving.dollars, |dollars| format!(
                    "${}",
                    grouped(dollars.round() as u64)
                )),
            );
            text += &wrapped(&format!("assumed: {}; {}", saving.often, saving.saves));
        }
        text + "\nChange them with --event NAME --every TIME[..TIME] --seconds N.\n"
    }
}

fn saving(event: &Event, gpus: u64, price: f64, every_s: [f64; 2], share: [f64; 2]) -> Saving {
    let gpu_hours = share.map(|share| share * gpus as f64 * HOURS_A_YEAR);
    Saving {
        event: event.name.into(),
        what: event.what.into(),
        every_s,
        saved_s: event.saved_s,
        often: event.often.into(),
        saves: event.saves.into(),
        share,
        gpu_hours,
        dollars: gpu_hours.map(|hours| hours * price),
    }
}

/// Three digits.
fn percent(share: f64) -> String {
    let percent = share * 100.0;
    let decimals = (2.0 - percent.max(1e-9).log10().floor()).clamp(0.0, 9.0);
    format!("{percent:.*}%", decimals as usize)
}

fn pair(values: [f64; 2], shown: impl Fn(f64) -> String) -> String {
    let [one, other] = values.map(shown);
    match one == other {
        true => one,
        false => format!("{one} to {other}"),
    }
}

/// Lines of at most 80 columns, indented.
fn wrapped(sentence: &str) -> String {
    let mut text = String::from(" ");
    let mut used = 1;
    for word in sentence.split(' ') {
        if used + 1 + word.chars().count() > 80 {
            text += "\n   ";
            used = 3;
        }
        used += 1 + word.chars().count();
        text = text + " " + word;
    }
    text + "\n"
}

/// Parses `1h` or `1.4h..1.6h`, into seconds.
///
/// # Errors
/// A sentence.
pub fn every(text: &str) -> Result<RangeInclusive<f64>, String> {
    let (from, to) = text.split_once("..").unwrap_or((text, text));
    let seconds = |text| super::time::range(text).map(|range| range.as_secs_f64());
    let (from, to) = (seconds(from)?, seconds(to)?);
    Ok(from.min(to)..=from.max(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn article(gpus: u64) -> Vec<Saving> {
        Savings::new(gpus, PRICE, &events()).events
    }

    /// Whether both ends are what the article rounds them to.
    fn assert_near(found: [f64; 2], said: [f64; 2], within: f64) {
        for (found, said) in found.into_iter().zip(said) {
            assert!((found / said - 1.0).abs() < within, "{found} for {said}");
        }
    }

    #[test]
    fn each_second_of_a_restart_costs_what_the_article_says() {
        let [mut resume, ..] = events();
        resume.saved_s = 1.0;
        let of = |gpus| {
            Savings::new(gpus, PRICE, std::slice::from_ref(&resume))
                .events
                .remove(0)
        };
        let small = of(32_768);
        assert_near(small.every_s, [1.6 * HOUR_S, 1.4 * HOUR_S], 0.04);
        assert_near(small.share, [0.000_17, 0.000_19], 0.02);
        assert_near(small.dollars, [435_000.0, 500_000.0], 0.005);
        let large = of(1_000_000);
        assert_near(large.gpu_hours, [1.5e6, 1.7e6], 0.02);
        assert_near(large.dollars, [13e6, 15e6], 0.025);
    }

    #[test]
    fn the_other_events_too() {
        let small = article(32_768);
        for (saving, said) in small.iter().zip([
            [3.8e6, 4.3e6],
            [19e6, 19e6],
            [256e3, 256e3],
            [117e3, 584e3],
            [467e3, 467e3],
            [81e3, 81e3],
        ]) {
            assert_near(saving.dollars, said, 0.015);
        }
    }

    #[test]
    fn the_text_fits_and_frequencies_are_understood() {
        let mut savings = Savings::new(1_000_000_000, 100.0, &events());
        savings.measure(3600.0, 3600.0);
        let text = savings.text();
        assert!(
            text.lines().all(|line| line.chars().count() <= 80),
            "{text}"
        );
        assert_eq!(every("1.4h..1.6h"), Ok(5040.0..=5760.0));
        assert_eq!(every("1d"), Ok(86_400.0..=86_400.0));
        assert!(every("often").is_err());
    }
}
