//! Comparison of the logits of an exported model with those of its source, a layer at a time.
//!
//! The export is read from disk: a folder by the model itself, a GGUF file by llama.cpp's graph. Both use the experts that the
//! source selects. Rounding may change the experts of a token near a tie of its router, and then its logits differ in a correct
//! file.
//!
//! Dimensions: t tokens of all prompts, v vocabulary size, k selected experts of a token

mod llama_cpp;
mod prompts;
mod routing;
mod unit_by_unit;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{
    Config, GgufFile, MergedModel, Model, ParamValues, ReplayedExperts, RouterContext, RoutingRecord, TensorCallback,
};
use candlewick_ops::to_host;
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::render::render_prompt;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use rayon::prelude::*;
use serde::Serialize;

use llama_cpp::LlamaCppGraph;
use prompts::PackedPrompts;
pub use routing::RoutingDifference;

/// Texts whose logits are compared: prose, code, numbers, other scripts.
const TEXTS: [&str; 16] = [
    "The quick brown fox jumps over the lazy dog because it was late for dinner.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "In 1969, 600 million people (1/6 of 3.6e9) watched Apollo 11: 12345 * 6789 = ",
    "Grüße aus Zürich! Привет, мир. 你好，世界。 🚀",
    "Question: Which planet is the largest?\nAnswer:",
    "The capital of France is Paris, and the capital of Japan is",
    "1. Wash the rice.\n2. Boil the water.\n3.",
    "SELECT name, COUNT(*) FROM users WHERE age > 21 GROUP BY",
    "{\"id\": 7, \"tags\": [\"red\", \"blue\"], \"price\":",
    "<html>\n  <body>\n    <h1>Welcome</h1>\n",
    "Dear Sir or Madam,\n\nI am writing about",
    "If all roses are flowers and some flowers fade, then",
    "Il était une fois une petite fille qui habitait",
    "El agua hierve a cien grados y se congela a",
    "let total: u64 = (1..=100).filter(|n| n % 3 == 0).sum();",
    "\\int_0^1 x^2 \\, dx = \\frac{1}{3}",
];

/// Maximum number of tokens of a prompt.
const MAX_TOKENS: usize = 12;

/// Logits of a model for some prompts. The weights of one layer are in memory at a time, in f32.
pub struct PromptLogits {
    prompts: PackedPrompts,
    /// f32 [t, v], on the host.
    logits: Vec<Vec<f32>>,
    /// Selected experts, u32 [t, k] by layer.
    experts: BTreeMap<usize, Tensor>,
}

/// Difference of two models' logits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LogitsDifference {
    /// Number of compared positions.
    pub n_positions: usize,
    /// Number of positions at which both have the same most probable token.
    pub n_same_top: usize,
    /// Largest absolute difference of a logit, each position's mean subtracted.
    pub largest: f64,
    /// Norm of the difference over the norm of the source's logits, each position's mean subtracted.
    pub relative: f64,
    /// Difference of the routers' selections; `None` without experts, and for a folder.
    pub routing: Option<RoutingDifference>,
}

impl fmt::Display for LogitsDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n_positions, n_same_top, largest, relative, routing } = self;
        write!(
            f,
            "largest logit difference {largest:.2e}, relative norm {relative:.2e}, same top-1 token at {n_same_top} of \
             {n_positions} positions"
        )?;
        routing.map_or(Ok(()), |routing| write!(f, ", {routing}"))
    }
}

impl PromptLogits {
    /// Computes the logits of a model in f32 for the check's prompts. A rendered chat is among them if the tokenizer has a
    /// chat template. Without a tokenizer, the prompt is arbitrary. `on_unit` gets the numbers of finished layers and of all.
    pub fn of(
        model: &MergedModel,
        tokenizer: Option<&Tokenizer>,
        device: &Device,
        on_unit: TensorCallback,
    ) -> Result<Self> {
        let prompts = match tokenizer {
            Some(tokenizer) => prompts(tokenizer, model.config())?,
            None => vec![arbitrary_tokens(model.config()); 2],
        };
        let prompts = PackedPrompts::new(prompts, model.config().max_positions());
        let exported = Model::new(model.config().clone(), None)?;
        let record = RoutingRecord::default();
        let router = RouterContext { record: Some(&record), ..RouterContext::default() };
        let logits = unit_by_unit::logits(&exported, &prompts, device, router, |param| model.value(param), on_unit)?;
        let experts =
            record.take_selected().into_iter().map(|((_, layer_idx), experts)| (layer_idx, experts)).collect();
        Ok(Self { prompts, logits: to_host(&logits)?.to_vec2()?, experts })
    }

    /// Compares with the logits of a safetensors folder.
    pub fn compare_folder(&self, folder: &Path, device: &Device, on_unit: TensorCallback) -> Result<LogitsDifference> {
        let (config, checkpoint) = Checkpoint::open_with_config(folder)?;
        let model = Model::new(config, None)?;
        let value = |param: &_| checkpoint.value(param);
        let replayed = ReplayedExperts::new(self.experts.clone());
        let router = RouterContext { replayed: Some(&replayed), ..RouterContext::default() };
        self.compare(&unit_by_unit::logits(&model, &self.prompts, device, router, value, on_unit)?)
    }

    /// Compares with the logits that llama.cpp's graph has with the dequantized weights of a GGUF file.
    pub fn compare_gguf(&self, path: &Path, device: &Device, on_unit: TensorCallback) -> Result<LogitsDifference> {
        let file = GgufFile::open(path)?;
        let (logits, routing) = LlamaCppGraph::new(&file, device)?.logits(&self.prompts, &self.experts, on_unit)?;
        Ok(LogitsDifference { routing, ..self.compare(&logits)? })
    }

    /// Compares with other logits, f32 [t, v].
    fn compare(&self, found: &Tensor) -> Result<LogitsDifference> {
        let found: Vec<Vec<f32>> = to_host(found)?.to_vec2()?;
        let shape = |rows: &[Vec<f32>]| [rows.len(), rows.first().map_or(0, Vec::len)];
        ensure!(
            shape(&found) == shape(&self.logits),
            "the export has logits of shape {:?}, and its source of {:?}",
            shape(&found),
            shape(&self.logits)
        );
        let of_position = |(found, wanted): (&Vec<f32>, &Vec<f32>)| PositionDifference::new(found, wanted);
        let positions: Vec<PositionDifference> = found.par_iter().zip(&self.logits).map(of_position).collect();
        let lost: f64 = positions.iter().map(|position| position.lost).sum();
        let total: f64 = positions.iter().map(|position| position.total).sum();
        Ok(LogitsDifference {
            n_positions: positions.len(),
            n_same_top: positions.iter().filter(|position| position.is_same_top).count(),
            largest: positions.iter().fold(0.0, |largest, position| larger(largest, position.largest)),
            relative: (lost / total).sqrt(),
            routing: None,
        })
    }
}

/// Difference of two rows of logits.
struct PositionDifference {
    is_same_top: bool,
    /// Largest absolute difference.
    largest: f64,
    /// Sum of squares of the difference.
    lost: f64,
    /// Sum of squares of the source's logits.
    total: f64,
}

impl PositionDifference {
    fn new(found: &[f32], wanted: &[f32]) -> Self {
        let is_same_top = top(found) == top(wanted);
        let mut this = Self { is_same_top, largest: 0.0, lost: 0.0, total: 0.0 };
        for (found, wanted) in centered(found).zip(centered(wanted)) {
            let difference = (found - wanted).abs();
            this.largest = larger(this.largest, difference);
            this.lost += difference * difference;
            this.total += wanted * wanted;
        }
        this
    }
}

/// Returns the larger number. A NaN is larger than every number.
fn larger(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

fn prompts(tokenizer: &Tokenizer, config: &Config) -> Result<Vec<Vec<u32>>> {
    let mut prompts = Vec::new();
    for text in TEXTS {
        prompts.push(tokenizer.encode(text, SpecialTokens::Include)?);
    }
    if let Some(template) = tokenizer.chat_template(None)? {
        // A template may need roles or variables that this chat does not have.
        let chat = Conversation::new([Message::new("user", "Who are you?")]);
        prompts.extend(render_prompt(tokenizer, &template, &chat).ok());
    }
    let most = MAX_TOKENS.min(config.max_positions());
    prompts.iter_mut().for_each(|prompt| prompt.truncate(most));
    prompts.retain(|prompt| !prompt.is_empty());
    Ok(prompts)
}

/// Returns a prompt for a model without a tokenizer: tokens all over the vocabulary.
fn arbitrary_tokens(config: &Config) -> Vec<u32> {
    let n_tokens = MAX_TOKENS.min(config.max_positions());
    (0..n_tokens).map(|i| (i * config.vocab_size() / n_tokens) as u32).collect()
}

fn top(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
}

fn centered(logits: &[f32]) -> impl Iterator<Item = f64> {
    let mean = logits.iter().map(|x| f64::from(*x)).sum::<f64>() / logits.len() as f64;
    logits.iter().map(move |x| f64::from(*x) - mean)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
