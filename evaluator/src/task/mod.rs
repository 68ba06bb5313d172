//! Tasks: what is asked of a model, and what its answers are worth. The files, prompts and scores are those of
//! lm-evaluation-harness 0.4.13; no tensors and no tokens are known here.
//!
//! [`TaskRegistry`] finds tasks by name, [`Task`] loads one's documents, makes its requests and scores the answers.

mod builtin;
mod config;
mod data;
mod data_override;
mod error;
mod fewshot;
mod fewshot_pool;
mod field;
mod filter;
mod function;
mod generation;
mod group;
mod instance;
mod instance_responses;
mod jinja;
mod keys;
mod load;
mod metric;
mod output_type;
mod prompt;
mod python;
mod python_random;
mod registry;
mod response_value;
mod sample;
mod score;
mod yaml;

pub use builtin::allow_modified_python;
pub use config::TaskConfig;
pub use data::SplitInfo;
pub use data_override::DataOverrides;
pub use error::{ConfigError, SourceLocation, TaskError};
pub use fewshot_pool::FewshotSplit;
pub(crate) use generation::ignored_kwargs;
pub use generation::settings as generation_settings;
pub use group::{GroupAggregate, TaskGroup};
pub use instance::{Instance, Task, TaskDataFiles};
pub use metric::MetricValue;
pub use output_type::OutputType;
pub use prompt::{ChatFormatter, PromptOptions};
pub use registry::{TaskListing, TaskRegistry, TaskSelection};
pub use sample::{ChoiceTargets, SampleRecord, task_hash};
pub use score::{DocCounts, MetricScore, TaskScores};

pub(crate) use metric::{Aggregation, pooled, unweighted, usual_aggregation};
pub(crate) use python::literal::literal_eval;
pub(crate) use python::repr::repr;
pub(crate) use python_random::PythonRandom;
