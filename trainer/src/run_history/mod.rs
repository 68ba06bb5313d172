//! The history of a run, as its files have it: `files` finds run.json and metrics.jsonl, `tail` reads new lines, `rows`
//! keeps the metrics by name and step.
//!
//! `status` decides if the run is in progress, `charts` lists the charts, and `summary` computes final and best values.
//! `trainer watch` and `trainer report` show them. Nothing here writes a file of the run.

mod charts;
mod downsample;
mod files;
mod history;
mod rows;
mod saved_run;
mod status;
mod summary;
mod tail;
mod unit;

pub use charts::{Chart, ChartLine, charts};
pub use downsample::{PointBucket, downsample};
pub use files::RunFiles;
pub use history::RunHistory;
pub use rows::{MetricPoint, MetricRows, RunAxis};
pub use saved_run::SavedRun;
pub use status::RunStatus;
pub use summary::{BetterValue, HistorySummary, SummaryNumber};
pub use unit::MetricUnit;
