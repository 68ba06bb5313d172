//! A mixture-of-experts block, and a rank that trains it.
//!
//! Tokens choose their experts.
//!
//! t tokens, d width, v vocabulary, e experts, f rows of an expert

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::{Axis, Degrees, Mesh};
use candlewick_comm::{Collective, World, sum};
use candlewick_model::{Dim, FsdpUnit, FsdpUnitKind, Init, ParamGroupKind, ParamScope, ParamSpec, UnitWeights};
use candlewick_ops::{
    CrossEntropy, GradScaler, LossGrad, OutputDtype, Reduction, Tape, WeightStorage, add, embedding, linear,
    linear_cross_entropy, record, rms_norm,
};
use candlewick_parallel::{
    CpuOffload, MasterRounding, Micro, MicroBatch, OPTIMIZER_KINDS, OptimizerGroups, ParallelGroups, ParamDtypes,
    ParamStore, PipelineLayout, SequenceParallel, StoreMode, StoreOptions, ZeroStage,
};

pub(crate) const V: usize = 40;
pub(crate) const D: usize = 16;
pub(crate) const E: usize = 4;
pub(crate) const F: usize = 20;
pub(crate) const N_TOKENS: usize = 60;
pub(crate) const N_MICROS: usize = 2;
pub(crate) const LR: f64 = 1e-2;

pub(crate) fn optimizer() -> OptimizerGroups {
    let adamw = OPTIMIZER_KINDS[0].with(&[("betas", &[0.9, 0.99]), ("eps", &[1e-4])]).unwrap();
    OptimizerGroups::of_all(adamw, 0.1)
}

/// A parallel strategy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertSetup {
    pub(crate) degrees: Degrees,
    pub(crate) zero_stage: Option<ZeroStage>,
    pub(crate) cpu_offload: CpuOffload,
}

fn spec(name: &str, dims: &[(Dim, usize)], group: ParamGroupKind) -> ParamSpec {
    let (name, is_matrix) = (name.to_owned(), dims.len() > 1);
    let (dims, shape) = dims.iter().copied().unzip();
    let init = Init::Normal { std: 0.3, zero_row: None };
    let (scope, storage) = (ParamScope::Sublayer, WeightStorage::Dense);
    ParamSpec { name, shape, dims, scope, init, decay: is_matrix, trainable: true, group, storage, hub: None }
}

/// Returns the units of the model: embedding, an expert block with a residual, and the head.
pub(crate) fn units() -> Vec<FsdpUnit> {
    let unit =
        |name: &str, params| FsdpUnit { name: name.to_owned(), params, tied: Vec::new(), kind: FsdpUnitKind::Named };
    let (d, experts) = ((Dim::Embed, D), (Dim::Experts, E * F));
    vec![
        unit("embed", vec![spec("embed", &[(Dim::Vocab, V), d], ParamGroupKind::Dense)]),
        unit(
            "block",
            vec![
                spec("norm", &[(Dim::HeadDim, D)], ParamGroupKind::Dense),
                spec("up", &[experts, d], ParamGroupKind::Expert),
                spec("up_bias", &[experts], ParamGroupKind::Expert),
                spec("mix", &[(Dim::HeadDim, D), d], ParamGroupKind::Dense),
                spec("down", &[d, experts], ParamGroupKind::Expert),
            ],
        ),
        unit("head", vec![spec("head", &[(Dim::Vocab, V), d], ParamGroupKind::Dense)]),
    ]
}

pub(crate) fn initial(spec: &ParamSpec) -> Result<Tensor> {
    let mut values = vec![0f32; spec.numel()];
    spec.initialise(3, &mut values);
    Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
}

/// A token with its target and its expert.
#[derive(Clone, Copy)]
pub(crate) struct RoutedToken {
    pub(crate) id: u32,
    pub(crate) target: i64,
    expert: usize,
}

pub(crate) fn tokens(step: usize) -> Vec<RoutedToken> {
    let token = |i: usize| {
        let n = step * N_TOKENS + i;
        RoutedToken { id: (n * 7 % V) as u32, target: (n * n % V) as i64, expert: (n + n / 9) % E }
    };
    (0..N_TOKENS).map(token).collect()
}

/// A rank of a mesh with its store.
pub(crate) struct ExpertRank {
    mesh: Mesh,
    rank: usize,
    all: Arc<dyn Collective>,
    pub(crate) store: ParamStore,
}

impl ExpertRank {
    pub(crate) fn new(world: &World, setup: ExpertSetup) -> Result<Self> {
        let ExpertSetup { degrees, zero_stage, cpu_offload } = setup;
        let mesh = Mesh::new(degrees, world.size()).unwrap();
        let groups = ParallelGroups::new(&mesh, &*world.group())?.with_experts(&mesh, &*world.group())?;
        let sharding = groups.sharding_groups(zero_stage, PipelineLayout::single_stage(1), SequenceParallel::Off);
        let dtypes = ParamDtypes::computing_in(DType::F32);
        let options =
            StoreOptions { cpu_offload, optimizer: optimizer(), ..StoreOptions::new(dtypes, StoreMode::Train) };
        let store = ParamStore::of_units(&units(), options, &Device::Cpu, sharding)?;
        store.fill(initial)?;
        Ok(Self { mesh, rank: world.rank(), all: world.group(), store })
    }

    /// Returns the experts that this rank has.
    fn experts(&self) -> Range<usize> {
        let n = E / self.mesh.degrees().ep;
        let first = self.mesh.coordinate(self.rank, Axis::Ep) * n;
        first..first + n
    }

    /// Returns this rank's tokens: those of its experts, distributed over the ranks with the same experts.
    fn own(&self, tokens: &[RoutedToken]) -> Vec<RoutedToken> {
        let mine = tokens.iter().filter(|token| self.experts().contains(&token.expert)).copied();
        let ([edp, etp], degrees) = ([Axis::Edp, Axis::Etp], self.mesh.degrees());
        let [of_edp, of_etp] = [edp, etp].map(|axis| self.mesh.coordinate(self.rank, axis));
        mine.skip(of_edp * degrees.etp + of_etp).step_by(degrees.of(edp) * degrees.etp).collect()
    }

    /// Returns the output of the block: [t, d] -> [t, d]. A token uses the rows of its own expert alone.
    fn block(&self, w: &UnitWeights, x_td: &Tensor, tokens: &[RoutedToken]) -> Result<Tensor> {
        let experts = self.experts();
        let is_own = |token: &RoutedToken, row: usize| experts.start + row / F == token.expert;
        let rows = 0..experts.len() * F;
        let mask = tokens.iter().flat_map(|token| rows.clone().map(|row| f32::from(u8::from(is_own(token, row)))));
        let mask = Tensor::from_iter(mask, &Device::Cpu)?.reshape((tokens.len(), rows.len()))?;
        let h = linear(&rms_norm(x_td, w.named("norm")?, 1e-5)?, w.named("mix")?, None, OutputDtype::SameAsInput)?;
        let up = linear(&h, w.named("up")?, Some(w.named("up_bias")?), OutputDtype::SameAsInput)?;
        let routed = (&up * &mask)?;
        let routed = record("route", [(&up).into()], routed, move |dy, _| Ok([Some((dy * &mask)?)]));
        add(x_td, &linear(&routed, w.named("down")?, None, OutputDtype::SameAsInput)?)
    }

    /// Adds the gradient of the mean loss over a step's tokens, and returns the sum of these tokens' losses.
    fn forward_backward(&self, tokens: &[RoutedToken], micro_batch: MicroBatch) -> Result<f64> {
        let store = &self.store;
        let ids = Tensor::from_iter(tokens.iter().map(|token| token.id), &Device::Cpu)?;
        let targets = Tensor::from_iter(tokens.iter().map(|token| token.target), &Device::Cpu)?;
        let embed = Tape::record(&[], || embedding(&ids, store.fetch(0)?.named("embed")?, None))?;
        store.release(0);
        let x = embed.output().clone();
        let block = Tape::record(&[&x], || self.block(store.fetch(1)?, &x, tokens))?;
        store.release(1);
        let done = |unit_idx| {
            store.release(unit_idx);
            store.start_grad_reduction(unit_idx, micro_batch)
        };
        store.prepare_grads(2)?;
        let spec =
            CrossEntropy { reduction: Reduction::Sum, ignore_index: Micro::IGNORED, label_smoothing: 0.0, chunk: 64 };
        let head = store.fetch(2)?.named("head")?.clone();
        let upstream = LossGrad::Scalar(1.0 / N_TOKENS as f64);
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
    pub(crate) fn step(&self, step: usize, scaler: &GradScaler) -> Result<[f64; 2]> {
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
        scaler.update(&squares, &Tensor::zeros(1, DType::F32, &Device::Cpu)?)?;
        self.store.step(LR, scaler, MasterRounding::Nearest)?;
        Ok([sum(&*self.all, loss)? / N_TOKENS as f64, norm])
    }
}
