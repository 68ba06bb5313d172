//! The engine of a plan: model, weights, and what each block keeps.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use candle_core::DType;
use candlewick_comm::Solo;
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{AdapterFolder, Model};
use candlewick_parallel::{Engine, Formats, Mode, Residency, Resident};
use evaluator::weights::{Origin, fill};

use crate::exit::ExitCode;
use crate::plan::{Activations, ComputeDtype, Init, OptimizerPlan, Plan};

use super::Assets;

/// Builds the model and sets its weights. Also returns what there is to say of it.
pub(super) fn engine(plan: &Plan, assets: &Assets) -> Result<(Engine, Vec<String>)> {
    let config = plan.model.config.clone().context("failed to build the model: its config is not known")?;
    let n_ids = assets.tokenizer.id_bound() as usize;
    if n_ids > config.vocab_size() {
        let error = anyhow!(
            "failed to fit the tokenizer to the model: it has ids up to {}, the model's vocab_size is {}; use the \
             tokenizer that the model was trained with",
            n_ids - 1,
            config.vocab_size()
        );
        return Err(error.context(ExitCode::Data));
    }
    let model = Model::new(config, plan.model.adapter.clone())?;
    let device = plan.device.open().map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))?;
    let OptimizerPlan { masters, moments, .. } = plan.optimizer;
    let [compute, masters, moments] = [plan.model.dtype, masters, moments].map(dtype);
    let attention = plan.model.attention;
    let said = attention.explain(&device, compute, model.config().attention_heads());
    let said = said.map_err(|error| anyhow!("failed to start: {error}").context(ExitCode::Usage))?;
    let store = Resident::new(&model, Formats { compute, masters, moments }, Mode::Train, &device)?;
    let random = Origin::Random { seed: plan.seed };
    let base = match (plan.model.init, &assets.model_folder) {
        (Init::Load, Some(folder)) => Some(Checkpoint::open(folder)?),
        _ => None,
    };
    let adapter = plan.model.adapter_folder.as_deref().map(AdapterFolder::open).transpose()?;
    let base = base.as_ref().map_or(random, Origin::Checkpoint);
    let notes = fill(&store, &model, base, adapter.as_ref().map_or(random, |it| Origin::Checkpoint(&it.weights)))?;
    notes.iter().for_each(|note| tracing::warn!("{note}"));
    let residency = (0..model.n_blocks()).map(|block_idx| residency(plan.model.activations, block_idx)).collect();
    let engine = Engine::new(model, store, residency, Arc::new(Solo), device).with_attention(attention);
    Ok((engine, said.into_iter().collect()))
}

/// The number format of a plan, as candle names it.
pub(super) fn dtype(dtype: ComputeDtype) -> DType {
    match dtype {
        ComputeDtype::Bf16 => DType::BF16,
        ComputeDtype::F32 => DType::F32,
        ComputeDtype::F16 => DType::F16,
    }
}

/// What the plan lets a block keep.
pub(crate) fn residency(activations: Activations, block_idx: usize) -> Residency {
    match activations {
        Activations::Keep => Residency::Keep,
        Activations::Recompute => Residency::Recompute,
        Activations::Offload => Residency::Offload,
        Activations::RecomputeEvery(k) if block_idx.is_multiple_of(k) => Residency::Recompute,
        Activations::RecomputeEvery(_) => Residency::Keep,
    }
}
