//! The search for modes that trade time for memory: their cost, and the cheapest that fit.
//!
//! The searched modes do not change results, so a resumed run may select others. Tiled MLPs sum weight gradients in
//! another order. The report advises them, and the search does not change them.

use candlewick_ops::AttentionImpl;

use super::{Capacity, Modes, Setup, Shortage, estimate};
use crate::metrics::{ModelShape, Recomputed, recomputed_flops};
use crate::plan::CheckpointingMode;

/// The modes that the recipe sets. The search does not change them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FixedModes {
    /// True if the recipe sets `model.activation_checkpoint` or an alias.
    pub activations: bool,
}

/// Modes with the memory that a run needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The modes.
    pub modes: Modes,
    /// The peak in bytes.
    pub peak_bytes: u64,
    /// The resources that are too small.
    pub short: Vec<Shortage>,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct ModeSearch {
    /// The cheapest modes that fit, if any do.
    pub found: Option<Candidate>,
    /// All candidates that were tried, in the order of their time.
    pub tried: Vec<Candidate>,
    /// The tokens of the longest row that fits, with the tried modes that need least memory.
    pub longest: Option<u64>,
}

/// Finds the cheapest modes with which `setup` fits `capacity`. `fixed` modes stay unchanged.
pub fn choose(setup: &Setup, fixed: FixedModes, capacity: &Capacity) -> ModeSearch {
    let mut tried = Vec::new();
    for modes in by_cost(setup, fixed) {
        let setup = Setup { modes, ..setup.clone() };
        let estimate = estimate(&setup);
        let (peak_bytes, short) = (estimate.peak_bytes(), estimate.shortages(capacity));
        let candidate = Candidate { modes, peak_bytes, short };
        tried.push(candidate.clone());
        if candidate.short.is_empty() {
            return ModeSearch { found: Some(candidate), tried, longest: max_row_tokens(&setup, capacity) };
        }
    }
    let least = tried.iter().min_by_key(|candidate| candidate.peak_bytes).map(|candidate| candidate.modes);
    let longest = least.and_then(|modes| max_row_tokens(&Setup { modes, ..setup.clone() }, capacity));
    ModeSearch { found: None, tried, longest }
}

/// Returns all modes in the order of their extra time. First is no checkpointing. Then come every k-th block and
/// `selective`, sorted by recomputed FLOPs, then `full`. Last is `offload` of 25% to 100% of the blocks, unless the
/// offload folder is in RAM.
pub(super) fn by_cost(setup: &Setup, fixed: FixedModes) -> Vec<Modes> {
    if fixed.activations {
        return vec![setup.modes];
    }
    let n_blocks = setup.model.n_blocks();
    let mut every: Vec<usize> = (1..=n_blocks).map(|n_recomputed| n_blocks.div_ceil(n_recomputed)).collect();
    every.dedup();
    let some = every.into_iter().filter(|&k| k > 1).map(|k| {
        let n_recomputed = n_blocks.div_ceil(k);
        (CheckpointingMode::EveryKth(k), n_recomputed as f64 / n_blocks as f64)
    });
    // The reference implementation cannot save the attention output separately.
    let can_save_output = setup.attention != AttentionImpl::Reference;
    let selective = can_save_output.then(|| (CheckpointingMode::Selective, 1.0 - attention_fraction(setup)));
    let mut partial: Vec<(CheckpointingMode, f64)> = some.chain(selective).collect();
    partial.sort_by(|(_, a), (_, b)| a.total_cmp(b));
    let partial = partial.into_iter().map(|(activations, _)| activations);
    let fractions: &[f64] = if setup.offloads_to_ram { &[] } else { &[0.25, 0.5, 0.75, 1.0] };
    let offloaded = fractions.iter().map(|fraction| CheckpointingMode::Offload(*fraction));
    let activations =
        [CheckpointingMode::None].into_iter().chain(partial).chain([CheckpointingMode::Full]).chain(offloaded);
    activations.map(|activations| Modes { activations, ..setup.modes }).collect()
}

/// Returns attention's fraction of a block's forward FLOPs, on a row of `row_tokens` tokens.
fn attention_fraction(setup: &Setup) -> f64 {
    let (shape, row) = (ModelShape::of(&setup.model), [setup.row_tokens as usize]);
    let of = |again: Recomputed| recomputed_flops(&shape, &[again], &row);
    let matmuls = of(Recomputed { layer: true, ..Recomputed::default() });
    // The causal mask removes half of the query-key pairs.
    let attention = of(Recomputed { attention: true, ..Recomputed::default() }) / 2.0;
    attention / (matmuls + attention)
}

/// Returns the most tokens of a row with which `setup` fits `capacity`; `None` if not even one fits.
///
/// It is a binary search: every term grows with the tokens.
pub fn max_row_tokens(setup: &Setup, capacity: &Capacity) -> Option<u64> {
    /// More tokens than any model's context.
    const MOST: u64 = 1 << 24;
    let fits = |row_tokens: u64| estimate(&Setup { row_tokens, ..setup.clone() }).shortages(capacity).is_empty();
    if !fits(1) {
        return None;
    }
    let (mut fitting, mut too_long) = (1, MOST);
    while too_long - fitting > 1 {
        let middle = fitting.midpoint(too_long);
        if fits(middle) {
            fitting = middle;
        } else {
            too_long = middle;
        }
    }
    Some(fitting)
}
