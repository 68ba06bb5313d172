//! The commands `chat` and `generate`, for every program that has them: their options, the model that they load, and their loops.

mod chat;
mod generate;
mod model;
mod sampling;

pub use chat::{ChatOptions, chat};
pub use generate::{GenerateArgs, generate};
pub use model::{ComputeOptions, DtypeOption, ModelOptions};
pub use sampling::SamplingOptions;
