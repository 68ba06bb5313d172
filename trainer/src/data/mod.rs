//! Rows of data become steps of tokens.
//!
//! [`DataPlan`] says what is wanted. [`prepare`] reads, renders and caches it once, refuses what
//! cannot teach anything, and counts every token in a [`Ledger`]. [`Stream`] is then a pure function
//! of the plan, the data set and a [`Cursor`]: restoring the cursor resumes the run.

mod batch;
mod cache;
mod check;
mod cut;
mod dataset;
mod error;
mod key;
mod ledger;
mod oddities;
mod order;
mod pack;
mod plan;
mod prepare;
mod render;
mod rows;
mod source;
mod store;
mod stream;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod fixture;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod laws;

pub use batch::{Batch, IGNORE_INDEX, Step};
pub use cache::default_cache_dir;
pub use dataset::{Dataset, SampleRef};
pub use error::{DataError, OverlongSamples};
pub use ledger::{Count, Counts, Ledger, Seen};
pub use plan::{DataPlan, Horizon, Kind, Order, Overlong, Packing, Padding, Sampling, SourcePlan, UnrenderedToolCalls};
pub use prepare::{Prepared, prepare};
pub use rows::Fill;
pub use source::open;
pub use stream::{Cursor, EvalStream, Stream};
