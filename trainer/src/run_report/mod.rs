//! HTML report of one or more runs: one self-contained page with curves, final and best values, differing settings, token
//! statistics and environment.
//!
//! `curves` has the data of the charts, which script.js draws; `tables` has the rows of the tables; `numbers` has the same
//! as JSON. The frame of the page is that of the crate `html`.

mod curves;
mod numbers;
mod page;
mod reported_run;
mod tables;

pub use numbers::numbers;
pub use page::{GENERATOR, page};
pub use reported_run::{ReportSetting, ReportedRun, RunsReport, SettingDifference};
