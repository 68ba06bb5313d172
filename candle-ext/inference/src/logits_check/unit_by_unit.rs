//! Logits of a model whose weights are in memory one FSDP unit at a time.
//!
//! Dimensions: t tokens of all prompts, d hidden size, v vocabulary size

use anyhow::Result;
use candle_core::{Device, Tensor};
use candlewick_model::{
    ForwardContext, FsdpUnit, FsdpUnitKind, Model, ModelError, ParamSpec, RouterContext, SingleDevice, TensorCallback,
    UnitWeights,
};
use candlewick_ops::{CuSeqlens, Weight};

use super::prompts::PackedPrompts;

/// Computes the logits of all prompts in one forward, f32 [t, v]. `value` returns the f32 value of a parameter. `router` records
/// the selected experts, or replaces them.
///
/// `on_unit` gets the numbers of finished units and of all.
pub(super) fn logits(
    model: &Model,
    prompts: &PackedPrompts,
    device: &Device,
    router: RouterContext<'_>,
    value: impl Fn(&ParamSpec) -> Result<Tensor, ModelError>,
    on_unit: TensorCallback,
) -> Result<Tensor> {
    let positions = prompts.positions();
    let (cos, sin) = model.rope_of_sparse_positions(positions, &model.length_classes(positions), device)?;
    let seqs = CuSeqlens::packed(prompts.starts())?;
    let context = ForwardContext { router, ..ForwardContext::on_single_device([&cos, &sin], &seqs) };
    let mut x = Tensor::new(prompts.ids(), device)?;
    for (idx, unit) in model.units().iter().enumerate() {
        on_unit(idx, model.units().len());
        let weights = || weights_of(model, unit, device, &value);
        x = match unit.kind {
            FsdpUnitKind::Embedding => model.embed(&weights()?, &x, &SingleDevice)?,
            FsdpUnitKind::Layer(_) => model.block(&weights()?, &x, &context)?,
            FsdpUnitKind::Head { .. } => {
                let weights = weights()?;
                model.logits(&weights, &model.final_norm(&weights, &x)?)?
            }
            // They predict later tokens.
            FsdpUnitKind::Mtp(_) | FsdpUnitKind::Named => x,
        };
    }
    on_unit(model.units().len(), model.units().len());
    Ok(x)
}

/// Reads the parameters that a unit owns, and those of other units that it reads.
fn weights_of(
    model: &Model,
    unit: &FsdpUnit,
    device: &Device,
    value: impl Fn(&ParamSpec) -> Result<Tensor, ModelError>,
) -> Result<UnitWeights> {
    let owned = |name: &str, owner: usize| model.units()[owner].params.iter().find(move |param| param.name == *name);
    let ties = unit.read_ties().filter_map(|tied| owned(&tied.name, tied.owner));
    let read = |param: &ParamSpec| {
        let on_device = value(param)?.to_device(device)?;
        anyhow::Ok((param.name.clone(), Weight::frozen(on_device)))
    };
    let weights = unit.params.iter().chain(ties).map(read).collect::<Result<Vec<_>>>()?;
    Ok(UnitWeights::new(unit, weights)?)
}
