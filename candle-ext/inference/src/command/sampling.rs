//! Sampling options of the command line.

use anyhow::Result;
use clap::Args;

use crate::answer::sample::SamplingDefaults;
use crate::generate::GenerateOptions;
use crate::lm::Lm;

/// Sampling options.
#[derive(Clone, Copy, Debug, Args)]
pub struct SamplingOptions {
    /// Sampling temperature; 0 is greedy decoding
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Nucleus sampling: sample from the most probable tokens whose probabilities add up to this
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Sampling seed
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Maximum number of new tokens [default: 64; in a chat 512]
    #[arg(long)]
    max_new_tokens: Option<usize>,
}

impl SamplingOptions {
    /// Returns the options, checked against the model's context length. The default maximum shrinks to fit a short
    /// context.
    pub(super) fn options(&self, lm: &Lm, default_max: usize) -> Result<GenerateOptions> {
        let Self { temperature, top_p, seed, max_new_tokens } = *self;
        let max_new_tokens = max_new_tokens.unwrap_or(default_max.min(lm.context().saturating_sub(1)));
        let options = GenerateOptions { max_new_tokens, temperature, top_p, seed };
        options.check(lm.context())?;
        // An invalid generation_config.json is an error here, as in evaluations.
        SamplingDefaults::read(lm.folder())?;
        Ok(options)
    }
}
