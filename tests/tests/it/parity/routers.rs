//! Losses and totals of routers are those of one rank on every mesh, and the gradient of each loss alone.

use std::collections::BTreeMap;
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, sum, threads};
use candlewick_model::RouterLoss::{self, GlobalLoadBalancing, LoadBalancing, SequenceLoadBalancing, Z};
use candlewick_model::{ExpertCapacity, ExpertSelection, ForcedExpertLoad, RouterDtype, RouterSettings, RouterTotal};
use candlewick_ops::{DropPolicy, GradPolicy, GradScaler, cpu_gemm_kernel};
use candlewick_parallel::{
    AuxiliaryLoss, CausalLm, LossScale, MasterRounding, Micro, MicroLoss, Objective, OptimizerStep, SequenceParallel,
    StepLoss, StepRouting, TokenDispatcher, TokenLosses, TrainBatch, ZeroGradCount, ZeroStage,
};

use super::ONE;
use super::case::{Batching, DOTS1, ModelCase, QWEN3_MOE, ROUTERS, micros};
use super::rank::{HYPER, Strategy, compare_tensors, data_rank, engine_with_routers, shards, unsharded};

/// The objective 0, which leaves the gradients of the routers' losses.
struct Nothing;

impl Objective for Nothing {
    fn loss(&self, tokens: &TokenLosses<'_>) -> Result<MicroLoss> {
        let zero = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        let weights = Tensor::zeros(tokens.micro().seqs.n_tokens(), DType::F32, &Device::Cpu)?;
        Ok(MicroLoss::Weighted { loss: zero, weights })
    }
}

/// Results of a step that minimizes one loss of the routers.
struct RouterStep {
    /// Mean of the loss by layer.
    layers: Vec<f64>,
    totals: BTreeMap<usize, RouterTotal>,
    /// Gradients that are not zero.
    grads: BTreeMap<String, Vec<f32>>,
}

/// Takes a step that minimizes `loss` alone, without and with every activation checkpointing.
fn step(strategy: Strategy, case: ModelCase, batching: Batching, loss: RouterLoss) -> RouterStep {
    let router = RouterSettings { losses: vec![loss], ..RouterSettings::default() };
    step_with(strategy, case, batching, &router, &Nothing)
}

/// Padding of experts to their capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpertInput {
    /// The rows of tokens.
    Ragged,
    /// Rows of padding up to the capacity.
    Padded,
}

/// Takes a step that minimizes an objective and the first of the routers' losses.
fn step_with(
    strategy: Strategy,
    case: ModelCase,
    batching: Batching,
    router: &RouterSettings,
    objective: &'static dyn Objective,
) -> RouterStep {
    step_of(strategy, (case, batching), router, objective, ExpertInput::Ragged)
}

fn step_of(
    strategy: Strategy,
    (case, batching): (ModelCase, Batching),
    router: &RouterSettings,
    objective: &'static dyn Objective,
    expert_input: ExpertInput,
) -> RouterStep {
    let loss = router.losses[0];
    let rank = |world: &World| -> Result<_> {
        let (rank, n_ranks) = data_rank(world, strategy);
        let engine = engine_with_routers(world, strategy, case, router.clone(), None)?;
        let (micros, n_targets) = micros(batching, 0, rank, n_ranks);
        let n_tokens = micros.iter().map(|micro: &Micro| micro.seqs.n_tokens()).sum::<usize>() as f64;
        let normalizer = sum(engine.group(), n_tokens)? / strategy.n_counts();
        let auxiliary = [AuxiliaryLoss { name: loss.name().to_owned(), coefficient: 1.0, normalizer }];
        let n_targets = sum(engine.group(), n_targets)? / strategy.n_counts();
        let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu)?;
        let dropout_keys = vec![5; micros.len()];
        let most_tokens = (expert_input == ExpertInput::Padded).then(|| most_tokens(batching, n_ranks));
        let batch = TrainBatch {
            micros: &micros,
            most_tokens: most_tokens.as_deref(),
            dropout_keys: &dropout_keys,
            n_targets,
            auxiliary: &auxiliary,
            routing: StepRouting::Select,
        };
        let optimizer = OptimizerStep {
            adamw: HYPER,
            scaler: &scaler,
            rounding: MasterRounding::Nearest,
            grad_zeros: ZeroGradCount::Off,
            max_loss: f64::INFINITY,
        };
        let result = engine.train_step(&batch, objective, &optimizer)?.wait()?;
        let layers = result.auxiliary_layers[loss.name()].clone();
        Ok((layers, result.routers, shards(&engine, |state| &state.grad)?))
    };
    let options = Options { timeout: Duration::from_secs(120), record: false };
    let ranks = threads::run(strategy.degrees.n_ranks(), options, rank).unwrap();
    for (layers, totals, _) in &ranks {
        assert_eq!((layers, totals), (&ranks[0].0, &ranks[0].1), "{strategy:?}: ranks disagree");
    }
    let mut grads = unsharded(ranks.iter().flat_map(|(.., shards)| shards));
    grads.retain(|_, grad| grad.iter().any(|x| *x != 0.0));
    RouterStep { layers: ranks[0].0.clone(), totals: ranks[0].1.clone(), grads }
}

/// Returns the most tokens of any data rank in each micro-batch of the first step.
fn most_tokens(batching: Batching, n_ranks: usize) -> Vec<usize> {
    let of_rank = |rank| micros(batching, 0, rank, n_ranks).0.iter().map(|micro| micro.seqs.n_tokens()).collect();
    let ranks: Vec<Vec<usize>> = (0..n_ranks).map(of_rank).collect();
    (0..ranks[0].len()).map(|micro| ranks.iter().map(|of_rank| of_rank[micro]).max().unwrap()).collect()
}

/// Compares two steps. Sums of logits round differently, by their absolute sum.
fn check_close(what: &str, ours: &RouterStep, one_rank: &RouterStep) {
    let is_close = |a: f64, b: f64, scale: f64| (a - b).abs() <= 1e-5 * scale.max(1e-3);
    let layers = ours.layers.iter().zip(&one_rank.layers);
    assert!(layers.clone().all(|(a, b)| is_close(*a, *b, b.abs())), "{what}: {:?}", layers.collect::<Vec<_>>());
    assert!(one_rank.layers.iter().any(|mean| *mean > 0.0) && one_rank.layers.contains(&0.0), "no dense layer");
    assert!(ours.totals.keys().eq(one_rank.totals.keys()), "{what}");
    for (a, b) in ours.totals.values().zip(one_rank.totals.values()) {
        assert_eq!((&a.expert_counts, a.n_tokens), (&b.expert_counts, b.n_tokens), "{what}");
        assert_eq!(a.n_dropped, b.n_dropped, "{what}");
        let scale = f64::from(b.logit_squares);
        assert!(is_close(a.logit_sum.into(), b.logit_sum.into(), scale), "{what}: {a:?} {b:?}");
        assert!(is_close(a.logit_squares.into(), b.logit_squares.into(), scale) && scale > 0.0, "{what}: {a:?} {b:?}");
    }
    assert!(one_rank.grads.keys().any(|name| name.ends_with("gate.weight")), "{what}");
    compare_tensors("gradient", &ours.grads, &one_rank.grads)
        .unwrap_or_else(|difference| panic!("{what}: {difference}"));
}

/// Compares each loss with one rank. `losses` do not depend on the mesh.
#[track_caller]
fn check(degrees: Degrees, zero_stage: Option<ZeroStage>, losses: &[RouterLoss]) {
    check_cases([DOTS1, QWEN3_MOE], degrees, zero_stage, losses);
}

#[track_caller]
fn check_cases(cases: [ModelCase; 2], degrees: Degrees, zero_stage: Option<ZeroStage>, losses: &[RouterLoss]) {
    let sequence_parallel = SequenceParallel::On;
    let chunk_layers = (degrees.pp > 1).then_some(&[2usize, 2][..]);
    let strategy = Strategy { degrees, zero_stage, sequence_parallel, chunk_layers, ..Strategy::ONE_RANK };
    for case in cases {
        for batching in [Batching::Accumulated(3), Batching::Packed] {
            for loss in losses {
                let what = format!("{degrees} {case:?} {batching:?} {loss:?}");
                let one_rank = step(Strategy::ONE_RANK, case, batching, *loss);
                check_close(&what, &step(strategy, case, batching, *loss), &one_rank);
            }
        }
    }
}

#[test]
fn losses_of_routers_are_those_of_one_rank_where_ranks_split_micro_batches() {
    let losses = RouterLoss::ALL;
    check(Degrees { tp: 2, ep: 2, ..ONE }, None, &losses);
    check(Degrees { tp: 2, cp: 2, ep: 2, etp: 2, ..ONE }, None, &losses);
    check(Degrees { cp: 2, ep: 2, ..ONE }, None, &losses);
    check(Degrees { cp: 2, sp: 2, ep: 4, ..ONE }, None, &losses);
    check(Degrees { pp: 2, cp: 2, ep: 2, ..ONE }, None, &losses);
}

#[test]
fn losses_of_routers_are_those_of_one_rank_where_ranks_have_other_micro_batches() {
    // The fractions of a micro-batch depend on the micro-batches, those of a sequence or of the step do not.
    let losses = [SequenceLoadBalancing, GlobalLoadBalancing, Z];
    check(Degrees { dp_replicate: 2, ep: 2, ..ONE }, None, &losses);
    check(Degrees { dp_shard: 4, ep: 2, ..ONE }, Some(ZeroStage::Three), &losses);
    check(Degrees { dp_shard: 2, tp: 2, ep: 4, ..ONE }, Some(ZeroStage::One), &losses);
    check(Degrees { pp: 2, dp_shard: 2, ep: 2, ..ONE }, Some(ZeroStage::One), &losses);
}

#[test]
fn routers_with_keys_of_megatron_are_those_of_one_rank() {
    check_cases(ROUTERS, Degrees { tp: 2, ep: 2, ..ONE }, None, &RouterLoss::ALL);
    let losses = [SequenceLoadBalancing, GlobalLoadBalancing];
    check_cases(ROUTERS, Degrees { dp_shard: 2, ep: 2, ..ONE }, Some(ZeroStage::Three), &losses);
    for case in ROUTERS {
        let grads = |case, objective| {
            let router = RouterSettings { losses: vec![Z], ..RouterSettings::default() };
            step_with(Strategy::ONE_RANK, case, Batching::Packed, &router, objective).grads
        };
        assert_ne!(grads(case, &CausalLm), grads(QWEN3_MOE, &CausalLm), "{case:?} has the family's router");
    }
}

#[test]
fn losses_of_routers_differ() {
    let mean = |loss| step(Strategy::ONE_RANK, DOTS1, Batching::Accumulated(3), loss).layers.iter().sum::<f64>();
    let means = [LoadBalancing, SequenceLoadBalancing, GlobalLoadBalancing].map(mean);
    assert!(means[0] != means[1] && means[0] != means[2] && means[1] != means[2], "{means:?}");
}

#[test]
fn jittered_routers_are_those_of_one_rank() {
    let router = |input_jitter_eps| RouterSettings { losses: vec![Z], input_jitter_eps, ..RouterSettings::default() };
    for degrees in [Degrees { tp: 2, ep: 2, ..ONE }, Degrees { cp: 2, ep: 2, ..ONE }] {
        let strategy = Strategy { degrees, sequence_parallel: SequenceParallel::On, ..Strategy::ONE_RANK };
        for case in [DOTS1, QWEN3_MOE] {
            let step = |strategy, eps| step_with(strategy, case, Batching::Packed, &router(eps), &CausalLm);
            let one_rank = step(Strategy::ONE_RANK, 0.25);
            check_close(&format!("{degrees} {case:?}"), &step(strategy, 0.25), &one_rank);
            assert_ne!(one_rank.layers, step(Strategy::ONE_RANK, 0.0).layers);
        }
    }
}

#[test]
fn routers_in_f64_are_those_of_one_rank() {
    let router = |dtype| RouterSettings { losses: vec![Z], dtype, ..RouterSettings::default() };
    for degrees in [Degrees { dp_replicate: 2, ep: 2, ..ONE }, Degrees { tp: 2, ep: 2, ..ONE }] {
        let sequence_parallel = if degrees.tp > 1 { SequenceParallel::On } else { SequenceParallel::Off };
        let strategy = Strategy { degrees, sequence_parallel, ..Strategy::ONE_RANK };
        for case in [DOTS1, QWEN3_MOE] {
            let step = |strategy, dtype| step_with(strategy, case, Batching::Packed, &router(dtype), &CausalLm);
            let one_rank = step(Strategy::ONE_RANK, RouterDtype::F64);
            check_close(&format!("{degrees} {case:?}"), &step(strategy, RouterDtype::F64), &one_rank);
            let of_f32 = step(Strategy::ONE_RANK, RouterDtype::F32);
            check_close(&format!("f32 {case:?}"), &of_f32, &one_rank);
            assert_ne!(one_rank.grads, of_f32.grads, "{case:?}: routers compute in f32");
        }
    }
}

#[test]
fn evaluation_has_the_router_dtype_of_training() {
    let losses = |dtype| {
        let rank = |world: &World| -> Result<_> {
            let router = RouterSettings { dtype, ..RouterSettings::default() };
            let engine = engine_with_routers(world, Strategy::ONE_RANK, QWEN3_MOE, router, None)?;
            engine.store().fill(|spec| {
                let mut values = vec![0f32; spec.numel()];
                spec.initialise(3, &mut values);
                if spec.name.ends_with("gate.weight") {
                    // Large logits with small differences: sums in f32 change the weights of the experts.
                    values.iter_mut().for_each(|x| *x += 1e3);
                }
                Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
            })?;
            let (micros, _) = micros(Batching::Packed, 0, 0, 1);
            let sums = engine.forward_backward(&micros, StepLoss::from(&LossScale::mean_over(1.0)), |_| 5)?;
            let trained = sums.micros.iter().map(|sum| Ok(f64::from(sum.to_scalar::<f32>()?)));
            let evaluated = micros.iter().map(|micro| engine.loss(micro));
            Ok([trained.collect::<Result<Vec<_>>>()?, evaluated.collect::<Result<Vec<_>>>()?])
        };
        let options = Options { timeout: Duration::from_secs(120), record: false };
        threads::run(1, options, rank).unwrap().remove(0)
    };
    let [trained, evaluated] = losses(RouterDtype::F64);
    assert_eq!(trained, evaluated);
    // The errors of AMX are equal for all experts here, and softmax ignores them.
    if cpu_gemm_kernel() != "amx" {
        assert_ne!(evaluated, losses(RouterDtype::F32)[1], "routers compute in f32");
    }
}

#[test]
fn a_capacity_drops_the_same_tokens_under_expert_parallelism() {
    for policy in [DropPolicy::Weights, DropPolicy::Position] {
        let capacity = Some(ExpertCapacity { factor: 0.75, policy });
        let router = RouterSettings { losses: vec![LoadBalancing], capacity, ..RouterSettings::default() };
        for case in [DOTS1, QWEN3_MOE] {
            let step = |ep| {
                let strategy = Strategy { degrees: Degrees { dp_replicate: 4, ep, ..ONE }, ..Strategy::ONE_RANK };
                step_with(strategy, case, Batching::Packed, &router, &CausalLm)
            };
            let replicated = step(1);
            for total in replicated.totals.values() {
                let selected: f32 = total.expert_counts.iter().sum();
                assert!(total.n_dropped > 0.1 * selected && total.n_dropped < 0.9 * selected, "{total:?}");
            }
            for ep in [2, 4] {
                check_close(&format!("ep {ep} {case:?} {policy:?}"), &step(ep), &replicated);
            }
        }
    }
}

/// Ranks have different numbers of tokens. So experts have more rows than the capacity of most ranks.
#[test]
fn experts_padded_to_their_capacity_train_as_those_without_padding() {
    let most = most_tokens(Batching::Packed, 4);
    assert!((0..4).any(|rank| micros(Batching::Packed, 0, rank, 4).0[0].seqs.n_tokens() < most[0]));
    for (degrees, dispatcher) in [
        (ONE, TokenDispatcher::AllToAll),
        (Degrees { dp_replicate: 4, ep: 2, ..ONE }, TokenDispatcher::AllToAll),
        (Degrees { dp_replicate: 4, ep: 4, ..ONE }, TokenDispatcher::AllGather),
        (Degrees { dp_replicate: 4, ep: 2, etp: 2, ..ONE }, TokenDispatcher::AllToAll),
        (Degrees { dp_replicate: 4, ep: 2, etp: 2, ..ONE }, TokenDispatcher::AllGather),
        (Degrees { dp_shard: 2, tp: 2, ep: 4, ..ONE }, TokenDispatcher::AllToAll),
        (Degrees { dp_shard: 2, cp: 2, ep: 2, ..ONE }, TokenDispatcher::AllGather),
        (Degrees { pp: 2, dp_shard: 2, ep: 2, ..ONE }, TokenDispatcher::AllToAll),
    ] {
        check_padding(degrees, dispatcher);
    }
}

/// Compares a step with padding and one without, in all batchings and with both policies.
#[track_caller]
fn check_padding(degrees: Degrees, token_dispatcher: TokenDispatcher) {
    let zero_stage = (degrees.dp_shard > 1).then_some(ZeroStage::One);
    let chunk_layers = (degrees.pp > 1).then_some(&[2usize, 2][..]);
    let sequence_parallel = SequenceParallel::On;
    let strategy =
        Strategy { degrees, zero_stage, sequence_parallel, chunk_layers, token_dispatcher, ..Strategy::ONE_RANK };
    for policy in [DropPolicy::Weights, DropPolicy::Position] {
        let capacity = Some(ExpertCapacity { factor: 0.75, policy });
        let router = RouterSettings { losses: vec![LoadBalancing], capacity, ..RouterSettings::default() };
        for case in [DOTS1, QWEN3_MOE] {
            for batching in [Batching::Packed, Batching::Accumulated(3)] {
                let step = |input| step_of(strategy, (case, batching), &router, &CausalLm, input);
                let (padded, ragged) = (step(ExpertInput::Padded), step(ExpertInput::Ragged));
                let what = format!("{degrees} {token_dispatcher:?} {case:?} {batching:?} {policy:?}");
                check_close(&what, &padded, &ragged);
                assert!(ragged.totals.values().all(|total| total.n_dropped > 0.0), "{what}: no token is dropped");
                if strategy.degrees.n_ranks() == 1 {
                    assert_eq!((&padded.layers, &padded.grads), (&ragged.layers, &ragged.grads), "{what}");
                }
            }
        }
    }
}

/// Sinkhorn balances the tokens of a rank's micro-batch. So meshes with the same micro-batches on each rank are compared.
#[test]
fn sinkhorn_selects_the_same_experts_under_expert_and_pipeline_parallelism() {
    let selecting = |selection| RouterSettings { losses: vec![Z], selection, ..RouterSettings::default() };
    let step = |degrees, selection| {
        let strategy = Strategy { degrees, ..Strategy::ONE_RANK };
        step_with(strategy, QWEN3_MOE, Batching::Accumulated(3), &selecting(selection), &CausalLm)
    };
    let one_rank = step(ONE, ExpertSelection::Sinkhorn);
    check_close("pp", &step(Degrees { pp: 2, ..ONE }, ExpertSelection::Sinkhorn), &one_rank);
    let loads = |step: &RouterStep| step.totals.values().map(|total| total.expert_counts.clone()).collect::<Vec<_>>();
    assert_ne!(loads(&one_rank), loads(&step(ONE, ExpertSelection::TopK)));
    let replicated = step(Degrees { dp_replicate: 4, ..ONE }, ExpertSelection::Sinkhorn);
    for [ep, etp] in [[2, 1], [4, 1], [2, 2]] {
        let ours = step(Degrees { dp_replicate: 4, ep, etp, ..ONE }, ExpertSelection::Sinkhorn);
        check_close(&format!("ep {ep} etp {etp}"), &ours, &replicated);
    }
}

#[test]
fn forced_loads_are_balanced_and_skewed() {
    let imbalance = |forced_load| {
        let router = RouterSettings { losses: vec![Z], forced_load, ..RouterSettings::default() };
        let step = step_with(Strategy::ONE_RANK, QWEN3_MOE, Batching::Packed, &router, &CausalLm);
        let of_layer = |total: &RouterTotal| {
            let counts = &total.expert_counts;
            counts.iter().copied().fold(0.0, f32::max) * counts.len() as f32 / counts.iter().sum::<f32>()
        };
        step.totals.values().map(of_layer).fold(0.0, f32::max)
    };
    let (balanced, skewed) = (imbalance(ForcedExpertLoad::Random), imbalance(ForcedExpertLoad::Biased { std: 100.0 }));
    // With large biases all tokens select the same two of eight experts.
    assert!(balanced < 2.0 && skewed == 4.0, "{balanced} {skewed}");
}
