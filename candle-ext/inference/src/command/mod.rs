//! The commands `chat`, `generate` and `serve`: options, model loading and loops, shared by all programs.

mod chat;
mod generate;
mod model;
mod sampling;
mod serve;

pub use chat::{ChatOptions, chat};
pub use generate::{GenerateArgs, generate};
pub use model::{ComputeOptions, DtypeOption, ModelOptions, QuantizationOption};
pub use sampling::SamplingOptions;
pub use serve::{ServeOptions, serve};
