//! Training in FP8 equals one rank, as far as the scales do not depend on the mesh.
//!
//! Sums in another order change activations by some 1e-7, and a scale that is another power of two changes the rounding of
//! subnormal numbers. Such a change moves few elements over the border between two codes: by up to an eighth of the element
//! in E4M3, and a quarter in E5M2. Later layers multiply the difference. In models as small as these, gradients differ by
//! up to 8e-2 of their norm with gradients in E5M2, and 4.2e-2 with gradients in E4M3: hence [`flips`].
//!
//! | scales | meshes with the scales of one rank |
//! |---|---|
//! | delayed | all: the amaxes are those of all ranks, after a first step with powers of two |
//! | current | those whose ranks have the micro-batches of one rank: data parallel, ZeRO, pipelines |
//! | current or blockwise, powers of two | all up to subnormal codes, because such a scale changes no rounding |

use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, sum, threads};
use candlewick_ops::{AmaxHistoryPolicy, DelayedScaling, Fp8Config, Fp8Formats, Fp8Recipe, Fp8Rounding, ScaleRule};
use candlewick_parallel::{LossScale, PipelineScheduleKind, SequenceParallel, StepLoss, ZeroStage};

use super::case::{ADAPTER, Batching, MODELS, ModelCase, QWEN3_MOE, micros};
use super::rank::{FEW_STEPS, RunResult, Strategy, TOLERANCE, compare_within, data_rank, engine, one_rank, run_with};
use super::{ONE, dp, pipeline, tensor, ulysses, zero};

/// Returns the tolerance where a few elements get another code.
fn flips(case: ModelCase) -> f64 {
    match case.fp8().map(|fp8| fp8.formats) {
        Some(Fp8Formats::E4m3) => 0.05,
        Some(Fp8Formats::Hybrid) | None => 0.1,
    }
}

const fn config(recipe: Fp8Recipe) -> Fp8Config {
    let formats = Fp8Formats::Hybrid;
    Fp8Config { recipe, formats, gradient_rounding: Fp8Rounding::Nearest, fake_quantize: false }
}

const fn rule(power_of_two: bool) -> ScaleRule {
    ScaleRule { power_of_two, amax_epsilon: 0.0 }
}

pub(super) const DELAYED: Fp8Config =
    config(Fp8Recipe::Delayed(DelayedScaling { margin: 0, amax_history_len: 4, amax_compute: AmaxHistoryPolicy::Max }));
pub(super) const CURRENT: Fp8Config = config(Fp8Recipe::Current(rule(false)));
pub(super) const CURRENT_POWER_OF_TWO: Fp8Config = config(Fp8Recipe::Current(rule(true)));
const BLOCKWISE: Fp8Config = config(Fp8Recipe::Blockwise(rule(true)));
/// The formats that blockwise scaling has by default.
const BLOCKWISE_E4M3: Fp8Config = Fp8Config { formats: Fp8Formats::E4m3, ..BLOCKWISE };
const DELAYED_E4M3: Fp8Config = Fp8Config { formats: Fp8Formats::E4m3, ..DELAYED };
const FAKE: Fp8Config = Fp8Config { fake_quantize: true, ..CURRENT_POWER_OF_TWO };

fn two_pipeline_stages() -> Strategy {
    pipeline(Degrees { pp: 2, ..ONE }, PipelineScheduleKind::OneForwardOneBackward, &[2, 2])
}

/// Strategies over all axes of dense models.
fn strategies() -> Vec<Strategy> {
    vec![
        dp(2),
        zero(2, ZeroStage::Three),
        ulysses(1, 2, None),
        Strategy { degrees: Degrees { cp: 2, ..ONE }, ..Strategy::ONE_RANK },
        tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::Off),
        tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On),
        two_pipeline_stages(),
        Strategy {
            zero_stage: Some(ZeroStage::Two),
            ..tensor(Degrees { tp: 2, dp_shard: 2, ..ONE }, SequenceParallel::On)
        },
    ]
}

/// Strategies over the axes of experts.
fn expert_strategies() -> Vec<Strategy> {
    let of = |degrees, zero_stage| Strategy {
        degrees,
        zero_stage,
        sequence_parallel: SequenceParallel::On,
        ..Strategy::ONE_RANK
    };
    vec![
        of(Degrees { dp_replicate: 2, ep: 2, ..ONE }, None),
        of(Degrees { dp_shard: 4, ep: 2, ..ONE }, Some(ZeroStage::Three)),
        of(Degrees { tp: 2, ep: 2, ..ONE }, None),
        of(Degrees { dp_replicate: 2, etp: 2, ..ONE }, None),
        of(Degrees { cp: 2, ep: 2, ..ONE }, None),
    ]
}

#[track_caller]
fn check(strategies: &[Strategy], case: ModelCase, batching: Batching, one: &RunResult) {
    for &strategy in strategies {
        let ours = run_with(strategy, case, batching, FEW_STEPS, None).unwrap();
        if let Err(difference) = compare_within(flips(case), &ours, one) {
            panic!("{strategy:?}, {case:?}: {difference}");
        }
    }
}

/// Padding tokens, which some meshes add, count for an amax. [`Batching::Padded`] divides evenly without.
#[test]
fn parity_of_fp8_with_scales_that_do_not_depend_on_the_mesh() {
    for fp8 in [DELAYED, CURRENT_POWER_OF_TWO, BLOCKWISE] {
        let case = MODELS[1].with_fp8(fp8);
        check(&strategies(), case, Batching::Padded, &one_rank(case, Batching::Padded, FEW_STEPS));
    }
}

/// Gradients in E4M3, and linear layers that round to FP8 but multiply in the dtype of the model.
#[test]
fn parity_of_fp8_with_other_formats_and_with_fake_quantization() {
    let strategies = [
        zero(2, ZeroStage::Three),
        tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On),
        ulysses(1, 2, None),
        two_pipeline_stages(),
    ];
    for fp8 in [DELAYED_E4M3, BLOCKWISE_E4M3, FAKE] {
        let case = MODELS[1].with_fp8(fp8);
        check(&strategies, case, Batching::Padded, &one_rank(case, Batching::Padded, FEW_STEPS));
    }
}

/// Each expert has its scales on the rank that holds it.
#[test]
fn parity_of_experts_in_fp8() {
    for fp8 in [DELAYED, CURRENT_POWER_OF_TWO, BLOCKWISE, BLOCKWISE_E4M3] {
        let case = QWEN3_MOE.with_fp8(fp8);
        check(&expert_strategies(), case, Batching::Padded, &one_rank(case, Batching::Padded, FEW_STEPS));
    }
}

/// A rank's micro-batches have the scales that they have on one rank.
#[test]
fn parity_of_fp8_with_current_scaling() {
    let case = MODELS[3].with_fp8(CURRENT);
    let one = one_rank(case, Batching::Accumulated(4), FEW_STEPS);
    let two_micros = [dp(2), zero(2, ZeroStage::One), zero(2, ZeroStage::Three)];
    check(&two_micros, case, Batching::Accumulated(2), &one);
    check(&[two_pipeline_stages()], case, Batching::Accumulated(4), &one);
}

/// Returns the delayed scales of each module after a step, by rank.
fn delayed_scales(strategy: Strategy, case: ModelCase) -> Vec<Vec<Vec<f32>>> {
    let of_rank = |world: &World| {
        let engine = engine(world, strategy, case, None)?;
        let (rank, n_ranks) = data_rank(world, strategy);
        let (micros, n_targets) = micros(Batching::Padded, 0, rank, n_ranks);
        let n_targets = sum(engine.group(), n_targets)? / strategy.n_counts();
        engine.store().zero_grads()?;
        let auxiliary = Strategy::auxiliary(case, n_targets);
        let loss = StepLoss { auxiliary: &auxiliary, ..StepLoss::from(&LossScale::mean_over(n_targets)) };
        engine.forward_backward(&micros, loss, |_| 5)?;
        engine.update_fp8_scales()?;
        let states = engine.store().fp8().unwrap().states()?;
        states.into_iter().map(|module| module.scales.to_vec1::<f32>()).collect::<candle_core::Result<Vec<_>>>()
    };
    threads::run(strategy.degrees.n_ranks(), Options::default(), of_rank).unwrap()
}

/// Returns the scales of the weights.
fn of_weights(scales: &[Vec<f32>]) -> Vec<f32> {
    scales.iter().flatten().skip(1).step_by(3).copied().collect()
}

/// After a step all ranks have the same scales, which are those of one rank where no rounding comes before: in the first
/// layer's inputs, and in weights.
#[test]
fn delayed_scales_are_those_of_all_ranks() {
    let case = MODELS[0].with_fp8(DELAYED);
    let one = delayed_scales(Strategy::ONE_RANK, case).remove(0);
    assert!(one.iter().flatten().all(|scale| *scale != 0.0), "every slot has an amax");
    for strategy in strategies() {
        let all = delayed_scales(strategy, case);
        for of_rank in &all {
            assert_eq!(*of_rank, all[0], "{strategy:?}: ranks disagree");
            assert_eq!([0, 1, 2].map(|layer| of_rank[layer][0]), [one[0][0]; 3], "{strategy:?}: the first inputs");
            assert_eq!(of_weights(of_rank), of_weights(&one), "{strategy:?}");
        }
    }
}

/// All ranks have the scales of all experts, whichever rank holds an expert.
#[test]
fn delayed_scales_of_experts_are_those_of_all_ranks() {
    let case = QWEN3_MOE.with_fp8(DELAYED);
    let one = delayed_scales(Strategy::ONE_RANK, case).remove(0);
    let weights = of_weights(&one);
    assert!(weights.iter().all(|scale| *scale != 0.0), "every weight has an amax");
    let n_matrices: Vec<usize> = one.iter().map(|scales| scales.len() / 3).collect();
    assert!(n_matrices.iter().any(|n| *n > 1), "experts have scales: {n_matrices:?}");
    for strategy in expert_strategies() {
        let all = delayed_scales(strategy, case);
        for of_rank in &all {
            assert_eq!(*of_rank, all[0], "{strategy:?}: ranks disagree");
            assert_eq!(of_weights(of_rank), weights, "{strategy:?}");
        }
    }
}

/// LoRA on a base that multiplies in FP8.
#[test]
fn parity_of_fp8_with_adapters() {
    let case = ADAPTER.with_fp8(DELAYED);
    let one = one_rank(case, Batching::Padded, FEW_STEPS);
    check(&[tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On)], case, Batching::Padded, &one);
}

/// The results are those of FP8, and FP8 is off in evaluation.
#[test]
fn fp8_changes_the_results_by_its_rounding() {
    for fp8 in [DELAYED, CURRENT, BLOCKWISE, DELAYED_E4M3, BLOCKWISE_E4M3, FAKE] {
        let dense = one_rank(MODELS[1], Batching::Padded, FEW_STEPS);
        let quantized = one_rank(MODELS[1].with_fp8(fp8), Batching::Padded, FEW_STEPS);
        assert!(compare_within(100.0 * TOLERANCE, &quantized, &dense).is_err(), "{fp8:?}");
        for (ours, dense) in quantized.losses.iter().zip(&dense.losses) {
            assert!((ours - dense).abs() < 0.05 * dense, "{fp8:?}: losses {ours} and {dense}");
        }
    }
}

/// Without the reduction of the amaxes each rank has scales of its own.
#[test]
fn a_corrupted_reduction_of_amaxes_is_detected() {
    let case = MODELS[1].with_fp8(DELAYED);
    let one = one_rank(case, Batching::Padded, FEW_STEPS);
    for strategy in [dp(2), tensor(Degrees { tp: 2, ..ONE }, SequenceParallel::On)] {
        for fault in run_with(strategy, case, Batching::Padded, FEW_STEPS, None).unwrap().used {
            let faulty = run_with(strategy, case, Batching::Padded, FEW_STEPS, Some(&fault));
            let is_detected = faulty.is_err() || compare_within(flips(case), &faulty.unwrap(), &one).is_err();
            assert!(is_detected, "{strategy:?}: a corrupted {fault} is not detected");
        }
    }
}
