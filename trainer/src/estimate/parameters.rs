//! The bytes of parameters and training state, in the layout of `parallel`'s `ParamStore`.

use std::collections::BTreeMap;

use candlewick_model::{FsdpUnit, LinearSpec, ParamGroupKind, ParamSpec};
use candlewick_ops::{DeviceKind, FP8_WEIGHT_FORMAT, Fp8Operand, WeightStorage};
use candlewick_parallel::{OptimizerKind, SlotDtype, UpdateNeed, whole_matrix_shard_len};

use super::Setup;
use super::memory_breakdown::{Category, MemoryBreakdown};
use crate::plan::{Fp8RecipePlan, RanksPlan};

/// An amount on a rank before ZeRO shards it: of dense parameters and of experts, which are sharded over other ranks.
#[derive(Clone, Copy, Default)]
struct ByGroup {
    dense: u64,
    expert: u64,
}

impl ByGroup {
    fn sum<'p>(params: impl Iterator<Item = &'p ParamSpec>, amount: impl Fn(&ParamSpec) -> u64) -> Self {
        params.fold(Self::default(), |sum, param| match param.group {
            ParamGroupKind::Dense => Self { dense: sum.dense + amount(param), ..sum },
            ParamGroupKind::Expert => Self { expert: sum.expert + amount(param), ..sum },
        })
    }

    fn total(self) -> u64 {
        self.dense + self.expert
    }

    fn times(self, factor: u64) -> Self {
        Self { dense: self.dense * factor, expert: self.expert * factor }
    }

    fn plus(self, other: Self) -> Self {
        Self { dense: self.dense + other.dense, expert: self.expert + other.expert }
    }

    fn minus(self, other: Self) -> Self {
        Self { dense: self.dense - other.dense, expert: self.expert - other.expert }
    }
}

/// Returns the bytes that stay allocated from the start of a run to its end. A frozen parameter has a compute copy
/// alone. A trained parameter has a master weight, a gradient and the states of its optimizer. It has a separate compute copy
/// unless the master has the same dtype in the same memory. The ZeRO stage decides which of these are sharded over ranks.
/// Padding between parameters, at most 127 elements each, is not counted. Padding of shards of whole matrices is.
pub(super) fn resident(setup: &Setup) -> MemoryBreakdown {
    let (frozen, trained) = counts_here(setup);
    let here = trained.minus(on_host(setup, |unit| trained_of(setup, unit)));
    let states = |unit: &FsdpUnit| trained_amount(setup, unit, |kind| state_bytes(setup, kind));
    let states = sum_of(setup.units().map(states)).minus(on_host(setup, states));
    let none = ByGroup::default();
    let weights = if setup.weights_on_host { none } else { frozen.plus(trained.times(setup.compute.n_bytes())) };
    let masters = setup.masters.n_bytes();
    let master_copies = if setup.compute == setup.masters { none } else { here };
    MemoryBreakdown::default()
        .with(Category::Weights, shard_of(setup, 3, weights))
        .with(Category::Fp8Weights, delayed_scaling(setup))
        .with(Category::Masters, shard_of(setup, 1, master_copies) * masters)
        .with(Category::Gradients, shard_of(setup, 2, trained) * masters)
        .with(Category::OptimizerStates, shard_of(setup, 1, states))
}

/// Returns the bytes of the FP8 copies of weights, which exist from a step's first forward to its end: a byte per element,
/// and on a GPU another for the transpose that the backward of a linear layer reads. The codes of weights stored in FP8 are not
/// copied if they are those of the recipe. At ZeRO stage 3 the copies of the current and the next unit exist; gathered codes are
/// among them. Scales are not counted.
pub(super) fn fp8_copies(setup: &Setup) -> u64 {
    let n_transposed = if setup.compute_device == DeviceKind::Gpu && !setup.fake_quantize { 1 } else { 0 };
    let of_unit = |unit: &FsdpUnit| {
        let linears = fp8_params(unit).map(|param| {
            let n_copied = if multiplies_stored_codes(setup, param) { 0 } else { 1 };
            (n_copied + n_transposed) * setup.numel_here(param)
        });
        linears.chain(fp8_experts(unit).map(|param| setup.numel_here(param))).sum::<u64>()
    };
    match setup.ranks.zero_stage {
        3 => 2 * setup.units().map(of_unit).max().unwrap_or(0),
        _ => setup.units().map(of_unit).sum(),
    }
}

/// Returns true if matmuls read the codes of a weight that is stored in FP8: with scales of the same blocks, powers of two.
fn multiplies_stored_codes(setup: &Setup, param: &ParamSpec) -> bool {
    let is_stored = matches!(param.storage, WeightStorage::Quantized(format) if *format == FP8_WEIGHT_FORMAT);
    let has_its_scales = match setup.fp8_recipe {
        Some(Fp8RecipePlan::Blockwise(rule)) => rule.power_of_two_scales && rule.amax_epsilon == 0.0,
        _ => false,
    };
    is_stored && has_its_scales && !setup.fake_quantize
}

/// Returns the bytes of the FP8 copies that exist after a step: of frozen weights whose scales do not change.
pub(super) fn lasting_fp8_copies(setup: &Setup) -> u64 {
    let follow_weights = matches!(setup.fp8_recipe, Some(Fp8RecipePlan::Current(_) | Fp8RecipePlan::Blockwise(_)));
    let last = setup.base_grad().is_none() && follow_weights && setup.ranks.zero_stage != 3;
    if last { fp8_copies(setup) } else { 0 }
}

/// Returns the bytes of the amaxes and scales of delayed scaling, which each rank has for all modules; zero with other recipes.
fn delayed_scaling(setup: &Setup) -> u64 {
    let Some(Fp8RecipePlan::Delayed { amax_history_len, .. }) = setup.fp8_recipe else { return 0 };
    let n_matrices: usize = setup.model.fp8_modules().iter().map(|module| module.n_matrices).sum();
    // Amaxes of earlier steps and of this one, and the scale, in f32.
    (n_matrices * Fp8Operand::ALL.len() * (amax_history_len + 2) * size_of::<f32>()) as u64
}

/// Returns the weights of the linear layers of a unit that multiply in FP8.
fn fp8_params(unit: &FsdpUnit) -> impl Iterator<Item = &ParamSpec> {
    let linears = unit.layer().into_iter().flat_map(|layer| layer.linears().filter(|linear| linear.fp8));
    let names: Vec<String> = linears.map(LinearSpec::weight_name).collect();
    unit.params.iter().filter(move |param| names.contains(&param.name))
}

/// Returns the routed experts of a unit that multiply in FP8.
fn fp8_experts(unit: &FsdpUnit) -> impl Iterator<Item = &ParamSpec> {
    let matrices = unit.layer().into_iter().flat_map(|layer| layer.expert_matrices().filter(|matrix| matrix.fp8));
    let names: Vec<&str> = matrices.map(|matrix| matrix.name.as_str()).collect();
    unit.params.iter().filter(move |param| names.contains(&param.name.as_str()))
}

/// Returns a rank's shard of elements or bytes, which ZeRO stages from `from_stage` on divide over ranks.
fn shard_of(setup: &Setup, from_stage: usize, amount: ByGroup) -> u64 {
    match setup.ranks.zero_stage >= from_stage {
        true => {
            let [dense, expert] = [setup.ranks.n_shards(), setup.ranks.n_expert_shards()].map(|n| n as u64);
            amount.dense.div_ceil(dense) + amount.expert.div_ceil(expert)
        }
        false => amount.total(),
    }
}

/// Returns the bytes of a step's buffers for all-gathered weights and for gradients that are being reduced. From ZeRO
/// stage 2 on there are two full gradients: one in backward, one in a reduce-scatter. Two reduced shards are added. With a dtype
/// of communication, two shards are in it, and from stage 2 on one full gradient: the other one is in backward. In earlier stages two
/// full gradients are converted, and one shard is converted back.
pub(super) fn exchange_buffers(setup: &Setup) -> u64 {
    let RanksPlan { zero_stage, dp_replicate, .. } = setup.ranks;
    // The head's weights are in use while MTP layers are computed one by one.
    let weights = match zero_stage {
        3 => two_units(setup, gathered_in_step).max(with_head(setup, 1, gathered_in_step)),
        _ => 0,
    };
    if setup.ranks.n_shards() * dp_replicate * setup.ranks.n_expert_shards() == 1 {
        return weights;
    }
    let units = || setup.units().map(|unit| trained_of(setup, unit));
    let n_trained = |setup: &Setup, unit: &FsdpUnit| trained_of(setup, unit).total();
    let two_units = 2 * units().map(ByGroup::total).max().unwrap_or(0);
    let n_full = if zero_stage >= 2 { two_units.max(with_head(setup, 2, n_trained)) } else { 0 };
    let shard = units().map(|trained| shard_of(setup, 1, trained)).max().unwrap_or(0);
    let bytes = setup.masters.n_bytes();
    weights
        + match setup.ranks.reduce_dtype {
            None => (n_full + 2 * shard) * bytes,
            Some(sent) if zero_stage >= 2 => n_full / 2 * bytes + (n_full / 2 + 2 * shard) * sent.n_bytes(),
            Some(sent) => shard * bytes + (two_units + 2 * shard) * sent.n_bytes(),
        }
}

/// Returns the size of the head and of up to `n_layers` MTP layers together; 0 without MTP layers on this stage.
fn with_head(setup: &Setup, n_layers: usize, size: impl Fn(&Setup, &FsdpUnit) -> u64) -> u64 {
    let mtp: Vec<u64> = setup.mtp_units().map(|unit| size(setup, unit)).take(n_layers).collect();
    match mtp.is_empty() {
        true => 0,
        false => mtp.iter().sum::<u64>() + setup.head_units().map(|unit| size(setup, unit)).sum::<u64>(),
    }
}

fn weights_of(setup: &Setup, unit: &FsdpUnit) -> u64 {
    let frozen = unit.params.iter().filter(|param| !param.trainable).map(|param| setup.weight_bytes(param));
    frozen.sum::<u64>() + trained_of(setup, unit).total() * setup.compute.n_bytes()
}

/// Returns the bytes of a unit's weights that a step gathers in their dtype. Gathered FP8 codes are [`fp8_copies`].
fn gathered_in_step(setup: &Setup, unit: &FsdpUnit) -> u64 {
    let as_codes = fp8_params(unit).filter(|_| setup.fp8_param_gather).map(|param| setup.weight_bytes(param));
    weights_of(setup, unit) - as_codes.sum::<u64>()
}

/// Returns the bytes of the all-gathered weights of the current and the next unit in evaluation; 0 below ZeRO stage 3.
pub(super) fn whole_weights(setup: &Setup) -> u64 {
    if setup.ranks.zero_stage == 3 { two_units(setup, weights_of) } else { 0 }
}

/// Returns the size of two of the largest units.
fn two_units(setup: &Setup, size: impl Fn(&Setup, &FsdpUnit) -> u64) -> u64 {
    2 * setup.units().map(|unit| size(setup, unit)).max().unwrap_or(0)
}

/// Returns the bytes that an asynchronous checkpoint copies: a rank's shard of masters and optimizer states, in f32.
pub(super) fn copied(setup: &Setup) -> u64 {
    let in_f32 = |kind: &dyn OptimizerKind| (1 + kind.slots().len() as u64) * 4;
    let copies = sum_of(setup.units().map(|unit| trained_amount(setup, unit, in_f32)));
    if setup.copies_to_save { shard_of(setup, 1, copies) } else { 0 }
}

/// Returns the bytes that the optimizer step all-gathers: at ZeRO stages 1 and 2 the largest unit's trained weights, and a unit's
/// slices of whole matrices, in f32, from all tensor parallel ranks.
pub(super) fn gathered(setup: &Setup) -> u64 {
    let largest = |size: &dyn Fn(&FsdpUnit) -> u64| setup.units().map(size).max().unwrap_or(0);
    let weights = match setup.ranks.zero_stage {
        0 | 3 => 0,
        _ => largest(&|unit| trained_of(setup, unit).total()) * setup.compute.n_bytes(),
    };
    let n_copies = 1 + setup.ranks.split_sizes().tensor as u64;
    let slices = |unit: &FsdpUnit| whole_matrix_shards(setup, unit).iter().map(|(_, n)| n * n_copies * 4).sum();
    weights.max(largest(&slices))
}

/// Returns the bytes of weights, masters and optimizer states in the host's RAM, and of two gradients being copied.
pub(super) fn bytes_on_host(setup: &Setup) -> u64 {
    let per_element = |kind: &dyn OptimizerKind| setup.masters.n_bytes() + state_bytes(setup, kind);
    let n = shard_of(setup, 1, on_host(setup, |unit| trained_amount(setup, unit, per_element)));
    let largest = setup.units().map(|unit| trained_of(setup, unit).total()).max().filter(|_| n > 0).unwrap_or(0);
    let (frozen, trained) = counts_here(setup);
    // Trained weights have one copy there if masters have the compute dtype.
    let copies = if setup.compute == setup.masters { 0 } else { setup.compute.n_bytes() };
    let weights = if setup.weights_on_host { shard_of(setup, 3, frozen.plus(trained.times(copies))) } else { 0 };
    weights + n + 2 * largest * setup.masters.n_bytes()
}

/// Returns an amount of the units whose optimizer is on the host: whole units, the first ones (`parallel::ParamStore`).
fn on_host(setup: &Setup, amount: impl Fn(&FsdpUnit) -> ByGroup) -> ByGroup {
    let units = || setup.units().map(|unit| trained_of(setup, unit));
    let wanted = setup.optimizer_on_host * units().map(ByGroup::total).sum::<u64>() as f64;
    let (mut n_seen, mut on_host) = (0, ByGroup::default());
    for unit in setup.units() {
        let n = trained_of(setup, unit).total();
        if setup.optimizer_on_host > 0.0 && n_seen as f64 + n as f64 / 2.0 <= wanted {
            on_host = on_host.plus(amount(unit));
        }
        n_seen += n;
    }
    on_host
}

fn trained_of(setup: &Setup, unit: &FsdpUnit) -> ByGroup {
    trained_amount(setup, unit, |_| 1)
}

/// Returns an amount of the elements of a unit's trained parameters, as the kind of their optimizer has it per element. Shards of
/// whole matrices are counted with their padding.
fn trained_amount(setup: &Setup, unit: &FsdpUnit, per_element: impl Fn(&dyn OptimizerKind) -> u64) -> ByGroup {
    let kind_of = |param: &ParamSpec| &*setup.optimizer.group_of(param).kind;
    let trained = unit.params.iter().filter(|param| param.trainable);
    let elements = trained.filter(|param| kind_of(param).need() == UpdateNeed::Elements);
    let sum = ByGroup::sum(elements, |param| setup.numel_here(param) * per_element(kind_of(param)));
    let shards = whole_matrix_shards(setup, unit).into_iter();
    let whole = shards.map(|(kind, shard_len)| per_element(kind) * shard_len * n_shards(setup) as u64);
    sum.plus(ByGroup { dense: whole.sum(), expert: 0 })
}

/// Returns the length of a unit's shards of whole matrices, by the kind of optimizer that needs them.
fn whole_matrix_shards<'s>(setup: &'s Setup, unit: &FsdpUnit) -> Vec<(&'s dyn OptimizerKind, u64)> {
    let mut by_kind: BTreeMap<&str, (&dyn OptimizerKind, Vec<usize>)> = BTreeMap::new();
    for param in unit.params.iter().filter(|param| param.trainable) {
        let kind = &*setup.optimizer.group_of(param).kind;
        if kind.need() == UpdateNeed::WholeMatrices {
            let (_, sizes) = by_kind.entry(kind.name()).or_insert_with(|| (kind, Vec::new()));
            sizes.push(setup.numel_here(param) as usize);
        }
    }
    let shard_len = |sizes: Vec<usize>| whole_matrix_shard_len(&sizes, n_shards(setup)) as u64;
    by_kind.into_values().map(|(kind, sizes)| (kind, shard_len(sizes))).collect()
}

/// Returns the number of shards of optimizer states.
fn n_shards(setup: &Setup) -> usize {
    if setup.ranks.zero_stage == 0 { 1 } else { setup.ranks.n_shards() }
}

/// Returns the bytes of optimizer state per element.
fn state_bytes(setup: &Setup, kind: &dyn OptimizerKind) -> u64 {
    let of_slot = |dtype: SlotDtype| match dtype {
        SlotDtype::Configured => setup.moments.n_bytes(),
        SlotDtype::F32 => 4,
    };
    kind.slots().iter().map(|slot| of_slot(slot.dtype)).sum()
}

fn sum_of(amounts: impl Iterator<Item = ByGroup>) -> ByGroup {
    amounts.fold(ByGroup::default(), ByGroup::plus)
}

/// Returns the numbers of frozen and of trained parameters of the whole model.
pub fn counts(setup: &Setup) -> (u64, u64) {
    let params = || setup.model.units().iter().flat_map(|unit| &unit.params);
    let numel =
        |trained: bool| params().filter(move |param| param.trainable == trained).map(|param| param.numel() as u64);
    (numel(false).sum(), numel(true).sum())
}

/// Returns the number of parameters of the whole model that a token uses: all but the experts that it does not select.
/// `None` for a dense model.
pub fn active_count(setup: &Setup) -> Option<u64> {
    let moe = setup.model.config().moe()?;
    let params = setup.model.units().iter().flat_map(|unit| &unit.params);
    let all = ByGroup::sum(params, |param| param.numel() as u64);
    Some(all.dense + all.expert / moe.n_experts as u64 * moe.router.top_k as u64)
}

/// Returns the bytes of a rank's frozen parameters and the number of its trained ones, before ZeRO shards them.
fn counts_here(setup: &Setup) -> (ByGroup, ByGroup) {
    let frozen = setup.units().flat_map(|unit| &unit.params).filter(|param| !param.trainable);
    let frozen = ByGroup::sum(frozen, |param| setup.weight_bytes(param));
    (frozen, sum_of(setup.units().map(|unit| trained_of(setup, unit))))
}

/// Returns the number of elements of the largest parameter. Parameters are loaded one at a time.
pub(super) fn largest(setup: &Setup) -> u64 {
    let params = setup.units().flat_map(|unit| &unit.params);
    params.map(|param| param.numel() as u64).max().unwrap_or(0)
}
