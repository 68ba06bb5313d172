//! A run on some ranks, and how it differs from another.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candlewick_comm::mesh::{Axis, Degrees, Mesh};
use candlewick_comm::{Call, Options, World, sum, threads};
use candlewick_model::MlpRows;
use candlewick_ops::{AdamW, GradPolicy, GradScaler};
use candlewick_parallel::{
    Engine, Formats, Groups, LossScale, Mode, ParamState, ParamStore, Residency, Sequence, Sharded,
};

use crate::case::{Batching, Kind, micros};
use crate::sabotage::{Lie, Lying};

const STEPS: usize = 5;
const TOLERANCE: f64 = 1e-5;
/// A large eps: with a small one the sign of a gradient that is nearly zero (of a bias of keys, on which hardly anything
/// depends) decides a whole step.
const HYPER: AdamW = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-4, weight_decay: 0.1 };

/// A way to share the work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub(crate) degrees: Degrees,
    pub(crate) sharded: Option<Sharded>,
    pub(crate) mlp_rows: MlpRows,
}

impl Way {
    pub(crate) const ONE_RANK: Self = Self {
        degrees: Degrees { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, sp: 1, tp: 1, ep: 1, etp: 1 },
        sharded: None,
        mlp_rows: MlpRows::Together,
    };

    /// Ranks that have the same micro-batches.
    fn n_of_micro_batch(&self) -> usize {
        self.degrees.cp * self.degrees.sp
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
}

/// A part of a parameter: its name, its length, which elements, and they.
type Piece = (String, usize, Range<usize>, Vec<f32>);

struct OfRank {
    losses: Vec<f64>,
    norms: Vec<f64>,
    held_out: f64,
    grads: Vec<Piece>,
    weights: Vec<Piece>,
    calls: Vec<Call>,
}

/// Trains some steps on as many ranks as `way` wants.
pub(crate) fn run(way: Way, kind: Kind, batching: Batching, lie: Option<Lie>) -> Outcome {
    let options = Options { timeout: Duration::from_secs(120), record: true };
    let rank = |world: &World| of_rank(world, way, kind, batching, lie);
    let ranks = threads::run(way.degrees.n_ranks(), options, rank).unwrap();
    if lie.is_none() {
        for other in &ranks {
            assert!(other.losses == ranks[0].losses && other.norms == ranks[0].norms, "{way:?}: ranks disagree");
            assert_eq!(other.held_out, ranks[0].held_out);
            let orders = order(&other.calls).into_iter().zip(order(&ranks[0].calls));
            for (i, (call, first)) in orders.enumerate() {
                assert_eq!(call, first, "{way:?}: call {i} is another on another rank");
            }
            assert_eq!(other.calls.len(), ranks[0].calls.len(), "{way:?}");
        }
    }
    let join = |pieces: fn(&OfRank) -> &Vec<Piece>| joined(ranks.iter().flat_map(pieces));
    let mut losses = ranks[0].losses.clone();
    losses.push(ranks[0].held_out);
    Outcome {
        losses,
        norms: ranks[0].norms.clone(),
        grads: join(|rank| &rank.grads),
        weights: join(|rank| &rank.weights),
    }
}

/// What was called of which group. Shapes are not compared: ranks of another group may have more tokens.
fn order(calls: &[Call]) -> Vec<String> {
    calls.iter().map(|call| format!("{} {} {}", call.group, call.op.name(), call.number)).collect()
}

/// This rank's place among those that have different micro-batches, and how many places there are. Ranks that share tokens have
/// the same micro-batches.
pub(crate) fn seat(world: &World, way: Way) -> (usize, usize) {
    let mesh = Mesh::new(way.degrees, world.size()).unwrap();
    let place = |axis| mesh.place(world.rank(), axis);
    let Degrees { dp_replicate, dp_shard, .. } = way.degrees;
    (place(Axis::DpReplicate) * dp_shard + place(Axis::DpShard), dp_replicate * dp_shard)
}

/// A rank's engine, with random weights.
pub(crate) fn engine(world: &World, way: Way, kind: Kind, lie: Option<Lie>) -> candle_core::Result<Engine> {
    let mesh = Mesh::new(way.degrees, world.size()).unwrap();
    let mut groups = Groups::new(&mesh, &*world.group())?;
    // Counts and losses stay honest: the lie has to show in gradients or weights.
    for group in [&mut groups.shards, &mut groups.replicas, &mut groups.sequence, &mut groups.context] {
        *group = Arc::new(Lying { group: Arc::clone(group), lie });
    }
    let model = kind.model();
    let formats = Formats::computing_in(DType::F32);
    let mut sharing = groups.sharing(way.sharded);
    if way.sharded.is_none() {
        sharing.replicas = Arc::new(Lying { group: sharing.replicas, lie });
    }
    let store = ParamStore::new(&model, formats, Mode::Train, &Device::Cpu, sharing)?;
    store.fill(|spec| {
        let mut values = vec![0f32; spec.numel()];
        spec.initialise(3, &mut values);
        if spec.name.ends_with("lora_B.weight") || spec.name.ends_with("bias") {
            // They begin as zeros, which would hide what the other factor does; and what becomes of a bias of keys, on which
            // hardly anything depends, would be rounding.
            values.iter_mut().enumerate().for_each(|(i, x)| *x = (i as f32 * 0.7).sin() * 0.1);
        }
        Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
    })?;
    // Every kind of residency: weights come and go differently for each.
    let residency = (0..model.n_blocks()).map(|block| match block % 3 {
        0 => Residency::Keep,
        1 => Residency::Recompute,
        _ => Residency::Offload,
    });
    let residency = residency.collect();
    let engine = Engine::new(model, store, residency, groups.data, Device::Cpu).with_mlp_rows(way.mlp_rows);
    Ok(match way.n_of_micro_batch() {
        1 => engine,
        _ => engine.with_sequence(Sequence::new(groups.context, groups.sequence)),
    })
}

fn of_rank(world: &World, way: Way, kind: Kind, batching: Batching, lie: Option<Lie>) -> candle_core::Result<OfRank> {
    let (rank, n_ranks) = seat(world, way);
    let engine = engine(world, way, kind, lie)?;
    let scaler = GradScaler::new(GradPolicy { max_norm: Some(1.0), ..GradPolicy::PLAIN }, 0, &Device::Cpu)?;
    let (mut losses, mut norms, mut grads) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..STEPS {
        let (micros, n_targets) = micros(batching, step, rank, n_ranks);
        let n_targets = sum(engine.group(), n_targets)? / way.n_of_micro_batch() as f64;
        engine.store().zero_grads()?;
        let sums = engine.forward_backward(&micros, &LossScale::mean_over(n_targets), |_| 5)?;
        let local = sums.iter().map(|sum| Ok(f64::from(sum.to_scalar::<f32>()?))).sum::<candle_core::Result<f64>>()?;
        losses.push(sum(engine.group(), local)? / n_targets);
        if step == 0 {
            grads = pieces(&engine, |state| &state.grad)?;
        }
        let squares = engine.store().grad_squares()?;
        norms.push(squares.sum_all()?.to_scalar::<f64>()?.sqrt());
        scaler.judge(&squares, &Tensor::zeros(1, DType::F32, &Device::Cpu)?, [HYPER.beta1, HYPER.beta2])?;
        engine.store().step(&HYPER, &scaler)?;
    }
    let (held_out, n_targets) = micros(batching, STEPS, rank, n_ranks);
    let local = held_out.iter().map(|micro| engine.loss(micro)).sum::<candle_core::Result<f64>>()?;
    let n_targets = sum(engine.group(), n_targets)? / way.n_of_micro_batch() as f64;
    let held_out = sum(engine.group(), local)? / n_targets;
    let weights = pieces(&engine, |state| &state.master)?;
    // What an export reads is what the ranks have.
    let exported = engine.store().masters().collect::<candle_core::Result<Vec<_>>>()?;
    if lie.is_none() {
        for (name, _, range, values) in &weights {
            let whole = exported.iter().find(|(spec, _)| spec.name == *name).unwrap();
            let whole = whole.1.flatten_all()?.narrow(0, range.start, range.len())?.to_vec1::<f32>()?;
            assert!(whole == *values, "{way:?}: an export has another {name}");
        }
    }
    Ok(OfRank { losses, norms, held_out, grads, weights, calls: world.calls() })
}

fn pieces(engine: &Engine, of: fn(&ParamState) -> &Tensor) -> candle_core::Result<Vec<Piece>> {
    let states = engine.store().states()?.into_iter();
    states
        .map(|state| {
            let values = of(&state).to_vec1()?;
            Ok((state.name, state.shape.iter().product(), state.range, values))
        })
        .collect()
}

/// Whole parameters of their parts. Those that several ranks have must be the same.
fn joined<'a>(pieces: impl Iterator<Item = &'a Piece>) -> BTreeMap<String, Vec<f32>> {
    let mut whole = BTreeMap::new();
    for (name, n, range, values) in pieces {
        let whole: &mut Vec<f32> = whole.entry(name.clone()).or_insert_with(|| vec![f32::NAN; *n]);
        for (slot, value) in whole[range.clone()].iter_mut().zip(values) {
            if slot.is_nan() {
                *slot = *value;
            } else if slot != value {
                // Replicas that disagree are nobody's equal.
                *slot = f32::INFINITY;
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

fn same(what: &str, ours: &BTreeMap<String, Vec<f32>>, other: &BTreeMap<String, Vec<f32>>) -> Result<(), String> {
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
