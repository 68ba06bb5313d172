//! HTML report of a comparison of two runs.

use anyhow::Result;
use minijinja::context;
use minijinja::value::Serde;
use serde::Serialize;

use super::super::compare::{Comparison, MetricDifference};
use super::interval::{Interval, Scale};
use super::render;

/// Row of the comparison table: one metric in both runs.
#[derive(Serialize)]
struct ComparisonRow<'c> {
    task: &'c str,
    metric: &'c str,
    arrow: &'c str,
    filter: &'c str,
    n: usize,
    n_unpaired: usize,
    a: String,
    b: String,
    difference: String,
    interval: String,
    /// True if the confidence interval excludes zero.
    is_sure: bool,
    plot: Option<Interval>,
    gained: Vec<usize>,
    lost: Vec<usize>,
}

/// Renders the comparison as HTML. `names` are the names of both runs. Fractions share one axis; each other metric
/// has its own.
pub fn comparison_page(comparison: &Comparison, names: [&str; 2]) -> Result<String> {
    let is_share = |d: &MetricDifference| [d.a, d.b].iter().all(|mean| (0.0..=1.0).contains(mean));
    let shared = Scale::symmetric(comparison.differences.iter().filter(|d| is_share(d)).flat_map(|d| d.interval));
    let scale = |d: &MetricDifference| {
        if is_share(d) { shared } else { Scale::symmetric(d.interval.into_iter().chain([d.difference])) }
    };
    let rows: Vec<ComparisonRow> =
        comparison.differences.iter().map(|difference| row(difference, scale(difference))).collect();
    let [a, b] = names;
    let (end, unpaired, left_out) = (shared.to, Serde(&comparison.unpaired), Serde(&comparison.left_out));
    render("comparison.html", "", context! { a, b, end, unpaired, left_out, rows => Serde(rows) })
}

fn row(d: &MetricDifference, scale: Scale) -> ComparisonRow<'_> {
    let [low, high] = d.interval;
    let is_known = low.is_finite() && high.is_finite();
    let flips = |gained: bool| {
        let own = d.flips.iter().filter(move |flip| (flip.b > flip.a) == gained);
        own.map(|flip| flip.doc_id).collect()
    };
    ComparisonRow {
        task: &d.task,
        metric: &d.metric,
        arrow: if d.higher_is_better { "↑" } else { "↓" },
        filter: &d.filter,
        n: d.n,
        n_unpaired: d.n_unpaired,
        a: format!("{:.4}", d.a),
        b: format!("{:.4}", d.b),
        difference: format!("{:+.4}", d.difference),
        interval: if is_known { format!("{low:+.4} … {high:+.4}") } else { String::new() },
        is_sure: low > 0.0 || high < 0.0,
        plot: d.difference.is_finite().then(|| {
            let within = if is_known { d.interval } else { [d.difference; 2] };
            scale.interval(d.difference, within)
        }),
        gained: flips(true),
        lost: flips(false),
    }
}
