//! Memory of tasks evaluated during training (`candlewick_inference::answer`).
//!
//! Prompts are not looked at: this is the most that batches of them take. t tokens of a forward, p tokens of context

use candlewick_inference::answer::batch::BatchLimits;

use super::compute_device::ComputeDevice;
use super::memory_breakdown::{Category, MemoryBreakdown};
use super::{EvalLoad, Setup, costs, program};
use crate::plan::RanksPlan;

const F32: u64 = 4;

/// The worst moment, beside what stays: a batch that is scored, or one that writes.
pub(super) fn worst_batch(setup: &Setup, eval_load: EvalLoad) -> MemoryBreakdown {
    let sizes = Sizes::of(setup, eval_load);
    let scored = scored(setup, &sizes);
    let written = if eval_load.generates { written(setup, &sizes) } else { MemoryBreakdown::default() };
    let most = if written.total() > scored.total() { written } else { scored };
    let passing = most.total() - most.of(Category::Cache);
    most.with(Category::Allocator, program::slack(setup.compute_device, passing))
}

struct Sizes {
    /// Of a forward.
    tokens: u64,
    /// What they look at, if texts begin alike.
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
        let auto = BatchLimits::auto(setup.compute_device == ComputeDevice::Cpu, row_bytes);
        let longest = eval_load.max_length.unwrap_or(config.max_positions());
        // A text that is longer than a forward has one of its own; none is, unless `eval.max_length` allows such long ones.
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

/// A batch whose texts branch off others: keys and values of the path that is remembered, in all blocks; in the block at
/// work those of the path and the batch as one, and those of each text's path, which a CPU widens.
fn scored(setup: &Setup, sizes: &Sizes) -> MemoryBreakdown {
    let wide = of_tokens(setup, sizes.tokens, sizes.context);
    let block = costs::layer(&wide, 0);
    let s = setup.compute.n_bytes();
    let widened = if setup.compute_device == ComputeDevice::Cpu && s < F32 { F32 } else { 0 };
    let keys = block.kv_bytes(sizes.context + sizes.tokens, s) + block.kv_bytes(sizes.keys, s + widened);
    let path = n_blocks_here(setup) * block.kv_bytes(sizes.context, s);
    let logits = if setup.has_head() { costs::head(&wide).forward_bytes() + block.activation_bytes() } else { 0 };
    breakdown(&wide, path, block.forward_bytes() + keys, logits)
}

/// Texts that are written: a pool of keys and values, in f32 on a CPU, and a forward of prompts that begin.
fn written(setup: &Setup, sizes: &Sizes) -> MemoryBreakdown {
    let wide = of_tokens(setup, sizes.tokens + sizes.context, sizes.context);
    let block = costs::layer(&wide, 0);
    let s = if setup.compute_device == ComputeDevice::Cpu { F32 } else { setup.compute.n_bytes() };
    let pool = n_blocks_here(setup) * block.kv_bytes(sizes.pool_rows + 1, s);
    let logits = sizes.texts * setup.model.config().vocab_size() as u64 * F32;
    breakdown(&wide, pool, block.forward_bytes(), if setup.has_head() { logits } else { 0 })
}

fn breakdown(wide: &Setup, cache: u64, block: u64, logits: u64) -> MemoryBreakdown {
    let layer = costs::layer(wide, 0);
    let activations = layer.activation_bytes() + layer.rope_bytes();
    let breakdown = MemoryBreakdown::default().with(Category::Cache, cache).with(Category::Activations, activations);
    if block > logits { breakdown.with(Category::Block, block) } else { breakdown.with(Category::Logits, logits) }
}

/// Returns the setup of a forward with `tokens` tokens, of texts of `context` tokens. No other rank has a part of them,
/// except in branches.
fn of_tokens(setup: &Setup, tokens: u64, context: u64) -> Setup {
    let ranks = RanksPlan { context: 1, sequence: 1, sequence_parallel: false, ..setup.ranks };
    Setup { row_tokens: context, rows: tokens.div_ceil(context.max(1)), ranks, ..setup.clone() }
}

fn n_blocks_here(setup: &Setup) -> u64 {
    (0..setup.model.n_blocks()).filter(|block_idx| setup.layout.stage_of(block_idx + 1) == setup.stage).count() as u64
}
