//! The options of sampling.

use anyhow::Result;
use clap::Args;

use crate::answer::sample::SamplingDefaults;
use crate::generate::GenerateOptions;
use crate::lm::Lm;

/// Options of the choice of tokens.
#[derive(Clone, Copy, Debug, Args)]
pub struct SamplingOptions {
    /// 0 takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Sample from the likeliest tokens whose probabilities reach this sum
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Seeds the sampling
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// The most tokens to generate for an answer [default: 64; in a chat 512]
    #[arg(long)]
    max_new_tokens: Option<usize>,
}

impl SamplingOptions {
    /// Returns the options for a model, checked against its context. A default gives way to a short context.
    pub(super) fn options(&self, lm: &Lm, default_max: usize) -> Result<GenerateOptions> {
        let Self { temperature, top_p, seed, max_new_tokens } = *self;
        let max_new_tokens = max_new_tokens.unwrap_or(default_max.min(lm.context().saturating_sub(1)));
        let options = GenerateOptions { max_new_tokens, temperature, top_p, seed };
        options.check(lm.context())?;
        // A broken generation_config.json is refused here as in all evaluations.
        SamplingDefaults::read(lm.folder())?;
        Ok(options)
    }
}
