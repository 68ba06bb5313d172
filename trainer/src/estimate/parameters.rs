//! The parameters and their training state, as `parallel`'s store lays them out.

use candlewick_model::{ParamSpec, Unit};

use super::Setup;
use super::account::{Account, Class};
use crate::plan::RanksPlan;

/// What stays from the beginning of a run to its end. A frozen parameter has a compute copy alone. A trained one has a
/// master with a gradient, two moments, and a compute copy unless the master has that format and lies beside it. (The
/// store's zeros between parameters, at most 127 elements each, are left out.) With several ranks a ZeRO stage says of what
/// each keeps a share only.
pub(super) fn resident(setup: &Setup) -> Account {
    let (frozen, trained) = counts(setup);
    let here = trained - on_host(setup);
    let (compute, masters, moments) = (setup.compute.n_bytes(), setup.masters.n_bytes(), setup.moments.n_bytes());
    let master_copies = if setup.compute == setup.masters { 0 } else { here };
    Account::default()
        .with(Class::Weights, share(setup, 3, frozen + trained) * compute)
        .with(Class::Masters, share(setup, 1, master_copies) * masters)
        .with(Class::Gradients, share(setup, 2, trained) * masters)
        .with(Class::Moments, 2 * share(setup, 1, here) * moments)
}

/// What a rank keeps of `n` elements that are sharded from a ZeRO stage on.
fn share(setup: &Setup, from_stage: usize, n: u64) -> u64 {
    match setup.ranks.zero_stage >= from_stage {
        true => n.div_ceil(setup.ranks.n_shards() as u64),
        false => n,
    }
}

/// What a step has of units besides, while they are at work or on their way between ranks: whole weights (two units, and what
/// the head borrows), whole gradients (of one unit at work and one on its way), and a sum that has come.
pub(super) fn travelling(setup: &Setup) -> u64 {
    let of = |unit: &Unit, trained: bool| {
        let params = unit.params.iter().filter(|param| param.trainable || !trained);
        params.map(|param| param.numel() as u64).sum::<u64>()
    };
    let largest = |trained| setup.model.units().iter().map(|unit| of(unit, trained)).max().unwrap_or(0);
    let (zero_stage, n_shards) = (setup.ranks.zero_stage, setup.ranks.n_shards() as u64);
    if setup.ranks == RanksPlan::alone() {
        return 0;
    }
    let weights = if zero_stage == 3 { 2 * largest(false) * setup.compute.n_bytes() } else { 0 };
    let gradients = if zero_stage >= 2 { 2 * largest(true) * setup.masters.n_bytes() } else { 0 };
    let sums = 2 * largest(true).div_ceil(if zero_stage > 0 { n_shards } else { 1 }) * setup.masters.n_bytes();
    weights + gradients + sums
}

/// What the update has besides where weights stay whole and their owners changed them: a unit's, gathered.
pub(super) fn gathered(setup: &Setup) -> u64 {
    match setup.ranks.zero_stage {
        0 | 3 => 0,
        _ => setup.model.units().iter().map(trained_of).max().unwrap_or(0) * setup.compute.n_bytes(),
    }
}

/// The bytes of the masters and moments that are in the RAM of a GPU's host, and of two gradients on their way.
pub(super) fn bytes_on_host(setup: &Setup) -> u64 {
    let n = on_host(setup);
    let units = setup.model.units().iter();
    let largest = units.map(trained_of).max().filter(|_| n > 0).unwrap_or(0);
    n * (setup.masters.n_bytes() + 2 * setup.moments.n_bytes()) + 2 * largest * setup.masters.n_bytes()
}

/// The number of parameters whose optimizer is on the host: whole units, the first ones (`parallel::ParamStore`).
fn on_host(setup: &Setup) -> u64 {
    let (_, trained) = counts(setup);
    let wanted = setup.optimizer_on_host * trained as f64;
    let (mut n_seen, mut n_there) = (0, 0);
    for n in setup.model.units().iter().map(trained_of) {
        if setup.optimizer_on_host > 0.0 && n_seen as f64 + n as f64 / 2.0 <= wanted {
            n_there += n;
        }
        n_seen += n;
    }
    n_there
}

fn trained_of(unit: &Unit) -> u64 {
    unit.params.iter().filter(|param| param.trainable).map(|param| param.numel() as u64).sum()
}

/// The numbers of frozen and of trained parameters.
pub(super) fn counts(setup: &Setup) -> (u64, u64) {
    let (trained, frozen): (Vec<_>, Vec<_>) = params(setup).partition(|param| param.trainable);
    let numel = |params: Vec<&ParamSpec>| params.into_iter().map(|param| param.numel() as u64).sum();
    (numel(frozen), numel(trained))
}

/// The number of elements of the largest parameter.
pub(super) fn largest(setup: &Setup) -> u64 {
    params(setup).map(|param| param.numel() as u64).max().unwrap_or(0)
}

fn params(setup: &Setup) -> impl Iterator<Item = &ParamSpec> {
    setup.model.units().iter().flat_map(|unit| &unit.params)
}
