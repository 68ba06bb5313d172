//! Results of a run in lm-eval's format: scores of tasks and groups, the table, comparisons of runs, and HTML
//! reports.

mod compare;
mod groups;
mod header;
mod paired;
mod report;
mod schema;
mod table;

pub use compare::{Comparison, FlippedSample, MetricDifference, SampleFile, SkippedMetric, compare};
pub use groups::assemble_results;
pub use header::{ResultsHeader, header_line};
pub use paired::IntervalMethod;
pub use report::{HtmlReport, comparison_page};
pub use schema::{ResultEntry, Results, TaskRun};
pub use table::{groups_table, results_table, skipped_counts};

/// 97.5 % quantile of the standard normal distribution, for 95 % confidence intervals.
const Z_95: f64 = 1.959_963_984_540_054;
