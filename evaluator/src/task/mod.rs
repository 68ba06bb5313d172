//! Tasks: what is asked of a model, and what its answers are worth. The files, prompts and scores are those of
//! lm-evaluation-harness 0.4.13; no tensors and no tokens are known here.
//!
//! [`Registry`] finds tasks by name, [`Task`] loads one's documents, makes its requests and scores the answers.

mod answer;
mod answered;
mod ask;
mod builtin;
mod config;
mod data;
mod data_paths;
mod error;
mod fewshot;
mod field;
mod filter;
mod function;
mod generation;
mod group;
mod jinja;
mod keys;
mod load;
mod mersenne;
mod metric;
mod output_type;
mod prompt;
mod python;
mod registry;
mod sample;
mod score;
mod shots;
mod yaml;

pub use ask::{Instance, Task, TaskData};
pub use builtin::allow_other_python;
pub use config::TaskConfig;
pub use data::SplitData;
pub use data_paths::DataPaths;
pub use error::{Fault, Place, TaskError};
pub use generation::settings as generation_settings;
pub(crate) use generation::without_effect;
pub use group::{Aggregate, Group};
pub use metric::Score;
pub use output_type::OutputType;
pub use prompt::{ChatStyle, PromptOptions};
pub use registry::{Listed, Registry, Selection};
pub use sample::{Choices, Sample, task_hash};
pub use score::{Counts, MetricScore, TaskScores};
pub use shots::FewshotData;

pub(crate) use mersenne::Random;
pub(crate) use metric::{Aggregation, pooled, unweighted, usual_aggregation};
pub(crate) use python::literal::literal_eval;
pub(crate) use python::repr::repr;
