//! Losses and totals of routers are those of one rank on every mesh, and the gradient of each loss alone.

use std::collections::BTreeMap;
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::Degrees;
use candlewick_comm::{Options, World, sum, threads};
use candlewick_model::RouterLoss::{self, GlobalLoadBalancing, LoadBalancing, SequenceLoadBalancing, Z};
use candlewick_model::{RouterSettings, RouterTotal};
use candlewick_ops::{GradPolicy, GradScaler};
use candlewick_parallel::{
    AuxiliaryLoss, Micro, MicroLoss, Objective, OptimizerStep, SequenceParallel, TokenLosses, TrainBatch, ZeroStage,
};

use super::ONE;
use super::case::{Batching, DOTS1, ModelCase, QWEN3_MOE, micros};
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
    let rank = |world: &World| -> Result<_> {
        let (rank, n_ranks) = data_rank(world, strategy);
        let router = RouterSettings { losses: vec![loss], ..RouterSettings::default() };
        let engine = engine_with_routers(world, strategy, case, router, None)?;
        let (micros, _) = micros(batching, 0, rank, n_ranks);
        let n_tokens = micros.iter().map(|micro: &Micro| micro.seqs.n_tokens()).sum::<usize>() as f64;
        let normalizer = sum(engine.group(), n_tokens)? / strategy.n_counts();
        let auxiliary = [AuxiliaryLoss { name: loss.name().to_owned(), coefficient: 1.0, normalizer }];
        let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu)?;
        let dropout_keys = vec![5; micros.len()];
        let batch = TrainBatch { micros: &micros, dropout_keys: &dropout_keys, n_targets: 1.0, auxiliary: &auxiliary };
        let optimizer = OptimizerStep { adamw: HYPER, scaler: &scaler };
        let result = engine.train_step(&batch, &Nothing, &optimizer)?.wait()?;
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

/// Compares two steps. Sums of logits round differently, by their absolute sum.
fn check_close(what: &str, ours: &RouterStep, one_rank: &RouterStep) {
    let is_close = |a: f64, b: f64, scale: f64| (a - b).abs() <= 1e-5 * scale.max(1e-3);
    let layers = ours.layers.iter().zip(&one_rank.layers);
    assert!(layers.clone().all(|(a, b)| is_close(*a, *b, b.abs())), "{what}: {:?}", layers.collect::<Vec<_>>());
    assert!(one_rank.layers.iter().any(|mean| *mean > 0.0) && one_rank.layers.contains(&0.0), "no dense layer");
    assert!(ours.totals.keys().eq(one_rank.totals.keys()), "{what}");
    for (a, b) in ours.totals.values().zip(one_rank.totals.values()) {
        assert_eq!((&a.expert_counts, a.n_tokens), (&b.expert_counts, b.n_tokens), "{what}");
        let scale = f64::from(b.logit_squares);
        assert!(is_close(a.logit_sum.into(), b.logit_sum.into(), scale), "{what}: {a:?} {b:?}");
        assert!(is_close(a.logit_squares.into(), b.logit_squares.into(), scale) && scale > 0.0, "{what}: {a:?} {b:?}");
    }
    assert!(one_rank.grads.keys().any(|name| name.ends_with("gate.weight")), "{what}");
    compare_tensors("gradient", &ours.grads, &one_rank.grads).unwrap_or_else(|difference| panic!("{what}: {difference}"));
}

/// Compares each loss with one rank. `losses` do not depend on the mesh.
#[track_caller]
fn check(degrees: Degrees, zero_stage: Option<ZeroStage>, losses: &[RouterLoss]) {
    let sequence_parallel = SequenceParallel::On;
    let chunk_layers = (degrees.pp > 1).then_some(&[2usize, 2][..]);
    let strategy = Strategy { degrees, zero_stage, sequence_parallel, chunk_layers, ..Strategy::ONE_RANK };
    for case in [DOTS1, QWEN3_MOE] {
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
fn losses_of_routers_differ() {
    let mean = |loss| step(Strategy::ONE_RANK, DOTS1, Batching::Accumulated(3), loss).layers.iter().sum::<f64>();
    let means = [LoadBalancing, SequenceLoadBalancing, GlobalLoadBalancing].map(mean);
    assert!(means[0] != means[1] && means[0] != means[2] && means[1] != means[2], "{means:?}");
}
