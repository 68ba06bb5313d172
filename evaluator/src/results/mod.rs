//! What a run found out, in the form of lm-eval's result files: scores of tasks and groups, the table, comparisons, and pages
//! for people.

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

/// The quantile of the normal distribution that leaves 2.5 % above it.
const Z: f64 = 1.959_963_984_540_054;
