//! Which modes trade time for memory, what each of them costs, and which are the cheapest that fit.
//!
//! Modes that are chosen change no result, so that a run may choose others whenever it is taken up. Tiled MLPs sum the
//! gradients of weights in another order: those are advised, never chosen.

use candlewick_ops::AttentionImpl;

use super::{Capacity, Modes, Setup, Shortage, estimate};
use crate::metrics::{ModelShape, Recomputed, recomputed_flops};
use crate::plan::Activations;

/// The modes that the recipe sets: they are never changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fixed {
    /// `model.activation_checkpoint`, or one of its other names.
    pub activations: bool,
}

/// Modes and what a run needs with them.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The modes.
    pub modes: Modes,
    /// The most bytes at once.
    pub peak_bytes: u64,
    /// What there is too little of for them.
    pub short: Vec<Shortage>,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The cheapest modes that fit, if any do.
    pub found: Option<Candidate>,
    /// All that were tried, in the order of what they cost.
    pub tried: Vec<Candidate>,
    /// The longest row that would fit with those of the tried modes that need least.
    pub longest: Option<u64>,
}

/// Finds the cheapest modes with which `setup` needs no more than there is. Those that are `fixed` stay as they are.
pub fn choose(setup: &Setup, fixed: Fixed, capacity: &Capacity) -> Choice {
    let mut tried = Vec::new();
    for modes in by_cost(setup, fixed) {
        let setup = Setup { modes, ..setup.clone() };
        let estimate = estimate(&setup);
        let (peak_bytes, short) = (estimate.peak_bytes(), estimate.shortages(capacity));
        let candidate = Candidate { modes, peak_bytes, short };
        tried.push(candidate.clone());
        if candidate.short.is_empty() {
            return Choice { found: Some(candidate), tried, longest: longest(&setup, capacity) };
        }
    }
    let least = tried.iter().min_by_key(|candidate| candidate.peak_bytes).map(|candidate| candidate.modes);
    let longest = least.and_then(|modes| longest(&Setup { modes, ..setup.clone() }, capacity));
    Choice { found: None, tried, longest }
}

/// All modes, those that cost least time first: nothing again; every k-th block for ever smaller k, or all without their
/// attention where that is less on the longest row; all; all with ever more inputs parked, if that leaves memory.
pub(super) fn by_cost(setup: &Setup, fixed: Fixed) -> Vec<Modes> {
    if fixed.activations {
        return vec![setup.modes];
    }
    let n_blocks = setup.model.n_blocks();
    let mut every: Vec<usize> = (1..=n_blocks).map(|n_recomputed| n_blocks.div_ceil(n_recomputed)).collect();
    every.dedup();
    let some = every.into_iter().filter(|&k| k > 1).map(|k| {
        let n_recomputed = n_blocks.div_ceil(k);
        (Activations::RecomputeEvery(k), n_recomputed as f64 / n_blocks as f64)
    });
    // The reference's attention is not kept for itself.
    let is_kept = setup.attention != AttentionImpl::Reference;
    let selective = is_kept.then(|| (Activations::Selective, 1.0 - attention_share(setup)));
    let mut again: Vec<(Activations, f64)> = some.chain(selective).collect();
    again.sort_by(|(_, a), (_, b)| a.total_cmp(b));
    let again = again.into_iter().map(|(activations, _)| activations);
    let shares: &[f64] = if setup.offloads_to_ram { &[] } else { &[0.25, 0.5, 0.75, 1.0] };
    let parked = shares.iter().map(|share| Activations::Offload(*share));
    let activations = [Activations::Keep].into_iter().chain(again).chain([Activations::Recompute]).chain(parked);
    activations.map(|activations| Modes { activations, ..setup.modes }).collect()
}

/// How much of a block's forward is attention, on a row of the greatest length.
fn attention_share(setup: &Setup) -> f64 {
    let (shape, row) = (ModelShape::of(&setup.model), [setup.row_tokens as usize]);
    let of = |again: Recomputed| recomputed_flops(&shape, &[again], &row);
    let matmuls = of(Recomputed { layer: true, ..Recomputed::default() });
    // Half of the pairs are masked.
    let attention = of(Recomputed { attention: true, ..Recomputed::default() }) / 2.0;
    attention / (matmuls + attention)
}

/// Returns the most tokens of a row with which `setup` needs no more than there is; `None` if even one is too many.
///
/// Every term grows with the tokens, so halving an interval finds it.
pub fn longest(setup: &Setup, capacity: &Capacity) -> Option<u64> {
    /// More tokens than any model reads at once.
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
