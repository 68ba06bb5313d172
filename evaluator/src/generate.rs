//! Generation: continues one prompt, token by token, with a KV cache.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use candlewick_parallel::{Engine, KvCache};
use serde::Serialize;

/// How the next token is chosen and when to stop.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// The most tokens to generate.
    pub max_new_tokens: usize,
    /// 0 takes the likeliest token; above, the logits are divided by it before sampling.
    pub temperature: f64,
    /// Samples only from the likeliest tokens whose probabilities reach this sum. 1 means all.
    pub top_p: f64,
    /// Seeds the sampling.
    pub seed: u64,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { max_new_tokens: 64, temperature: 0.0, top_p: 1.0, seed: 42 }
    }
}

/// How long a generation took. Loading the model and reading the prompt are not in it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timings {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Seconds until the first new token was chosen.
    pub prompt_time: f64,
    /// New tokens, without the stop token that ended them.
    pub new_tokens: usize,
    /// Seconds for those after the first.
    pub decode_time: f64,
    /// `new_tokens` over both times.
    pub tokens_per_second: f64,
}

/// Returns the tokens that continue `prompt`, without the stop token that ended them.
pub fn generate(
    engine: &Engine,
    prompt: &[u32],
    stop: &[u32],
    options: &GenerateOptions,
) -> Result<(Vec<u32>, Timings)> {
    ensure!(!prompt.is_empty(), "failed to generate: the prompt has no tokens");
    let mut sampler = LogitsProcessor::from_sampling(options.seed, options.sampling());
    let cache = KvCache::new(engine.model().n_blocks(), prompt.len() + options.max_new_tokens);
    let mut generated = Vec::new();
    let mut fresh = prompt.to_vec();
    let began = Instant::now();
    let mut prompt_time = None;
    while generated.len() < options.max_new_tokens {
        let logits = engine.next_logits(&fresh, cache.n_tokens(), &cache).context("failed to compute logits")?;
        let token = sampler.sample(&logits).context("failed to choose the next token")?;
        prompt_time.get_or_insert_with(|| began.elapsed().as_secs_f64());
        if stop.contains(&token) {
            break;
        }
        generated.push(token);
        fresh = vec![token];
    }
    let (time, new_tokens) = (began.elapsed().as_secs_f64(), generated.len());
    let prompt_time = prompt_time.unwrap_or(0.0);
    let timings = Timings {
        prompt_tokens: prompt.len(),
        prompt_time,
        new_tokens,
        decode_time: time - prompt_time,
        tokens_per_second: new_tokens as f64 / time,
    };
    Ok((generated, timings))
}

impl GenerateOptions {
    fn sampling(&self) -> Sampling {
        match (self.temperature, self.top_p) {
            (temperature, _) if temperature <= 0.0 => Sampling::ArgMax,
            (temperature, p) if p >= 1.0 => Sampling::All { temperature },
            (temperature, p) => Sampling::TopP { p, temperature },
        }
    }
}
