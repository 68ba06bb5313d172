//! Data of the charts, for the script of the page.

use std::collections::BTreeMap;

use serde::Serialize;

use super::reported_run::{ReportedRun, RunsReport};
use crate::run_history::{Chart, MetricPoint, PointBucket, charts, downsample};

/// Points of a curve. A longer series is downsampled, with the extremes of each bucket.
pub(super) const MOST_POINTS: usize = 1_000;

/// Data of all charts.
#[derive(Serialize)]
pub(super) struct ReportCurves<'r> {
    charts: Vec<Chart>,
    runs: Vec<RunCurves<'r>>,
}

/// Curves of a run.
#[derive(Serialize)]
struct RunCurves<'r> {
    label: &'r str,
    axis: DownsampledAxis,
    series: BTreeMap<String, Curve>,
    /// Steps after which the run resumed.
    resumes: Vec<usize>,
}

/// Tokens and seconds at some steps. Between these they are linear.
#[derive(Serialize)]
struct DownsampledAxis {
    step: Vec<u64>,
    tokens: Vec<f64>,
    time: Vec<f64>,
}

/// Curve of a metric.
#[derive(Serialize)]
struct Curve {
    /// Steps.
    step: Vec<u64>,
    /// Values, or means of buckets.
    value: Vec<f64>,
    /// Least value of each bucket; absent if every point is shown.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    low: Vec<f64>,
    /// Largest value of each bucket.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    high: Vec<f64>,
    /// Steps whose value is not finite.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_finite: Vec<u64>,
}

impl<'r> ReportCurves<'r> {
    /// Downsamples the metrics of all charts.
    pub(super) fn of(report: &'r RunsReport) -> Self {
        let charts = charts(report.runs.iter().map(|run| &run.history.rows));
        let keys = || charts.iter().flat_map(|chart| &chart.lines).map(|line| line.key.as_str());
        let runs = report.runs.iter().map(|run| RunCurves::of(run, keys())).collect();
        Self { charts, runs }
    }
}

impl<'r> RunCurves<'r> {
    fn of<'k>(run: &'r ReportedRun, keys: impl Iterator<Item = &'k str>) -> Self {
        let rows = &run.history.rows;
        let with_points = keys.filter(|key| !rows.series(key).is_empty());
        Self {
            label: &run.label,
            axis: DownsampledAxis::of(run),
            series: with_points.map(|key| (key.to_owned(), Curve::of(rows.series(key)))).collect(),
            resumes: rows.resumes().iter().map(|record| record.iter).collect(),
        }
    }
}

impl DownsampledAxis {
    fn of(run: &ReportedRun) -> Self {
        let axis = run.history.rows.axis();
        let n = axis.steps.len();
        let every = n.div_ceil(MOST_POINTS).max(1);
        let at: Vec<usize> = (0..n).filter(|idx| idx % every == 0 || idx + 1 == n).collect();
        let pick = |values: &[f64]| at.iter().map(|idx| short(values[*idx])).collect();
        Self {
            step: at.iter().map(|idx| axis.steps[*idx]).collect(),
            tokens: pick(&axis.tokens),
            time: pick(&axis.seconds),
        }
    }
}

impl Curve {
    fn of(points: &[MetricPoint]) -> Self {
        let (buckets, mut not_finite) = downsample(points, MOST_POINTS);
        let every = not_finite.len().div_ceil(MOST_POINTS).max(1);
        let mut idx = 0;
        not_finite.retain(|_| {
            idx += 1;
            (idx - 1) % every == 0
        });
        let all = |of: fn(&PointBucket) -> f64| buckets.iter().map(|bucket| short(of(bucket))).collect();
        let is_downsampled = points.len() > MOST_POINTS;
        let ends = |of: fn(&PointBucket) -> f64| if is_downsampled { all(of) } else { Vec::new() };
        Self {
            step: buckets.iter().map(|bucket| bucket.step).collect(),
            value: all(|bucket| bucket.mean),
            low: ends(|bucket| bucket.low),
            high: ends(|bucket| bucket.high),
            not_finite,
        }
    }
}

/// Rounds to seven significant digits, which a plot cannot show, to keep the page small.
fn short(value: f64) -> f64 {
    format!("{value:.6e}").parse().unwrap_or(value)
}
