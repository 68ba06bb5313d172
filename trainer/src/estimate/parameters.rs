//! The parameters and their training state, as `parallel`'s store lays them out.

use candlewick_model::{ParamSpec, Unit};

use super::Setup;
use super::account::{Account, Class};

/// What stays from the beginning of a run to its end. A frozen parameter has a compute copy alone. A trained one has a
/// master with a gradient, two moments, and a compute copy unless the master has that format and lies beside it. (The
/// store's zeros between parameters, at most 127 elements each, are left out.)
pub(super) fn resident(setup: &Setup) -> Account {
    let (frozen, trained) = counts(setup);
    let here = trained - on_host(setup);
    let (compute, masters, moments) = (setup.compute.n_bytes(), setup.masters.n_bytes(), setup.moments.n_bytes());
    let master_copies = if setup.compute == setup.masters { 0 } else { here };
    Account::default()
        .with(Class::Weights, (frozen + trained) * compute)
        .with(Class::Masters, master_copies * masters)
        .with(Class::Gradients, trained * masters)
        .with(Class::Moments, 2 * here * moments)
}

/// The bytes of the masters and moments that are in the RAM of a GPU's host, and of two gradients on their way.
pub(super) fn bytes_on_host(setup: &Setup) -> u64 {
    let n = on_host(setup);
    let units = setup.model.units().iter();
    let largest = units.map(trained_of).max().filter(|_| n > 0).unwrap_or(0);
    n * (setup.masters.n_bytes() + 2 * setup.moments.n_bytes()) + 2 * largest * setup.masters.n_bytes()
}

/// The number of parameters whose optimizer is on the host: whole units, the first ones (`parallel::Resident`).
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
