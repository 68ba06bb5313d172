//! The commands `chat` and `generate`: options, model loading and loops, shared by all programs.

mod chat;
mod generate;
mod model;
mod sampling;

pub use chat::{ChatOptions, chat};
pub use generate::{GenerateArgs, generate};
pub use model::{ComputeOptions, DtypeOption, ModelOptions, QuantizationOption};
pub use sampling::SamplingOptions;
