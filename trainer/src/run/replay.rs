//! `trainer replay`: forward and backward of a kept batch, on one rank.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::{DType, Device, Tensor};
use candlewick_comm::World;
use candlewick_inference::eval_loss::EvalLossSum;
use candlewick_ops::{LossScaling, ScalerState, derive_key, to_host};
use candlewick_parallel::{Engine, LossScale, StepLoss};
use candlewick_runtime::run_id::RunId;
use candlewick_text::hub::Hub;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use serde::Serialize;

use crate::checkpoint::load_checkpoint;
use crate::data::{Batch, GlobalBatch};
use crate::exit::ExitCode;
use crate::plan::Plan;

use super::assets::Assets;
use super::build::{self, Built};
use super::kept_batch::KeptBatch;
use super::ranks::RankContext;
use super::slower_modules::EarlierRun;
use super::state::EngineState;
use super::step;

/// The weights of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayWeights {
    /// The checkpoint that the kept batch names; without one, the weights at the start of the run.
    Recorded,
    /// A `sharded` checkpoint.
    Checkpoint(PathBuf),
    /// The weights at the start of the run: of the model, or random ones.
    Initial,
}

/// The result of a replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplayReport {
    /// The step's number.
    pub step: usize,
    /// The reason to keep the batch.
    pub reason: String,
    /// The checkpoint of the weights; `None` for those at the start of the run.
    pub checkpoint: Option<PathBuf>,
    /// The step after which the weights are.
    pub weights_after_step: usize,
    /// The loss and the gradient norm of the run, if they were finite.
    pub recorded: ReplayTotals,
    /// The loss and the gradient norm of the replay.
    pub replayed: ReplayTotals,
    /// The number of target tokens.
    pub n_targets: usize,
    /// The number of tokens without padding.
    pub n_tokens: usize,
    /// The gradient norm of each layer, and of the parameters outside of layers.
    pub grad_norms: BTreeMap<String, Option<f64>>,
    /// The sequences, the highest loss first.
    pub sequences: Vec<ReplayedSequence>,
}

/// The loss and the gradient norm of a batch; `None` if they are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ReplayTotals {
    /// The mean loss over the target tokens.
    pub loss: Option<f64>,
    /// The gradient norm before clipping.
    pub grad_norm: Option<f64>,
}

/// A sequence of a replayed batch. Its loss is that of evaluation, without dropout and label smoothing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplayedSequence {
    /// The micro-batch.
    pub micro_batch: usize,
    /// The file and row of its samples.
    pub sources: Vec<String>,
    /// The mean loss over its target tokens; `None` if it is not finite or there are none.
    pub loss: Option<f64>,
    /// The sum of the losses of its target tokens.
    pub loss_sum: Option<f64>,
    /// The number of target tokens.
    pub n_targets: usize,
    /// The number of tokens.
    pub n_tokens: usize,
    /// The text.
    pub text: String,
}

/// Computes loss and gradient of a kept batch with the settings of `plan`, which has one rank.
pub fn replay(
    kept: &KeptBatch,
    plan: &Plan,
    weights: &ReplayWeights,
    hub: &Hub,
    device: &Device,
) -> Result<ReplayReport> {
    let world = World::solo();
    let ranks = RankContext::new(&world, device, &plan.ranks)?;
    let assets = Assets::find(plan, hub, RunId::now())?;
    let earlier = EarlierRun::Replayed(kept.slower_modules.as_deref());
    let Built { engine, .. } = build::engine(plan, &assets, &ranks, &earlier)?;
    let loaded = load(kept, weights, &engine)?;
    let step = kept.global_batch();
    ensure!(step.n_tokens() > 0, anyhow!("failed to replay: the batch has no tokens").context(ExitCode::Data));
    check_ids(&step, engine.model().config().vocab_size())?;
    let (loss, squares) = forward_backward(&engine, plan, kept.step, &step, loaded.scale.as_ref())?;
    let finite = |value: f64| value.is_finite().then_some(value);
    let mut sequences = sequences(kept, &engine, &assets.tokenizer)?;
    let badness = |sequence: &ReplayedSequence| match sequence.loss {
        None if sequence.n_targets > 0 => f64::INFINITY,
        loss => loss.unwrap_or(f64::NEG_INFINITY),
    };
    sequences.sort_by(|a, b| badness(b).total_cmp(&badness(a)));
    Ok(ReplayReport {
        step: kept.step,
        reason: kept.reason.clone(),
        checkpoint: loaded.checkpoint,
        weights_after_step: loaded.step,
        recorded: ReplayTotals { loss: kept.loss, grad_norm: kept.grad_norm },
        replayed: ReplayTotals { loss: finite(loss), grad_norm: finite(squares.values().sum::<f64>().sqrt()) },
        n_targets: step.n_targets,
        n_tokens: step.n_tokens(),
        grad_norms: squares.into_iter().map(|(layer, square)| (layer, finite(square.sqrt()))).collect(),
        sequences,
    })
}

/// The loaded weights.
struct LoadedWeights {
    checkpoint: Option<PathBuf>,
    step: usize,
    /// The gradient scaler of a run with loss scaling.
    scale: Option<ScalerState>,
}

fn load(kept: &KeptBatch, weights: &ReplayWeights, engine: &Engine) -> Result<LoadedWeights> {
    let dir = match weights {
        ReplayWeights::Recorded => kept.checkpoint.clone(),
        ReplayWeights::Checkpoint(dir) => Some(dir.clone()),
        ReplayWeights::Initial => None,
    };
    let Some(dir) = dir else { return Ok(LoadedWeights { checkpoint: None, step: 0, scale: None }) };
    if !dir.exists() {
        let problem = format!("failed to load the weights: there is no {}", dir.display());
        let advice = "give another sharded checkpoint of the run with --checkpoint, or use --initial-weights";
        return Err(anyhow!("{problem}; {advice}").context(ExitCode::Checkpoint));
    }
    let state = load_checkpoint(&dir, &mut EngineState::of(engine)?)?;
    engine.store().refresh()?;
    Ok(LoadedWeights { checkpoint: Some(dir), step: state.step, scale: state.scaler })
}

fn check_ids(step: &GlobalBatch, vocab_size: usize) -> Result<()> {
    let largest = step.micro_batches.iter().flat_map(|batch| &batch.ids).max().copied().unwrap_or(0) as usize;
    if largest < vocab_size {
        return Ok(());
    }
    let problem =
        format!("failed to replay: the batch has the token id {largest}, and the model's vocab_size is {vocab_size}");
    Err(anyhow!(problem).context(ExitCode::Data))
}

/// Runs forward and backward as the training step does. Returns the mean loss, and the sum of squares of the gradient by
/// layer.
fn forward_backward(
    engine: &Engine,
    plan: &Plan,
    number: usize,
    step: &GlobalBatch,
    scaler: Option<&ScalerState>,
) -> Result<(f64, BTreeMap<String, f64>)> {
    let micros = step.micro_batches.iter().map(|batch| step::micro(batch, engine)).collect::<Result<Vec<_>>>()?;
    let auxiliary = step::auxiliary_losses(plan.moe.as_ref(), plan.model.mtp, step);
    let loss_scale = match (plan.optimizer.loss_scaling, scaler) {
        (scaling, _) if scaling == LossScaling::NONE => 1.0,
        (scaling, state) => state.map_or(scaling.initial, |state| state.loss_scale),
    };
    let scale = (loss_scale != 1.0).then(|| Tensor::new(loss_scale as f32, engine.device())).transpose()?;
    let objective = plan.objective.objective();
    let normalizer = step.count(objective.normalizer()) as f64;
    let loss = StepLoss { objective, scale: LossScale::mean_over(normalizer).times(scale), auxiliary: &auxiliary };
    let dropout_key = derive_key(plan.seed, number as u64);
    engine.store().zero_grads()?;
    let losses = engine.forward_backward(&micros, loss, |micro_idx| derive_key(dropout_key, micro_idx as u64))?;
    engine.store().wait_grad_reduction()?;
    let sums = losses.micros.iter().map(|sum| Ok(f64::from(to_host(sum)?.to_scalar::<f32>()?)));
    let loss = sums.sum::<Result<f64>>().context("failed to compute the loss")? / normalizer.max(1.0);
    let mut squares = BTreeMap::new();
    for state in engine.store().states()? {
        let grad: Vec<f32> = to_host(&state.grad.flatten_all()?)?.to_dtype(DType::F32)?.to_vec1()?;
        let square: f64 = grad.iter().map(|x| (f64::from(*x) / loss_scale).powi(2)).sum();
        *squares.entry(layer_of(&state.name)).or_default() += square;
    }
    Ok((loss, squares))
}

/// Returns the layer of a parameter, with its number in five digits so that layers are in order: `layers.00012`; outside of
/// layers its module, such as `embed_tokens`.
fn layer_of(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    let layer = parts.windows(2).find_map(|pair| (pair[0] == "layers").then(|| pair[1].parse::<usize>().ok())?);
    match layer {
        Some(layer) => format!("layers.{layer:05}"),
        None => parts.iter().rev().skip(1).find(|part| !part.starts_with("lora_")).unwrap_or(&name).to_string(),
    }
}

/// Computes the loss of every sequence on its own.
fn sequences(kept: &KeptBatch, engine: &Engine, tokenizer: &Tokenizer) -> Result<Vec<ReplayedSequence>> {
    let all = kept.micro_batches.iter().enumerate();
    let all = all.flat_map(|(micro_idx, micro)| micro.sequences().map(move |sequence| (micro_idx, sequence)));
    all.filter(|(_, (batch, _))| !batch.ids.is_empty())
        .map(|(micro_batch, (batch, sources))| {
            let finite = |value: f64| value.is_finite().then_some(value);
            let sum = match batch.n_targets {
                0 => 0.0,
                n_targets => EvalLossSum::default().add(engine, &step::micro(&batch, engine)?, n_targets)?,
            };
            let Batch { ids, n_targets, n_tokens, .. } = batch;
            Ok(ReplayedSequence {
                micro_batch,
                sources: sources.to_vec(),
                loss: finite(sum / n_targets as f64),
                loss_sum: finite(sum),
                n_targets,
                n_tokens,
                text: tokenizer.decode(&ids, SpecialTokens::Include).unwrap_or_default(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_grouped_by_layer() {
        for (name, want) in [
            ("model.layers.12.self_attn.q_proj.weight", "layers.00012"),
            ("base_model.model.model.layers.3.mlp.up_proj.lora_A.weight", "layers.00003"),
            ("model.embed_tokens.weight", "embed_tokens"),
            ("model.norm.weight", "norm"),
            ("lm_head.weight", "lm_head"),
            ("lm_head.lora_A.weight", "lm_head"),
        ] {
            assert_eq!(layer_of(name), want, "{name}");
        }
    }
}
