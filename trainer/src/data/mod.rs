//! Rows of data become steps of tokens.
//!
//! [`DataPlan`] says what is wanted. [`prepare`] reads, renders and caches it once, refuses what
//! cannot teach anything, and counts every token in a [`TokenStats`]. [`TrainLoader`] is then a pure function
//! of the plan, the data set and a [`Cursor`]: restoring the cursor resumes the run.

mod batch;
mod cache;
mod cache_key;
mod dataset;
mod dataset_check;
mod error;
mod loader;
mod order;
mod pack;
mod plan;
mod prepare;
mod render;
mod rows;
mod source;
mod token_stats;
mod token_store;
mod truncation;
mod warnings;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod fixture;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod properties;

pub use batch::{Batch, GlobalBatch, IGNORE_INDEX};
pub use cache::default_cache_dir;
pub use dataset::{Dataset, SampleRef};
pub use error::{DataError, LongSamples};
pub use loader::{Cursor, EvalLoader, TrainLoader};
pub use plan::{
    DataKind, DataPlan, Horizon, Packing, Padding, RowOrder, Sampling, SourcePlan, Truncation, UnrenderedToolCalls,
};
pub use prepare::{PreparedData, prepare};
pub use rows::PackingStats;
pub use source::open;
pub use token_stats::{DatasetCounts, TokenCount, TokenStats, TrainedCounts};
