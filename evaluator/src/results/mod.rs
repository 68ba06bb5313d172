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
pub use groups::assemble;
pub use header::{ResultsHeader, header};
pub use paired::IntervalBy;
pub use report::{HtmlReport, comparison_page};
pub use schema::{ResultEntry, Results, TaskRun};
pub use table::{counts, groups_table, table};

/// 97.5 % quantile of the standard normal distribution, for 95 % confidence intervals.
const Z: f64 = 1.959_963_984_540_054;
