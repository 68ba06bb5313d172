//! A mixer that the library does not have, a gated moving average, trained on several ranks.
//!
//! Dimensions: t tokens (packed), d hidden size, c channels of this rank

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::{Degrees, Mesh};
use candlewick_comm::{Options, World, threads};
use candlewick_model::{
    Config, Dim, DimSize, ForwardContext, LayerSizes, Linear, LinearSpec, Mixer, MixerCost, MixerSpec, MixerSplit,
    Model, NormPlacement, WeightLookup,
};
use candlewick_ops::{CuSeqlens, GradPolicy, GradScaler, record};
use candlewick_parallel::{
    ActivationCheckpointing, Engine, EngineSpec, LossScale, MasterRounding, OPTIMIZER_KINDS, OptimizerGroups,
    ParallelGroups, ParamDtypes, PipelineLayout, SequenceParallel, ZeroStage,
};

use crate::engine::{config, micro, sequences};

const N_STEPS: usize = 3;
const TOLERANCE: f64 = 1e-5;
const LEARNING_RATE: f64 = 1e-2;

/// out(h), where h[t] = g[t] h[t - 1] + (1 - g[t]) in(x)[t] and g = sigmoid(gate(x)), from zero in each sequence.
#[derive(Clone, Debug, PartialEq)]
struct MovingAverageSpec {
    in_and_gate: [LinearSpec; 2],
    out: LinearSpec,
}

struct MovingAverage {
    in_and_gate: [Linear; 2],
    out: Linear,
}

impl MovingAverageSpec {
    fn new(layer_idx: usize, hidden_size: usize, n_channels: usize) -> Self {
        let embed = DimSize { dim: Dim::Embed, len: hidden_size };
        let channels = DimSize { dim: Dim::Heads, len: n_channels };
        let name = |linear: &str| format!("model.layers.{layer_idx}.average.{linear}_proj");
        let linear = |(linear, bias)| LinearSpec::new(name(linear), [channels, embed], bias);
        let out = LinearSpec::new(name("out"), [embed, channels], false);
        Self { in_and_gate: [("in", false), ("gate", true)].map(linear), out }
    }
}

impl MixerSpec for MovingAverageSpec {
    fn kind(&self) -> &'static str {
        "moving average"
    }

    fn linears(&self) -> Vec<&LinearSpec> {
        self.in_and_gate.iter().chain([&self.out]).collect()
    }

    fn linears_mut(&mut self) -> Vec<&mut LinearSpec> {
        self.in_and_gate.iter_mut().chain([&mut self.out]).collect()
    }

    fn refusal(&self, split: MixerSplit) -> Option<String> {
        match split {
            MixerSplit::Tensor => None,
            MixerSplit::Context | MixerSplit::Ulysses => Some("its state does not pass from rank to rank".to_owned()),
        }
    }

    fn cost(&self, sizes: &LayerSizes) -> MixerCost {
        let width = (self.out.input.len / sizes.n_slices) as u64;
        let saved = 3 * sizes.n_tokens * width * sizes.n_bytes();
        MixerCost { saved, forward: saved, backward: 2 * saved, state_elements: width, ..MixerCost::default() }
    }

    fn build(&self, _: usize, get: &mut WeightLookup) -> Result<Box<dyn Mixer>> {
        let [x, gate] = &self.in_and_gate;
        let in_and_gate = [Linear::build(x, get)?, Linear::build(gate, get)?];
        Ok(Box::new(MovingAverage { in_and_gate, out: Linear::build(&self.out, get)? }))
    }
}

impl Mixer for MovingAverage {
    fn forward(&self, normed_td: Tensor, context: &ForwardContext) -> Result<Tensor> {
        let tokens = context.parallel_ops.tokens;
        let x_td = tokens.copy_to_tp(&normed_td)?;
        let [x_tc, gate_tc] = [self.in_and_gate[0].forward(&x_td, None)?, self.in_and_gate[1].forward(&x_td, None)?];
        tokens.reduce_from_tp(&self.out.forward(&average(&x_tc, &gate_tc, context.seqs)?, None)?)
    }
}

/// Returns the gated moving average of each channel.
fn average(x_tc: &Tensor, gate_tc: &Tensor, seqs: &CuSeqlens) -> Result<Tensor> {
    let (x, logits) = (x_tc.to_vec2::<f32>()?, gate_tc.to_vec2::<f32>()?);
    let gates: Vec<Vec<f32>> =
        logits.iter().map(|row| row.iter().map(|z| 1.0 / (1.0 + (-z).exp())).collect()).collect();
    let is_first: Vec<bool> = (0..x.len()).map(|t| seqs.cu_seqlens_q().contains(&t)).collect();
    let n_channels = x_tc.dim(1)?;
    let mut h = vec![vec![0f32; n_channels]; x.len()];
    for t in 0..x.len() {
        for c in 0..n_channels {
            let before = if is_first[t] { 0.0 } else { h[t - 1][c] };
            h[t][c] = gates[t][c] * before + (1.0 - gates[t][c]) * x[t][c];
        }
    }
    let output = Tensor::new(h.clone(), x_tc.device())?;
    Ok(record("moving_average", [x_tc.into(), gate_tc.into()], output, move |dy, _| {
        let mut dh = dy.to_vec2::<f32>()?;
        let (mut dx, mut dgate) = (dh.clone(), dh.clone());
        for t in (0..x.len()).rev() {
            for c in 0..n_channels {
                let (gate, grad) = (gates[t][c], dh[t][c]);
                let before = if is_first[t] { 0.0 } else { h[t - 1][c] };
                if !is_first[t] {
                    dh[t - 1][c] += gate * grad;
                }
                dx[t][c] = (1.0 - gate) * grad;
                dgate[t][c] = grad * (before - x[t][c]) * gate * (1.0 - gate);
            }
        }
        Ok([Some(Tensor::new(dx, dy.device())?), Some(Tensor::new(dgate, dy.device())?)])
    }))
}

/// Returns a model of three layers. The first and the last have a moving average, the second attention. Norms are before, around
/// and after the sublayers.
fn model() -> Model {
    let config: Config = config(false);
    let mut layers: Vec<_> = (0..config.n_layers()).map(|layer_idx| config.layer(layer_idx)).collect();
    for layer_idx in [0, 2] {
        layers[layer_idx].mixer = Box::new(MovingAverageSpec::new(layer_idx, config.hidden_size(), 24));
    }
    layers[1].norms = NormPlacement::Sandwich;
    (layers[2].norms, layers[2].residual_scale) = (NormPlacement::Post, 0.5);
    Model::with_layers(config, layers)
}

/// Ranks and settings of a run.
#[derive(Clone, Copy, Debug)]
struct Strategy {
    degrees: Degrees,
    zero_stage: Option<ZeroStage>,
    sequence_parallel: SequenceParallel,
    checkpointing: ActivationCheckpointing,
}

impl Strategy {
    fn one_rank() -> Self {
        Self {
            degrees: Degrees::default(),
            zero_stage: None,
            sequence_parallel: SequenceParallel::Off,
            checkpointing: ActivationCheckpointing::None,
        }
    }

    fn engine(self, world: &World) -> Result<Engine> {
        let model = model();
        let mesh = Mesh::new(self.degrees, world.size()).unwrap();
        let groups = ParallelGroups::new(&mesh, &*world.group())?;
        let layout = PipelineLayout::single_stage(model.n_blocks());
        // A small eps would let the sign of a nearly zero gradient decide a weight.
        let adamw = OPTIMIZER_KINDS[0].with(&[("betas", &[0.9, 0.99]), ("eps", &[1e-4])]).unwrap();
        let spec = EngineSpec {
            zero_stage: self.zero_stage,
            sequence_parallel: self.sequence_parallel,
            checkpointing: vec![self.checkpointing; model.n_blocks()],
            optimizer: OptimizerGroups::of_all(adamw, 0.1),
            ..EngineSpec::training(ParamDtypes::computing_in(DType::F32), layout)
        };
        let engine = spec.build(model, &groups, Device::Cpu)?;
        engine.store().fill(|spec| {
            let mut values = vec![0f32; spec.numel()];
            spec.initialise(3, &mut values);
            Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
        })?;
        Ok(engine)
    }

    /// Returns the gradient norms of some steps, and the weights after them.
    fn train(self) -> (Vec<f64>, BTreeMap<String, Vec<f32>>) {
        let mut ranks = threads::run(self.degrees.n_ranks(), Options::default(), |world| -> Result<_> {
            let engine = self.engine(world)?;
            let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 0, &Device::Cpu)?;
            let n_shards = self.degrees.dp_shard;
            let own = world.rank() / self.degrees.tp;
            let of_rank = |micro_idx: &usize| micro_idx % n_shards == own;
            let micros = [micro(&sequences(&[5, 2, 1])), micro(&sequences(&[8]))];
            let micros: Vec<_> = (0..2).filter(of_rank).map(|micro_idx| micros[micro_idx].clone()).collect();
            let mut norms = Vec::new();
            for _ in 0..N_STEPS {
                engine.store().zero_grads()?;
                engine.forward_backward(&micros, &LossScale::mean_over(16.0), |_| 0)?;
                let squares = engine.store().grad_squares()?;
                norms.push(squares.sum_all()?.to_scalar::<f64>()?.sqrt());
                scaler.update(&squares, &Tensor::zeros(1, DType::F32, &Device::Cpu)?)?;
                engine.store().step(LEARNING_RATE, &scaler, MasterRounding::Nearest)?;
            }
            let weights = engine.store().masters().map(|master| {
                let (spec, whole) = master?;
                Ok((spec.name.clone(), whole.flatten_all()?.to_vec1()?))
            });
            Ok((norms, weights.collect::<Result<_>>()?))
        });
        ranks.as_mut().unwrap().swap_remove(0)
    }
}

#[track_caller]
fn check(strategy: Strategy) {
    let (want_norms, want) = Strategy::one_rank().train();
    let (norms, weights) = strategy.train();
    for (ours, want) in norms.iter().zip(&want_norms) {
        assert!(
            (ours - want).abs() <= TOLERANCE * want,
            "{strategy:?}: norms are {norms:?}, on one rank {want_norms:?}"
        );
    }
    assert_eq!(weights.len(), want.len());
    for (name, want) in &want {
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
        let off = norm(&mut want.iter().zip(&weights[name]).map(|(a, b)| a - b)) / norm(&mut want.iter().copied());
        assert!(off <= TOLERANCE, "{strategy:?}: {name} is off by {off:.1e} of its norm");
    }
}

#[test]
fn a_mixer_of_another_crate_trains_on_tensor_parallel_ranks_as_on_one() {
    let degrees = Degrees { tp: 2, ..Degrees::default() };
    for sequence_parallel in [SequenceParallel::Off, SequenceParallel::On] {
        check(Strategy { degrees, sequence_parallel, ..Strategy::one_rank() });
    }
}

#[test]
fn a_mixer_of_another_crate_trains_on_shards_as_on_one_rank() {
    let degrees = Degrees { dp_shard: 2, ..Degrees::default() };
    let checkpointing = ActivationCheckpointing::Full;
    for zero_stage in [ZeroStage::One, ZeroStage::Three] {
        check(Strategy { degrees, zero_stage: Some(zero_stage), checkpointing, ..Strategy::one_rank() });
    }
}

#[test]
fn a_mixer_refuses_a_mesh_by_its_name() {
    let refused = |degrees: Degrees| {
        let strategy = Strategy { degrees, ..Strategy::one_rank() };
        let ranks =
            threads::run(2, Options::default(), |world| Ok::<_, candle_core::Error>(strategy.engine(world).err()));
        ranks.unwrap().swap_remove(0).expect("an error").to_string()
    };
    let want = "the moving average of layer 0 cannot be split over 2 context parallel ranks: its state does not pass";
    let error = refused(Degrees { cp: 2, ..Degrees::default() });
    assert!(error.contains(want), "{error}");
    let error = refused(Degrees { sp: 2, ..Degrees::default() });
    assert!(error.contains("2 Ulysses ranks"), "{error}");
}

/// Tokens of one sequence do not reach another one.
#[test]
fn packed_sequences_do_not_mix() {
    let losses = |batches: &[&[usize]]| {
        let strategy = Strategy::one_rank();
        let ranks = threads::run(1, Options::default(), |world| -> Result<Vec<f32>> {
            let engine = strategy.engine(world)?;
            let all = sequences(&[4, 3]);
            let mut losses = Vec::new();
            for batch in batches {
                let batch: Vec<_> = batch.iter().map(|i| all[*i].clone()).collect();
                losses.extend(engine.token_losses(&micro(&batch))?);
            }
            Ok(losses)
        });
        ranks.unwrap().swap_remove(0)
    };
    let (packed, alone) = (losses(&[&[0, 1]]), losses(&[&[0], &[1]]));
    assert!(packed.iter().zip(&alone).all(|(a, b)| (a - b).abs() < 1e-5), "{packed:?} {alone:?}");
}
