//! A plan and what is known of it, as text of 80 columns.

use std::fmt::Write as _;

use super::{From, Kind, Tuned};
use crate::compare::bytes;
use crate::profile::{Class, File, Machine};

/// The report.
pub fn text(tuned: &Tuned) -> String {
    let mut text = String::new();
    let file = &tuned.file;
    if let Some(machine) = &file.machine {
        text += &machine_text(machine);
    }
    let _ = match &tuned.from {
        From::Search => writeln!(
            text,
            "plan: measured by --search {} in {:.1} s",
            tuned.kind.name(),
            tuned.took.as_secs_f64()
        ),
        From::Cache(_) => {
            let measured = file.measured.as_ref();
            writeln!(
                text,
                "plan: measured by --search {} on {}; --fresh measures anew",
                measured.map_or(Kind::Fast, Kind::of).name(),
                measured.map_or("an earlier day", |measured| &measured.date)
            )
        }
        From::File(path) => writeln!(text, "plan: {}", path.display()),
        From::Nearest(name) => writeln!(
            text,
            "plan: measured on the machine most like this one, {name}"
        ),
        From::Estimate => writeln!(text, "plan: estimated, not measured"),
    };
    if let Some(path) = &tuned.cached {
        let _ = writeln!(text, "kept in {}", path.display());
    }
    for note in &tuned.notes {
        text += &wrapped(note);
    }
    text += &plan_text(file);
    text += &classes_text(file);
    text
}

/// The machine in a few lines.
pub fn machine_text(machine: &Machine) -> String {
    let mut gpu = machine.gpu.clone().unwrap_or_else(|| "GPU".to_owned());
    if let Some(link) = &machine.link {
        let _ = write!(gpu, ", {} x{}", link.speed, link.width);
    }
    if let Some(driver) = &machine.driver {
        let _ = write!(gpu, ", driver {driver}");
    }
    let mut cpu = machine.cpu.clone().unwrap_or_else(|| "CPU".to_owned());
    let _ = write!(cpu, ", {} CPUs allowed", machine.cpus);
    if let Some(quota) = machine.quota {
        let _ = write!(cpu, ", quota {quota:.1}");
    }
    wrapped(&gpu) + &wrapped(&cpu)
}

/// The rows of a plan.
pub fn plan_text(file: &File) -> String {
    let mut text = String::new();
    for (direction, rows) in [("HtoD", &file.htod), ("DtoH", &file.dtoh)] {
        let _ = writeln!(text, "\n {direction}, {} cores", file.cores.name());
        if rows.iter().all(|row| !row.stages()) {
            text += "  all              original function\n";
            continue;
        }
        for row in rows {
            let _ = writeln!(text, "  {row}");
        }
    }
    text
}

/// What was measured, if anything was.
pub fn classes_text(file: &File) -> String {
    let Some(measured) = &file.measured else {
        return String::new();
    };
    let has_instant = measured.classes.iter().any(|it| it.instant_gbps.is_some());
    let mut text = String::new();
    for direction in ["HtoD", "DtoH"] {
        let classes: Vec<&Class> = measured
            .classes
            .iter()
            .filter(|class| class.direction == direction)
            .collect();
        if classes.is_empty() {
            continue;
        }
        let _ = write!(
            text,
            "\n {direction} GB/s     stock   tuned  pinned    gain"
        );
        text += match has_instant {
            true => " estimate  fresh: stock   tuned near\n",
            false => "   near\n",
        };
        for class in classes {
            let _ = write!(
                text,
                "  {:<10} {:>6.2}  {:>6.2}  {:>6.2}  {:>5.2}x",
                bytes(class.bytes),
                class.stock_gbps,
                class.tuned_gbps,
                class.pinned_gbps,
                class.tuned_gbps / class.stock_gbps,
            );
            let number = |value: Option<f64>| {
                value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
            };
            let near = format!("{}/{}", class.near, class.finalists);
            let _ = match has_instant {
                true => writeln!(
                    text,
                    " {:>8}  {:>12}  {:>6} {near:>4}",
                    number(class.instant_gbps),
                    number(class.fresh_stock_gbps),
                    number(class.fresh_tuned_gbps),
                ),
                false => writeln!(text, "  {near:>5}"),
            };
        }
    }
    text + &gain_text(file)
}

/// How much better than the estimate, and how flat.
fn gain_text(file: &File) -> String {
    let Some(measured) = &file.measured else {
        return String::new();
    };
    let ratios: Vec<f64> = measured
        .classes
        .iter()
        .filter_map(|class| Some(class.tuned_gbps / class.instant_gbps?))
        .collect();
    let mut text = String::new();
    if !ratios.is_empty() {
        let most = ratios.iter().copied().fold(0.0, f64::max);
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        let _ = writeln!(
            text,
            "\n {mean:.2}x the estimate by the mean of all classes, {most:.2}x at most"
        );
    }
    let staged = measured.classes.iter().filter(|class| class.finalists > 0);
    let (near, finalists) = staged.clone().fold((0, 0), |(near, finalists), class| {
        (near + class.near, finalists + class.finalists)
    });
    let widest = staged.map(|class| class.spread).fold(0.0, f64::max);
    if finalists > 0 {
        let _ = writeln!(
            text,
            " {near} of {finalists} finalists were within 3 % of the best; the widest spread was {:.0} %",
            widest * 100.0
        );
    }
    text
}

/// A sentence in lines that fit.
fn wrapped(sentence: &str) -> String {
    const WIDTH: usize = 80;
    let mut text = String::new();
    let mut column = 0;
    for word in sentence.split(' ') {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > WIDTH {
            text.push('\n');
            column = 0;
        }
        if column > 0 {
            text.push(' ');
            column += 1;
        }
        text += word;
        column += length;
    }
    text.push('\n');
    text
}
