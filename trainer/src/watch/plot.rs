//! Points, ranges and labels of a chart in the terminal.

use candlewick_text::quantity::grouped;

use crate::metrics::{clock, quantity};
use crate::run_history::{Chart, MetricPoint, MetricRows, MetricUnit, RunAxis, downsample};

/// Scale of the y axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlotScale {
    Linear,
    Log,
}

/// Quantity of the x axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlotAxis {
    Step,
    Tokens,
    Time,
}

/// Line of a plot.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PlotLine {
    pub(super) label: String,
    /// Index of the metric in the chart.
    pub(super) idx: usize,
    pub(super) style: PlotStyle,
    /// Positions in the units of both axes. On a logarithmic scale, y is the logarithm.
    pub(super) points: Vec<(f64, f64)>,
}

/// Style of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlotStyle {
    /// Recorded values next to smoothed ones.
    Faint,
    Line,
    /// Few values, each with a mark.
    Marked,
}

/// Settings of a plot.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlotSettings {
    pub(super) scale: PlotScale,
    pub(super) x_axis: PlotAxis,
    /// Weight of the moving average; 0 for none.
    pub(super) weight: f64,
    /// Points of a line.
    pub(super) most: usize,
}

/// Lines of a chart with the ranges of both axes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plot {
    pub(super) lines: Vec<PlotLine>,
    pub(super) x_bounds: [f64; 2],
    pub(super) y_bounds: [f64; 2],
    pub(super) x_labels: Vec<String>,
    pub(super) y_labels: Vec<String>,
}

/// Metrics that are not smoothed, because they do not vary at random.
const EXACT: [&str; 3] = ["lr", "loss_scale", "num_zeros"];
/// Fewest points of a line that is smoothed.
const FEWEST_SMOOTHED: usize = 30;
/// Most points of a line whose points are marked.
const MOST_MARKED: usize = 60;

impl PlotScale {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Linear => Self::Log,
            Self::Log => Self::Linear,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Log => "log",
        }
    }

    /// Returns the position of a value; `None` for one that a logarithmic scale cannot show.
    fn position(self, value: f64) -> Option<f64> {
        match self {
            Self::Linear => Some(value).filter(|value| value.is_finite()),
            Self::Log => Some(value.log10()).filter(|value| value.is_finite()),
        }
    }

    fn value(self, position: f64) -> f64 {
        match self {
            Self::Linear => position,
            Self::Log => 10f64.powf(position),
        }
    }
}

impl PlotAxis {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Step => Self::Tokens,
            Self::Tokens => Self::Time,
            Self::Time => Self::Step,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::Tokens => "tokens",
            Self::Time => "training time",
        }
    }

    fn position(self, axis: &RunAxis, step: u64) -> f64 {
        match self {
            Self::Step => step as f64,
            Self::Tokens => axis.tokens_at(step),
            Self::Time => axis.seconds_at(step),
        }
    }

    fn label(self, value: f64) -> String {
        match self {
            Self::Step => grouped(value.round().max(0.0) as usize),
            Self::Tokens => quantity(value.round()),
            Self::Time => clock(value.max(0.0)),
        }
    }
}

impl Plot {
    /// Returns the plot of a chart; `None` if it has no value that the scale can show.
    pub(super) fn of(chart: &Chart, rows: &MetricRows, axis: &RunAxis, settings: PlotSettings) -> Option<Self> {
        let of_line =
            |(idx, key, label): (usize, &str, &str)| lines(idx, label, (key, rows.series(key)), axis, settings);
        let named = chart.lines.iter().enumerate().map(|(idx, line)| (idx, line.key.as_str(), line.label.as_str()));
        let lines: Vec<PlotLine> = named.flat_map(of_line).collect();
        let points = || lines.iter().flat_map(|line| &line.points);
        let x_bounds = range(points().map(|point| point.0))?;
        let y_bounds = padded(range(points().map(|point| point.1))?, settings.scale);
        let x_labels = [0.0, 0.5, 1.0].map(|part| settings.x_axis.label(between(x_bounds, part))).to_vec();
        let y_labels = [0.0, 0.25, 0.5, 0.75, 1.0]
            .map(|part| label(chart.unit, settings.scale.value(between(y_bounds, part))))
            .to_vec();
        let x_bounds = if x_bounds[0] == x_bounds[1] { [x_bounds[0] - 0.5, x_bounds[1] + 0.5] } else { x_bounds };
        Some(Self { lines, x_bounds, y_bounds, x_labels, y_labels })
    }
}

/// Returns the lines of a metric: recorded values, and smoothed ones if they are smoothed.
fn lines(
    idx: usize,
    label: &str,
    (key, points): (&str, &[MetricPoint]),
    axis: &RunAxis,
    settings: PlotSettings,
) -> Vec<PlotLine> {
    let is_exact = EXACT.contains(&key) || key.contains("eval") || points.len() < FEWEST_SMOOTHED;
    let is_smoothed = settings.weight > 0.0 && !is_exact;
    let style = match points.len() {
        _ if is_smoothed => PlotStyle::Faint,
        n if n <= MOST_MARKED && key.contains("eval") || n == 1 => PlotStyle::Marked,
        _ => PlotStyle::Line,
    };
    let line = |points: &[MetricPoint], style: PlotStyle| PlotLine {
        label: label.to_owned(),
        idx,
        style,
        points: positions(points, axis, settings),
    };
    let recorded = line(points, style);
    let smoothed = is_smoothed.then(|| line(&smoothed(points, settings.weight), PlotStyle::Line));
    [Some(recorded), smoothed].into_iter().flatten().filter(|line| !line.points.is_empty()).collect()
}

/// Returns the positions of a series. A longer one has the lowest and the highest value of each bucket.
fn positions(points: &[MetricPoint], axis: &RunAxis, settings: PlotSettings) -> Vec<(f64, f64)> {
    let (buckets, _) = downsample(points, settings.most);
    let of_bucket = |bucket: &crate::run_history::PointBucket| {
        let x = settings.x_axis.position(axis, bucket.step);
        let ends = if bucket.low == bucket.high { vec![bucket.low] } else { vec![bucket.low, bucket.high] };
        ends.into_iter().filter_map(move |value| Some((x, settings.scale.position(value)?))).collect::<Vec<_>>()
    };
    buckets.iter().flat_map(of_bucket).collect()
}

/// Returns an exponential moving average of the finite values, without the bias to its start.
fn smoothed(points: &[MetricPoint], weight: f64) -> Vec<MetricPoint> {
    let (mut sum, mut norm) = (0.0, 0.0);
    let finite = points.iter().filter(|point| point.value.is_finite());
    let average = finite.map(|point| {
        sum = weight * sum + (1.0 - weight) * point.value;
        norm = weight * norm + (1.0 - weight);
        MetricPoint { step: point.step, value: sum / norm }
    });
    average.collect()
}

fn range(values: impl Iterator<Item = f64>) -> Option<[f64; 2]> {
    let [low, high] = values.fold([f64::INFINITY, f64::NEG_INFINITY], |[l, h], v| [l.min(v), h.max(v)]);
    (low <= high).then_some([low, high])
}

/// Widens a range by a few percent, so that a line does not touch the frame. Zero stays an end.
fn padded([low, high]: [f64; 2], scale: PlotScale) -> [f64; 2] {
    let pad = if high > low { 0.04 * (high - low) } else { (0.05 * high.abs()).max(1e-9) };
    let is_at_zero = scale == PlotScale::Linear && low >= 0.0 && low < pad;
    [if is_at_zero { 0.0 } else { low - pad }, high + pad]
}

fn between([low, high]: [f64; 2], part: f64) -> f64 {
    low + part * (high - low)
}

/// Formats a label of the y axis in few characters.
fn label(unit: MetricUnit, value: f64) -> String {
    match unit {
        MetricUnit::Plain if (0.01..1e4).contains(&value.abs()) => format!("{value:.2}"),
        MetricUnit::Seconds if value < 59.0 => format!("{value:.2}s"),
        unit => unit.format(value),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::run_history::charts;

    const SETTINGS: PlotSettings =
        PlotSettings { scale: PlotScale::Linear, x_axis: PlotAxis::Step, weight: 0.0, most: 100 };

    fn rows(losses: &[f64]) -> MetricRows {
        let mut rows = MetricRows::default();
        for (step, loss) in (1..).zip(losses) {
            let json = serde_json::json!({"iter": step, "loss": loss, "tokens": 10, "step_time": 60.0});
            rows.push(json.to_string().as_bytes());
        }
        rows
    }

    fn plot(losses: &[f64], settings: PlotSettings) -> Option<Plot> {
        let rows = rows(losses);
        Plot::of(&charts([&rows])[0], &rows, &rows.axis(), settings)
    }

    #[test]
    fn positions_have_the_units_of_their_axes() {
        let x = |x_axis| plot(&[4.0, 2.0], PlotSettings { x_axis, ..SETTINGS }).unwrap();
        assert_eq!(x(PlotAxis::Step).lines[0].points, [(1.0, 4.0), (2.0, 2.0)]);
        assert_eq!(x(PlotAxis::Tokens).lines[0].points, [(10.0, 4.0), (20.0, 2.0)]);
        assert_eq!(x(PlotAxis::Time).x_labels, ["0:01:00", "0:01:30", "0:02:00"]);
        let log = plot(&[100.0, 0.0, -1.0, 10.0], PlotSettings { scale: PlotScale::Log, ..SETTINGS }).unwrap();
        assert_eq!(log.lines[0].points, [(1.0, 2.0), (4.0, 1.0)]);
        assert_eq!(plot(&[0.0], PlotSettings { scale: PlotScale::Log, ..SETTINGS }), None);
    }

    #[test]
    fn one_value_and_equal_values_have_a_range() {
        for losses in [&[2.0][..], &[2.0, 2.0], &[0.0], &[f64::NAN, 2.0, f64::NAN]] {
            let plot = plot(losses, SETTINGS).unwrap();
            assert!(plot.x_bounds[0] < plot.x_bounds[1] && plot.y_bounds[0] < plot.y_bounds[1], "{plot:?}");
        }
        assert_eq!(plot(&[f64::NAN], SETTINGS), None);
    }

    #[test]
    fn smoothing_adds_a_line_and_keeps_the_recorded_values() {
        let losses: Vec<f64> = (0..50).map(|i| f64::from(i % 2)).collect();
        let plot = plot(&losses, PlotSettings { weight: 0.9, ..SETTINGS }).unwrap();
        let styles: Vec<PlotStyle> = plot.lines.iter().map(|line| line.style).collect();
        assert_eq!(styles, [PlotStyle::Faint, PlotStyle::Line]);
        let last = plot.lines[1].points.last().unwrap().1;
        assert!((last - 0.5).abs() < 0.06 && plot.lines[1].points[0].1 == 0.0, "{last}");
    }

    #[test]
    fn a_long_series_keeps_its_spikes() {
        let mut losses = vec![1.0; 10_000];
        losses[5_000] = 70.0;
        let plot = plot(&losses, SETTINGS).unwrap();
        assert!(plot.lines[0].points.len() <= 200 && plot.y_bounds[1] > 70.0, "{:?}", plot.y_bounds);
    }
}
