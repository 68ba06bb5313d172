//! An f32 residual stream in bf16 training: strategies that compute what one rank computes give its bits, because activations
//! travel in f32. Tensor parallelism rounds partial sums to bf16, and stays near.

use std::collections::BTreeMap;

use candle_core::{DType, Result};
use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, sum, threads};
use candlewick_parallel::{
    ActivationCheckpointing, LossScale, PipelineScheduleKind, SequenceParallel, StepLoss, ZeroStage,
};

use super::case::{Batching, MODELS, MTP, ModelCase, QWEN3_MOE, micros};
use super::rank::{ParamShard, Strategy, bf16_engine, data_rank, shards, unsharded};
use super::{ONE, pipeline, tensor, zero};

/// Residual stream of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Residual {
    Bf16,
    F32,
}

/// Loss and gradients of a step.
type StepResult = (f64, BTreeMap<String, Vec<f32>>);

fn step(
    strategy: Strategy,
    (case, residual, batching): (ModelCase, Residual, Batching),
    checkpointing: ActivationCheckpointing,
) -> StepResult {
    let of_rank = |world: &World| -> Result<(f64, Vec<ParamShard>)> {
        let model = case.model();
        let model = if residual == Residual::F32 { model.with_f32_residual() } else { model };
        let engine = bf16_engine(world, strategy, model, (DType::F32, checkpointing))?;
        let (rank, n_ranks) = data_rank(world, strategy);
        let (micros, n_targets) = micros(batching, 0, rank, n_ranks);
        let n_targets = sum(engine.group(), n_targets)? / strategy.n_counts();
        engine.store().zero_grads()?;
        let auxiliary = Strategy::auxiliary(case, n_targets);
        let loss = StepLoss { auxiliary: &auxiliary, ..StepLoss::from(&LossScale::mean_over(n_targets)) };
        let losses = engine.forward_backward(&micros, loss, |_| 5)?.micros;
        let own = losses.iter().map(|loss| Ok(f64::from(loss.to_scalar::<f32>()?))).sum::<Result<f64>>()?;
        Ok((sum(engine.group(), own)? / n_targets, shards(&engine, |state| &state.grad)?))
    };
    let ranks = threads::run(strategy.degrees.n_ranks(), Options::default(), of_rank).unwrap();
    (ranks[0].0, unsharded(ranks.iter().flat_map(|(_, shards)| shards)))
}

/// Returns |a - b| / |b| over all gradients.
fn relative_error(a: &StepResult, b: &StepResult) -> f64 {
    let pairs = a.1.iter().flat_map(|(name, a)| a.iter().zip(&b.1[name]));
    let (difference, size) = pairs.fold((0.0, 0.0), |(difference, size), (a, b)| {
        let (a, b) = (f64::from(*a), f64::from(*b));
        (difference + (a - b).powi(2), size + b * b)
    });
    f64::sqrt(difference / size)
}

const FOUR: Batching = Batching::Accumulated(4);

#[test]
fn recomputed_and_offloaded_blocks_have_the_bits_of_saved_ones() {
    for case in [MODELS[3], QWEN3_MOE] {
        let step = |checkpointing| step(Strategy::ONE_RANK, (case, Residual::F32, FOUR), checkpointing);
        let saved = step(ActivationCheckpointing::None);
        for checkpointing in
            [ActivationCheckpointing::Full, ActivationCheckpointing::Selective, ActivationCheckpointing::Offload]
        {
            assert!(step(checkpointing) == saved, "{checkpointing:?}, {case:?}");
        }
    }
}

/// The gradients of one stage and of two are summed in the same order, as far as no parameter is tied.
#[test]
fn stages_exchange_the_residual_stream_in_f32() {
    let two = pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[2, 2]);
    for residual in [Residual::F32, Residual::Bf16] {
        let step = |strategy| step(strategy, (MODELS[0], residual, FOUR), ActivationCheckpointing::None);
        assert!(step(two) == step(Strategy::ONE_RANK), "{residual:?}");
    }
}

#[test]
fn tensor_parallel_and_sharded_ranks_train_an_f32_residual_stream() {
    // A sum of partial sums in bf16 moves an activation by up to 2^-9, and four layers of width 32 multiply that.
    const BF16: f64 = 0.03;
    let strategies = [
        zero(2, ZeroStage::Three),
        tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::Off),
        tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On),
        Strategy {
            zero_stage: Some(ZeroStage::Two),
            ..tensor(Degrees { tp: 2, dp_shard: 2, ..ONE }, SequenceParallel::On)
        },
        pipeline(Degrees { pp: 2, tp: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[2, 2]),
    ];
    for case in [MODELS[3], MTP] {
        let settings = (case, Residual::F32, FOUR);
        let one = step(Strategy::ONE_RANK, settings, ActivationCheckpointing::None);
        for strategy in strategies {
            let ours = step(strategy, settings, ActivationCheckpointing::Full);
            let error = relative_error(&ours, &one);
            assert!(error < BF16 && (ours.0 / one.0 - 1.0).abs() < BF16, "{strategy:?}, {case:?}: {error}");
        }
    }
}

#[test]
fn the_residual_stream_changes_the_loss() {
    let loss = |residual| step(Strategy::ONE_RANK, (MODELS[0], residual, FOUR), ActivationCheckpointing::None).0;
    assert_ne!(loss(Residual::F32), loss(Residual::Bf16));
}
