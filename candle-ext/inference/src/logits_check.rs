//! Comparison of the logits of an exported model with those of its source.
//!
//! The export is read from disk. candle-transformers' quantized models read GGUF where they compute the architecture; it
//! shares no code with ours above candle-core. Other files are read into our own engine.
//!
//! Dimensions: t tokens, v vocabulary size

use std::fmt;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use candle_core::{DType, Device, Tensor};
use candle_transformers::models::{quantized_llama, quantized_qwen2, quantized_qwen3};
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{Config, GgufModel, MergedModel, Model, ModelError, ParamSpec, ParamValues, QuantizedModel};
use candlewick_ops::to_host;
use candlewick_parallel::{Engine, EngineSpec, KvCache, PackedTokens, PipelineLayout};
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::files::open_regular_file;
use candlewick_text::render::render_prompt;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use serde::Serialize;

use crate::parallel_config::ParallelConfig;

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

/// Logits of a model for some prompts.
pub struct PromptLogits {
    prompts: Vec<Vec<u32>>,
    /// f32 [t, v] of each prompt, on the host.
    logits: Vec<Vec<Vec<f32>>>,
}

/// Reader of an exported model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum ExportReader {
    /// A quantized model of candle-transformers.
    CandleTransformers,
    /// This program's engine, with the dequantized weights of the file.
    Candlewick,
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
}

impl fmt::Display for LogitsDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n_positions, n_same_top, largest, relative } = self;
        write!(
            f,
            "largest logit difference {largest:.2e}, relative norm {relative:.2e}, same top-1 token at {n_same_top} of \
             {n_positions} positions"
        )
    }
}

impl fmt::Display for ExportReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CandleTransformers => "candle-transformers",
            Self::Candlewick => "this program",
        })
    }
}

impl PromptLogits {
    /// Computes the logits of a model in f32 for the check's prompts. A rendered chat is among them if the tokenizer has a
    /// chat template. Without a tokenizer, the prompt is arbitrary.
    pub fn of(model: &MergedModel, tokenizer: Option<&Tokenizer>, device: &Device) -> Result<Self> {
        let prompts = match tokenizer {
            Some(tokenizer) => prompts(tokenizer, model.config())?,
            None => vec![arbitrary_tokens(model.config())],
        };
        let mut reader = engine(model.config(), device, |param| model.value(param))?;
        let logits = prompts.iter().map(|prompt| reader.prompt_logits(prompt)).collect::<Result<_>>()?;
        Ok(Self { prompts, logits })
    }

    /// Compares with the logits of a safetensors folder.
    pub fn compare_folder(&self, folder: &Path, device: &Device) -> Result<LogitsDifference> {
        let checkpoint = Checkpoint::open(folder)?;
        let mut reader = engine(&Config::read(folder)?, device, |param| checkpoint.value(param))?;
        self.compare(&mut reader)
    }

    /// Compares with the logits of a GGUF file of a model with this config.
    pub fn compare_gguf(
        &self,
        path: &Path,
        config: &Config,
        device: &Device,
    ) -> Result<(ExportReader, LogitsDifference)> {
        match CandleReader::open(path, config).context("failed to read the file with candle-transformers")? {
            Some(mut reader) => Ok((ExportReader::CandleTransformers, self.compare(&mut reader)?)),
            None => {
                let file = GgufModel::open(path, config)?;
                let mut reader = engine(config, device, |param| file.value(param))?;
                Ok((ExportReader::Candlewick, self.compare(&mut reader)?))
            }
        }
    }

    fn compare(&self, reader: &mut dyn LogitsReader) -> Result<LogitsDifference> {
        let (mut n_positions, mut n_same_top) = (0, 0);
        let (mut largest, mut lost, mut total) = (0f64, 0.0, 0.0);
        for (prompt, wanted) in self.prompts.iter().zip(&self.logits) {
            for (found, wanted) in reader.prompt_logits(prompt)?.iter().zip(wanted) {
                n_positions += 1;
                n_same_top += usize::from(top(found) == top(wanted));
                for (found, wanted) in centered(found).zip(centered(wanted)) {
                    let difference = (found - wanted).abs();
                    // A NaN is larger than every number.
                    largest = if difference > largest || difference.is_nan() { difference } else { largest };
                    lost += difference * difference;
                    total += wanted * wanted;
                }
            }
        }
        Ok(LogitsDifference { n_positions, n_same_top, largest, relative: (lost / total).sqrt() })
    }
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

/// A model that computes the logits [t, v] of a prompt.
trait LogitsReader {
    fn prompt_logits(&mut self, prompt: &[u32]) -> Result<Vec<Vec<f32>>>;
}

/// Builds a model in f32 from its values.
fn engine(
    config: &Config,
    device: &Device,
    value: impl FnMut(&ParamSpec) -> Result<Tensor, ModelError>,
) -> Result<Engine> {
    let model = Model::new(config.clone(), None)?;
    let layout = PipelineLayout::balanced(model.n_blocks(), 1, 1, 0.0);
    let groups = ParallelConfig::single_rank_groups()?;
    let engine = EngineSpec::inference(DType::F32, layout).build(model, &groups, device.clone())?;
    engine.store().fill(value)?;
    Ok(engine)
}

impl LogitsReader for Engine {
    fn prompt_logits(&mut self, prompt: &[u32]) -> Result<Vec<Vec<f32>>> {
        let rows: Vec<u32> = (0..prompt.len() as u32).collect();
        let mut tokens = PackedTokens::default();
        tokens.extend(prompt, 0, self.model().length_class(prompt.len()));
        let cache = KvCache::new(self.model().n_blocks(), prompt.len());
        Ok(to_host(&self.logits(&tokens, &rows, &cache)?)?.to_vec2()?)
    }
}

/// Returns false for a matrix that candle panics on: Q5_0 and Q5_1 with an odd number of blocks in a row.
fn can_multiply(tensor: &TensorInfo) -> bool {
    let n_columns = tensor.shape.dims().last().copied().unwrap_or(1);
    let is_in_pairs = matches!(tensor.ggml_dtype, GgmlDType::Q5_0 | GgmlDType::Q5_1);
    !is_in_pairs || (n_columns / tensor.ggml_dtype.block_size()).is_multiple_of(2)
}

/// A quantized model of candle-transformers, on the CPU.
enum CandleReader {
    Llama(quantized_llama::ModelWeights),
    Qwen2(quantized_qwen2::ModelWeights),
    Qwen3(quantized_qwen3::ModelWeights),
}

impl CandleReader {
    /// Opens a file; `None` if candle-transformers does not compute the model.
    fn open(path: &Path, config: &Config) -> candle_core::Result<Option<Self>> {
        let mut file = BufReader::new(open_regular_file(path)?);
        let (mut content, device) = (Content::read(&mut file)?, Device::Cpu);
        let Some(kind) = config.quantized_model().filter(|_| content.tensor_infos.values().all(can_multiply)) else {
            return Ok(None);
        };
        // By default, `quantized_qwen3` rounds RoPE's cosines and sines to f16.
        content.metadata.insert("general.dtype".to_owned(), Value::U32(0));
        Ok(Some(match kind {
            QuantizedModel::Llama => {
                Self::Llama(quantized_llama::ModelWeights::from_gguf(content, &mut file, &device)?)
            }
            QuantizedModel::Qwen2 => {
                Self::Qwen2(quantized_qwen2::ModelWeights::from_gguf(content, &mut file, &device)?)
            }
            QuantizedModel::Qwen3 => {
                Self::Qwen3(quantized_qwen3::ModelWeights::from_gguf(content, &mut file, &device)?)
            }
        }))
    }

    fn clear(&mut self) {
        match self {
            Self::Llama(model) => model.clear_kv_cache(),
            Self::Qwen2(model) => model.clear_kv_cache(),
            Self::Qwen3(model) => model.clear_kv_cache(),
        }
    }

    fn forward(&mut self, ids: &Tensor, position: usize) -> candle_core::Result<Tensor> {
        match self {
            Self::Llama(model) => model.forward(ids, position),
            Self::Qwen2(model) => model.forward(ids, position),
            Self::Qwen3(model) => model.forward(ids, position),
        }
    }
}

impl LogitsReader for CandleReader {
    /// Passes one token at a time: the models return the logits of the last token alone.
    fn prompt_logits(&mut self, prompt: &[u32]) -> Result<Vec<Vec<f32>>> {
        self.clear();
        let mut rows = Vec::new();
        for (position, id) in prompt.iter().enumerate() {
            let ids = Tensor::new(&[[*id]], &Device::Cpu)?;
            let logits = self.forward(&ids, position)?.flatten_all()?.to_dtype(DType::F32)?;
            rows.push(to_host(&logits)?.to_vec1()?);
        }
        Ok(rows)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    struct Fixed(Vec<Vec<f32>>);

    impl LogitsReader for Fixed {
        fn prompt_logits(&mut self, _prompt: &[u32]) -> Result<Vec<Vec<f32>>> {
            Ok(self.0.clone())
        }
    }

    #[track_caller]
    fn check(found: [[f32; 2]; 2], want: LogitsDifference) {
        let source = PromptLogits { prompts: vec![vec![0, 1]], logits: vec![vec![vec![1.0, 3.0], vec![6.0, 4.0]]] };
        let difference = source.compare(&mut Fixed(found.map(|row| row.to_vec()).to_vec())).unwrap();
        assert_eq!(format!("{difference:?}"), format!("{want:?}"));
    }

    #[test]
    fn a_difference_ignores_a_shift_and_sees_a_swap_and_a_nan() {
        let same = LogitsDifference { n_positions: 2, n_same_top: 2, largest: 0.0, relative: 0.0 };
        check([[1.0, 3.0], [8.0, 6.0]], same);
        check(
            [[3.0, 1.0], [6.0, 4.0]],
            LogitsDifference { n_same_top: 1, largest: 2.0, relative: 2f64.sqrt(), ..same },
        );
        check(
            [[f32::NAN, 3.0], [6.0, 4.0]],
            LogitsDifference { n_same_top: 1, largest: f64::NAN, relative: f64::NAN, ..same },
        );
    }
}
