//! Evaluation tasks of lm-evaluation-harness 0.4.13: configuration, documents, prompts, filters and metrics. This
//! module does not depend on models or tokenizers.
//!
//! [`TaskRegistry`] finds tasks by name. [`Task`] loads documents, builds requests and scores the responses.

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
mod unsafe_code;
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
pub use unsafe_code::{UnsafeCodeOptions, UnsafeCodePolicy};

pub(crate) use metric::{Aggregation, default_aggregation, pooled_stderr, unweighted_stderr};
pub(crate) use python::literal::literal_eval;
pub(crate) use python::repr::repr;
pub(crate) use python_random::PythonRandom;
