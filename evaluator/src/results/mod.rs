//! What a run found out, in the form of lm-eval's result files: scores of tasks and groups, the table, comparisons, and pages
//! for people.

mod compare;
mod groups;
mod header;
mod paired;
mod report;
mod schema;
mod table;

pub use compare::{Comparison, Flip, LeftOut, MetricDifference, SampleFile, compare};
pub use groups::assemble;
pub use header::{Header, header};
pub use paired::IntervalBy;
pub use report::{Report, comparison_page};
pub use schema::{Results, TaskRun, TaskScore};
pub use table::{counts, groups_table, table};

/// The quantile of the normal distribution that leaves 2.5 % above it.
const Z: f64 = 1.959_963_984_540_054;
