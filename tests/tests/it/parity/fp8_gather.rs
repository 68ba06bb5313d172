//! ZeRO stage 3 that gathers FP8 codes has the bits of one that gathers the weights in their dtype.
//!
//! Only the sum of the gradient norm has another order: the parameters of a unit are in more groups. It is f64, and clipping
//! rounds it to f32.

use candle_core::{DType, Result, Tensor};
use candlewick_comm::mesh::Degrees;
use candlewick_comm::{CollectiveCall, Op, Options, World, threads};
use candlewick_ops::{GradPolicy, GradScaler};
use candlewick_parallel::{CpuOffload, LossScale, MasterRounding, PipelineScheduleKind, SequenceParallel, ZeroStage};

use super::case::{ADAPTER, Batching, DENSE_BASE, DOTS1, MODELS, ModelCase, micros};
use super::faulty_group::GroupOp;
use super::fp8::{CURRENT, CURRENT_POWER_OF_TWO, DELAYED};
use super::rank::{FEW_STEPS, LR, RunResult, STEPS, Strategy, compare_within, data_rank, engine, run_with};
use super::{ONE, hybrid, pipeline, tensor, ulysses, zero};

/// Rounding of f64 sums of squares in another order.
const NORM: f64 = 1e-12;

const fn gathering(strategy: Strategy) -> Strategy {
    Strategy { fp8_param_gather: true, ..strategy }
}

/// Fails unless two runs have the same bits, and norms within [`NORM`].
fn same_bits(ours: &RunResult, other: &RunResult) -> std::result::Result<(), String> {
    compare_within(NORM, ours, other)?;
    for (what, are_equal) in [
        ("losses", ours.losses == other.losses),
        ("gradients", ours.grads == other.grads),
        ("weights", ours.weights == other.weights),
    ] {
        if !are_equal {
            return Err(format!("{what} differ"));
        }
    }
    Ok(())
}

#[track_caller]
fn check(strategy: Strategy, case: ModelCase, batching: Batching) {
    let run = |strategy| run_with(strategy, case, batching, STEPS, None).unwrap();
    let (gathered, plain) = (run(gathering(strategy)), run(strategy));
    if let Err(difference) = same_bits(&gathered, &plain) {
        panic!("{strategy:?}, {case:?}, {batching:?}: {difference}");
    }
    assert!(gathered.calls.len() > plain.calls.len(), "a layer has a group of FP8 weights and one of the others");
}

/// The layers have all modes of activation checkpointing.
#[test]
fn gathered_codes_give_the_bits_of_gathered_weights() {
    for fp8 in [DELAYED, CURRENT, CURRENT_POWER_OF_TWO] {
        for (model, batching) in [(MODELS[0], Batching::Packed), (MODELS[1], Batching::Accumulated(3))] {
            for strategy in [zero(2, ZeroStage::Three), zero(3, ZeroStage::Three)] {
                check(strategy, model.with_fp8(fp8), batching);
            }
        }
        check(hybrid(2, 2, ZeroStage::Three), MODELS[3].with_fp8(fp8), Batching::Padded);
    }
}

/// Ranks without any element of a weight take its scale from the others.
#[test]
fn gathered_codes_of_eight_ranks_give_the_bits_of_gathered_weights() {
    check(zero(8, ZeroStage::Three), MODELS[2].with_fp8(CURRENT), Batching::Packed);
}

/// The base is frozen and gathered as codes, the adapter is gathered in its dtype.
#[test]
fn gathered_codes_of_a_frozen_base_give_the_bits_of_gathered_weights() {
    for case in [ADAPTER, DENSE_BASE] {
        for fp8 in [DELAYED, CURRENT] {
            check(zero(2, ZeroStage::Three), case.with_fp8(fp8), Batching::Accumulated(2));
        }
    }
}

#[test]
fn gathered_codes_of_offloaded_weights_give_the_bits_of_gathered_weights() {
    let cpu_offload = CpuOffload { optimizer: 1.0, weights: true };
    for fp8 in [DELAYED, CURRENT] {
        let strategy = Strategy { cpu_offload, ..zero(2, ZeroStage::Three) };
        check(strategy, MODELS[3].with_fp8(fp8), Batching::Accumulated(2));
    }
}

/// Scales are those of a rank's slices of the weights, as without the all-gather of codes.
#[test]
fn gathered_codes_give_the_bits_of_gathered_weights_on_other_axes() {
    let three = |strategy| Strategy { zero_stage: Some(ZeroStage::Three), ..strategy };
    for fp8 in [DELAYED, CURRENT] {
        let tensor = |sequence_parallel| tensor(Degrees { tp: 2, dp_shard: 2, ..ONE }, sequence_parallel);
        for sequence_parallel in [SequenceParallel::Off, SequenceParallel::On] {
            check(three(tensor(sequence_parallel)), MODELS[1].with_fp8(fp8), Batching::Packed);
        }
        check(ulysses(1, 2, Some(ZeroStage::Three)), MODELS[0].with_fp8(fp8), Batching::Packed);
        let stages = Degrees { pp: 2, dp_shard: 2, ..ONE };
        let stages = pipeline(stages, PipelineScheduleKind::OneForwardOneBackward, &[2, 2]);
        check(three(stages), MODELS[1].with_fp8(fp8), Batching::Accumulated(5));
    }
}

/// Attention and shared experts are gathered as codes, routed experts in their dtype.
#[test]
fn gathered_codes_of_a_mixture_of_experts_give_the_bits_of_gathered_weights() {
    check(zero(2, ZeroStage::Three), DOTS1.with_fp8(CURRENT), Batching::Packed);
}

/// Without the reduction of the amaxes each rank's codes have a scale of their own.
#[test]
fn a_corrupted_exchange_of_codes_or_amaxes_is_detected() {
    for fp8 in [DELAYED, CURRENT] {
        let (case, batching) = (MODELS[1].with_fp8(fp8), Batching::Packed);
        let run = |strategy, fault: Option<&GroupOp>| run_with(strategy, case, batching, FEW_STEPS, fault);
        let strategy = zero(2, ZeroStage::Three);
        let (plain, used) = (run(strategy, None).unwrap(), run(gathering(strategy), None).unwrap().used);
        let names: Vec<String> = used.iter().map(ToString::to_string).collect();
        assert!(names.iter().any(|name| name == "dp_shard-cp-sp all_reduce"), "{names:?}");
        for fault in used {
            let faulty = run(gathering(strategy), Some(&fault));
            assert!(faulty.is_err() || same_bits(&faulty.unwrap(), &plain).is_err(), "{fp8:?}: a corrupted {fault}");
        }
    }
}

/// Bytes that a rank receives in the all-gathers of its calls: codes, and other elements.
fn gathered_bytes(calls: &[CollectiveCall], n_ranks: usize) -> [usize; 2] {
    let gathers = calls.iter().filter(|call| call.op == Op::AllGather && &*call.group == "dp_shard-cp-sp");
    gathers.fold([0, 0], |[codes, others], call| {
        let n = call.shape.iter().product::<usize>() * (n_ranks - 1);
        match call.dtype {
            Some(DType::U8) => [codes + n, others],
            dtype => [codes, others + n * dtype.map_or(0, |dtype| dtype.size_in_bytes())],
        }
    })
}

/// Returns the losses of two evaluations, each after a step, and the bytes of the all-gathers of steps and evaluations.
fn steps_and_evaluations(strategy: Strategy, case: ModelCase) -> (Vec<f64>, [[usize; 2]; 2]) {
    let of_rank = |world: &World| -> Result<_> {
        let engine = engine(world, strategy, case, None)?;
        let (rank, n_ranks) = data_rank(world, strategy);
        let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, engine.device())?;
        let (mut losses, mut bytes) = (Vec::new(), [[0, 0]; 2]);
        for step in 0..2 {
            let (micros, n_targets) = micros(Batching::Accumulated(2), step, rank, n_ranks);
            let before = world.calls().len();
            engine.store().zero_grads()?;
            engine.forward_backward(&micros, &LossScale::mean_over(n_targets), |_| 5)?;
            let none = Tensor::zeros(1, DType::F32, engine.device())?;
            scaler.update(&engine.store().grad_squares()?, &none)?;
            engine.store().step(LR, &scaler, MasterRounding::Nearest)?;
            engine.update_fp8_scales()?;
            let between = world.calls().len();
            for micro in &micros {
                losses.push(engine.loss(micro)?);
            }
            let calls = world.calls();
            for (phase, calls) in [&calls[before..between], &calls[between..]].into_iter().enumerate() {
                let of_phase = gathered_bytes(calls, n_ranks);
                bytes[phase] = [0, 1].map(|kind| bytes[phase][kind] + of_phase[kind]);
            }
        }
        Ok((losses, bytes))
    };
    let options = Options { record: true, ..Options::default() };
    let mut ranks = threads::run(strategy.degrees.n_ranks(), options, of_rank).unwrap();
    assert_eq!(ranks[0].1, ranks[1].1, "ranks receive the same bytes");
    ranks.remove(0)
}

/// Steps gather a byte instead of four per weight, and evaluations between them all elements in f32.
#[test]
fn steps_gather_codes_and_evaluations_gather_elements() {
    // Linear layers of a block: q and o of 64 x 32, k and v of 32 x 32, an MLP of 48.
    let n_weights = 2 * 64 * 32 + 2 * 32 * 32 + 3 * 48 * 32;
    // Two steps of two micro-batches gather four blocks in forward, and three in backward: the last is still gathered.
    let n_gathers = 2 * 2 * (4 + 3);
    for fp8 in [DELAYED, CURRENT] {
        let (case, strategy) = (MODELS[0].with_fp8(fp8), zero(2, ZeroStage::Three));
        let (losses, [step, evaluation]) = steps_and_evaluations(gathering(strategy), case);
        let (plain_losses, [plain_step, plain_evaluation]) = steps_and_evaluations(strategy, case);
        assert_eq!(losses, plain_losses, "{fp8:?}");
        assert_eq!([plain_step[0], plain_evaluation[0]], [0, 0]);
        // A rank receives the half of the other.
        let codes = n_gathers * n_weights / 2;
        assert_eq!(step, [codes, plain_step[1] - 4 * codes], "{fp8:?}");
        assert_eq!(evaluation, plain_evaluation, "{fp8:?}");
    }
}
