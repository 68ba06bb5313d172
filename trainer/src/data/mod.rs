//! The data pipeline: rows of data sets to global batches of tokens.
//!
//! [`DataPlan`] has the settings. [`prepare`] reads, renders, tokenizes and caches the data once, refuses data without
//! targets, and counts every token in [`TokenStats`]. [`TrainLoader`] is a pure function of the plan, the data set and
//! a [`Cursor`]: restoring the cursor resumes the run. [`TrainSteps`] adds prefetching, and streams of rows that are
//! tokenized while training ([`prepare_stream`]).

mod batch;
mod cache;
mod cache_key;
mod dataset;
mod dataset_check;
mod error;
mod loader;
mod mixture;
mod order;
mod pack;
mod plan;
mod prefetch;
mod prepare;
mod render;
mod report;
mod rows;
mod source;
mod steps;
mod stream;
mod stream_loader;
mod token_count;
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
pub(crate) use cache::{CacheEntryUse, describe_cache_entry, remove_cache_entry};
pub use dataset::{Dataset, SampleRef};
pub use error::{DataError, LongSamples};
pub use loader::{Cursor, EvalLoader, TrainLoader};
pub use mixture::SourceCounts;
pub(crate) use plan::TOKEN_IDS;
pub use plan::{
    DataKind, DataPlan, Horizon, MaskingStrategy, Mixture, Packing, PackingStrategy, Padding, RowOrder, Sampling,
    SnowflakePlan, SourcePlan, StoppingStrategy, StreamingPlan, TrainOnEos, TrainedRole, Truncation,
    UnrenderedMessages,
};
pub use prepare::{PreparedData, prepare, prepare_stream_until, prepare_until, prepare_without_caching};
pub use report::{DataReport, LengthBin, LengthHistogram};
pub use rows::PackingStats;
pub(crate) use source::hub_repo;
pub use source::{SourceUse, open};
pub use steps::{EpochSize, StepSource, TrainSteps};
pub use stream::{ReaderShard, StreamedData};
pub use stream_loader::PartExchange;
pub use token_count::TokenCount;
pub use token_stats::{DatasetCounts, TokenStats, TrainedCounts};
