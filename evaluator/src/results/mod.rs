//! What a run found out, in the form of lm-eval's result files: scores of tasks and groups, the table, and comparisons.

mod compare;
mod groups;
mod schema;
mod table;

pub use compare::{Comparison, Flip, MetricDifference, SampleFile, compare};
pub use groups::assemble;
pub use schema::{Results, TaskRun, TaskScore};
pub use table::{groups_table, table};
