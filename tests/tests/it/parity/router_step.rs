//! Steps whose objective is a loss of the routers, and their comparison.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::{Options, World, sum, threads};
use candlewick_model::{ROUTER_TOTALS, RouterLoss, RouterSettings, RouterTotal};
use candlewick_ops::{GradPolicy, GradScaler};
use candlewick_parallel::{
    AuxiliaryLoss, Engine, MasterRounding, Micro, MicroLoss, Objective, OptimizerStep, StepResult, StepRouting,
    TokenLosses, TrainBatch, ZeroGradCount, mtp_loss_name,
};

use super::case::{Batching, ModelCase, micros};
use super::faulty_group::GroupOp;
use super::rank::{LR, Strategy, buffers, compare_tensors, data_rank, engine_with_routers, shards, unsharded};

/// The objective 0, which leaves the gradients of the routers' losses.
pub(super) struct Nothing;

impl Objective for Nothing {
    fn loss(&self, tokens: &TokenLosses<'_>) -> Result<MicroLoss> {
        let zero = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        let weights = Tensor::zeros(tokens.micro().seqs.n_tokens(), DType::F32, &Device::Cpu)?;
        Ok(MicroLoss::Weighted { loss: zero, weights })
    }
}

/// A run that minimizes an objective and the routers' losses.
#[derive(Clone, Copy)]
pub(super) struct RouterRun<'a> {
    pub(super) strategy: Strategy,
    pub(super) case: ModelCase,
    pub(super) batching: Batching,
    pub(super) router: &'a RouterSettings,
    pub(super) objective: &'static dyn Objective,
    pub(super) expert_input: ExpertInput,
    pub(super) fault: Option<&'a GroupOp>,
}

/// Results of a step.
pub(super) struct RouterStep {
    /// Mean of the losses by layer, one loss after the other.
    pub(super) layers: Vec<f64>,
    pub(super) totals: BTreeMap<usize, RouterTotal>,
    /// Gradients that are not zero.
    pub(super) grads: BTreeMap<String, Vec<f32>>,
    /// Expert biases after the step.
    pub(super) biases: BTreeMap<String, Vec<f32>>,
}

/// Padding of experts to their capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertInput {
    /// The rows of tokens.
    Ragged,
    /// Rows of padding up to the capacity.
    Padded,
}

/// Takes a step that minimizes `loss` alone.
pub(super) fn step(strategy: Strategy, case: ModelCase, batching: Batching, loss: RouterLoss) -> RouterStep {
    let router = RouterSettings { losses: vec![loss], ..RouterSettings::default() };
    step_with(strategy, case, batching, &router, &Nothing)
}

/// Takes a step that minimizes an objective and the routers' losses.
pub(super) fn step_with(
    strategy: Strategy,
    case: ModelCase,
    batching: Batching,
    router: &RouterSettings,
    objective: &'static dyn Objective,
) -> RouterStep {
    let expert_input = ExpertInput::Ragged;
    RouterRun { strategy, case, batching, router, objective, expert_input, fault: None }.step()
}

impl RouterRun<'_> {
    /// Takes a step, with every activation checkpointing. The coefficients of the losses are 1, 1/2, and so on.
    pub(super) fn step(&self) -> RouterStep {
        let rank = |world: &World| -> Result<_> {
            let engine = self.engine(world)?;
            let result = self.train_step(world, &engine, LR)?;
            let layers = self.layers(&result);
            Ok((layers, router_totals(&result), shards(&engine, |state| &state.grad)?, buffers(&engine)?))
        };
        let ranks = self.on_ranks(rank);
        for (layers, totals, ..) in ranks.iter().filter(|_| self.fault.is_none()) {
            assert_eq!((layers, totals), (&ranks[0].0, &ranks[0].1), "{:?}: ranks disagree", self.strategy);
        }
        let mut grads = unsharded(ranks.iter().flat_map(|(_, _, shards, _)| shards));
        grads.retain(|_, grad| grad.iter().any(|x| *x != 0.0));
        let biases = unsharded(ranks.iter().flat_map(|(.., buffers)| buffers));
        RouterStep { layers: ranks[0].0.clone(), totals: ranks[0].1.clone(), grads, biases }
    }

    /// Takes `n_steps` steps on the same data, which change no weights. Returns the means of the losses by layer.
    pub(super) fn steps_without_updates(&self, n_steps: usize) -> Vec<Vec<f64>> {
        let rank = |world: &World| -> Result<_> {
            let engine = self.engine(world)?;
            let step = |_| Ok(self.layers(&self.train_step(world, &engine, 0.0)?));
            (0..n_steps).map(step).collect::<Result<Vec<_>>>()
        };
        self.on_ranks(rank).remove(0)
    }

    fn on_ranks<T: Send>(&self, rank: impl Fn(&World) -> Result<T> + Sync) -> Vec<T> {
        let options = Options { timeout: Duration::from_secs(120), record: false };
        threads::run(self.strategy.degrees.n_ranks(), options, rank).unwrap()
    }

    fn engine(&self, world: &World) -> Result<Engine> {
        engine_with_routers(world, self.strategy, self.case, self.router.clone(), self.fault)
    }

    fn layers(&self, result: &StepResult) -> Vec<f64> {
        self.router.losses.iter().flat_map(|loss| result.outputs.vector(loss.name()).to_vec()).collect()
    }

    fn train_step(&self, world: &World, engine: &Engine, lr: f64) -> Result<StepResult> {
        let (rank, n_ranks) = data_rank(world, self.strategy);
        let (micros, n_targets) = micros(self.batching, 0, rank, n_ranks);
        let n_padding = |micro: &Micro| micro.padding.iter().map(Range::len).sum::<usize>();
        let n_tokens = micros.iter().map(|micro| micro.seqs.n_tokens() - n_padding(micro)).sum::<usize>() as f64;
        // Fault injection does not affect these sums.
        let group = world.group();
        let n_copies = self.strategy.n_counts() * self.strategy.degrees.tp as f64;
        let normalizer = sum(&*group, n_tokens)? / n_copies;
        let losses = self.router.losses.iter().enumerate();
        let of_routers = losses.map(|(i, loss)| (loss.name().to_owned(), 1.0 / (i + 1) as f64));
        let of_mtp = (1..=self.case.n_mtp_layers()).map(|depth| (mtp_loss_name(depth), 0.0));
        let auxiliary: Vec<AuxiliaryLoss> = of_routers
            .chain(of_mtp)
            .map(|(name, coefficient)| AuxiliaryLoss { name, coefficient, normalizer })
            .collect();
        let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu)?;
        let most_tokens = (self.expert_input == ExpertInput::Padded).then(|| most_tokens(self.batching, n_ranks));
        let batch = TrainBatch {
            micros: &micros,
            most_tokens: most_tokens.as_deref(),
            dropout_keys: &vec![5; micros.len()],
            normalizer: sum(&*group, n_targets)? / n_copies,
            auxiliary: &auxiliary,
            routing: StepRouting::Select,
        };
        let optimizer = OptimizerStep {
            lr,
            scaler: &scaler,
            rounding: MasterRounding::Nearest,
            grad_zeros: ZeroGradCount::Off,
            max_loss: f64::INFINITY,
        };
        engine.train_step(&batch, self.objective, &optimizer)?.wait()
    }
}

/// Returns the totals of the routers, by layer index.
pub(super) fn router_totals(result: &StepResult) -> BTreeMap<usize, RouterTotal> {
    result.outputs.layers(ROUTER_TOTALS).map(|(layer_idx, total)| (layer_idx, RouterTotal::read(total))).collect()
}

/// Returns the most tokens of any data rank in each micro-batch of the first step.
pub(super) fn most_tokens(batching: Batching, n_ranks: usize) -> Vec<usize> {
    let of_rank = |rank| micros(batching, 0, rank, n_ranks).0.iter().map(|micro| micro.seqs.n_tokens()).collect();
    let ranks: Vec<Vec<usize>> = (0..n_ranks).map(of_rank).collect();
    (0..ranks[0].len()).map(|micro| ranks.iter().map(|of_rank| of_rank[micro]).max().unwrap()).collect()
}

/// Compares two steps; the error describes the first difference. Sums of logits round differently, by their absolute sum.
pub(super) fn compare_steps(ours: &RouterStep, one_rank: &RouterStep) -> std::result::Result<(), String> {
    let is_close = |a: f64, b: f64, scale: f64| (a - b).abs() <= 1e-5 * scale.max(1e-3);
    let layers = ours.layers.iter().zip(&one_rank.layers);
    if !layers.clone().all(|(a, b)| is_close(*a, *b, b.abs())) {
        return Err(format!("losses {:?}", layers.collect::<Vec<_>>()));
    }
    if !ours.totals.keys().eq(one_rank.totals.keys()) {
        return Err(format!("totals of layers {:?}", ours.totals.keys()));
    }
    for (a, b) in ours.totals.values().zip(one_rank.totals.values()) {
        let scale = f64::from(b.logit_squares);
        let is_equal = (&a.expert_counts, a.n_tokens, a.n_dropped) == (&b.expert_counts, b.n_tokens, b.n_dropped)
            && is_close(a.logit_sum.into(), b.logit_sum.into(), scale)
            && is_close(a.logit_squares.into(), b.logit_squares.into(), scale);
        if !is_equal {
            return Err(format!("{a:?} {b:?}"));
        }
    }
    compare_tensors("gradient", &ours.grads, &one_rank.grads)
}

/// Compares a step with one that has losses, logits and gradients of routers, and a dense layer.
#[track_caller]
pub(super) fn check_close(what: &str, ours: &RouterStep, one_rank: &RouterStep) {
    assert!(one_rank.layers.iter().any(|mean| *mean > 0.0) && one_rank.layers.contains(&0.0), "no dense layer");
    assert!(one_rank.totals.values().all(|total| total.logit_squares > 0.0), "{what}");
    assert!(one_rank.grads.keys().any(|name| name.ends_with("gate.weight")), "{what}");
    compare_steps(ours, one_rank).unwrap_or_else(|difference| panic!("{what}: {difference}"));
}
