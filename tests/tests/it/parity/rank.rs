//! A run on some ranks, and how it differs from another.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candlewick_comm::mesh::{Axis, Degrees, Mesh};
use candlewick_comm::{Call, Options, World, sum, threads};
use candlewick_model::TiledMlp;
use candlewick_ops::{AdamW, GradPolicy, GradScaler};
use candlewick_parallel::{
    ActivationCheckpointing, CpuOffload, Engine, EngineSpec, LossScale, ParallelGroups, ParamDtypes, ParamState,
    PipelineLayout, PipelineScheduleKind, SequenceParallel, ZeroStage,
};

use super::case::{Batching, Kind, micros};
use super::sabotage::{Lie, Lying};

/// Enough for what one step does to show in another.
pub(crate) const FEW: usize = 2;
pub(crate) const STEPS: usize = 5;
const TOLERANCE: f64 = 1e-5;
/// A large eps: with a small one the sign of a gradient that is nearly zero (of a bias of keys, on which hardly anything
/// depends) decides a whole step.
pub(crate) const HYPER: AdamW = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-4, weight_decay: 0.1 };

/// A way to share the work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub(crate) degrees: Degrees,
    pub(crate) zero_stage: Option<ZeroStage>,
    pub(crate) sequence_parallel: SequenceParallel,
    pub(crate) schedule: PipelineScheduleKind,
    /// Blocks of each run, in the order of the runs; `None` shares them out evenly, a run a stage.
    pub(crate) runs: Option<&'static [usize]>,
    pub(crate) tiled_mlp: TiledMlp,
    /// Bytes of logits that the loss holds at once, if not so many that all fit.
    pub(crate) logits_bytes: Option<usize>,
    pub(crate) cpu_offload: CpuOffload,
}

impl Way {
    pub(crate) const ONE_RANK: Self = Self {
        degrees: Degrees { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, sp: 1, tp: 1, ep: 1, etp: 1 },
        zero_stage: None,
        sequence_parallel: SequenceParallel::Off,
        schedule: PipelineScheduleKind::OneForwardOneBackward,
        runs: None,
        tiled_mlp: TiledMlp::Off,
        logits_bytes: None,
        cpu_offload: CpuOffload { optimizer: 0.0, weights: false },
    };

    /// Ranks that have the same micro-batches, and count their targets each.
    pub(crate) fn n_counts(&self) -> f64 {
        (self.degrees.cp * self.degrees.sp * self.degrees.pp) as f64
    }

    fn layout(&self, n_blocks: usize) -> PipelineLayout {
        match self.runs {
            Some(runs) => PipelineLayout::new(self.degrees.pp, runs),
            None => PipelineLayout::balanced(n_blocks, self.degrees.pp, 1, 0.0),
        }
    }
}

/// What came of a run.
pub(crate) struct Outcome {
    /// The mean loss of each step.
    pub(crate) losses: Vec<f64>,
    /// The norm of each step's gradient.
    pub(crate) norms: Vec<f64>,
    /// The gradient of the first step, by parameter.
    pub(crate) grads: BTreeMap<String, Vec<f32>>,
    /// The masters after the last, by parameter.
    pub(crate) weights: BTreeMap<String, Vec<f32>>,
    /// What training has asked of which groups.
    pub(crate) asked: BTreeSet<Lie>,
}

/// A part of a parameter.
pub(crate) struct Piece {
    name: String,
    shape: Vec<usize>,
    columns: Range<usize>,
    range: Range<usize>,
    values: Vec<f32>,
}

impl Piece {
    /// The places of its elements in the whole parameter.
    fn places(&self) -> impl Iterator<Item = usize> {
        let (width, n) = (self.shape[self.shape.len() - 1], self.columns.len());
        let first = self.columns.start;
        self.range.clone().map(move |at| at / n * width + first + at % n)
    }
}

struct OfRank {
    stage: usize,
    losses: Vec<f64>,
    norms: Vec<f64>,
    held_out: f64,
    grads: Vec<Piece>,
    weights: Vec<Piece>,
    asked: BTreeSet<Lie>,
    calls: Vec<Call>,
}

/// Trains some steps on as many ranks as `way` wants.
pub(crate) fn run(way: Way, kind: Kind, batching: Batching) -> Outcome {
    run_with(way, kind, batching, STEPS, None).unwrap()
}

/// What one rank makes of so many steps. It is computed once in a process.
pub(crate) fn one_rank(kind: Kind, batching: Batching, n_steps: usize) -> Arc<Outcome> {
    static KNOWN: Mutex<BTreeMap<String, Arc<Outcome>>> = Mutex::new(BTreeMap::new());
    let key = format!("{kind:?} {batching:?} {n_steps}");
    let known = KNOWN.lock().unwrap().get(&key).cloned();
    known.unwrap_or_else(|| {
        let outcome = Arc::new(run_with(Way::ONE_RANK, kind, batching, n_steps, None).unwrap());
        KNOWN.lock().unwrap().insert(key, Arc::clone(&outcome));
        outcome
    })
}

/// [`run`] for so many steps, with what a group says instead of the truth. A lie may make a run fail.
pub(crate) fn run_with(
    way: Way,
    kind: Kind,
    batching: Batching,
    n_steps: usize,
    lie: Option<&Lie>,
) -> candlewick_comm::Result<Outcome> {
    let options = Options { timeout: Duration::from_secs(120), record: true };
    let rank = |world: &World| of_rank(world, way, kind, batching, (n_steps, lie));
    let ranks = threads::run(way.degrees.n_ranks(), options, rank)?;
    if lie.is_none() {
        for other in &ranks {
            assert!(other.losses == ranks[0].losses && other.norms == ranks[0].norms, "{way:?}: ranks disagree");
            assert_eq!(other.held_out, ranks[0].held_out);
            let first = ranks.iter().find(|first| first.stage == other.stage).unwrap();
            let orders = order(&other.calls).into_iter().zip(order(&first.calls));
            for (i, (call, first)) in orders.enumerate() {
                assert_eq!(call, first, "{way:?}: call {i} is another on another rank of the stage");
            }
            assert_eq!(other.calls.len(), first.calls.len(), "{way:?}");
        }
    }
    let join = |pieces: fn(&OfRank) -> &Vec<Piece>| joined(ranks.iter().flat_map(pieces));
    let mut losses = ranks[0].losses.clone();
    losses.push(ranks[0].held_out);
    Ok(Outcome {
        losses,
        norms: ranks[0].norms.clone(),
        grads: join(|rank| &rank.grads),
        weights: join(|rank| &rank.weights),
        asked: ranks.iter().flat_map(|rank| rank.asked.clone()).collect(),
    })
}

/// What was called of which group. Shapes are not compared: ranks of another group may have more tokens.
fn order(calls: &[Call]) -> Vec<String> {
    calls.iter().map(|call| format!("{} {} {}", call.group, call.op.name(), call.number)).collect()
}

/// This rank's place among those that have different micro-batches, and how many places there are. Ranks that share tokens have
/// the same micro-batches.
pub(crate) fn seat(world: &World, way: Way) -> (usize, usize) {
    let mesh = Mesh::new(way.degrees, world.size()).unwrap();
    let place = |axis| mesh.coordinate(world.rank(), axis);
    let Degrees { dp_replicate, dp_shard, .. } = way.degrees;
    (place(Axis::DpReplicate) * dp_shard + place(Axis::DpShard), dp_replicate * dp_shard)
}

/// A rank's engine, with random weights.
pub(crate) fn engine(world: &World, way: Way, kind: Kind, lie: Option<&Lie>) -> candle_core::Result<Engine> {
    let mesh = Mesh::new(way.degrees, world.size()).unwrap();
    let everyone = Lying { group: world.group(), name: "world".to_owned(), lie: lie.cloned() };
    let groups = ParallelGroups::new(&mesh, &everyone)?;
    let model = kind.model();
    // Every kind of activation checkpointing: weights come and go differently for each.
    let checkpointing = (0..model.n_blocks()).map(|block| match block % 4 {
        0 => ActivationCheckpointing::None,
        1 => ActivationCheckpointing::Full,
        2 => ActivationCheckpointing::Selective,
        _ => ActivationCheckpointing::Offload,
    });
    let spec = EngineSpec {
        zero_stage: way.zero_stage,
        sequence_parallel: way.sequence_parallel,
        schedule: way.schedule,
        cpu_offload: way.cpu_offload,
        checkpointing: checkpointing.collect(),
        ..EngineSpec::training(ParamDtypes::computing_in(DType::F32), way.layout(model.n_blocks()))
    };
    let engine = spec.build(model, &groups, Device::Cpu)?.with_tiled_mlp(way.tiled_mlp);
    engine.store().fill(|spec| {
        let mut values = vec![0f32; spec.numel()];
        spec.initialise(3, &mut values);
        if spec.name.ends_with("lora_B.weight") || spec.name.ends_with("bias") {
            // They begin as zeros, which would hide what the other factor does; and what becomes of a bias of keys, on which
            // hardly anything depends, would be rounding.
            values.iter_mut().enumerate().for_each(|(i, x)| *x = (i as f32 * 0.7).sin() * 0.1);
        }
        Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
    })?;
    Ok(match way.logits_bytes {
        Some(logits_bytes) => engine.with_logits_bytes(logits_bytes),
        None => engine,
    })
}

fn of_rank(
    world: &World,
    way: Way,
    kind: Kind,
    batching: Batching,
    (n_steps, lie): (usize, Option<&Lie>),
) -> candle_core::Result<OfRank> {
    let (rank, n_ranks) = seat(world, way);
    let stage = Mesh::new(way.degrees, world.size()).unwrap().coordinate(world.rank(), Axis::Pp);
    let engine = engine(world, way, kind, lie)?;
    let scaler = GradScaler::new(GradPolicy { max_norm: Some(1.0), ..GradPolicy::NO_CLIP_NO_SCALE }, 0, &Device::Cpu)?;
    let (mut losses, mut norms, mut grads) = (Vec::new(), Vec::new(), Vec::new());
    let n_before = world.calls().len();
    for step in 0..n_steps {
        let (micros, n_targets) = micros(batching, step, rank, n_ranks);
        let n_targets = sum(engine.group(), n_targets)? / way.n_counts();
        engine.store().zero_grads()?;
        let sums = engine.forward_backward(&micros, &LossScale::mean_over(n_targets), |_| 5)?;
        let local =
            sums.micros.iter().map(|sum| Ok(f64::from(sum.to_scalar::<f32>()?))).sum::<candle_core::Result<f64>>()?;
        losses.push(sum(engine.group(), local)? / n_targets);
        if step == 0 {
            grads = pieces(&engine, |state| &state.grad)?;
        }
        let squares = engine.store().grad_squares()?;
        norms.push(squares.sum_all()?.to_scalar::<f64>()?.sqrt());
        scaler.update(&squares, &Tensor::zeros(1, DType::F32, &Device::Cpu)?, [HYPER.beta1, HYPER.beta2])?;
        engine.store().step(&HYPER, &scaler)?;
    }
    let asked = Lie::all(&world.calls()[n_before..]);
    let (held_out, n_targets) = micros(batching, STEPS, rank, n_ranks);
    let local = held_out.iter().map(|micro| engine.loss(micro)).sum::<candle_core::Result<f64>>()?;
    let n_targets = sum(engine.group(), n_targets)? / way.n_counts();
    let held_out = sum(engine.group(), local)? / n_targets;
    let weights = pieces(&engine, |state| &state.master)?;
    // What an export reads is what the ranks have.
    let exported = engine.store().masters().collect::<candle_core::Result<Vec<_>>>()?;
    if lie.is_none() {
        for piece in &weights {
            let (_, whole) = exported.iter().find(|(spec, _)| spec.name == piece.name).unwrap();
            let whole = whole.flatten_all()?.to_vec1::<f32>()?;
            let same = piece.places().zip(&piece.values).all(|(at, value)| whole[at] == *value);
            assert!(same, "{way:?}: an export has another {}", piece.name);
        }
        let trained = exported.iter().filter(|(spec, _)| spec.trainable).count();
        assert_eq!(
            trained,
            engine.model().units().iter().flat_map(|unit| &unit.params).filter(|spec| spec.trainable).count()
        );
    }
    Ok(OfRank { stage, losses, norms, held_out, grads, weights, asked, calls: world.calls() })
}

pub(crate) fn pieces(engine: &Engine, of: fn(&ParamState) -> &Tensor) -> candle_core::Result<Vec<Piece>> {
    let states = engine.store().states()?.into_iter();
    states
        .map(|state| {
            let values = of(&state).to_vec1()?;
            let ParamState { name, shape, columns, range, .. } = state;
            Ok(Piece { name, shape, columns, range, values })
        })
        .collect()
}

/// Whole parameters of their parts. Those that several ranks have must be the same.
pub(crate) fn joined<'a>(pieces: impl Iterator<Item = &'a Piece>) -> BTreeMap<String, Vec<f32>> {
    let mut whole = BTreeMap::new();
    for piece in pieces {
        let n = piece.shape.iter().product();
        let whole: &mut Vec<f32> = whole.entry(piece.name.clone()).or_insert_with(|| vec![f32::NAN; n]);
        for (at, value) in piece.places().zip(&piece.values) {
            if whole[at].is_nan() {
                whole[at] = *value;
            } else if whole[at] != *value {
                // Replicas that disagree are nobody's equal.
                whole[at] = f32::INFINITY;
            }
        }
    }
    whole
}

/// Says how one run differs from another, if it does.
pub(crate) fn compare(ours: &Outcome, one_rank: &Outcome) -> Result<(), String> {
    for (what, ours, other) in [("loss", &ours.losses, &one_rank.losses), ("norm", &ours.norms, &one_rank.norms)] {
        for (step, (a, b)) in ours.iter().zip(other).enumerate() {
            // What is not a number is close to none.
            let is_close = (a - b).abs() <= TOLERANCE * b.abs();
            if !is_close {
                return Err(format!("{what} of step {step}: {a}, one rank has {b}"));
            }
        }
    }
    same("gradient", &ours.grads, &one_rank.grads)?;
    same("weight", &ours.weights, &one_rank.weights)
}

pub(crate) fn same(
    what: &str,
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
        let is_close = difference <= TOLERANCE * scale;
        if !is_close {
            return Err(format!("{what} of {name}: off by {:.1e} of its norm", difference / scale));
        }
    }
    Ok(())
}
