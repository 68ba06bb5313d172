//! Parameters of two groups, dense ones and experts, each reduced over its own ranks: any number of ranks trains as one does.
//!
//! t tokens, d width, v vocabulary, e experts, f rows of an expert
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::{Axis, Degrees, Mesh};
use candlewick_comm::{Options, World, sum, threads};
use candlewick_model::{Config, Dim, GroupKind, Init, Model, ParamSpec, Region, Unit, Weights};
use candlewick_ops::{
    AdamW, CrossEntropy, GradPolicy, GradScaler, Precision, Reduction, Seqs, Tape, Upstream, add, copy_into, embedding,
    linear, linear_cross_entropy, record, rms_norm,
};
use candlewick_parallel::{
    CpuOffload, Engine, Formats, Groups, Layout, LossScale, Micro, MicroBatch, Mode, ParamState, ParamStore, Residency,
    SequenceParallel, StoreOptions, ZeroStage,
};
use serde_json::json;

const V: usize = 40;
const D: usize = 16;
const E: usize = 4;
const F: usize = 20;
const N_TOKENS: usize = 60;
const N_MICROS: usize = 2;
const N_STEPS: usize = 6;
const TOLERANCE: f64 = 1e-5;
const HYPER: AdamW = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-4, weight_decay: 0.1 };
/// Below the norms of all steps, so that each is clipped.
const MAX_NORM: f64 = 0.2;

const STAGES: [Option<ZeroStage>; 4] = [None, Some(ZeroStage::One), Some(ZeroStage::Two), Some(ZeroStage::Three)];

/// Data parallel replicas and shards, and expert parallel ranks.
const fn degrees(dp_replicate: usize, dp_shard: usize, ep: usize) -> Degrees {
    Degrees { pp: 1, dp_replicate, dp_shard, cp: 1, sp: 1, tp: 1, ep, etp: 1 }
}

fn spec(name: &str, dims: &[(Dim, usize)], group: GroupKind) -> ParamSpec {
    let (name, is_matrix) = (name.to_owned(), dims.len() > 1);
    let (dims, shape) = dims.iter().copied().unzip();
    let init = Init::Normal { std: 0.3, zero_row: None };
    ParamSpec { name, shape, dims, region: Region::Branch, init, decay: is_matrix, trainable: true, group }
}

/// A token's embedding, plus what its expert makes of it, to logits.
fn units() -> Vec<Unit> {
    let unit = |name: &str, params| Unit { name: name.to_owned(), params, shared: Vec::new(), adapters: Vec::new() };
    let (d, experts) = ((Dim::Embed, D), (Dim::Experts, E * F));
    vec![
        unit("embed", vec![spec("embed", &[(Dim::Vocab, V), d], GroupKind::Dense)]),
        unit(
            "block",
            vec![
                spec("norm", &[(Dim::HeadDim, D)], GroupKind::Dense),
                spec("up", &[experts, d], GroupKind::Expert),
                spec("up_bias", &[experts], GroupKind::Expert),
                spec("mix", &[(Dim::HeadDim, D), d], GroupKind::Dense),
                spec("down", &[d, experts], GroupKind::Expert),
            ],
        ),
        unit("head", vec![spec("head", &[(Dim::Vocab, V), d], GroupKind::Dense)]),
    ]
}

fn initial(spec: &ParamSpec) -> Result<Tensor> {
    let mut values = vec![0f32; spec.numel()];
    spec.initialise(3, &mut values);
    Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
}

/// A token with its target and its expert.
#[derive(Clone, Copy)]
struct Token {
    id: u32,
    target: i64,
    expert: usize,
}

fn tokens(step: usize) -> Vec<Token> {
    let token = |i: usize| {
        let n = step * N_TOKENS + i;
        Token { id: (n * 7 % V) as u32, target: (n * n % V) as i64, expert: (n + n / 9) % E }
    };
    (0..N_TOKENS).map(token).collect()
}

/// A rank of a mesh with its store.
struct Rank {
    mesh: Mesh,
    rank: usize,
    all: Arc<dyn candlewick_comm::Collective>,
    store: ParamStore,
}

impl Rank {
    fn new(world: &World, degrees: Degrees, zero_stage: Option<ZeroStage>) -> Result<Self> {
        let mesh = Mesh::new(degrees, world.size()).unwrap();
        let groups = Groups::new(&mesh, &*world.group())?.with_experts(&mesh, &*world.group())?;
        let sharding = groups.sharding_groups(zero_stage, Layout::whole(1), SequenceParallel::Off);
        let formats = Formats::computing_in(DType::F32);
        let options = StoreOptions { formats, mode: Mode::Train, cpu_offload: CpuOffload::default() };
        let store = ParamStore::of_units(&units(), options, &Device::Cpu, sharding)?;
        store.fill(initial)?;
        Ok(Self { mesh, rank: world.rank(), all: world.group(), store })
    }

    /// Returns the experts that this rank has.
    fn experts(&self) -> Range<usize> {
        let n = E / self.mesh.degrees().ep;
        let first = self.mesh.place(self.rank, Axis::Ep) * n;
        first..first + n
    }

    /// Returns this rank's tokens: those of its experts, dealt out among the ranks that have the same experts.
    fn own(&self, tokens: &[Token]) -> Vec<Token> {
        let mine = tokens.iter().filter(|token| self.experts().contains(&token.expert)).copied();
        mine.skip(self.mesh.place(self.rank, Axis::Edp)).step_by(self.mesh.degrees().of(Axis::Edp)).collect()
    }

    /// Returns the output of the block: [t, d] -> [t, d]. Of its experts' rows a token uses those of its own expert.
    fn block(&self, w: &Weights, x_td: &Tensor, tokens: &[Token]) -> Result<Tensor> {
        let experts = self.experts();
        let is_own = |token: &Token, row: usize| experts.start + row / F == token.expert;
        let rows = 0..experts.len() * F;
        let mask = tokens.iter().flat_map(|token| rows.clone().map(|row| f32::from(u8::from(is_own(token, row)))));
        let mask = Tensor::from_iter(mask, &Device::Cpu)?.reshape((tokens.len(), rows.len()))?;
        let h = linear(&rms_norm(x_td, w.get("norm")?, 1e-5)?, w.get("mix")?, None, Precision::Compute)?;
        let up = linear(&h, w.get("up")?, Some(w.get("up_bias")?), Precision::Compute)?;
        let routed = (&up * &mask)?;
        let routed = record("route", [(&up).into()], routed, move |dy| Ok([Some((dy * &mask)?)]));
        add(x_td, &linear(&routed, w.get("down")?, None, Precision::Compute)?)
    }

    /// Adds the gradient of the mean loss over a step's tokens, and returns the sum of these tokens' losses.
    fn forward_backward(&self, tokens: &[Token], micro_batch: MicroBatch) -> Result<f64> {
        let store = &self.store;
        let ids = Tensor::from_iter(tokens.iter().map(|token| token.id), &Device::Cpu)?;
        let targets = Tensor::from_iter(tokens.iter().map(|token| token.target), &Device::Cpu)?;
        let embed = Tape::record(&[], || embedding(&ids, store.fetch(0)?.get("embed")?, None))?;
        store.release(0);
        let x = embed.output().clone();
        let block = Tape::record(&[&x], || self.block(&store.fetch(1)?, &x, tokens))?;
        store.release(1);
        let done = |unit_idx| {
            store.release(unit_idx);
            store.start_grad_reduction(unit_idx, micro_batch)
        };
        store.prepare_grads(2)?;
        let spec = CrossEntropy { reduction: Reduction::Sum, ignore_index: Micro::IGNORED, chunk: 64 };
        let head = store.fetch(2)?.get("head")?.clone();
        let upstream = Upstream::Scalar(1.0 / N_TOKENS as f64);
        let out = linear_cross_entropy(block.output(), &head, &targets, &spec, upstream)?;
        done(2)?;
        store.fetch(1)?;
        store.prepare_grads(1)?;
        let dx = block.backward(&out.dx.unwrap())?.remove(&x).unwrap();
        done(1)?;
        store.prepare_grads(0)?;
        embed.backward(&dx)?;
        done(0)?;
        Ok(f64::from(out.loss.to_scalar::<f32>()?))
    }

    /// Takes an optimizer step, and returns the mean loss and the norm of the gradient.
    fn step(&self, step: usize, scaler: &GradScaler) -> Result<[f64; 2]> {
        self.store.zero_grads()?;
        let tokens = tokens(step);
        let mut loss = 0.0;
        for (i, micro) in tokens.chunks(N_TOKENS / N_MICROS).enumerate() {
            let micro_batch = if i + 1 == N_MICROS { MicroBatch::Last } else { MicroBatch::Earlier };
            loss += self.forward_backward(&self.own(micro), micro_batch)?;
        }
        self.store.wait_grad_reduction()?;
        let squares = self.store.grad_squares()?;
        let norm = squares.sum_all()?.to_scalar::<f64>()?.sqrt();
        scaler.judge(&squares, &Tensor::zeros(1, DType::F32, &Device::Cpu)?, [HYPER.beta1, HYPER.beta2])?;
        self.store.step(&HYPER, scaler)?;
        Ok([sum(&*self.all, loss)? / N_TOKENS as f64, norm])
    }
}

/// Whole tensors of a checkpoint by name.
type Saved = BTreeMap<String, Vec<f32>>;

/// Elements of a whole parameter that a state is about, in its order.
fn places(state: &ParamState) -> impl Iterator<Item = usize> + use<> {
    let (width, columns) = (*state.shape.last().unwrap(), state.columns.clone());
    state.range.clone().map(move |at| at / columns.len() * width + columns.start + at % columns.len())
}

fn tensors(state: &ParamState) -> [(String, Tensor); 4] {
    let named = |part: &str, x: &Tensor| (format!("{part}/{}", state.name), x.clone());
    [
        named("master", &state.master),
        named("exp_avg", &state.exp_avg),
        named("exp_avg_sq", &state.exp_avg_sq),
        named("grad", &state.grad),
    ]
}

/// A rank's part of a tensor.
struct Piece {
    name: String,
    /// Elements of the whole tensor.
    numel: usize,
    /// Places in the whole tensor, and their values.
    values: Vec<(usize, f32)>,
    is_written: bool,
}

fn pieces(store: &ParamStore) -> Result<Vec<Piece>> {
    let mut pieces = Vec::new();
    for state in store.states()? {
        let (numel, is_written) = (state.shape.iter().product(), state.writes_checkpoint);
        for (name, tensor) in tensors(&state) {
            let values = places(&state).zip(tensor.to_vec1::<f32>()?).collect();
            pieces.push(Piece { name, numel, values, is_written });
        }
    }
    Ok(pieces)
}

/// Joins what the ranks write: every element once, and the same as on ranks that hold it without writing it.
fn join(pieces: &[Piece]) -> Saved {
    let mut saved = Saved::new();
    let (written, held): (Vec<_>, Vec<_>) = pieces.iter().partition(|piece| piece.is_written);
    for Piece { name, numel, values, .. } in written {
        let whole = saved.entry(name.clone()).or_insert_with(|| vec![f32::NAN; *numel]);
        for (at, value) in values {
            assert!(whole[*at].is_nan(), "element {at} of {name} is written twice");
            whole[*at] = *value;
        }
    }
    let n_names = 4 * units().iter().map(|unit| unit.params.len()).sum::<usize>();
    assert_eq!(saved.len(), n_names, "written were {:?}", saved.keys());
    for (name, whole) in &saved {
        assert!(whole.iter().all(|x| !x.is_nan()), "{name} is not written whole");
    }
    for Piece { name, values, .. } in held {
        assert!(values.iter().all(|(at, value)| saved[name][*at] == *value), "replicas of {name} differ");
    }
    saved
}

fn load(store: &ParamStore, saved: &Saved) -> Result<()> {
    for state in store.states()? {
        for (name, tensor) in tensors(&state) {
            let values: Vec<f32> = places(&state).map(|at| saved[&name][at]).collect();
            copy_into(&tensor, &Tensor::new(values, &Device::Cpu)?)?;
        }
    }
    store.refresh()
}

/// Losses and norms of some steps, and the state after them.
#[derive(Clone)]
struct Outcome {
    steps: Vec<[f64; 2]>,
    saved: Saved,
}

/// Trains on a mesh, from a checkpoint if there is one.
fn train(degrees: Degrees, zero_stage: Option<ZeroStage>, steps: Range<usize>, from: Option<&Saved>) -> Outcome {
    let ranks = threads::run(degrees.n_ranks(), Options::default(), |world| -> Result<_> {
        let rank = Rank::new(world, degrees, zero_stage)?;
        from.map_or(Ok(()), |saved| load(&rank.store, saved))?;
        let policy = GradPolicy { max_norm: Some(MAX_NORM), ..GradPolicy::PLAIN };
        let scaler = GradScaler::new(policy, steps.start, &Device::Cpu)?;
        let done = steps.clone().map(|step| rank.step(step, &scaler)).collect::<Result<Vec<_>>>()?;
        let pieces = pieces(&rank.store)?;
        for master in rank.store.masters() {
            let (spec, whole) = master?;
            let whole = whole.flatten_all()?.to_vec1::<f32>()?;
            let name = format!("master/{}", spec.name);
            let mine = pieces.iter().filter(|piece| piece.name == name).flat_map(|piece| &piece.values);
            let is_same = mine.into_iter().all(|(at, value)| whole[*at] == *value);
            assert!(is_same, "an export has another {name}");
        }
        Ok((done, pieces))
    });
    let (all, pieces): (Vec<_>, Vec<_>) = ranks.unwrap().into_iter().unzip();
    assert!(all.iter().all(|steps| *steps == all[0]), "ranks differ: {all:?}");
    let pieces: Vec<Piece> = pieces.into_iter().flatten().collect();
    Outcome { steps: all[0].clone(), saved: join(&pieces) }
}

#[track_caller]
fn assert_close(what: &str, ours: &Outcome, one_rank: &Outcome) {
    let from = one_rank.steps.len() - ours.steps.len();
    for (step, (ours, want)) in ours.steps.iter().zip(&one_rank.steps[from..]).enumerate() {
        let is_close = ours.iter().zip(want).all(|(a, b)| (a - b).abs() <= TOLERANCE * b.abs());
        assert!(is_close, "{what}: loss and norm of step {step} are {ours:?}, on one rank {want:?}");
    }
    for (name, want) in &one_rank.saved {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let scale = norm(&mut want.iter().map(|x| f64::from(*x)));
        let off = norm(&mut want.iter().zip(&ours.saved[name]).map(|(a, b)| f64::from(a - b)));
        assert!(scale > 0.0, "{name} is zero");
        assert!(off <= TOLERANCE * scale, "{what}: {name} is off by {:.1e} of its norm", off / scale);
    }
}

fn one_rank() -> Outcome {
    let outcome = train(degrees(1, 1, 1), None, 0..N_STEPS, None);
    assert!(outcome.steps.iter().all(|[_, norm]| *norm > MAX_NORM), "not all steps are clipped: {:?}", outcome.steps);
    outcome
}

#[test]
fn experts_on_pairs_of_four_ranks_train_as_on_one_rank() {
    let want = one_rank();
    for zero_stage in STAGES {
        for mesh in [degrees(1, 4, 2), degrees(2, 2, 2), degrees(4, 1, 2), degrees(1, 4, 4), degrees(1, 4, 1)] {
            assert_close(&format!("{mesh} {zero_stage:?}"), &train(mesh, zero_stage, 0..N_STEPS, None), &want);
        }
    }
}

#[test]
fn a_run_of_four_ranks_resumes_on_two_and_on_one() {
    let want = one_rank();
    for zero_stage in STAGES {
        let four = train(degrees(2, 2, 2), zero_stage, 0..2, None);
        let two = train(degrees(1, 2, 2), zero_stage, 2..4, Some(&four.saved));
        let one = train(degrees(1, 1, 1), zero_stage, 4..N_STEPS, Some(&two.saved));
        assert_close(&format!("{zero_stage:?}"), &one, &want);
    }
}

#[test]
fn each_group_has_writers_of_its_own() {
    let writers = threads::run(4, Options::default(), |world| -> Result<[bool; 2]> {
        let rank = Rank::new(world, degrees(2, 2, 2), Some(ZeroStage::One))?;
        let states = rank.store.states()?;
        Ok(["embed", "down"].map(|name| states.iter().any(|state| state.name == name && state.writes_checkpoint)))
    });
    // Two replicas of dense shards, one of the experts' shards.
    assert_eq!(writers.unwrap(), [[true, true], [true, true], [false, true], [false, true]]);
}

#[test]
fn experts_without_expert_groups_are_refused_by_name() {
    let groups = Groups::new(&Mesh::new(Degrees::default(), 1).unwrap(), &candlewick_comm::Solo).unwrap();
    let sharding = groups.sharding_groups(None, Layout::whole(1), SequenceParallel::Off);
    let options = StoreOptions {
        formats: Formats::computing_in(DType::F32),
        mode: Mode::Train,
        cpu_offload: CpuOffload::default(),
    };
    let refused = ParamStore::of_units(&units(), options, &Device::Cpu, sharding).err().unwrap().to_string();
    assert!(refused.contains("up belongs to an expert"), "{refused}");
    let mesh = Mesh::new(Degrees { dp_shard: 2, etp: 2, ..Degrees::default() }, 2).unwrap();
    let refused = threads::run(2, Options::default(), |world| -> Result<String> {
        let groups = Groups::new(&mesh, &*world.group())?;
        Ok(groups.with_experts(&mesh, &*world.group()).err().unwrap().to_string())
    });
    assert!(refused.unwrap()[0].contains("etp 2"));
}

/// A step's micro-batch for one of so many data parallel ranks, and the targets of all.
fn micro(step: usize, rank: usize, n_ranks: usize) -> Micro {
    let tokens: Vec<Token> = tokens(step).into_iter().skip(rank).step_by(n_ranks).collect();
    Micro {
        ids: Tensor::from_iter(tokens.iter().map(|token| token.id), &Device::Cpu).unwrap(),
        targets: Tensor::from_iter(tokens.iter().map(|token| token.target), &Device::Cpu).unwrap(),
        // Sequences of one token each: any rank may have any of them.
        positions: vec![0; tokens.len()],
        seqs: Seqs::packed((0..=tokens.len()).collect()).unwrap(),
    }
}

/// Norms of the steps of an engine, and its weights after them, with the matrices of the MLPs as experts.
fn train_engine(mesh: Degrees, zero_stage: Option<ZeroStage>) -> (Vec<f64>, Vec<Vec<f32>>) {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": V, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "initializer_range": 0.3,
    });
    let mut ranks = threads::run(mesh.n_ranks(), Options::default(), |world| -> Result<_> {
        let model = Model::new(Config::from_json(config.clone()).unwrap(), None).unwrap();
        let mut units = model.units().to_vec();
        for spec in units.iter_mut().flat_map(|unit| &mut unit.params).filter(|spec| spec.name.contains(".mlp.")) {
            spec.group = GroupKind::Expert;
            spec.dims.iter_mut().filter(|dim| **dim == Dim::Ffn).for_each(|dim| *dim = Dim::Experts);
        }
        let mesh = Mesh::new(mesh, world.size()).unwrap();
        let groups = Groups::new(&mesh, &*world.group())?.with_experts(&mesh, &*world.group())?;
        let sharding = groups.sharding_groups(zero_stage, Layout::whole(model.n_blocks()), SequenceParallel::Off);
        let formats = Formats::computing_in(DType::F32);
        let options = StoreOptions { formats, mode: Mode::Train, cpu_offload: CpuOffload::default() };
        let store = ParamStore::of_units(&units, options, &Device::Cpu, sharding)?;
        store.fill(initial)?;
        let residency = vec![Residency::Keep, Residency::Recompute];
        let engine = Engine::new(model, store, residency, Arc::clone(&groups.losses), Device::Cpu);
        let policy = GradPolicy { max_norm: Some(MAX_NORM), ..GradPolicy::PLAIN };
        let scaler = GradScaler::new(policy, 0, &Device::Cpu)?;
        let mut norms = Vec::new();
        for step in 0..3 {
            engine.store().zero_grads()?;
            let micros = [micro(step, world.rank(), world.size()), micro(step + 1, world.rank(), world.size())];
            engine.forward_backward(&micros, &LossScale::mean_over(2.0 * N_TOKENS as f64), |_| 0)?;
            let squares = engine.store().grad_squares()?;
            norms.push(squares.sum_all()?.to_scalar::<f64>()?.sqrt());
            scaler.judge(&squares, &Tensor::zeros(1, DType::F32, &Device::Cpu)?, [HYPER.beta1, HYPER.beta2])?;
            engine.store().step(&HYPER, &scaler)?;
        }
        let masters = engine.store().masters().map(|master| master?.1.flatten_all()?.to_vec1());
        Ok((norms, masters.collect::<Result<Vec<_>>>()?))
    });
    ranks.as_mut().unwrap().swap_remove(0)
}

#[test]
fn an_engine_trains_groups_with_other_numbers_of_shards_as_one_rank_does() {
    let (norms, weights) = train_engine(degrees(1, 1, 1), None);
    for zero_stage in STAGES {
        for mesh in [degrees(2, 2, 1), degrees(1, 4, 1)] {
            let (ours, other) = train_engine(mesh, zero_stage);
            let is_close = |a: f64, b: f64| (a - b).abs() <= TOLERANCE * b.abs();
            assert!(
                norms.iter().zip(&ours).all(|(a, b)| is_close(*a, *b)),
                "{mesh} {zero_stage:?}: {ours:?} {norms:?}"
            );
            for (a, b) in weights.iter().zip(&other) {
                let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                let off = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
                assert!(off <= TOLERANCE * norm(&mut a.iter().map(|x| f64::from(*x))), "{mesh} {zero_stage:?}");
            }
        }
    }
}
