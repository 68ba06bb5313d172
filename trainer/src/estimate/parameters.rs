//! The parameters and their training state, as `parallel`'s store lays them out.

use candlewick_model::ParamSpec;

use super::Setup;
use super::account::{Account, Class};

/// What stays from the beginning of a run to its end. A frozen parameter has a compute copy alone. A trained one has a
/// master with a gradient, two moments, and a compute copy unless the master has that format. (The store's zeros between
/// parameters, at most 127 elements each, are left out.)
pub(super) fn resident(setup: &Setup) -> Account {
    let (frozen, trained) = counts(setup);
    let (compute, masters, moments) = (setup.compute.n_bytes(), setup.masters.n_bytes(), setup.moments.n_bytes());
    let master_copies = if setup.compute == setup.masters { 0 } else { trained };
    Account::default()
        .with(Class::Weights, (frozen + trained) * compute)
        .with(Class::Masters, master_copies * masters)
        .with(Class::Gradients, trained * masters)
        .with(Class::Moments, 2 * trained * moments)
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
