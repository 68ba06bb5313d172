//! Experts that a step records are replayed on every mesh. On the mesh that recorded them, a replay gives the same bits.

use std::collections::BTreeMap;
use std::time::Duration;

use candle_core::{Device, Result};
use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, sum, threads};
use candlewick_model::{RouterLoss, RouterSettings};
use candlewick_ops::{GradPolicy, GradScaler};
use candlewick_parallel::{
    AuxiliaryLoss, CausalLm, MasterRounding, Micro, OptimizerStep, RoutedMicro, SequenceParallel, StepRouting,
    TrainBatch, ZeroGradCount, mtp_loss_name,
};

use super::ONE;
use super::case::{Batching, DOTS1, MOE_MTP, ModelCase, QWEN3_MOE, micros};
use super::rank::{LR, Strategy, compare_tensors, data_rank, engine_with_routers, shards, unsharded};
use super::router_step::router_totals;

/// Jitter that changes selections, as another program or dtype does.
const JITTER: f64 = 0.5;

/// Results of a step.
#[derive(Debug)]
struct RoutedStep {
    losses: Vec<f32>,
    /// Selections of each expert by layer.
    counts: BTreeMap<usize, Vec<f32>>,
    grads: BTreeMap<String, Vec<f32>>,
    /// Recorded experts of each rank and micro-batch.
    experts: Vec<Vec<RoutedMicro>>,
}

/// Origin of the experts.
#[derive(Clone, Copy)]
enum Origin<'a> {
    Select,
    Record,
    Replay(&'a [RoutedMicro]),
}

/// Takes a step in which all ranks share the micro-batches, with every activation checkpointing.
fn step(strategy: Strategy, case: ModelCase, batching: Batching, jitter: f64, origin: Origin) -> RoutedStep {
    let router = RouterSettings { losses: vec![RouterLoss::Z], input_jitter_eps: jitter, ..RouterSettings::default() };
    let given: Vec<_> = match origin {
        Origin::Replay(experts) => experts.iter().cloned().map(Some).collect(),
        Origin::Select | Origin::Record => Vec::new(),
    };
    let rank = |world: &World| -> Result<_> {
        let (rank, n_ranks) = data_rank(world, strategy);
        let engine = engine_with_routers(world, strategy, case, router.clone(), None)?;
        let (micros, n_targets) = micros(batching, 0, rank, n_ranks);
        let n_tokens = micros.iter().map(|micro: &Micro| micro.seqs.n_tokens()).sum::<usize>() as f64;
        let n_targets = sum(engine.group(), n_targets)? / strategy.n_counts();
        let loss = |name: String| AuxiliaryLoss { name, coefficient: 0.1, normalizer: n_tokens };
        let of_mtp = (1..=case.n_mtp_layers()).map(mtp_loss_name);
        let auxiliary: Vec<_> = [RouterLoss::Z.name().to_owned()].into_iter().chain(of_mtp).map(loss).collect();
        let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu)?;
        let dropout_keys = vec![5; micros.len()];
        let routing = match origin {
            Origin::Select => StepRouting::Select,
            Origin::Record => StepRouting::Record,
            Origin::Replay(_) => StepRouting::Replay(&given),
        };
        let batch = TrainBatch {
            micros: &micros,
            most_tokens: None,
            dropout_keys: &dropout_keys,
            normalizer: n_targets,
            auxiliary: &auxiliary,
            routing,
        };
        let optimizer = OptimizerStep {
            lr: LR,
            scaler: &scaler,
            rounding: MasterRounding::Nearest,
            grad_zeros: ZeroGradCount::Off,
            max_loss: f64::INFINITY,
        };
        let result = engine.train_step(&batch, &CausalLm, &optimizer)?.wait()?;
        let counts = router_totals(&result).into_iter().map(|(layer_idx, total)| (layer_idx, total.expert_counts));
        let counts: BTreeMap<usize, Vec<f32>> = counts.collect();
        Ok((result.losses, counts, shards(&engine, |state| &state.grad)?, result.routed))
    };
    let options = Options { timeout: Duration::from_secs(120), record: false };
    let ranks: Vec<_> = threads::run(strategy.degrees.n_ranks(), options, rank).unwrap();
    let grads = unsharded(ranks.iter().flat_map(|(_, _, shards, _)| shards));
    let (losses, counts) = (ranks[0].0.clone(), ranks[0].1.clone());
    RoutedStep { losses, counts, grads, experts: ranks.into_iter().map(|(.., experts)| experts).collect() }
}

/// Joins the records of all ranks. Each token and layer is in one of them.
fn joined(step: &RoutedStep) -> Vec<RoutedMicro> {
    let of_micro = |micro_idx: usize| {
        let mut layers: BTreeMap<usize, BTreeMap<u32, Vec<u32>>> = BTreeMap::new();
        for RoutedMicro { tokens, layers: of_rank } in step.experts.iter().map(|micros| &micros[micro_idx]) {
            for (layer_idx, experts) in of_rank {
                let k = experts.len() / tokens.len();
                for (token, experts) in tokens.iter().zip(experts.chunks(k)) {
                    let earlier = layers.entry(*layer_idx).or_default().insert(*token, experts.to_vec());
                    assert_eq!(earlier, None, "token {token} of layer {layer_idx} is recorded twice");
                }
            }
        }
        let tokens: Vec<u32> = layers.values().next().unwrap().keys().copied().collect();
        assert!(tokens.iter().copied().eq(0..tokens.len() as u32), "{tokens:?}");
        assert!(layers.values().all(|layer| layer.keys().eq(&tokens)));
        let layers = layers.into_iter().map(|(layer_idx, layer)| (layer_idx, layer.into_values().flatten().collect()));
        RoutedMicro { tokens, layers: layers.collect() }
    };
    (0..step.experts[0].len()).map(of_micro).collect()
}

fn strategy(degrees: Degrees) -> Strategy {
    let chunk_layers = (degrees.pp > 1).then_some(&[2usize, 2][..]);
    Strategy { degrees, sequence_parallel: SequenceParallel::On, chunk_layers, ..Strategy::ONE_RANK }
}

const BATCHINGS: [Batching; 2] = [Batching::Accumulated(3), Batching::Packed];
const CASES: [ModelCase; 3] = [DOTS1, QWEN3_MOE, MOE_MTP];

#[test]
fn a_replayed_step_has_the_bits_of_the_recorded_step() {
    for degrees in [ONE, Degrees { tp: 2, cp: 2, ep: 2, ..ONE }] {
        for (case, batching) in CASES.into_iter().flat_map(|case| BATCHINGS.map(|batching| (case, batching))) {
            let what = format!("{degrees} {case:?} {batching:?}");
            let step = |jitter, origin| step(strategy(degrees), case, batching, jitter, origin);
            let recorded = step(0.0, Origin::Record);
            let selected = step(0.0, Origin::Select);
            assert!(selected.experts.iter().all(Vec::is_empty), "{what}");
            let experts = joined(&recorded);
            let replayed = step(0.0, Origin::Replay(&experts));
            for other in [&selected, &replayed] {
                assert_eq!((&other.losses, &other.counts), (&recorded.losses, &recorded.counts), "{what}");
                assert!(other.grads == recorded.grads, "{what}");
            }
            // The routers alone would select other experts.
            assert_ne!(step(JITTER, Origin::Select).counts, recorded.counts, "{what}");
            assert_eq!(step(JITTER, Origin::Replay(&experts)).counts, recorded.counts, "{what}");
        }
    }
}

#[test]
fn experts_are_replayed_on_other_meshes() {
    for degrees in [
        Degrees { tp: 2, ep: 2, ..ONE },
        Degrees { cp: 2, ep: 2, ..ONE },
        Degrees { cp: 2, sp: 2, ep: 2, etp: 2, ..ONE },
        Degrees { pp: 2, ..ONE },
        Degrees { pp: 2, tp: 2, ep: 2, ..ONE },
    ] {
        for (case, batching) in CASES.into_iter().flat_map(|case| BATCHINGS.map(|batching| (case, batching))) {
            let what = format!("{degrees} {case:?} {batching:?}");
            let recorded = step(Strategy::ONE_RANK, case, batching, 0.0, Origin::Record);
            let experts = joined(&recorded);
            let of_mesh = joined(&step(strategy(degrees), case, batching, 0.0, Origin::Record));
            assert_eq!(of_mesh, experts, "{what}");
            let one_rank = step(Strategy::ONE_RANK, case, batching, JITTER, Origin::Replay(&experts));
            let ours = step(strategy(degrees), case, batching, JITTER, Origin::Replay(&experts));
            assert_eq!((&ours.counts, &one_rank.counts), (&recorded.counts, &recorded.counts), "{what}");
            for (a, b) in ours.losses.iter().zip(&one_rank.losses) {
                assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}: {a} {b}");
            }
            compare_tensors("gradient", &ours.grads, &one_rank.grads)
                .unwrap_or_else(|difference| panic!("{what}: {difference}"));
        }
    }
}

/// Without sequence parallelism, tensor parallel ranks have the same tokens.
#[test]
fn one_of_the_ranks_with_equal_tokens_records_them() {
    let tensor = Strategy { degrees: Degrees { tp: 2, ..ONE }, ..Strategy::ONE_RANK };
    let recorded = step(tensor, QWEN3_MOE, Batching::Packed, 0.0, Origin::Record);
    assert!(recorded.experts[1].iter().all(|micro| micro.layers.is_empty()), "{:?}", recorded.experts[1]);
    let one_rank = step(Strategy::ONE_RANK, QWEN3_MOE, Batching::Packed, 0.0, Origin::Record);
    assert_eq!(joined(&recorded), joined(&one_rank));
}

#[test]
fn experts_of_other_layers_or_tokens_are_errors() {
    let recorded = step(Strategy::ONE_RANK, QWEN3_MOE, Batching::Packed, 0.0, Origin::Record);
    let refused = |change: fn(&mut RoutedMicro)| {
        let mut experts = joined(&recorded);
        change(&mut experts[0]);
        let replay = || step(Strategy::ONE_RANK, QWEN3_MOE, Batching::Packed, 0.0, Origin::Replay(&experts));
        std::panic::catch_unwind(replay).is_err()
    };
    assert!(!refused(|_| {}));
    assert!(refused(|experts| drop(experts.layers.pop_last())));
    assert!(refused(|experts| experts.layers.values_mut().next().unwrap().truncate(4)));
    assert!(refused(|experts| experts.layers.values_mut().next().unwrap()[1] = 99));
}
