//! The bytes of parameters and training state, in the layout of `parallel`'s `ParamStore`.

use candlewick_model::FsdpUnit;

use super::Setup;
use super::memory_breakdown::{Category, MemoryBreakdown};
use crate::plan::RanksPlan;

/// Returns the bytes that stay allocated from the start of a run to its end. A frozen parameter has a compute copy
/// alone. A trained parameter has a master weight, a gradient and two moments. It has a separate compute copy unless
/// the master has the same dtype in the same memory. The ZeRO stage decides which of these are sharded over ranks.
/// Padding between parameters, at most 127 elements each, is not counted.
pub(super) fn resident(setup: &Setup) -> MemoryBreakdown {
    let (frozen, trained) = counts_here(setup);
    let here = trained - on_host(setup);
    let weights = if setup.weights_on_host { 0 } else { frozen + trained * setup.compute.n_bytes() };
    let (masters, moments) = (setup.masters.n_bytes(), setup.moments.n_bytes());
    let master_copies = if setup.compute == setup.masters { 0 } else { here };
    MemoryBreakdown::default()
        .with(Category::Weights, shard_of(setup, 3, weights))
        .with(Category::Masters, shard_of(setup, 1, master_copies) * masters)
        .with(Category::Gradients, shard_of(setup, 2, trained) * masters)
        .with(Category::Moments, 2 * shard_of(setup, 1, here) * moments)
}

/// Returns a rank's shard of `n` elements or bytes, which ZeRO stages from `from_stage` on divide over ranks.
fn shard_of(setup: &Setup, from_stage: usize, n: u64) -> u64 {
    match setup.ranks.zero_stage >= from_stage {
        true => n.div_ceil(setup.ranks.n_shards() as u64),
        false => n,
    }
}

/// Returns the bytes of a step's buffers for all-gathered weights and for gradients that are being reduced. The
/// weights are those of [`whole_weights`]. From ZeRO stage 2 on there are two full gradients: one in backward, one in
/// a reduce-scatter. Two reduced shards are added.
pub(super) fn exchange_buffers(setup: &Setup) -> u64 {
    let largest_trained = setup.units().map(|unit| trained_of(setup, unit)).max().unwrap_or(0);
    let RanksPlan { zero_stage, dp_replicate, .. } = setup.ranks;
    let n_shards = setup.ranks.n_shards();
    let weights = whole_weights(setup);
    if n_shards * dp_replicate == 1 {
        return weights;
    }
    let gradients = if zero_stage >= 2 { 2 * largest_trained * setup.masters.n_bytes() } else { 0 };
    let shard = largest_trained.div_ceil(if zero_stage > 0 { n_shards as u64 } else { 1 });
    weights + gradients + 2 * shard * setup.masters.n_bytes()
}

/// Returns the bytes of the all-gathered weights of the current and the next unit; 0 below ZeRO stage 3.
pub(super) fn whole_weights(setup: &Setup) -> u64 {
    let of = |unit: &FsdpUnit| unit.params.iter().map(|param| setup.weight_bytes(param)).sum::<u64>();
    match setup.ranks.zero_stage {
        3 => 2 * setup.units().map(of).max().unwrap_or(0),
        _ => 0,
    }
}

/// Returns the bytes that an asynchronous checkpoint copies: a rank's shard of masters and two moments, in f32.
pub(super) fn copied(setup: &Setup) -> u64 {
    let (_, trained) = counts_here(setup);
    if setup.copies_to_save { shard_of(setup, 1, trained) * 3 * 4 } else { 0 }
}

/// Returns the bytes that the optimizer step all-gathers at ZeRO stages 1 and 2: the largest unit's trained weights.
pub(super) fn gathered(setup: &Setup) -> u64 {
    match setup.ranks.zero_stage {
        0 | 3 => 0,
        _ => setup.units().map(|unit| trained_of(setup, unit)).max().unwrap_or(0) * setup.compute.n_bytes(),
    }
}

/// Returns the bytes of weights, masters and moments in the host's RAM, and of two gradients being copied.
pub(super) fn bytes_on_host(setup: &Setup) -> u64 {
    let n = shard_of(setup, 1, on_host(setup));
    let largest = setup.units().map(|unit| trained_of(setup, unit)).max().filter(|_| n > 0).unwrap_or(0);
    let (frozen, trained) = counts_here(setup);
    // Trained weights have one copy there if masters have the compute dtype.
    let trained_copies = if setup.compute == setup.masters { 0 } else { trained * setup.compute.n_bytes() };
    let weights = if setup.weights_on_host { shard_of(setup, 3, frozen + trained_copies) } else { 0 };
    weights + n * (setup.masters.n_bytes() + 2 * setup.moments.n_bytes()) + 2 * largest * setup.masters.n_bytes()
}

/// Returns the number of parameters whose optimizer is on the host: whole units, the first ones
/// (`parallel::ParamStore`).
fn on_host(setup: &Setup) -> u64 {
    let units = || setup.units().map(|unit| trained_of(setup, unit));
    let wanted = setup.optimizer_on_host * units().sum::<u64>() as f64;
    let (mut n_seen, mut n_on_host) = (0, 0);
    for n in units() {
        if setup.optimizer_on_host > 0.0 && n_seen as f64 + n as f64 / 2.0 <= wanted {
            n_on_host += n;
        }
        n_seen += n;
    }
    n_on_host
}

fn trained_of(setup: &Setup, unit: &FsdpUnit) -> u64 {
    unit.params.iter().filter(|param| param.trainable).map(|param| setup.numel_here(param)).sum()
}

/// Returns the numbers of frozen and of trained parameters of the whole model.
pub fn counts(setup: &Setup) -> (u64, u64) {
    let params = || setup.model.units().iter().flat_map(|unit| &unit.params);
    let numel =
        |trained: bool| params().filter(move |param| param.trainable == trained).map(|param| param.numel() as u64);
    (numel(false).sum(), numel(true).sum())
}

/// Returns the bytes of a rank's frozen parameters and the number of its trained ones, before ZeRO shards them.
fn counts_here(setup: &Setup) -> (u64, u64) {
    let params = || setup.units().flat_map(|unit| &unit.params);
    let frozen = params().filter(|param| !param.trainable).map(|param| setup.weight_bytes(param));
    let trained = params().filter(|param| param.trainable).map(|param| setup.numel_here(param));
    (frozen.sum(), trained.sum())
}

/// Returns the number of elements of the largest parameter. Parameters are loaded one at a time.
pub(super) fn largest(setup: &Setup) -> u64 {
    let params = setup.units().flat_map(|unit| &unit.params);
    params.map(|param| param.numel() as u64).max().unwrap_or(0)
}
