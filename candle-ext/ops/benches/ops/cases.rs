//! Benchmark cases: each op at the shapes of common models, with its minimum bytes moved and FLOPs.
//!
//! t tokens, d model, f inner width of the MLP, v vocabulary, k head dim, hq and hkv heads, n elements

use std::rc::Rc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Shape, Tensor};
use candlewick_ops::{
    AdamW, AdamWState, AdamWStep, AttentionChoice, AttentionImpl, AttentionSpec, CrossEntropy, CuSeqlens, Dropout,
    GradPolicy, GradScaler, GradSink, GroupedGemmImpl, LossGrad, Reduction, Tape, Weight, adamw, add, add_rms_norm,
    attention, copy_into, dropout, embedding, linear_cross_entropy, rms_norm, rope, set_rows, sum_of_squares,
    swiglu_joined, zero_,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::linear::linears;
use crate::measure::{BenchResult, BenchRun};
use crate::{grouped, moe};

/// Bytes of an element.
pub(crate) const BF16: f64 = 2.0;
pub(crate) const F32: f64 = 4.0;

/// One op at one shape, in one direction.
pub(crate) struct BenchCase {
    pub(crate) op: &'static str,
    pub(crate) what: &'static str,
    /// Sizes by name, sufficient for another program to run the same case.
    pub(crate) shape: Vec<(&'static str, usize)>,
    pub(crate) cost: BenchCost,
    pub(crate) make: Make,
}

/// Constructor of one set of inputs.
type Make = Box<dyn Fn(&Device) -> Result<Set>>;

/// Bytes that any implementation must read and write, and its FLOPs.
#[derive(Clone, Copy, Default)]
pub(crate) struct BenchCost {
    pub(crate) bytes: f64,
    pub(crate) flops: f64,
}

/// One set of inputs with the runs over it.
pub(crate) struct Set {
    pub(crate) run: BenchRun,
    /// Forward part of a backward on a GPU, whose time is subtracted. On a CPU a backward is timed alone.
    pub(crate) forward: Option<BenchRun>,
}

/// Sizes that ops have in a model.
struct Model {
    d: usize,
    f: usize,
    v: usize,
    hq: usize,
    hkv: usize,
    k: usize,
}

const LLAMA_1B: Model = Model { d: 2048, f: 8192, v: 49_152, hq: 32, hkv: 8, k: 64 };
const QWEN3_4B: Model = Model { d: 2560, f: 9728, v: 151_936, hq: 32, hkv: 8, k: 128 };
const TINY: Model = Model { d: 64, f: 160, v: 500, hq: 4, hkv: 2, k: 16 };

/// Returns the square bf16 matmul whose speed is the ceiling of compute-bound ops.
pub(crate) fn square_product(n: usize) -> BenchCase {
    linears(DType::BF16, n, n, n).swap_remove(0)
}

/// Returns the device-to-device copy whose speed is the ceiling of memory-bound ops.
pub(crate) fn device_copy(n_bytes: usize) -> BenchCase {
    let n = n_bytes / 4;
    once("device copy", vec![("n", n)], 2.0 * F32 * n as f64, move |device| {
        let x = Tensor::rand(0f32, 1.0, n, device)?;
        Ok(Box::new(move || keep(x.copy()?)))
    })
}

pub(crate) fn all(experts: GroupedGemmImpl) -> Vec<BenchCase> {
    let mut cases = of_model(&LLAMA_1B, 4096, 4096);
    cases.extend(of_model(&QWEN3_4B, 16_384, 4096));
    cases.push(head(16_384, &LLAMA_1B, 16_384));
    cases.extend(attentions(&LLAMA_1B, 16_384, 16_384));
    cases.extend(moe::layers("moe layer", moe::QWEN3_30B_A3B, experts));
    cases.extend(of_flat_buffers(100_000_000));
    cases
}

/// Returns the same ops at tiny sizes, for a trial run.
pub(crate) fn tiny(experts: GroupedGemmImpl) -> Vec<BenchCase> {
    let mut cases = of_model(&TINY, 96, 32);
    cases.extend(moe::layers("moe layer", moe::TINY, experts));
    cases.extend(of_flat_buffers(10_000));
    cases
}

fn of_model(model: &Model, t: usize, len: usize) -> Vec<BenchCase> {
    let &Model { d, f, v, hq, hkv, k } = model;
    let mut cases = Vec::new();
    cases.extend(rms_norms(t, d));
    cases.extend(add_rms_norms(t, d));
    if k == 128 {
        cases.extend(rms_norms(t * hq, k));
    }
    cases.extend(ropes(t, hq, k));
    cases.extend(swiglus(t, f));
    cases.push(adds(t, d));
    cases.extend(dropouts(t, d));
    cases.push(rows_set(t, hkv * k));
    cases.extend(embeddings(t, v, d));
    cases.extend(attentions(model, t, len));
    cases.extend(linears(DType::BF16, t, d, hq * k));
    cases.extend(linears(DType::BF16, t, d, f));
    cases.extend(linears(DType::BF16, t, f, d));
    cases.extend(grouped::linears(grouped::FUSED, DType::BF16, [2 * t, d, d / 2, 64]));
    // Chunks of few tokens, as on a CPU, and of many.
    cases.push(head(t, model, (64 << 20) / (4 * v)));
    cases.push(head(t, model, t));
    cases
}

/// Cases of x and y, and of x, dy and dx.
fn rms_norms(t: usize, d: usize) -> [BenchCase; 2] {
    let costs = [2.0, 3.0].map(|n| bytes(n * BF16 * (t * d) as f64));
    both("rms_norm", vec![("t", t), ("d", d)], costs, move |device| {
        let w = trainable(&[d], device)?;
        Ok(Graph::new([randn((t, d), device)?], move |x| rms_norm(&x[0], &w, 1e-6)))
    })
}

/// Cases of both inputs, their sum and its norm, and of x, dy and dx.
fn add_rms_norms(t: usize, d: usize) -> [BenchCase; 2] {
    let costs = [4.0, 3.0].map(|n| bytes(n * BF16 * (t * d) as f64));
    both("add_rms_norm", vec![("t", t), ("d", d)], costs, move |device| {
        let w = trainable(&[d], device)?;
        let inputs = [randn((t, d), device)?, randn((t, d), device)?];
        Ok(Graph::new(inputs, move |x| Ok(add_rms_norm(&x[0], &x[1], &w, 1e-6)?.1)))
    })
}

/// Cases of x and y, with the tables of cosines and sines.
fn ropes(t: usize, h: usize, k: usize) -> [BenchCase; 2] {
    let cost = bytes(2.0 * BF16 * (t * h * k) as f64 + F32 * (t * k) as f64);
    both("rope", vec![("t", t), ("h", h), ("k", k)], [cost; 2], move |device| {
        let angles = Tensor::rand(0f32, 6.0, (t, k / 2), device)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        Ok(Graph::new([randn((t, h, k), device)?], move |x| rope(&x[0], &cos, &sin)))
    })
}

/// Cases of gate, up and y, and of gate, up, dy, d_gate and d_up.
fn swiglus(t: usize, f: usize) -> [BenchCase; 2] {
    let costs = [3.0, 5.0].map(|n| bytes(n * BF16 * (t * f) as f64));
    both("swiglu", vec![("t", t), ("f", f)], costs, move |device| {
        Ok(Graph::new([randn((t, 2 * f), device)?], |x| swiglu_joined(&x[0])))
    })
}

/// Case of both inputs and y.
fn adds(t: usize, d: usize) -> BenchCase {
    once("add", vec![("t", t), ("d", d)], 3.0 * BF16 * (t * d) as f64, move |device| {
        let (a, b) = (randn((t, d), device)?, randn((t, d), device)?);
        Ok(Box::new(move || keep(add(&a, &b)?)))
    })
}

/// Case of writing new keys into a KV cache twice their size: rows, read and written.
fn rows_set(t: usize, d: usize) -> BenchCase {
    once("set_rows", vec![("t", t), ("d", d)], 2.0 * BF16 * (t * d) as f64, move |device| {
        let (to, from) = (randn((2 * t, d), device)?, randn((t, d), device)?);
        let rows: Vec<u32> = (0..t as u32).map(|i| 2 * i).collect();
        Ok(Box::new(move || keep(set_rows(&to, &rows, &from)?)))
    })
}

fn dropouts(t: usize, d: usize) -> [BenchCase; 2] {
    let cost = bytes(2.0 * BF16 * (t * d) as f64);
    both("dropout", vec![("t", t), ("d", d)], [cost; 2], move |device| {
        Ok(Graph::new([randn((t, d), device)?], |x| dropout(&x[0], Dropout { p: 0.1, key: 7 })))
    })
}

/// Cases of rows and y, and of dy with the f32 sums of each row that occurs, read and written.
fn embeddings(t: usize, v: usize, d: usize) -> [BenchCase; 2] {
    let distinct = v as f64 * (1.0 - (1.0 - 1.0 / v as f64).powf(t as f64));
    let costs = [2.0 * BF16 * (t * d) as f64, BF16 * (t * d) as f64 + 2.0 * F32 * distinct * d as f64].map(bytes);
    both("embedding", vec![("t", t), ("v", v), ("d", d)], costs, move |device| {
        let w = trainable(&[v, d], device)?;
        let ids: Vec<u32> = random_below(v, t).into_iter().map(|id| id as u32).collect();
        let ids = Tensor::new(ids, device)?;
        Ok(Graph::new([], move |_| embedding(&ids, &w, None)))
    })
}

/// Cases of packed causal sequences of equal length: two matmuls of rows and visible keys forward, five backward.
fn attentions(model: &Model, t: usize, len: usize) -> Vec<BenchCase> {
    [("attention", AttentionImpl::Auto), ("attention fused", AttentionImpl::Fused)]
        .into_iter()
        .flat_map(|(name, implementation)| attentions_by(name, implementation, model, t, len))
        .collect()
}

fn attentions_by(name: &'static str, by: AttentionImpl, model: &Model, t: usize, len: usize) -> [BenchCase; 2] {
    let &Model { hq, hkv, k, .. } = model;
    let n_seqs = t / len;
    let pairs = (n_seqs * len * (len + 1) / 2 * hq * k) as f64;
    let (q, kv) = ((t * hq * k) as f64, (t * hkv * k) as f64);
    let costs = [
        BenchCost { bytes: BF16 * (2.0 * q + 2.0 * kv), flops: 4.0 * pairs },
        BenchCost { bytes: BF16 * (4.0 * q + 4.0 * kv), flops: 10.0 * pairs },
    ];
    let shape = vec![("t", t), ("n_seqs", n_seqs), ("hq", hq), ("hkv", hkv), ("k", k)];
    both(name, shape, costs, move |device| {
        let seqs = CuSeqlens::packed((0..=n_seqs).map(|i| i * len).collect())?;
        let choice = AttentionChoice { implementation: by, deterministic: false };
        let spec = AttentionSpec { scale: (k as f32).powf(-0.5), causal: true, window: None, choice };
        let qkv = [randn((t, hq, k), device)?, randn((t, hkv, k), device)?, randn((t, hkv, k), device)?];
        Ok(Graph::new(qkv, move |x| attention(&x[0], &x[1], &x[2], &seqs, &spec)))
    })
}

/// Case of the loss with both gradients: three matmuls over x, dx, w, and dw in f32.
fn head(t: usize, model: &Model, chunk: usize) -> BenchCase {
    let &Model { d, v, .. } = model;
    let (x, w) = ((t * d) as f64, (v * d) as f64);
    let cost = BenchCost { bytes: BF16 * (2.0 * x + w) + 2.0 * F32 * w, flops: 6.0 * x * v as f64 };
    let shape = vec![("t", t), ("v", v), ("d", d), ("chunk", chunk.clamp(1, t))];
    let case = once("linear_cross_entropy", shape, cost.bytes, move |device| {
        let (x, w) = (randn((t, d), device)?, trainable(&[v, d], device)?);
        let targets: Vec<i64> = random_below(v, t).into_iter().map(|id| id as i64).collect();
        let targets = Tensor::new(targets, &Device::Cpu)?;
        let spec = CrossEntropy {
            reduction: Reduction::Mean,
            ignore_index: -100,
            label_smoothing: 0.0,
            chunk: chunk.clamp(1, t),
        };
        Ok(Box::new(move || keep(linear_cross_entropy(&x, &w, &targets, &spec, LossGrad::Scalar(1.0))?)))
    });
    BenchCase { what: "forward+backward", cost, ..case }
}

fn of_flat_buffers(n: usize) -> Vec<BenchCase> {
    let bytes = |per_element: f64| per_element * n as f64;
    let shape = || vec![("n", n)];
    let f32s = move |device: &Device| Tensor::rand(0f32, 1.0, n, device);
    vec![
        // Parameter and both moments are read and written, the gradient is read, the bf16 copy written.
        once("adamw", shape(), bytes(7.0 * F32 + BF16), move |device| {
            let [p, g, m, v] = [f32s(device)?, f32s(device)?, f32s(device)?, f32s(device)?];
            let copy = p.to_dtype(DType::BF16)?;
            let hyper = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
            let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 9, device)?;
            let ones = |dtype| Tensor::ones(1, dtype, device);
            scaler.update(&ones(DType::F64)?, &ones(DType::F32)?)?;
            Ok(Box::new(move || {
                let state = AdamWState { master: &p, grad: &g, exp_avg: &m, exp_avg_sq: &v, compute: Some(&copy) };
                keep(adamw(&hyper, &AdamWStep::new(&hyper, &scaler)?, state)?)
            }))
        }),
        // A sum of squares for each tensor of a model, and the losses of a few micro-batches: latency is what counts.
        once("grad_scaler", vec![("n_sums", 400)], 8.0 * 400.0, |device| {
            let scaler = GradScaler::new(GradPolicy::NO_CLIP_NO_SCALE, 9, device)?;
            let (squares, losses) = (Tensor::ones(400, DType::F64, device)?, Tensor::ones(16, DType::F32, device)?);
            Ok(Box::new(move || keep(scaler.update(&squares, &losses)?)))
        }),
        once("copy_into f32 to bf16", shape(), bytes(F32 + BF16), move |device| {
            let (from, to) = (f32s(device)?, Tensor::zeros(n, DType::BF16, device)?);
            Ok(Box::new(move || keep(copy_into(&to, &from)?)))
        }),
        once("copy_into f32", shape(), bytes(2.0 * F32), move |device| {
            let (from, to) = (f32s(device)?, Tensor::zeros(n, DType::F32, device)?);
            Ok(Box::new(move || keep(copy_into(&to, &from)?)))
        }),
        once("zero_", shape(), bytes(F32), move |device| {
            let x = f32s(device)?;
            Ok(Box::new(move || keep(zero_(&x)?)))
        }),
        once("sum_of_squares", shape(), bytes(F32), move |device| {
            let x = f32s(device)?;
            Ok(Box::new(move || keep(sum_of_squares(&x)?)))
        }),
    ]
}

pub(crate) fn bytes(bytes: f64) -> BenchCost {
    BenchCost { bytes, flops: 0.0 }
}

/// Tracked inputs, and the op applied to them.
pub(crate) struct Graph {
    tracked: Vec<Tensor>,
    op: Op,
}

type Op = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

impl Graph {
    pub(crate) fn new<const N: usize>(
        tracked: [Tensor; N],
        op: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
    ) -> Self {
        Self { tracked: tracked.into(), op: Box::new(op) }
    }

    fn forward(self) -> Set {
        Set { run: Box::new(move || keep((self.op)(&self.tracked)?)), forward: None }
    }

    fn backward(self) -> Result<Set> {
        let graph = Rc::new(self);
        let again = graph.clone();
        let y = (graph.op)(&graph.tracked)?;
        let dy = randn_in(y.dtype(), y.shape(), y.device())?;
        let is_cpu = dy.device().is_cpu();
        let run: BenchRun = Box::new(move || {
            let began = Instant::now();
            let tape = graph.record()?;
            let untimed = if is_cpu { began.elapsed() } else { Duration::ZERO };
            Ok(BenchResult { result: Box::new(tape.backward(&dy)?), untimed })
        });
        let forward: BenchRun = Box::new(move || keep(again.record()?));
        Ok(Set { run, forward: (!is_cpu).then_some(forward) })
    }

    fn record(&self) -> Result<Tape> {
        let inputs: Vec<&Tensor> = self.tracked.iter().collect();
        Tape::record(&inputs, || (self.op)(&self.tracked))
    }
}

pub(crate) fn both(
    op: &'static str,
    shape: Vec<(&'static str, usize)>,
    [forward, backward]: [BenchCost; 2],
    graph: impl Fn(&Device) -> Result<Graph> + Clone + 'static,
) -> [BenchCase; 2] {
    let again = graph.clone();
    [
        BenchCase {
            op,
            what: "forward",
            shape: shape.clone(),
            cost: forward,
            make: Box::new(move |device| Ok(graph(device)?.forward())),
        },
        BenchCase {
            op,
            what: "backward",
            shape,
            cost: backward,
            make: Box::new(move |device| again(device)?.backward()),
        },
    ]
}

pub(crate) fn once(
    op: &'static str,
    shape: Vec<(&'static str, usize)>,
    n_bytes: f64,
    make: impl Fn(&Device) -> Result<BenchRun> + 'static,
) -> BenchCase {
    let make = Box::new(move |device: &Device| Ok(Set { run: make(device)?, forward: None }));
    BenchCase { op, what: "forward", shape, cost: bytes(n_bytes), make }
}

pub(crate) fn keep(result: impl std::any::Any) -> Result<BenchResult> {
    Ok(BenchResult { result: Box::new(result), untimed: Duration::ZERO })
}

pub(crate) fn randn(shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    randn_in(DType::BF16, shape, device)
}

pub(crate) fn randn_in(dtype: DType, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, device)?.to_dtype(dtype)
}

pub(crate) fn trainable(shape: &[usize], device: &Device) -> Result<Weight> {
    trainable_in(DType::BF16, shape, device)
}

pub(crate) fn trainable_in(dtype: DType, shape: &[usize], device: &Device) -> Result<Weight> {
    let sink = GradSink::new(Tensor::zeros(shape, DType::F32, device)?)?;
    Ok(Weight::trainable(randn_in(dtype, shape, device)?, sink))
}

/// Returns n numbers below the bound.
fn random_below(bound: usize, n: usize) -> Vec<usize> {
    let mut rng = StdRng::seed_from_u64(1);
    (0..n).map(|_| rng.random_range(0..bound)).collect()
}
