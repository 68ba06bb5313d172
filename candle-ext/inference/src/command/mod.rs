//! The commands `chat`, `generate`, `prefetch` and `serve`: options, model loading and loops, shared by all programs.

mod chat;
mod chat_input;
mod generate;
mod model;
mod parallel;
mod portable_folder;
mod prefetch;
mod reply_printer;
mod sampling;
mod serve;

pub use chat::{ChatOptions, chat};
pub use generate::{GenerateArgs, generate};
pub use model::{ComputeOptions, DtypeOption, ModelOptions, QuantizationOption, TemplateOptions, find_folders};
pub use parallel::ParallelArgs;
pub use prefetch::{Prefetch, PrefetchOptions};
pub use sampling::SamplingOptions;
pub use serve::{ServeOptions, serve};
