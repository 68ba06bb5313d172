//! Stochastic rounding of bf16 master weights: every mesh rounds to the same bits.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, sum, threads};
use candlewick_ops::{GradPolicy, GradScaler, copy_into};
use candlewick_parallel::{
    ActivationCheckpointing, CpuOffload, Engine, LossScale, MasterRounding, PipelineScheduleKind, SequenceParallel,
    ZeroStage,
};

use super::case::{Batching, DENSE_BASE, DOTS1, MODELS, ModelCase, QWEN3_MOE, micros};
use super::rank::{LR, ParamShard, Strategy, bf16_engine, data_rank, shards, unsharded};
use super::{ONE, dp, hybrid, pipeline, tensor, zero};

type Weights = BTreeMap<String, Vec<f32>>;

const N_STEPS: u64 = 3;

/// Trains on the ranks of `strategy`, and returns the whole master weights. `set_gradients` computes the gradients of a step.
fn train(
    (strategy, case): (Strategy, ModelCase),
    rounding: impl Fn(u64) -> MasterRounding + Sync,
    set_gradients: impl Fn(&World, &Engine, u64) -> Result<()> + Sync,
) -> Weights {
    let of_rank = |world: &World| -> Result<Vec<ParamShard>> {
        let bf16 = (DType::BF16, ActivationCheckpointing::None);
        let engine = bf16_engine(world, strategy, case.model(), bf16)?;
        let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu)?;
        for step in 0..N_STEPS {
            engine.store().zero_grads()?;
            set_gradients(world, &engine, step)?;
            let losses = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
            scaler.update(&engine.store().grad_squares()?, &losses)?;
            engine.store().step(LR, &scaler, rounding(step))?;
        }
        shards(&engine, |state| &state.master)
    };
    let ranks = threads::run(strategy.degrees.n_ranks(), Options::default(), of_rank).unwrap();
    unsharded(ranks.iter().flatten())
}

fn stochastic(step: u64) -> MasterRounding {
    MasterRounding::Stochastic { key: 100 + step }
}

/// Runs a backward pass, and overwrites its gradients: an element's gradient follows from its position in the parameter.
fn synthetic_gradients(world: &World, engine: &Engine, step: u64, strategy: Strategy) -> Result<()> {
    let (rank, n_ranks) = data_rank(world, strategy);
    let (micros, _) = micros(Batching::Accumulated(8), step as usize, rank, n_ranks);
    engine.forward_backward(&micros, &LossScale::mean_over(1.0), |_| 5)?;
    let states = engine.store().states()?;
    for (state, shard) in states.iter().zip(shards(engine, |state| &state.grad)?) {
        let value = |at: usize| ((at as u64 * 3 + step + state.name.len() as u64) as f32).sin() * 0.3;
        let values: Vec<f32> = shard.positions().map(value).collect();
        copy_into(&state.grad, &Tensor::new(values, &Device::Cpu)?)?;
    }
    Ok(())
}

fn one_stage_per_two_layers() -> Strategy {
    pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[2, 2])
}

/// From equal gradients, the weights of a mesh equal those of one rank to the bit.
#[track_caller]
fn check_equal_bits(case: ModelCase, strategies: &[Strategy]) {
    let weights = |strategy: Strategy| {
        train((strategy, case), stochastic, |world, engine, step| synthetic_gradients(world, engine, step, strategy))
    };
    let one = weights(Strategy::ONE_RANK);
    for &strategy in strategies {
        let ours = weights(strategy);
        assert!(ours.keys().eq(one.keys()));
        let differing: Vec<&String> = one.keys().filter(|name| ours[*name] != one[*name]).collect();
        assert!(differing.is_empty(), "{strategy:?}, {case:?}: {differing:?}");
    }
}

#[test]
fn masters_are_rounded_to_the_same_bits_on_every_mesh() {
    let offloaded = CpuOffload { optimizer: 1.0, weights: false };
    let strategies = [
        dp(2),
        zero(2, ZeroStage::One),
        zero(3, ZeroStage::Two),
        zero(2, ZeroStage::Three),
        hybrid(2, 2, ZeroStage::Three),
        tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::Off),
        Strategy {
            zero_stage: Some(ZeroStage::Two),
            ..tensor(Degrees { tp: 2, dp_shard: 3, ..ONE }, SequenceParallel::On)
        },
        tensor(Degrees { tp: 4, ..ONE }, SequenceParallel::On),
        one_stage_per_two_layers(),
        Strategy { cpu_offload: offloaded, ..Strategy::ONE_RANK },
    ];
    check_equal_bits(MODELS[1], &strategies);
    check_equal_bits(DENSE_BASE, &strategies[..7]);
}

#[test]
fn masters_of_experts_are_rounded_to_the_same_bits_on_every_mesh() {
    let strategies = [
        Strategy { degrees: Degrees { dp_shard: 2, ep: 2, ..ONE }, ..zero(2, ZeroStage::One) },
        Strategy { degrees: Degrees { dp_shard: 2, ep: 2, tp: 2, etp: 2, ..ONE }, ..zero(2, ZeroStage::Two) },
    ];
    check_equal_bits(QWEN3_MOE, &strategies);
    check_equal_bits(DOTS1, &strategies);
}

/// Data-parallel ranks with one micro-batch each reduce the same gradients in every ZeRO stage.
#[test]
fn zero_stages_round_masters_to_the_same_bits() {
    let weights = |strategy: Strategy, rounding: fn(u64) -> MasterRounding| {
        train((strategy, MODELS[3]), rounding, |world, engine, step| {
            let (rank, n_ranks) = data_rank(world, strategy);
            let (micros, n_targets) = micros(Batching::Packed, step as usize, rank, n_ranks);
            let n_targets = sum(engine.group(), n_targets)?;
            engine.forward_backward(&micros, &LossScale::mean_over(n_targets), |_| 5)?;
            Ok(())
        })
    };
    let replicated = weights(dp(2), stochastic);
    for stage in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        assert!(weights(zero(2, stage), stochastic) == replicated, "{stage:?}");
    }
    assert!(weights(dp(2), |_| MasterRounding::Nearest) != replicated, "rounding has no effect");
    assert!(weights(dp(2), |step| stochastic(step + 1)) != replicated, "the key has no effect");
}
