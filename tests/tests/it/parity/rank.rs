//! A training run with a parallel strategy, and its comparison with one rank.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candlewick_comm::mesh::{Axis, Degrees, Mesh};
use candlewick_comm::{CollectiveCall, Options, Reduce, World, sum, threads};
use candlewick_model::{Model, RouterLoss, RouterSettings, TiledMlp};
use candlewick_ops::{GradPolicy, GradScaler};
use candlewick_parallel::{
    ActivationCheckpointing, AuxiliaryLoss, BufferState, CpuOffload, Engine, EngineSpec, LossScale, MasterRounding,
    OPTIMIZER_KINDS, OptimizerGroups, ParallelGroups, ParamDtypes, ParamState, PipelineLayout, PipelineScheduleKind,
    SequenceParallel, StepLoss, TokenDispatcher, ZeroStage, mtp_loss_name,
};

use super::case::{Batching, ModelCase, micros};
use super::faulty_group::{FaultyGroup, GroupOp};

/// Steps of a run with fault injection: a wrong update must change a later step.
pub(crate) const FEW_STEPS: usize = 2;
pub(crate) const STEPS: usize = 5;
/// Tolerance of f32 sums in another order.
pub(crate) const TOLERANCE: f64 = 1e-5;
/// Change of the expert biases per step: large enough to change the selections.
const BIAS_UPDATE_RATE: f64 = 0.02;
pub(crate) const LR: f64 = 1e-2;

/// Returns AdamW with a large eps. With a small one, the sign of a nearly zero gradient, such as that of a key bias, decides a
/// whole step.
pub(crate) fn optimizer() -> OptimizerGroups {
    let adamw = OPTIMIZER_KINDS[0].with(&[("betas", &[0.9, 0.99]), ("eps", &[1e-4])]).unwrap();
    OptimizerGroups::of_all(adamw, 0.1)
}

/// A parallel strategy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strategy {
    pub(crate) degrees: Degrees,
    pub(crate) zero_stage: Option<ZeroStage>,
    pub(crate) sequence_parallel: SequenceParallel,
    pub(crate) schedule: PipelineScheduleKind,
    /// Layers of each model chunk, in order; `None` balances them, with one chunk per stage.
    pub(crate) chunk_layers: Option<&'static [usize]>,
    pub(crate) tiled_mlp: TiledMlp,
    /// Most bytes of logits that the loss holds at once; `None` does not limit them.
    pub(crate) logits_bytes: Option<usize>,
    pub(crate) label_smoothing: f32,
    pub(crate) cpu_offload: CpuOffload,
    pub(crate) token_dispatcher: TokenDispatcher,
    /// True if weights that multiply in FP8 are gathered as codes.
    pub(crate) fp8_param_gather: bool,
    pub(crate) optimizer: fn() -> OptimizerGroups,
}

impl Strategy {
    pub(crate) const ONE_RANK: Self = Self {
        degrees: Degrees { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, sp: 1, tp: 1, ep: 1, etp: 1 },
        zero_stage: None,
        sequence_parallel: SequenceParallel::Off,
        schedule: PipelineScheduleKind::OneForwardOneBackward,
        chunk_layers: None,
        tiled_mlp: TiledMlp::Off,
        logits_bytes: None,
        label_smoothing: 0.0,
        cpu_offload: CpuOffload { optimizer: 0.0, weights: false },
        token_dispatcher: TokenDispatcher::AllToAll,
        fp8_param_gather: false,
        optimizer,
    };

    /// Returns the number of ranks with equal micro-batches, each of which counts their targets.
    pub(crate) fn n_counts(&self) -> f64 {
        (self.degrees.cp * self.degrees.sp * self.degrees.pp) as f64
    }

    /// Returns the settings of a model's routers.
    fn routers(case: ModelCase) -> RouterSettings {
        let losses = if case.has_experts() { vec![RouterLoss::Z] } else { Vec::new() };
        RouterSettings { losses, bias_update_rate: BIAS_UPDATE_RATE, ..RouterSettings::default() }
    }

    pub(crate) fn auxiliary(case: ModelCase, n_tokens: f64) -> Vec<AuxiliaryLoss> {
        let loss =
            |loss: RouterLoss| AuxiliaryLoss { name: loss.name().to_owned(), coefficient: 0.05, normalizer: n_tokens };
        let of_mtp = (1..=case.n_mtp_layers()).map(|depth| AuxiliaryLoss {
            name: mtp_loss_name(depth),
            coefficient: 0.3,
            normalizer: n_tokens,
        });
        Self::routers(case).losses.into_iter().map(loss).chain(of_mtp).collect()
    }

    pub(crate) fn layout(&self, n_blocks: usize) -> PipelineLayout {
        match self.chunk_layers {
            Some(chunk_layers) => PipelineLayout::new(self.degrees.pp, chunk_layers),
            None => PipelineLayout::balanced(n_blocks, self.degrees.pp, 1, 0.0),
        }
    }
}

/// Results of a run.
pub(crate) struct RunResult {
    /// Mean loss of each step.
    pub(crate) losses: Vec<f64>,
    /// Gradient norm of each step.
    pub(crate) norms: Vec<f64>,
    /// Gradients of the first step by parameter.
    pub(crate) grads: BTreeMap<String, Vec<f32>>,
    /// Master weights after the last step by parameter.
    pub(crate) weights: BTreeMap<String, Vec<f32>>,
    /// Collectives that the training steps used.
    pub(crate) used: BTreeSet<GroupOp>,
    /// Calls of the first rank, in order: group, operation and number.
    pub(crate) calls: Vec<String>,
}

/// A rank's shard of a parameter or a buffer.
#[derive(Clone)]
pub(crate) struct ParamShard {
    name: String,
    shape: Vec<usize>,
    row_len: usize,
    columns: Range<usize>,
    range: Range<usize>,
    values: Vec<f32>,
}

impl ParamShard {
    /// Returns the name of the parameter.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns other values of the same elements.
    pub(crate) fn with_values(&self, name: String, values: Vec<f32>) -> Self {
        Self { name, values, ..self.clone() }
    }

    /// Returns the positions of the shard's elements in the whole parameter.
    pub(crate) fn positions(&self) -> impl Iterator<Item = usize> {
        let (width, n) = (self.row_len, self.columns.len());
        let first = self.columns.start;
        self.range.clone().map(move |at| at / n * width + first + at % n)
    }
}

struct RankResult {
    stage: usize,
    losses: Vec<f64>,
    norms: Vec<f64>,
    eval_loss: f64,
    grads: Vec<ParamShard>,
    /// Zeros among the gradients of the first step, on all ranks.
    n_zeros: f64,
    weights: Vec<ParamShard>,
    used: BTreeSet<GroupOp>,
    calls: Vec<CollectiveCall>,
}

/// Trains [`STEPS`] steps on the ranks of `strategy`.
pub(crate) fn run(strategy: Strategy, case: ModelCase, batching: Batching) -> RunResult {
    run_with(strategy, case, batching, STEPS, None).unwrap()
}

/// Returns the results of one rank after `n_steps`, cached per process.
pub(crate) fn one_rank(case: ModelCase, batching: Batching, n_steps: usize) -> Arc<RunResult> {
    static KNOWN: Mutex<BTreeMap<String, Arc<RunResult>>> = Mutex::new(BTreeMap::new());
    let key = format!("{case:?} {batching:?} {n_steps}");
    let known = KNOWN.lock().unwrap().get(&key).cloned();
    known.unwrap_or_else(|| {
        let result = Arc::new(run_with(Strategy::ONE_RANK, case, batching, n_steps, None).unwrap());
        KNOWN.lock().unwrap().insert(key, Arc::clone(&result));
        result
    })
}

/// Trains `n_steps`, with a fault injected into one collective if `fault` is given. A faulty run may fail.
pub(crate) fn run_with(
    strategy: Strategy,
    case: ModelCase,
    batching: Batching,
    n_steps: usize,
    fault: Option<&GroupOp>,
) -> candlewick_comm::Result<RunResult> {
    let options = Options { timeout: Duration::from_secs(120), record: true };
    let rank = |world: &World| run_rank(world, strategy, case, batching, (n_steps, fault));
    let ranks = threads::run(strategy.degrees.n_ranks(), options, rank)?;
    if fault.is_none() {
        for other in &ranks {
            assert!(other.losses == ranks[0].losses && other.norms == ranks[0].norms, "{strategy:?}: ranks disagree");
            assert_eq!(other.eval_loss, ranks[0].eval_loss);
            let first = ranks.iter().find(|first| first.stage == other.stage).unwrap();
            let orders = order(&other.calls).into_iter().zip(order(&first.calls));
            for (i, (call, first)) in orders.enumerate() {
                assert_eq!(call, first, "{strategy:?}: call {i} differs between ranks of the stage");
            }
            assert_eq!(other.calls.len(), first.calls.len(), "{strategy:?}");
        }
    }
    let join = |shards: fn(&RankResult) -> &Vec<ParamShard>| unsharded(ranks.iter().flat_map(shards));
    let mut losses = ranks[0].losses.clone();
    losses.push(ranks[0].eval_loss);
    let grads = join(|rank| &rank.grads);
    if fault.is_none() {
        let n_zeros = grads.values().flatten().filter(|grad| **grad == 0.0).count() as f64;
        ranks.iter().for_each(|rank| assert_eq!(rank.n_zeros, n_zeros, "{strategy:?}: zeros among the gradients"));
    }
    Ok(RunResult {
        losses,
        norms: ranks[0].norms.clone(),
        grads,
        weights: join(|rank| &rank.weights),
        used: ranks.iter().flat_map(|rank| rank.used.clone()).collect(),
        calls: order(&ranks[0].calls),
    })
}

/// Lists the calls of a rank by group, operation and number. Shapes may differ: ranks of another group may have more tokens.
fn order(calls: &[CollectiveCall]) -> Vec<String> {
    calls.iter().map(|call| format!("{} {} {}", call.group, call.op.name(), call.number)).collect()
}

/// Returns the data parallel rank and world size. Context parallel and Ulysses ranks share micro-batches.
pub(crate) fn data_rank(world: &World, strategy: Strategy) -> (usize, usize) {
    let mesh = Mesh::new(strategy.degrees, world.size()).unwrap();
    let place = |axis| mesh.coordinate(world.rank(), axis);
    let Degrees { dp_replicate, dp_shard, .. } = strategy.degrees;
    (place(Axis::DpReplicate) * dp_shard + place(Axis::DpShard), dp_replicate * dp_shard)
}

/// Builds a rank's engine with random weights.
pub(crate) fn engine(
    world: &World,
    strategy: Strategy,
    case: ModelCase,
    fault: Option<&GroupOp>,
) -> candle_core::Result<Engine> {
    engine_with_routers(world, strategy, case, Strategy::routers(case), fault)
}

/// Builds a rank's engine with random weights and these settings of the routers.
pub(crate) fn engine_with_routers(
    world: &World,
    strategy: Strategy,
    case: ModelCase,
    router: RouterSettings,
    fault: Option<&GroupOp>,
) -> candle_core::Result<Engine> {
    let groups = groups(world, strategy, case, fault)?;
    let model = case.model();
    // All modes of activation checkpointing: each gathers and frees weights at other times.
    let checkpointing = (0..model.n_blocks()).map(|block| match block % 4 {
        0 => ActivationCheckpointing::None,
        1 => ActivationCheckpointing::Full,
        2 => ActivationCheckpointing::Selective,
        _ => ActivationCheckpointing::Offload,
    });
    let spec = EngineSpec {
        zero_stage: strategy.zero_stage,
        sequence_parallel: strategy.sequence_parallel,
        schedule: strategy.schedule,
        cpu_offload: strategy.cpu_offload,
        optimizer: (strategy.optimizer)(),
        checkpointing: checkpointing.collect(),
        token_dispatcher: strategy.token_dispatcher,
        router,
        fp8: case.fp8(),
        fp8_param_gather: strategy.fp8_param_gather,
        ..EngineSpec::training(ParamDtypes::computing_in(DType::F32), strategy.layout(model.n_blocks()))
    };
    let engine = spec
        .build(model, &groups, Device::Cpu)?
        .with_tiled_mlp(strategy.tiled_mlp)
        .with_label_smoothing(strategy.label_smoothing);
    fill(&engine)?;
    Ok(match strategy.logits_bytes {
        Some(logits_bytes) => engine.with_logits_bytes(logits_bytes),
        None => engine,
    })
}

/// Builds a rank's engine with random weights, and a frozen reference: the model without its adapter, whose weights are shared.
pub(crate) fn engine_with_reference(
    world: &World,
    strategy: Strategy,
    case: ModelCase,
    fault: Option<&GroupOp>,
) -> candle_core::Result<Engine> {
    let engine = engine(world, strategy, case, fault)?;
    let model = case.without_adapter().model();
    let spec = EngineSpec {
        zero_stage: strategy.zero_stage,
        sequence_parallel: strategy.sequence_parallel,
        ..EngineSpec::inference(DType::F32, strategy.layout(model.n_blocks()))
    };
    let groups = groups(world, strategy, case, fault)?;
    let reference = spec.build_sharing(model, &groups, Device::Cpu, Some(&engine))?;
    fill(&reference)?;
    Ok(engine.with_reference(reference))
}

/// Makes the groups of a rank, with a fault in one collective if `fault` is given.
fn groups(
    world: &World,
    strategy: Strategy,
    case: ModelCase,
    fault: Option<&GroupOp>,
) -> candle_core::Result<ParallelGroups> {
    let mesh = Mesh::new(strategy.degrees, world.size()).unwrap();
    let everyone = FaultyGroup { group: world.group(), name: "world".to_owned(), fault: fault.cloned() };
    let groups = ParallelGroups::new(&mesh, &everyone)?;
    Ok(if case.has_experts() { groups.with_experts(&mesh, &everyone)? } else { groups })
}

/// Sets random weights.
fn fill(engine: &Engine) -> candle_core::Result<()> {
    engine.store().fill(|spec| {
        let mut values = vec![0f32; spec.numel()];
        spec.initialise(3, &mut values);
        if spec.name.ends_with("lora_B.weight") || spec.name.ends_with("bias") {
            // Zeros, the usual initial values, would hide errors in the gradient of the other factor, and would leave key
            // biases to rounding.
            values.iter_mut().enumerate().for_each(|(i, x)| *x = (i as f32 * 0.7).sin() * 0.1);
        }
        Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
    })
}

fn run_rank(
    world: &World,
    strategy: Strategy,
    case: ModelCase,
    batching: Batching,
    (n_steps, fault): (usize, Option<&GroupOp>),
) -> candle_core::Result<RankResult> {
    let (rank, n_ranks) = data_rank(world, strategy);
    let stage = Mesh::new(strategy.degrees, world.size()).unwrap().coordinate(world.rank(), Axis::Pp);
    let engine = engine(world, strategy, case, fault)?;
    let scaler = GradScaler::new(GradPolicy { max_norm: Some(1.0), ..GradPolicy::NO_CLIP_NO_SCALE }, 0, &Device::Cpu)?;
    let (mut losses, mut norms, mut grads, mut n_zeros) = (Vec::new(), Vec::new(), Vec::new(), 0.0);
    let n_before = world.calls().len();
    for step in 0..n_steps {
        let (micros, n_targets) = micros(batching, step, rank, n_ranks);
        let n_targets = sum(engine.group(), n_targets)? / strategy.n_counts();
        engine.store().zero_grads()?;
        let n_tokens = micros.iter().map(|micro| micro.seqs.n_tokens()).sum::<usize>() as f64;
        let n_tokens = sum(engine.group(), n_tokens)? / strategy.n_counts();
        let auxiliary = Strategy::auxiliary(case, n_tokens);
        let loss = StepLoss { auxiliary: &auxiliary, ..StepLoss::from(&LossScale::mean_over(n_targets)) };
        let sums = engine.forward_backward(&micros, loss, |_| 5)?;
        let local =
            sums.micros.iter().map(|sum| Ok(f64::from(sum.to_scalar::<f32>()?))).sum::<candle_core::Result<f64>>()?;
        losses.push(sum(engine.group(), local)? / n_targets);
        for loss in &sums.auxiliary {
            losses.push(sum(engine.group(), f64::from(loss.sum_all()?.to_scalar::<f32>()?))?);
        }
        if step == 0 {
            grads = shards(&engine, |state| &state.grad)?;
            n_zeros = engine.store().grad_zeros()?.to_scalar::<f64>()?;
        }
        let squares = engine.store().grad_squares()?;
        norms.push(squares.sum_all()?.to_scalar::<f64>()?.sqrt());
        scaler.update(&squares, &Tensor::zeros(1, DType::F32, &Device::Cpu)?)?;
        engine.store().step(LR, &scaler, MasterRounding::Nearest)?;
        engine.update_fp8_scales()?;
        let totals = sums.layers.iter().map(|total| Ok(engine.group().all_reduce(total, Reduce::Sum)?));
        engine.update_layers(&totals.collect::<candle_core::Result<Vec<_>>>()?, &scaler)?;
    }
    let used = GroupOp::used_in(&world.calls()[n_before..]);
    let (eval_loss, n_targets) = micros(batching, STEPS, rank, n_ranks);
    let local = eval_loss.iter().map(|micro| engine.loss(micro)).sum::<candle_core::Result<f64>>()?;
    let n_targets = sum(engine.group(), n_targets)? / strategy.n_counts();
    let eval_loss = sum(engine.group(), local)? / n_targets;
    let weights = [shards(&engine, |state| &state.master)?, buffers(&engine)?].concat();
    // An export reads the weights that the ranks have.
    let exported = engine.store().masters().collect::<candle_core::Result<Vec<_>>>()?;
    if fault.is_none() {
        for shard in &weights {
            let (_, whole) = exported.iter().find(|(spec, _)| spec.name == shard.name).unwrap();
            let whole = whole.flatten_all()?.to_vec1::<f32>()?;
            let same = shard.positions().zip(&shard.values).all(|(at, value)| whole[at] == *value);
            assert!(same, "{strategy:?}: the export of {} differs", shard.name);
        }
        let trained = exported.iter().filter(|(spec, _)| spec.trainable).count();
        assert_eq!(
            trained,
            engine.model().units().iter().flat_map(|unit| &unit.params).filter(|spec| spec.trainable).count()
        );
    }
    Ok(RankResult { stage, losses, norms, eval_loss, grads, n_zeros, weights, used, calls: world.calls() })
}

/// Builds a rank's engine with random weights in bf16, and with these masters, moments and activation checkpointing.
pub(crate) fn bf16_engine(
    world: &World,
    strategy: Strategy,
    model: Model,
    (states, checkpointing): (DType, ActivationCheckpointing),
) -> candle_core::Result<Engine> {
    let mesh = Mesh::new(strategy.degrees, world.size()).unwrap();
    let groups = ParallelGroups::new(&mesh, &*world.group())?;
    let has_experts = model.layers().any(|layer| layer.n_experts().is_some());
    let groups = if has_experts { groups.with_experts(&mesh, &*world.group())? } else { groups };
    let dtypes = ParamDtypes { compute: DType::BF16, masters: states, optimizer_states: states };
    let spec = EngineSpec {
        zero_stage: strategy.zero_stage,
        sequence_parallel: strategy.sequence_parallel,
        schedule: strategy.schedule,
        cpu_offload: strategy.cpu_offload,
        optimizer: (strategy.optimizer)(),
        checkpointing: vec![checkpointing; model.n_blocks()],
        ..EngineSpec::training(dtypes, strategy.layout(model.n_blocks()))
    };
    let engine = spec.build(model, &groups, Device::Cpu)?;
    engine.store().fill(|spec| {
        let mut values = vec![0f32; spec.numel()];
        spec.initialise(3, &mut values);
        Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
    })?;
    Ok(engine)
}

pub(crate) fn shards(engine: &Engine, of: fn(&ParamState) -> &Tensor) -> candle_core::Result<Vec<ParamShard>> {
    let states = engine.store().states()?.into_iter();
    states
        .map(|state| {
            let values = of(&state).to_dtype(DType::F32)?.to_vec1()?;
            let ParamState { name, shape, row_len, columns, range, .. } = state;
            Ok(ParamShard { name, shape, row_len, columns, range, values })
        })
        .collect()
}

pub(crate) fn buffers(engine: &Engine) -> candle_core::Result<Vec<ParamShard>> {
    let of_buffer = |BufferState { name, shape, range, value, .. }| {
        let row_len = shape[0];
        Ok(ParamShard { name, shape, row_len, columns: 0..row_len, range, values: value.to_vec1()? })
    };
    engine.store().buffers()?.into_iter().map(of_buffer).collect()
}

/// Assembles whole parameters from shards. An element that differs between replicas becomes infinity.
pub(crate) fn unsharded<'a>(shards: impl Iterator<Item = &'a ParamShard>) -> BTreeMap<String, Vec<f32>> {
    let mut whole = BTreeMap::new();
    for shard in shards {
        let n = shard.shape.iter().product();
        let whole: &mut Vec<f32> = whole.entry(shard.name.clone()).or_insert_with(|| vec![f32::NAN; n]);
        for (at, value) in shard.positions().zip(&shard.values) {
            if whole[at].is_nan() {
                whole[at] = *value;
            } else if whole[at] != *value {
                // Infinity fails every comparison.
                whole[at] = f32::INFINITY;
            }
        }
    }
    whole
}

/// Compares a run with that of one rank; the error describes the first difference.
pub(crate) fn compare(ours: &RunResult, one_rank: &RunResult) -> Result<(), String> {
    compare_within(TOLERANCE, ours, one_rank)
}

/// Compares with a relative tolerance.
pub(crate) fn compare_within(tolerance: f64, ours: &RunResult, one_rank: &RunResult) -> Result<(), String> {
    for (what, ours, other) in [("loss", &ours.losses, &one_rank.losses), ("norm", &ours.norms, &one_rank.norms)] {
        for (step, (a, b)) in ours.iter().zip(other).enumerate() {
            // A NaN is never close.
            let is_close = (a - b).abs() <= tolerance * b.abs();
            if !is_close {
                return Err(format!("{what} of step {step}: {a}, one rank has {b}"));
            }
        }
    }
    tensors_within("gradient", tolerance, &ours.grads, &one_rank.grads)?;
    tensors_within("weight", tolerance, &ours.weights, &one_rank.weights)
}

pub(crate) fn compare_tensors(
    what: &str,
    ours: &BTreeMap<String, Vec<f32>>,
    other: &BTreeMap<String, Vec<f32>>,
) -> Result<(), String> {
    tensors_within(what, TOLERANCE, ours, other)
}

fn tensors_within(
    what: &str,
    tolerance: f64,
    ours: &BTreeMap<String, Vec<f32>>,
    other: &BTreeMap<String, Vec<f32>>,
) -> Result<(), String> {
    if !ours.keys().eq(other.keys()) {
        return Err(format!("other {what}s: {:?}", ours.keys()));
    }
    for ((name, a), b) in ours.iter().zip(other.values()) {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
        let difference = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
        let scale = norm(&mut b.iter().map(|&b| f64::from(b)));
        assert!(scale > 0.0, "{name} has no {what}");
        let is_close = difference <= tolerance * scale;
        if !is_close {
            return Err(format!("{what} of {name}: off by {:.1e} of its norm", difference / scale));
        }
    }
    Ok(())
}
