//! Memory of tasks evaluated during training (`candlewick_inference::answer`).
//!
//! It is an upper bound for every batch: the prompts themselves are not read.

use candlewick_inference::answer::batch::BatchLimits;
use candlewick_ops::DeviceKind;

use super::memory_breakdown::{Category, MemoryBreakdown};
use super::{EvalLoad, Setup, costs, program};
use crate::plan::RanksPlan;

const F32: u64 = 4;

/// Returns the larger peak of a scored and a generated batch, without the resident bytes.
pub(super) fn worst_batch(setup: &Setup, eval_load: EvalLoad) -> MemoryBreakdown {
    let sizes = Sizes::of(setup, eval_load);
    let scored = scored(setup, &sizes);
    let generated = if eval_load.generates { generated(setup, &sizes) } else { MemoryBreakdown::default() };
    let most = if generated.total() > scored.total() { generated } else { scored };
    let temporary = most.total() - most.of(Category::Cache);
    most.with(Category::Allocator, program::slack(setup.compute_device, temporary))
}

struct Sizes {
    /// Tokens of a forward.
    tokens: u64,
    /// The keys that a forward attends to: shared prefixes and texts.
    keys: u64,
    context: u64,
    texts: u64,
    pool_rows: u64,
}

impl Sizes {
    fn of(setup: &Setup, eval_load: EvalLoad) -> Self {
        let config = setup.model.config();
        let heads = config.attention_heads();
        let row_bytes = 2 * config.n_layers() * heads.n_kv * heads.dim * F32 as usize;
        let auto = BatchLimits::auto(setup.compute_device == DeviceKind::Cpu, row_bytes);
        let longest = eval_load.max_length.unwrap_or(config.max_positions());
        // A text longer than a forward gets a forward of its own. Only `eval.max_length` allows such texts.
        let context = if eval_load.max_length.is_some() { longest } else { longest.min(auto.n_tokens) };
        let (tokens, keys, texts, most_rows) = match eval_load.batch_size {
            Some(n) => (n * context, n * context, n, usize::MAX),
            None => (auto.n_tokens.max(context), auto.n_keys.max(context), auto.n_texts, auto.pool_rows),
        };
        let pool_rows = ((texts + 1) * longest).min(most_rows.max(longest));
        let [tokens, keys, context, texts, pool_rows] = [tokens, keys, context, texts, pool_rows].map(|n| n as u64);
        Self { tokens, keys, context, texts, pool_rows }
    }
}

/// Returns the bytes of a scored batch, whose texts extend a shared prefix. All blocks cache the prefix's keys and
/// values. The current block also concatenates those of prefix and batch, and gathers those of each text. A CPU
/// converts the latter to f32.
fn scored(setup: &Setup, sizes: &Sizes) -> MemoryBreakdown {
    let wide = of_tokens(setup, sizes.tokens, sizes.context);
    let block = costs::layer(&wide, 0).in_evaluation();
    let s = setup.compute.n_bytes();
    let converted = if setup.compute_device == DeviceKind::Cpu && s < F32 { F32 } else { 0 };
    let keys = block.state_bytes(sizes.context + sizes.tokens, s) + block.state_bytes(sizes.keys, s + converted);
    let prefix = n_blocks_here(setup) * block.state_bytes(sizes.context, s);
    let logits = if setup.has_head() { costs::head(&wide).forward_bytes() + block.activation_bytes() } else { 0 };
    breakdown(&wide, prefix, block.forward_bytes() + keys, logits)
}

/// Returns the bytes of a generated batch: a KV cache pool (f32 on a CPU) and a forward of prompts.
fn generated(setup: &Setup, sizes: &Sizes) -> MemoryBreakdown {
    let wide = of_tokens(setup, sizes.tokens + sizes.context, sizes.context);
    let block = costs::layer(&wide, 0).in_evaluation();
    let s = if setup.compute_device == DeviceKind::Cpu { F32 } else { setup.compute.n_bytes() };
    let pool = n_blocks_here(setup) * block.state_bytes(sizes.pool_rows + 1, s);
    let logits = sizes.texts * setup.model.config().vocab_size() as u64 * F32;
    breakdown(&wide, pool, block.forward_bytes(), if setup.has_head() { logits } else { 0 })
}

fn breakdown(wide: &Setup, cache: u64, block: u64, logits: u64) -> MemoryBreakdown {
    let layer = costs::layer(wide, 0);
    let activations = layer.activation_bytes() + layer.rope_bytes();
    let breakdown = MemoryBreakdown::default().with(Category::Cache, cache).with(Category::Activations, activations);
    if block > logits { breakdown.with(Category::Block, block) } else { breakdown.with(Category::Logits, logits) }
}

/// Returns the setup of a forward with `tokens` tokens of texts with `context` tokens. Context parallelism is off;
/// tensor parallelism stays on.
fn of_tokens(setup: &Setup, tokens: u64, context: u64) -> Setup {
    let ranks = RanksPlan { context: 1, sequence: 1, sequence_parallel: false, ..setup.ranks };
    Setup { row_tokens: context, rows: tokens.div_ceil(context.max(1)), ranks, ..setup.clone() }
}

fn n_blocks_here(setup: &Setup) -> u64 {
    (0..setup.model.n_blocks()).filter(|block_idx| setup.layout.stage_of(block_idx + 1) == setup.stage).count() as u64
}
