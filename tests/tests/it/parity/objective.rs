//! Objectives whose token weights depend on the forward pass, and auxiliary losses: every parallel strategy equals one rank.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, sum, threads};
use candlewick_model::{AttentionCall, SequenceMixing};
use candlewick_ops::{self as ops, GradPolicy, GradScaler};
use candlewick_parallel::{
    AuxiliaryLoss, CausalLm, Engine, LossScale, MasterRounding, MicroLoss, Objective, OptimizerStep,
    PipelineScheduleKind, SequenceParallel, StepLoss, StepRouting, TokenLosses, TrainBatch, ZeroGradCount, ZeroStage,
};

use super::case::{Batching, MODELS, ModelCase, micros};
use super::rank::{LR, Strategy, compare_tensors, data_rank, engine, shards, unsharded};
use super::{ONE, dp, pipeline, ring, tensor, ulysses, zero};

const BATCHING: Batching = Batching::Accumulated(2);

/// The half sum of squared token losses: its derivative by a token's loss is that loss.
struct Squared;

impl Objective for Squared {
    fn loss(&self, tokens: &TokenLosses<'_>) -> Result<MicroLoss> {
        let weights = tokens.losses()?;
        let loss = (weights.sqr()?.sum_all()? * 0.5)?;
        Ok(MicroLoss::Weighted { loss, weights })
    }
}

/// Attention that adds the sum of squared queries as an auxiliary loss.
struct QueryEnergy;

impl SequenceMixing for QueryEnergy {
    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        let AttentionCall { q, k, v, seqs, spec, .. } = *call;
        let twice_q = (q * 2.0)?;
        let energy = ops::record("query_energy", [q.into()], q.sqr()?.sum_all()?, move |dy, _| {
            Ok([Some(twice_q.broadcast_mul(dy)?)])
        });
        ops::auxiliary_loss("query_energy", &energy)?;
        ops::attention(q, k, v, seqs, spec)
    }
}

/// Mean loss, means of auxiliary losses and gradients of a step.
#[derive(Debug)]
struct Step {
    loss: f64,
    auxiliary: BTreeMap<String, f64>,
    grads: BTreeMap<String, Vec<f32>>,
}

/// Loss, auxiliary losses and number of zero gradients.
type StepNumbers = (f64, BTreeMap<String, f64>, Option<u64>);

fn auxiliary(coefficient: f64) -> Vec<AuxiliaryLoss> {
    vec![AuxiliaryLoss { name: "query_energy".to_owned(), coefficient, normalizer: 1000.0 }]
}

fn with_energy(engine: Engine) -> Engine {
    engine.with_attention_hook(Arc::new(QueryEnergy))
}

/// Takes one step with `strategy`. Layers compute the auxiliary loss only if `auxiliary` is not empty.
fn step(strategy: Strategy, case: ModelCase, objective: &'static dyn Objective, auxiliary: &[AuxiliaryLoss]) -> Step {
    let rank = |world: &World| -> Result<(StepNumbers, Vec<_>)> {
        let (rank, n_ranks) = data_rank(world, strategy);
        let mut engine = engine(world, strategy, case, None)?;
        if !auxiliary.is_empty() {
            engine = with_energy(engine);
        }
        let (micros, n_targets) = micros(BATCHING, 0, rank, n_ranks);
        let n_targets = sum(engine.group(), n_targets)? / strategy.n_counts();
        let scaler =
            GradScaler::new(GradPolicy { max_norm: Some(1.0), ..GradPolicy::NO_CLIP_NO_SCALE }, 0, &Device::Cpu)?;
        let (routing, dropout_keys) = (StepRouting::Select, &[5, 6]);
        let batch =
            TrainBatch { micros: &micros, most_tokens: None, dropout_keys, normalizer: n_targets, auxiliary, routing };
        let optimizer = OptimizerStep {
            lr: LR,
            scaler: &scaler,
            rounding: MasterRounding::Nearest,
            grad_zeros: ZeroGradCount::On,
            max_loss: f64::INFINITY,
        };
        let result = engine.train_step(&batch, objective, &optimizer)?.wait()?;
        let loss = result.losses.iter().copied().map(f64::from).sum::<f64>() / n_targets;
        let names = auxiliary.iter().map(|loss| loss.name.clone());
        let means = names.map(|name| (name.clone(), result.outputs.total(&name).unwrap())).collect();
        Ok(((loss, means, result.zero_grads()), shards(&engine, |state| &state.grad)?))
    };
    let options = Options { timeout: Duration::from_secs(120), record: false };
    let ranks = threads::run(strategy.degrees.n_ranks(), options, rank).unwrap();
    for (numbers, _) in &ranks {
        assert_eq!(numbers, &ranks[0].0, "{strategy:?}: ranks disagree");
    }
    let grads = unsharded(ranks.iter().flat_map(|(.., shards)| shards));
    let n_zeros = grads.values().flatten().filter(|grad| **grad == 0.0).count() as u64;
    let (loss, auxiliary, zeros) = ranks[0].0.clone();
    assert_eq!(zeros, Some(n_zeros), "{strategy:?}: zeros among the gradients");
    Step { loss, auxiliary, grads }
}

#[track_caller]
fn check_close(strategy: Strategy, ours: &Step, one_rank: &Step) {
    let is_close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
    assert!(is_close(ours.loss, one_rank.loss), "{strategy:?}: {} {}", ours.loss, one_rank.loss);
    assert!(ours.auxiliary.keys().eq(one_rank.auxiliary.keys()));
    for (name, value) in &ours.auxiliary {
        assert!(is_close(*value, one_rank.auxiliary[name]), "{strategy:?}: {name}: {value}");
    }
    compare_tensors("gradient", &ours.grads, &one_rank.grads)
        .unwrap_or_else(|difference| panic!("{strategy:?}: {difference}"));
}

/// The closed form is the sum over tokens of the loss times the gradient of a step with that token alone.
#[test]
fn weights_that_depend_on_the_forward_give_the_closed_form() {
    for label_smoothing in [0.0, 0.2] {
        check_closed_form(Strategy { label_smoothing, ..Strategy::ONE_RANK });
    }
}

#[track_caller]
fn check_closed_form(strategy: Strategy) {
    let gradients = |objective: &'static dyn Objective, only: Option<usize>| {
        let rank = |world: &World| -> Result<_> {
            let engine = engine(world, strategy, MODELS[1], None)?;
            let (mut micros, _) = micros(Batching::Accumulated(5), 0, 0, 1);
            micros.truncate(1);
            let targets = micros[0].targets.to_vec1::<i64>()?;
            if let Some(only) = only {
                let ignored = |(i, target): (usize, i64)| if i == only { target } else { -100 };
                let only = targets.iter().copied().enumerate().map(ignored);
                micros[0].targets = Tensor::new(only.collect::<Vec<_>>(), &Device::Cpu)?;
            }
            let loss = StepLoss { objective, scale: LossScale::mean_over(1.0), auxiliary: &[] };
            let sums = engine.forward_backward(&micros, loss, |_| 5)?;
            Ok((sums.micros[0].to_scalar::<f32>()?, targets, unsharded(shards(&engine, |state| &state.grad)?.iter())))
        };
        threads::run(1, Options { timeout: Duration::from_secs(120), record: false }, rank).unwrap().remove(0)
    };
    let (loss, targets, ours) = gradients(&Squared, None);
    let mut half_squares = 0.0;
    let mut want: BTreeMap<String, Vec<f32>> =
        ours.iter().map(|(name, x)| (name.clone(), vec![0.0; x.len()])).collect();
    for i in (0..targets.len()).filter(|i| targets[*i] != -100) {
        let (loss, _, grads) = gradients(&CausalLm, Some(i));
        half_squares += loss * loss / 2.0;
        for (name, grad) in grads {
            want.get_mut(&name).unwrap().iter_mut().zip(grad).for_each(|(sum, grad)| *sum += loss * grad);
        }
    }
    assert!((loss - half_squares).abs() <= 1e-5 * half_squares, "{loss} {half_squares}");
    assert!(targets.len() > 20);
    compare_tensors("gradient", &ours, &want).unwrap();
}

#[test]
fn parity_of_an_objective_that_reads_token_losses() {
    let one_rank = step(Strategy::ONE_RANK, MODELS[1], &Squared, &[]);
    let plain = step(Strategy::ONE_RANK, MODELS[1], &CausalLm, &[]);
    assert!(compare_tensors("gradient", &plain.grads, &one_rank.grads).is_err(), "the objective has no effect");
    let strategies = [
        dp(4),
        zero(4, ZeroStage::Three),
        ulysses(1, 2, None),
        ring::ring(2),
        tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On),
        tensor(Degrees { tp: 2, sp: 2, ..ONE }, SequenceParallel::Off),
        pipeline(Degrees { pp: 2, dp_replicate: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[2, 2]),
    ];
    for strategy in strategies {
        check_close(strategy, &step(strategy, MODELS[1], &Squared, &[]), &one_rank);
    }
    let smoothed = |strategy| Strategy { label_smoothing: 0.2, ..strategy };
    let one_rank = step(smoothed(Strategy::ONE_RANK), MODELS[1], &Squared, &[]);
    for strategy in strategies.map(smoothed) {
        check_close(strategy, &step(strategy, MODELS[1], &Squared, &[]), &one_rank);
    }
}

#[test]
fn parity_of_an_auxiliary_loss() {
    let losses = auxiliary(0.1);
    let one_rank = step(Strategy::ONE_RANK, MODELS[1], &CausalLm, &losses);
    assert!(one_rank.auxiliary["query_energy"] > 0.0);
    let without = step(Strategy::ONE_RANK, MODELS[1], &CausalLm, &auxiliary(0.0));
    assert_eq!(without.auxiliary, one_rank.auxiliary);
    assert!(compare_tensors("gradient", &without.grads, &one_rank.grads).is_err(), "the coefficient has no effect");
    let strategies = [
        dp(4),
        zero(4, ZeroStage::One),
        zero(4, ZeroStage::Three),
        pipeline(Degrees { pp: 2, dp_replicate: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[2, 2]),
    ];
    for strategy in strategies {
        check_close(strategy, &step(strategy, MODELS[1], &CausalLm, &losses), &one_rank);
    }
}

/// Compares the gradient of coefficient * sum / normalizer with central differences along it.
#[test]
fn the_gradient_of_an_auxiliary_loss_is_its_derivative() {
    let rank = |world: &World| -> Result<_> {
        let engine = with_energy(engine(world, Strategy::ONE_RANK, MODELS[1], None)?);
        let (micros, _) = micros(BATCHING, 0, 0, 1);
        let losses = auxiliary(1000.0);
        let run = |mean: f64| {
            let loss = StepLoss { objective: &CausalLm, scale: LossScale::mean_over(mean), auxiliary: &losses };
            engine.store().zero_grads()?;
            engine.forward_backward(&micros, loss, |_| 5)?.auxiliary[0].sum_all()?.to_scalar::<f32>()
        };
        // Dividing by this mean makes the cross-entropy negligible compared with the auxiliary loss.
        run(1e12)?;
        let states = engine.store().states()?;
        let grads = states.iter().map(|state| state.grad.copy()).collect::<Result<Vec<_>>>()?;
        let norm: f64 = f64::from(
            ops::to_host(&engine.store().grad_squares()?.to_dtype(DType::F32)?.sum_all()?)?.to_scalar::<f32>()?,
        )
        .sqrt();
        let at = |step: f64| {
            for (state, grad) in states.iter().zip(&grads) {
                let moved = (&state.master + (grad * (step / norm))?)?;
                ops::copy_into(&state.master, &moved)?;
            }
            engine.store().refresh()?;
            run(1e12)
        };
        let h = 1e-2;
        let (above, below) = (f64::from(at(h)?), f64::from(at(-2.0 * h)?));
        Ok(((above - below) / (2.0 * h), norm))
    };
    let options = Options { timeout: Duration::from_secs(120), record: false };
    let (difference, norm) = threads::run(1, options, rank).unwrap().remove(0);
    // Errors: f32 sums of some thousand squares, and a third derivative of a few thousandths.
    assert!((difference - norm).abs() < 5e-3 * norm, "{difference} {norm}");
}

#[test]
fn an_auxiliary_loss_without_a_coefficient_is_refused_by_name() {
    let rank = |world: &World| -> Result<_> {
        let engine = with_energy(engine(world, Strategy::ONE_RANK, MODELS[1], None)?);
        let (micros, n_targets) = micros(BATCHING, 0, 0, 1);
        Ok(engine.forward_backward(&micros, &LossScale::mean_over(n_targets), |_| 5).unwrap_err().to_string())
    };
    let options = Options { timeout: Duration::from_secs(120), record: false };
    let said = threads::run(1, options, rank).unwrap().remove(0);
    assert!(said.contains("the auxiliary loss `query_energy`, for which the step has no coefficient"), "{said}");
}
