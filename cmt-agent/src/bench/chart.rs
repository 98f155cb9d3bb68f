//! One graph as SVG for a page of HTML. Colours are left to the page's style sheet.

use anyhow::anyhow;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::prelude::*;

use crate::compare;

/// Size in the units of the SVG; the page scales it.
const SIZE: (u32, u32) = (480, 320);
/// Size of axis labels, so that they can be read at the width of a telephone.
const FONT: i32 = 20;
/// The style sheet shows this as the page's text colour.
const INK: RGBColor = RGBColor(1, 1, 1);

/// What an axis counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Bytes, by powers of two.
    Bytes,
    /// Things, evenly from 0.
    Count,
    /// 1e9 bytes a second, evenly from 0.
    Rate,
    /// The same by powers of ten.
    RateByTens,
    /// Nanoseconds by powers of ten.
    Duration,
}

/// One line, and the band around it.
pub struct Series {
    /// Position in the page's list of colours, below 256.
    pub colour: u8,
    /// x, median, and the lower and the upper end of the band.
    pub points: Vec<(f64, f64, f64, f64)>,
}

/// Draws it; an empty string without points.
pub fn draw(x: Axis, y: Axis, series: &[Series]) -> anyhow::Result<String> {
    let points = || series.iter().flat_map(|series| &series.points);
    if points().next().is_none() {
        return Ok(String::new());
    }
    let x = Scale::of(x, points().map(|point| point.0));
    let y = Scale::of(y, points().flat_map(|point| [point.1, point.2, point.3]));
    let mut svg = String::new();
    draw_on(&mut svg, x, y, series).map_err(|error| anyhow!("drawing: {error}"))?;
    // Inline, it needs no namespace, and no fixed size.
    Ok(svg
        .replacen("xmlns=\"http://www.w3.org/2000/svg\"", "role=\"img\"", 1)
        .replacen(
            &format!("width=\"{}\" height=\"{}\" ", SIZE.0, SIZE.1),
            "",
            1,
        ))
}

fn draw_on(
    svg: &mut String,
    x: Scale,
    y: Scale,
    series: &[Series],
) -> Result<(), Box<dyn std::error::Error>> {
    let (x_axis, y_axis) = (x.axis, y.axis);
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let mut chart = ChartBuilder::on(&root)
        .margin(6)
        .margin_top(14)
        .margin_right(28)
        .x_label_area_size(32)
        .y_label_area_size(74)
        .build_cartesian_2d(x, y)?;
    let font = ("sans-serif", FONT).into_font().color(&INK);
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(INK.mix(0.15))
        .axis_style(INK.mix(0.5))
        .label_style(font)
        .x_label_formatter(&|value| x_axis.label(*value))
        .y_label_formatter(&|value| y_axis.label(*value))
        .draw()?;
    for line in series {
        let colour = RGBColor(line.colour, 254, 253);
        let lower = line.points.iter().map(|point| (point.0, point.2));
        let upper = line.points.iter().rev().map(|point| (point.0, point.3));
        let band: Vec<(f64, f64)> = lower.chain(upper).collect();
        chart.draw_series([Polygon::new(band, colour.mix(0.2))])?;
        let median = || line.points.iter().map(|point| (point.0, point.1));
        chart.draw_series(LineSeries::new(median(), colour.stroke_width(2)))?;
        chart.draw_series(median().map(|point| Circle::new(point, 3, colour.filled())))?;
    }
    root.present()?;
    Ok(())
}

impl Axis {
    /// Where a value stands on the axis.
    fn place(self, value: f64) -> f64 {
        match self {
            Self::Bytes => value.max(1.0).log2(),
            Self::Count | Self::Rate => value,
            Self::RateByTens => value.max(1e-3).log10(),
            Self::Duration => value.max(1.0).log10(),
        }
    }

    /// The value that stands at a place.
    fn value(self, place: f64) -> f64 {
        match self {
            Self::Bytes => place.exp2().round(),
            Self::Count | Self::Rate => place,
            Self::RateByTens => 10f64.powf(place),
            Self::Duration => 10f64.powf(place).round(),
        }
    }

    fn label(self, value: f64) -> String {
        match self {
            Self::Bytes => compare::bytes(value as u64),
            Self::Count | Self::Rate => format!("{}", (value * 1e3).round() / 1e3),
            Self::RateByTens if value < 1.0 => format!("{value}"),
            Self::RateByTens => format!("{value:.0}"),
            Self::Duration => compare::duration(value as u64)
                .replace(".00", "")
                .replace(".0", ""),
        }
    }
}

/// An axis from one value to another.
struct Scale {
    axis: Axis,
    /// Both ends, as places on the axis.
    from: f64,
    to: f64,
    /// Values to label.
    ticks: Vec<f64>,
}

impl Scale {
    /// The part of the axis that holds all values.
    fn of(axis: Axis, values: impl Iterator<Item = f64>) -> Self {
        let places = values.map(|value| axis.place(value));
        let (least, most) = places.fold(
            (f64::INFINITY, f64::NEG_INFINITY),
            |(least, most), place| (least.min(place), most.max(place)),
        );
        let (from, to, step) = match axis {
            Axis::Bytes => {
                let step = if most - least > 10.0 { 4.0 } else { 2.0 };
                (least, most.max(least + 1.0), step)
            }
            Axis::RateByTens | Axis::Duration => {
                (least.floor(), most.ceil().max(least.floor() + 1.0), 1.0)
            }
            Axis::Rate | Axis::Count => {
                let step = match axis {
                    Axis::Count => even_step(most).max(1.0),
                    _ => even_step(most),
                };
                (0.0, (most / step).ceil() * step, step)
            }
        };
        let count = ((to - from) / step + 1e-9).floor() as usize;
        let ticks = (0..=count)
            .map(|index| axis.value(from + index as f64 * step))
            .collect();
        Self {
            axis,
            from,
            to,
            ticks,
        }
    }
}

impl Ranged for Scale {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (low, high): (i32, i32)) -> i32 {
        let part = (self.axis.place(*value) - self.from) / (self.to - self.from);
        low + (part * f64::from(high - low)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match hint.weight().allow_light_points() {
            true => Vec::new(),
            false => self.ticks.clone(),
        }
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.axis.value(self.from)..self.axis.value(self.to)
    }
}

/// A round step that divides `most` into four to eight parts.
fn even_step(most: f64) -> f64 {
    let rough = (most / 5.0).max(1e-3);
    let ten = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * ten)
        .find(|&step| step >= rough)
        .unwrap_or(ten)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_labels_short() {
        assert_eq!(
            (even_step(55.0), even_step(3.0), even_step(16.0)),
            (20.0, 1.0, 5.0)
        );
        assert_eq!(Axis::Bytes.label(65536.0), "64 KiB");
        assert_eq!(Axis::Duration.label(1e6), "1 ms");
        assert_eq!(Axis::RateByTens.label(0.1), "0.1");
        assert_eq!(Axis::RateByTens.label(100.0), "100");
    }

    #[test]
    fn a_graph_loads_nothing_and_one_without_points_is_empty() {
        let line = Series {
            colour: 3,
            points: vec![(4096.0, 1.0, 0.5, 2.0), (8192.0, 3.0, 3.0, 3.0)],
        };
        let svg = draw(Axis::Bytes, Axis::Rate, &[line]).expect("drawn");
        assert!(svg.contains("#03FEFD"), "{svg}");
        assert!(!svg.contains("http"), "{svg}");
        assert_eq!(draw(Axis::Bytes, Axis::Rate, &[]).expect("nothing"), "");
    }
}
