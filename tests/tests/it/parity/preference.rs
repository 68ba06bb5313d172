//! An objective over pairs with a frozen reference, under every parallelism: the sigmoid loss of DPO (Rafailov et al., 2023,
//! <https://arxiv.org/abs/2305.18290>), with the formula, rewards and metrics of TRL's `DPOTrainer` (`loss_type="sigmoid"`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use candle_core::{Device, Result, Tensor};
use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, sum, threads};
use candlewick_ops::{self as ops, GradPolicy, GradScaler, UpdateOutcome};
use candlewick_parallel::{
    ColumnScope, ColumnSpec, Engine, LossNormalizer, LossScale, MasterRounding, MetricReduction, MetricSpec, Micro,
    MicroColumn, MicroColumns, MicroLoss, Objective, OptimizerStep, PipelineScheduleKind, REFERENCE_LOG_PROBS,
    ReferenceModel, SequenceParallel, StepLoss, StepRouting, TokenLosses, TrainBatch, ZeroGradCount, ZeroStage,
};

use super::case::{Batching, DENSE_BASE, MODELS, ModelCase, packed, sequence};
use super::faulty_group::GroupOp;
use super::rank::{LR, Strategy, compare_tensors, data_rank, engine_with_reference, shards, unsharded};
use super::{ONE, dp, pipeline, ring, tensor, ulysses, zero};

/// Column with 1 for a chosen sequence and -1 for a rejected one.
const PREFERENCE: &str = "preference";
/// Column with the index of a sequence's pair in its micro-batch.
const PAIR: &str = "pair";

const BETA: f64 = 0.3;
const N_PAIRS: usize = 8;
const N_STEPS: usize = 2;

/// DPO's sigmoid loss.
struct Dpo;

/// Cross-entropy with metrics that are not finite.
struct InfiniteMetric;

const INFINITE: [MetricSpec; 2] =
    [mean("infinite_mean"), MetricSpec { name: "infinite_sum", reduction: MetricReduction::Sum }];

/// Dpo without metrics of which the engine knows.
struct Undeclared;

const COLUMNS: [ColumnSpec; 2] = [
    ColumnSpec { name: PREFERENCE, scope: ColumnScope::Sequence },
    ColumnSpec { name: PAIR, scope: ColumnScope::Sequence },
];

const fn mean(name: &'static str) -> MetricSpec {
    MetricSpec { name, reduction: MetricReduction::Mean }
}

const METRICS: [MetricSpec; 7] = [
    mean("rewards/chosen"),
    mean("rewards/rejected"),
    mean("rewards/margins"),
    mean("rewards/accuracies"),
    MetricSpec { name: "pairs", reduction: MetricReduction::Sum },
    MetricSpec { name: "rewards/largest_margin", reduction: MetricReduction::Max },
    // Negative on every rank: a zero from any of them would be the maximum.
    MetricSpec { name: "rewards/largest_margin_below_10", reduction: MetricReduction::Max },
];

impl Objective for Dpo {
    fn columns(&self) -> &[ColumnSpec] {
        &COLUMNS
    }

    fn reference(&self) -> ReferenceModel {
        ReferenceModel::Frozen
    }

    fn normalizer(&self) -> LossNormalizer {
        LossNormalizer::Pairs
    }

    fn metrics(&self) -> &[MetricSpec] {
        &METRICS
    }

    /// s sequences, p pairs: as many rows as sequences, of which those without a pair are masked
    fn loss(&self, tokens: &TokenLosses<'_>) -> Result<MicroLoss> {
        let micro = tokens.micro();
        let (sign_s, pair_s) = (micro.columns.values(PREFERENCE)?, micro.columns.values(PAIR)?);
        let log_ratios_t = (tokens.losses()?.neg()? - micro.columns.values(REFERENCE_LOG_PROBS)?)?;
        let rewards_s = (micro.sum_by_sequence(&log_ratios_t)? * BETA)?;
        let by_pair = |values_s: &Tensor| values_s.zeros_like()?.index_add(pair_s, values_s, 0);
        let margins_p = by_pair(&(&rewards_s * sign_s)?)?;
        let is_pair_p = by_pair(&(sign_s.abs()? * 0.5)?)?;
        // -log sigmoid(m) = max(-m, 0) + log(1 + exp(-|m|)), with the derivative -sigmoid(-m).
        let of_abs_p = (margins_p.abs()?.neg()?.exp()? + 1.0)?.log()?;
        let losses_p = (margins_p.neg()?.relu()? + of_abs_p)?;
        let slopes_p = ((margins_p.exp()? + 1.0)?.recip()? * &is_pair_p)?;
        let weights_s = ((slopes_p.index_select(pair_s, 0)? * sign_s)? * BETA)?;
        let rewards_of = |sign: f64| (sign_s * sign)?.relu()?.mul(&rewards_s)?.sum_all();
        tokens.emit("rewards/chosen", rewards_of(1.0)?)?;
        tokens.emit("rewards/rejected", rewards_of(-1.0)?)?;
        tokens.emit("rewards/margins", (&margins_p * &is_pair_p)?.sum_all()?)?;
        tokens
            .emit("rewards/accuracies", margins_p.gt(0.0)?.to_dtype(is_pair_p.dtype())?.mul(&is_pair_p)?.sum_all()?)?;
        tokens.emit("pairs", is_pair_p.sum_all()?)?;
        let unpaired_p = is_pair_p.affine(1e9, -1e9)?;
        let largest = (&margins_p + unpaired_p)?.max(0)?;
        tokens.emit("rewards/largest_margin_below_10", (&largest - 10.0)?)?;
        tokens.emit("rewards/largest_margin", largest)?;
        Ok(MicroLoss::Weighted { loss: (losses_p * is_pair_p)?.sum_all()?, weights: micro.to_tokens(&weights_s)? })
    }
}

impl Objective for InfiniteMetric {
    fn metrics(&self) -> &[MetricSpec] {
        &INFINITE
    }

    fn loss(&self, tokens: &TokenLosses<'_>) -> Result<MicroLoss> {
        for metric in &INFINITE {
            tokens.emit(metric.name, Tensor::new(f32::INFINITY, &Device::Cpu)?)?;
        }
        Ok(MicroLoss::SumOfTokens)
    }
}

impl Objective for Undeclared {
    fn loss(&self, tokens: &TokenLosses<'_>) -> Result<MicroLoss> {
        tokens.emit("margins", tokens.losses()?.sum_all()?)?;
        Ok(MicroLoss::SumOfTokens)
    }
}

/// Returns the micro-batches of a data rank in a step: pairs dealt out to micro-batches and ranks.
fn pairs(batching: Batching, step: usize, (rank, n_ranks): (usize, usize)) -> Vec<Micro> {
    let n_micros = if let Batching::Accumulated(n_micros) = batching { n_micros } else { 1 };
    let of_micro = |micro: usize| {
        let own = (0..N_PAIRS).filter(|pair| pair % n_micros == micro && pair / n_micros % n_ranks == rank);
        micro_of(batching, step, &own.collect::<Vec<_>>())
    };
    (0..n_micros).map(of_micro).collect()
}

fn micro_of(batching: Batching, step: usize, pairs: &[usize]) -> Micro {
    let sequences: Vec<_> = pairs.iter().flat_map(|pair| [2 * pair, 2 * pair + 1]).collect();
    let sequences: Vec<_> = sequences.into_iter().map(|idx| sequence(batching, step, idx)).collect();
    let (signs, of_pair): (Vec<f32>, Vec<u32>) =
        (0..pairs.len() as u32).flat_map(|pair| [(1.0, pair), (-1.0, pair)]).unzip();
    let column = |values| MicroColumn { scope: ColumnScope::Sequence, values };
    let columns = MicroColumns::default()
        .with(PREFERENCE, column(Tensor::new(signs, &Device::Cpu).unwrap()))
        .with(PAIR, column(Tensor::new(of_pair, &Device::Cpu).unwrap()));
    Micro { columns, ..packed(&sequences) }
}

/// Returns the pairs of all ranks in this rank's micro-batches.
fn n_pairs(micros: &[Micro]) -> f64 {
    let of_micro = |micro: &Micro| {
        LossNormalizer::Pairs.count(&micro.targets.to_vec1::<i64>().unwrap(), micro.seqs.cu_seqlens_q())
    };
    micros.iter().map(of_micro).sum::<usize>() as f64
}

/// Results of some steps: losses, gradient norms and metrics of each, and the gradients of the last.
struct Preference {
    losses: Vec<f64>,
    norms: Vec<f64>,
    metrics: Vec<BTreeMap<&'static str, f64>>,
    grads: BTreeMap<String, Vec<f32>>,
    used: BTreeSet<GroupOp>,
}

fn steps(
    strategy: Strategy,
    case: ModelCase,
    batching: Batching,
    fault: Option<&GroupOp>,
) -> candlewick_comm::Result<Preference> {
    let rank = |world: &World| -> Result<_> {
        let engine = engine_with_reference(world, strategy, case, fault)?;
        let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu)?;
        let (mut losses, mut norms, mut metrics, n_before) = (Vec::new(), Vec::new(), Vec::new(), world.calls().len());
        for step in 0..N_STEPS {
            let micros = pairs(batching, step, data_rank(world, strategy));
            // Fault injection does not affect this sum.
            let n_copies = strategy.n_counts() * strategy.degrees.tp as f64;
            let normalizer = sum(&*world.group(), n_pairs(&micros))? / n_copies;
            let (routing, dropout_keys) = (StepRouting::Select, &vec![5; micros.len()]);
            let batch =
                TrainBatch { micros: &micros, most_tokens: None, dropout_keys, normalizer, auxiliary: &[], routing };
            let optimizer = OptimizerStep {
                lr: LR,
                scaler: &scaler,
                rounding: MasterRounding::Nearest,
                grad_zeros: ZeroGradCount::Off,
                max_loss: f64::INFINITY,
            };
            let result = engine.train_step(&batch, &Dpo, &optimizer)?.wait()?;
            losses.push(result.losses.iter().copied().map(f64::from).sum::<f64>() / normalizer);
            norms.push(result.decision.norm);
            metrics.push(METRICS.map(|metric| (metric.name, result.outputs.total(metric.name).unwrap())).into());
        }
        let used = GroupOp::used_in(&world.calls()[n_before..]);
        Ok(((losses, norms, metrics), shards(&engine, |state| &state.grad)?, used))
    };
    let options = Options { timeout: Duration::from_secs(120), record: true };
    let ranks = threads::run(strategy.degrees.n_ranks(), options, rank)?;
    for (numbers, ..) in ranks.iter().filter(|_| fault.is_none()) {
        assert_eq!(numbers, &ranks[0].0, "{strategy:?}: ranks disagree");
    }
    let (losses, norms, metrics) = ranks[0].0.clone();
    Ok(Preference {
        losses,
        norms,
        metrics,
        grads: unsharded(ranks.iter().flat_map(|(_, shards, _)| shards)),
        used: ranks.iter().flat_map(|(.., used)| used.clone()).collect(),
    })
}

fn compare(ours: &Preference, one_rank: &Preference) -> std::result::Result<(), String> {
    // A reward is a small difference of sums of log-probabilities, which are 100 times larger.
    let is_close = |a: f64, b: f64| (a - b).abs() <= 2e-5 * b.abs().max(0.1);
    for (step, (a, b)) in ours.losses.iter().zip(&one_rank.losses).enumerate() {
        if !is_close(*a, *b) {
            return Err(format!("loss of step {step}: {a} {b}"));
        }
    }
    for (step, (a, b)) in ours.norms.iter().zip(&one_rank.norms).enumerate() {
        if !is_close(*a, *b) {
            return Err(format!("gradient norm of step {step}: {a} {b}"));
        }
    }
    for (a, b) in ours.metrics.iter().zip(&one_rank.metrics) {
        if let Some((name, value)) = a.iter().find(|(name, value)| !is_close(**value, b[*name])) {
            return Err(format!("{name}: {value} {}", b[name]));
        }
    }
    compare_tensors("gradient", &ours.grads, &one_rank.grads)
}

/// Compares a strategy with one rank in other cuts of the batch, and checks that faults in its collectives are detected.
#[track_caller]
fn check(strategy: Strategy, case: ModelCase) {
    let one_rank = steps(Strategy::ONE_RANK, case, Batching::Packed, None).unwrap();
    let mut used = BTreeSet::new();
    for batching in [Batching::Packed, Batching::Accumulated(2)] {
        let ours = steps(strategy, case, batching, None).unwrap();
        compare(&ours, &one_rank).unwrap_or_else(|difference| panic!("{strategy:?}, {batching:?}: {difference}"));
        // The test itself sums over the world.
        used = ours.used.into_iter().filter(|it| it.group != "world").collect();
    }
    assert!(!used.is_empty() || strategy.degrees.n_ranks() == 1, "{strategy:?} communicates nothing");
    for fault in used {
        let faulty = steps(strategy, case, Batching::Accumulated(2), Some(&fault));
        let is_detected = faulty.map_or(true, |faulty| compare(&faulty, &one_rank).is_err());
        assert!(is_detected, "{strategy:?}: a corrupted {fault} is not detected");
    }
}

#[test]
fn parity_of_preferences_over_cuts_of_the_batch() {
    check(Strategy::ONE_RANK, DENSE_BASE);
    check(Strategy::ONE_RANK, MODELS[1]);
}

#[test]
fn parity_of_preferences_with_data_parallelism() {
    check(dp(4), DENSE_BASE);
    check(zero(2, ZeroStage::Three), MODELS[1]);
}

#[test]
fn parity_of_preferences_with_tensor_parallelism() {
    check(tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On), DENSE_BASE);
}

#[test]
fn parity_of_preferences_with_context_parallelism() {
    check(ring::ring(2), DENSE_BASE);
    check(ulysses(1, 2, None), DENSE_BASE);
}

#[test]
fn parity_of_preferences_with_pipeline_stages() {
    let degrees = Degrees { pp: 2, dp_replicate: 2, ..ONE };
    check(pipeline(degrees, PipelineScheduleKind::OneForwardOneBackward, &[2, 2]), DENSE_BASE);
}

/// Runs `f` on one rank.
fn on_one_rank<T: Send>(case: ModelCase, f: impl Fn(&Engine) -> Result<T> + Sync) -> T {
    let rank = |world: &World| f(&engine_with_reference(world, Strategy::ONE_RANK, case, None)?);
    let options = Options { timeout: Duration::from_secs(120), record: false };
    threads::run(1, options, rank).unwrap().remove(0)
}

/// The sums are in f64, over the losses of each sequence alone.
#[test]
fn loss_and_rewards_follow_the_formula() {
    let (losses, wants) = on_one_rank(DENSE_BASE, |engine| {
        let reference = engine.reference().unwrap();
        let reward = |idx: usize| -> Result<f64> {
            let alone = packed(&[sequence(Batching::Packed, 0, idx)]);
            let sum =
                |engine: &Engine| -> Result<f64> { Ok(engine.token_losses(&alone)?.into_iter().map(f64::from).sum()) };
            Ok(BETA * (sum(reference)? - sum(engine)?))
        };
        let rewards: Vec<[f64; 2]> =
            (0..N_PAIRS).map(|pair| Ok([reward(2 * pair)?, reward(2 * pair + 1)?])).collect::<Result<_>>()?;
        let margins: Vec<f64> = rewards.iter().map(|[chosen, rejected]| chosen - rejected).collect();
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / N_PAIRS as f64;
        let loss = mean(&mut margins.iter().map(|margin| (1.0 + (-margin).exp()).ln()));
        let wants = BTreeMap::from([
            ("rewards/chosen", mean(&mut rewards.iter().map(|[chosen, _]| *chosen))),
            ("rewards/rejected", mean(&mut rewards.iter().map(|[_, rejected]| *rejected))),
            ("rewards/margins", mean(&mut margins.iter().copied())),
            ("rewards/accuracies", margins.iter().filter(|margin| **margin > 0.0).count() as f64 / N_PAIRS as f64),
            ("pairs", N_PAIRS as f64),
            ("rewards/largest_margin", margins.iter().copied().fold(f64::NEG_INFINITY, f64::max)),
        ]);
        Ok((loss, wants))
    });
    let ours = steps(Strategy::ONE_RANK, DENSE_BASE, Batching::Packed, None).unwrap();
    assert!((ours.losses[0] - losses).abs() < 1e-5 * losses, "{} {losses}", ours.losses[0]);
    for (name, want) in wants {
        let found = ours.metrics[0][name];
        assert!((found - want).abs() <= 2e-5 * want.abs().max(0.1), "{name}: {found} {want}");
    }
    assert!(ours.metrics[0]["rewards/margins"].abs() > 1e-3, "the adapter has no effect");
}

/// A full fine-tune begins at its reference: the margins are 0.
#[test]
fn the_reference_is_the_model_at_the_start() {
    let ours = steps(Strategy::ONE_RANK, MODELS[1], Batching::Packed, None).unwrap();
    assert!((ours.losses[0] - 2f64.ln()).abs() < 1e-6 && ours.metrics[0]["rewards/margins"].abs() < 1e-6);
    assert!(ours.metrics[1]["rewards/margins"].abs() > 1e-4, "the first step has no effect");
}

/// Compares the norm of the gradient with central differences along it.
#[test]
fn the_gradient_of_a_preference_is_its_derivative() {
    let (difference, norm) = on_one_rank(DENSE_BASE, |engine| {
        let micros = pairs(Batching::Packed, 0, (0, 1));
        let run = || {
            let loss = StepLoss { objective: &Dpo, scale: LossScale::mean_over(1.0), auxiliary: &[] };
            engine.store().zero_grads()?;
            Ok::<_, candle_core::Error>(f64::from(
                engine.forward_backward(&micros, loss, |_| 5)?.micros[0].to_scalar::<f32>()?,
            ))
        };
        run()?;
        let states = engine.store().states()?;
        let grads = states.iter().map(|state| state.grad.copy()).collect::<Result<Vec<_>>>()?;
        let norm = engine.store().grad_squares()?.sum_all()?.to_scalar::<f64>()?.sqrt();
        let at = |step: f64| {
            for (state, grad) in states.iter().zip(&grads) {
                ops::copy_into(&state.master, &(&state.master + (grad * (step / norm))?)?)?;
            }
            engine.store().refresh()?;
            run()
        };
        let h = 1e-2;
        let (above, below) = (at(h)?, at(-2.0 * h)?);
        Ok(((above - below) / (2.0 * h), norm))
    });
    assert!(norm > 0.1 && (difference - norm).abs() < 5e-3 * norm, "{difference} {norm}");
}

#[test]
fn an_infinite_metric_does_not_skip_the_update() {
    let result = on_one_rank(DENSE_BASE, |engine| {
        let micros = pairs(Batching::Packed, 0, (0, 1));
        let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu)?;
        let (routing, dropout_keys) = (StepRouting::Select, &[5]);
        let batch =
            TrainBatch { micros: &micros, most_tokens: None, dropout_keys, normalizer: 100.0, auxiliary: &[], routing };
        let optimizer = OptimizerStep {
            lr: LR,
            scaler: &scaler,
            rounding: MasterRounding::Nearest,
            grad_zeros: ZeroGradCount::Off,
            max_loss: f64::INFINITY,
        };
        engine.train_step(&batch, &InfiniteMetric, &optimizer)?.wait()
    });
    assert_eq!(result.decision.outcome, UpdateOutcome::Applied);
    assert!(INFINITE.iter().all(|metric| result.outputs.total(metric.name) == Some(f64::INFINITY)));
}

#[test]
fn what_an_objective_lacks_is_an_error() {
    let errors = on_one_rank(DENSE_BASE, |engine| {
        let run = |objective: &'static dyn Objective, micros: &[Micro]| {
            let loss = StepLoss { objective, scale: LossScale::mean_over(1.0), auxiliary: &[] };
            engine.forward_backward(micros, loss, |_| 5).unwrap_err().to_string()
        };
        let micros = pairs(Batching::Packed, 0, (0, 1));
        let bare = Micro { columns: MicroColumns::default(), ..micros[0].clone() };
        Ok([run(&Dpo, &[bare]), run(&Undeclared, &micros)])
    });
    assert!(errors[0].contains("no column `preference`"), "{}", errors[0]);
    assert!(errors[1].contains("`margins`, which is not among its metrics"), "{}", errors[1]);
    let rank = |world: &World| -> Result<_> {
        let engine = super::rank::engine(world, Strategy::ONE_RANK, DENSE_BASE, None)?;
        let loss = StepLoss { objective: &Dpo, scale: LossScale::mean_over(1.0), auxiliary: &[] };
        Ok(engine.forward_backward(&pairs(Batching::Packed, 0, (0, 1)), loss, |_| 5).unwrap_err().to_string())
    };
    let error = threads::run(1, Options { timeout: Duration::from_secs(120), record: false }, rank).unwrap().remove(0);
    assert!(error.contains("the engine has none"), "{error}");
}
