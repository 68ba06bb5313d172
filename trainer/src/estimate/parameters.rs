//! The parameters and their training state, as `parallel`'s store lays them out.

use candlewick_model::FsdpUnit;

use super::Setup;
use super::memory_breakdown::{Category, MemoryBreakdown};
use crate::plan::RanksPlan;

/// What stays from the beginning of a run to its end. A frozen parameter has a compute copy alone. A trained one has a
/// master with a gradient, two moments, and a compute copy unless the master has that format and lies beside it. (The
/// store's zeros between parameters, at most 127 elements each, are left out.) With several ranks a ZeRO stage says of what
/// each keeps a share only.
pub(super) fn resident(setup: &Setup) -> MemoryBreakdown {
    let (frozen, trained) = counts_here(setup);
    let here = trained - on_host(setup);
    let weights = if setup.weights_on_host { 0 } else { frozen + trained * setup.compute.n_bytes() };
    let (masters, moments) = (setup.masters.n_bytes(), setup.moments.n_bytes());
    let master_copies = if setup.compute == setup.masters { 0 } else { here };
    MemoryBreakdown::default()
        .with(Category::Weights, share(setup, 3, weights))
        .with(Category::Masters, share(setup, 1, master_copies) * masters)
        .with(Category::Gradients, share(setup, 2, trained) * masters)
        .with(Category::Moments, 2 * share(setup, 1, here) * moments)
}

/// What a rank keeps of `n` elements or bytes that are sharded from a ZeRO stage on.
fn share(setup: &Setup, from_stage: usize, n: u64) -> u64 {
    match setup.ranks.zero_stage >= from_stage {
        true => n.div_ceil(setup.ranks.n_shards() as u64),
        false => n,
    }
}

/// What a step has of units besides, while they are at work or on their way between ranks: whole weights (two units, and what
/// the head borrows), whole gradients (of one unit at work and one on its way), and a sum that has come.
pub(super) fn travelling(setup: &Setup) -> u64 {
    let largest_trained = setup.units().map(|unit| trained_of(setup, unit)).max().unwrap_or(0);
    let RanksPlan { zero_stage, dp_replicate, .. } = setup.ranks;
    let n_shards = setup.ranks.n_shards();
    let weights = whole_weights(setup);
    if n_shards * dp_replicate == 1 {
        return weights;
    }
    let gradients = if zero_stage >= 2 { 2 * largest_trained * setup.masters.n_bytes() } else { 0 };
    let share = largest_trained.div_ceil(if zero_stage > 0 { n_shards as u64 } else { 1 });
    weights + gradients + 2 * share * setup.masters.n_bytes()
}

/// The whole weights of the unit at work and of the next one, where each rank keeps a share.
pub(super) fn whole_weights(setup: &Setup) -> u64 {
    let of = |unit: &FsdpUnit| unit.params.iter().map(|param| setup.weight_bytes(param)).sum::<u64>();
    match setup.ranks.zero_stage {
        3 => 2 * setup.units().map(of).max().unwrap_or(0),
        _ => 0,
    }
}

/// What is copied to be saved while training goes on: a rank's share of masters and moments, in f32.
pub(super) fn copied(setup: &Setup) -> u64 {
    let (_, trained) = counts_here(setup);
    if setup.copies_to_save { share(setup, 1, trained) * 3 * 4 } else { 0 }
}

/// What the update has besides where weights stay whole and their owners changed them: a unit's, gathered.
pub(super) fn gathered(setup: &Setup) -> u64 {
    match setup.ranks.zero_stage {
        0 | 3 => 0,
        _ => setup.units().map(|unit| trained_of(setup, unit)).max().unwrap_or(0) * setup.compute.n_bytes(),
    }
}

/// The bytes of the weights, masters and moments that are in the RAM of a GPU's host, and of two gradients on their way.
pub(super) fn bytes_on_host(setup: &Setup) -> u64 {
    let n = share(setup, 1, on_host(setup));
    let largest = setup.units().map(|unit| trained_of(setup, unit)).max().filter(|_| n > 0).unwrap_or(0);
    let (frozen, trained) = counts_here(setup);
    // Trained ones have one copy there if they have one format.
    let trained_copies = if setup.compute == setup.masters { 0 } else { trained * setup.compute.n_bytes() };
    let weights = if setup.weights_on_host { share(setup, 3, frozen + trained_copies) } else { 0 };
    weights + n * (setup.masters.n_bytes() + 2 * setup.moments.n_bytes()) + 2 * largest * setup.masters.n_bytes()
}

/// The number of parameters whose optimizer is on the host: whole units, the first ones (`parallel::ParamStore`).
fn on_host(setup: &Setup) -> u64 {
    let units = || setup.units().map(|unit| trained_of(setup, unit));
    let wanted = setup.optimizer_on_host * units().sum::<u64>() as f64;
    let (mut n_seen, mut n_there) = (0, 0);
    for n in units() {
        if setup.optimizer_on_host > 0.0 && n_seen as f64 + n as f64 / 2.0 <= wanted {
            n_there += n;
        }
        n_seen += n;
    }
    n_there
}

fn trained_of(setup: &Setup, unit: &FsdpUnit) -> u64 {
    unit.params.iter().filter(|param| param.trainable).map(|param| setup.kept(param)).sum()
}

/// Returns the numbers of frozen and of trained parameters of the whole model.
pub fn counts(setup: &Setup) -> (u64, u64) {
    let params = || setup.model.units().iter().flat_map(|unit| &unit.params);
    let numel =
        |trained: bool| params().filter(move |param| param.trainable == trained).map(|param| param.numel() as u64);
    (numel(false).sum(), numel(true).sum())
}

/// Returns the bytes of the frozen and the number of the trained parameters that a rank keeps, before ZeRO shards them.
fn counts_here(setup: &Setup) -> (u64, u64) {
    let params = || setup.units().flat_map(|unit| &unit.params);
    let frozen = params().filter(|param| !param.trainable).map(|param| setup.weight_bytes(param));
    let trained = params().filter(|param| param.trainable).map(|param| setup.kept(param));
    (frozen.sum(), trained.sum())
}

/// The number of elements of the largest parameter: weights are read whole.
pub(super) fn largest(setup: &Setup) -> u64 {
    let params = setup.units().flat_map(|unit| &unit.params);
    params.map(|param| param.numel() as u64).max().unwrap_or(0)
}
