//! Fused LM head and cross-entropy loss: logits exist for one chunk of tokens at a time.
//!
//! t tokens, v vocabulary, d model

mod args;
mod chunk;
mod cost;
mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
mod vocab_shard;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::span::span;
use crate::storage::{self, host};
use crate::transfer::to_host;
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::weight::GradSink;
use crate::weight::Weight;

use args::{LabelSmoothing, Sizes, Target};
pub use args::{Reduction, TokenScores};
pub use chunk::{LOGITS_BYTES_ON_CPU, logits_bytes, logits_bytes_on_gpu, max_logit_rows};
pub use cost::CrossEntropyCost;
pub use vocab_shard::VocabShard;

/// Gradient of the objective with respect to the loss. It is known before the forward, so backward runs in the same
/// pass.
#[derive(Clone, Copy, Debug)]
pub enum LossGrad<'a> {
    /// No gradient: forward only.
    NoGrad,
    /// d(objective) / d(loss), for [`Reduction::Mean`] and [`Reduction::Sum`].
    Scalar(f64),
    /// d(objective) / d(loss) times an f32 scalar on x's device: the loss scale of fp16.
    Scaled(f64, &'a Tensor),
    /// d(objective) / d(loss) of each token, f32 [t], for [`Reduction::None`].
    PerToken(&'a Tensor),
}

/// Options of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// Reduction of the token losses.
    pub reduction: Reduction,
    /// Target value of ignored tokens, as torch's `ignore_index`; -100 in most data.
    pub ignore_index: i64,
    /// Probability that the target distribution spreads evenly over the vocabulary, as torch's `label_smoothing`; at
    /// least 0 (off) and below 1.
    pub label_smoothing: f32,
    /// Most tokens whose logits exist at once. A large vocabulary lowers the number further.
    pub chunk: usize,
}

impl CrossEntropy {
    fn smoothing(&self, n_vocab: usize) -> LabelSmoothing {
        LabelSmoothing { factor: self.label_smoothing, n_vocab }
    }
}

/// Loss, and gradient of the hidden states.
#[derive(Clone, Debug)]
pub struct LossAndGrad {
    /// Loss, f32: a scalar, or [t] for [`Reduction::None`].
    pub loss: Tensor,
    /// Gradient of x, [t, d] in x's dtype; `None` for [`LossGrad::NoGrad`].
    pub dx: Option<Tensor>,
}

/// Computes the loss -log softmax(x w^T)[target] for `x` [t, d], `w` [v, d] and i64 `targets` [t].
///
/// With label smoothing e it is (1 - e) times that, plus e times the mean of -log softmax(x w^T) over the vocabulary.
/// Ignored tokens cost no computation. Adds the gradient of `w` to its sink and returns that of `x`. Neither input
/// needs to be tracked. Arithmetic is f32.
pub fn linear_cross_entropy(
    x: &Tensor,
    w: &Weight,
    targets: &Tensor,
    spec: &CrossEntropy,
    upstream: LossGrad<'_>,
) -> Result<LossAndGrad> {
    run(x, w, targets, spec, upstream, None)
}

/// Computes [`linear_cross_entropy`] with the vocabulary sharded over ranks, as Megatron's vocab-parallel
/// cross-entropy.
///
/// Each rank passes its rows of `w` and gets the full loss. `dx` is this rank's contribution: all-reduce it to get the
/// gradient of x.
pub fn vocab_parallel_cross_entropy(
    x: &Tensor,
    w: &Weight,
    targets: &Tensor,
    spec: &CrossEntropy,
    upstream: LossGrad<'_>,
    shard: &VocabShard<'_>,
) -> Result<LossAndGrad> {
    run(x, w, targets, spec, upstream, Some(shard))
}

fn run(
    x: &Tensor,
    w: &Weight,
    targets: &Tensor,
    spec: &CrossEntropy,
    upstream: LossGrad<'_>,
    shard: Option<&VocabShard<'_>>,
) -> Result<LossAndGrad> {
    let _span = span(
        "linear_cross_entropy",
        if matches!(upstream, LossGrad::NoGrad) { "forward" } else { "forward and backward" },
    );
    let sizes = check(x, w, targets, spec, shard)?;
    let n_vocab = shard.map_or(sizes.v, |shard| shard.n_vocab);
    let mut targets = supervised(targets, spec, n_vocab)?;
    if let Some(shard) = shard {
        targets.iter_mut().for_each(|target| target.class = shard.local(target.class, sizes.v));
    }
    let mut weights = row_weights(&targets, spec.reduction, upstream, sizes.t)?;
    let x = x.contiguous()?;
    let wants_dx = !matches!(upstream, LossGrad::NoGrad);
    on_device!("linear_cross_entropy", x, {
        cpu => {
            if let LossGrad::Scaled(_, factor) = upstream {
                let factor = to_host(factor)?.to_scalar::<f32>()?;
                weights.iter_mut().for_each(|weight| *weight *= factor);
            }
            let weights = wants_dx.then_some(weights.as_slice());
            let (losses, dx) = on_cpu(&x, w, &targets, weights, (sizes, spec), shard)?;
            Ok(LossAndGrad { loss: reduce(&targets, &losses, spec.reduction, sizes.t)?, dx })
        },
        cuda => {
            let value = w.value()?;
            let dw = w.sink().filter(|_| wants_dx && !targets.is_empty()).map(GradSink::grad_to_write).transpose()?;
            let head = cuda::CudaLmHead::new(&x, &value, &targets, sizes, spec.chunk, shard)?;
            let head = head.with_smoothing(spec.smoothing(n_vocab));
            let factor = if let LossGrad::Scaled(_, factor) = upstream { Some(factor) } else { None };
            let gradients = cuda::Gradients { weights: &weights, factor, dw: dw.as_ref() };
            let (losses, dx) = head.run(wants_dx.then_some(&gradients))?;
            Ok(LossAndGrad { loss: head.reduce(&losses, spec.reduction)?, dx })
        },
    })
}

/// Returns the log-probabilities of `targets`, one per row of `x` [t, d], for `w` [v, d].
///
/// At most `chunk` rows of logits exist at once. Arithmetic is f32. Waits for the device.
pub fn token_scores(x: &Tensor, w: &Weight, targets: &[u32], chunk: usize) -> Result<TokenScores> {
    let _span = span("token_scores", "forward");
    let ids: Vec<i64> = targets.iter().map(|&id| i64::from(id)).collect();
    let spec = CrossEntropy { reduction: Reduction::None, ignore_index: -1, label_smoothing: 0.0, chunk };
    let ids = Tensor::from_vec(ids, targets.len(), &Device::Cpu)?;
    let sizes = check(x, w, &ids, &spec, None)?;
    let targets = supervised(&ids, &spec, sizes.v)?;
    let (x, value) = (x.contiguous()?, w.value()?);
    on_device!("token_scores", x, {
        cpu => {
            let (x, w) = (host("token_scores", &x)?, host("token_scores", &value)?);
            let (x, w, smoothing) = (x.floats()?, w.floats()?, LabelSmoothing::OFF);
            let head = cpu::CpuLmHead { x, w, sizes, chunk, smoothing, shard: None };
            Ok(head.scores(&targets).into_iter().collect())
        },
        cuda => cuda::CudaLmHead::new(&x, &value, &targets, sizes, chunk, None)?.scores(),
    })
}

/// Returns the loss of each target, and dx if the targets have weights. Adds dw to its sink.
fn on_cpu(
    x: &Tensor,
    w: &Weight,
    targets: &[Target],
    weights: Option<&[f32]>,
    (sizes, spec): (Sizes, &CrossEntropy),
    shard: Option<&VocabShard<'_>>,
) -> Result<(Vec<f32>, Option<Tensor>)> {
    let value = w.value()?;
    let (x_host, w_host) = (host("linear_cross_entropy", x)?, host("linear_cross_entropy", &value)?);
    let (x_floats, w_floats) = (x_host.floats()?, w_host.floats()?);
    let smoothing = spec.smoothing(shard.map_or(sizes.v, |shard| shard.n_vocab));
    let head = cpu::CpuLmHead { x: x_floats, w: w_floats, sizes, chunk: spec.chunk, smoothing, shard };
    let Some(weights) = weights else { return Ok((head.losses(targets)?, None)) };
    let mut dx = FloatBuf::zeros(x.dtype(), x.elem_count())?;
    let losses = match w.sink().filter(|_| !targets.is_empty()) {
        None => head.backward(targets, weights, dx.view(), None)?,
        Some(sink) => {
            let mut losses = Ok(Vec::new());
            sink.add_or_write("linear_cross_entropy", |dw, accumulate| {
                losses = head.backward(targets, weights, dx.view(), Some((dw, accumulate)));
            })?;
            losses?
        }
    };
    Ok((losses, Some(storage::tensor(dx, x.shape()))))
}

fn check(
    x: &Tensor,
    w: &Weight,
    targets: &Tensor,
    spec: &CrossEntropy,
    shard: Option<&VocabShard<'_>>,
) -> Result<Sizes> {
    let op = "linear_cross_entropy";
    check_dtype(op, "the input", x.dtype())?;
    check_dtype(op, "the weight", w.dtype())?;
    let (Ok((t, d)), &[v, _]) = (x.dims2(), w.dims()) else {
        bail!("{op}: want x [t, d] and w [v, d], got {:?} and {:?}", x.dims(), w.dims())
    };
    w.check(op, &[v, d])?;
    if targets.dims() != [t] || targets.dtype() != DType::I64 {
        bail!("{op}: targets are {:?} {:?}, want i64 {:?}", targets.dtype(), targets.dims(), [t])
    }
    if spec.chunk == 0 {
        bail!("{op}: a chunk of 0 tokens, want at least 1")
    }
    if !(0.0..1.0).contains(&spec.label_smoothing) {
        bail!("{op}: a label smoothing of {}, want at least 0 and below 1", spec.label_smoothing)
    }
    if let Some(shard) = shard.filter(|shard| shard.first_row + v > shard.n_vocab || v > shard.max_shard_rows) {
        bail!(
            "{op}: a shard of {v} rows from row {} on, in a vocabulary of {} with shards of at most {}",
            shard.first_row,
            shard.n_vocab,
            shard.max_shard_rows
        )
    }
    Ok(Sizes { t, v, d })
}

/// Returns the tokens that are not ignored. Fails for a target outside the vocabulary.
///
/// Targets are read on the host. Keep them there to avoid a wait for the device.
fn supervised(targets: &Tensor, spec: &CrossEntropy, v: usize) -> Result<Vec<Target>> {
    let targets = to_host(targets)?.contiguous()?;
    let targets = host("linear_cross_entropy", &targets)?;
    let counted = targets.slice::<i64>()?.iter().enumerate();
    counted
        .filter(|&(_, &target)| target != spec.ignore_index)
        .map(|(row, &target)| match usize::try_from(target) {
            Ok(class) if class < v => Ok(Target { row, class }),
            _ => bail!(
                "linear_cross_entropy: target {target} in row {row} is not in 0..{v} (and not the \
                 ignored {})",
                spec.ignore_index
            ),
        })
        .collect()
}

/// Returns d(objective) / d(token loss) for each token that is not ignored.
fn row_weights(targets: &[Target], reduction: Reduction, upstream: LossGrad<'_>, t: usize) -> Result<Vec<f32>> {
    let n = targets.len();
    match (reduction, upstream) {
        (_, LossGrad::NoGrad) => Ok(Vec::new()),
        (Reduction::Mean, LossGrad::Scalar(scalar) | LossGrad::Scaled(scalar, _)) => {
            Ok(vec![(scalar / n as f64) as f32; n])
        }
        (Reduction::Sum, LossGrad::Scalar(scalar) | LossGrad::Scaled(scalar, _)) => Ok(vec![scalar as f32; n]),
        (Reduction::None, LossGrad::PerToken(rows)) => {
            if rows.dims() != [t] || rows.dtype() != DType::F32 {
                bail!(
                    "linear_cross_entropy: per-token loss gradients are {:?} {:?}, want f32 {:?}",
                    rows.dtype(),
                    rows.dims(),
                    [t]
                )
            }
            let rows = to_host(rows)?.contiguous()?;
            let rows = host("linear_cross_entropy", &rows)?;
            let rows = rows.slice::<f32>()?;
            Ok(targets.iter().map(|target| rows[target.row]).collect())
        }
        (Reduction::None, LossGrad::Scalar(_) | LossGrad::Scaled(..)) => {
            bail!("linear_cross_entropy: per-token losses need a gradient per token")
        }
        (_, LossGrad::PerToken(_)) => {
            bail!("linear_cross_entropy: a reduced loss needs one gradient, not one per token")
        }
    }
}

/// Reduces the losses, in f64 and in token order.
fn reduce(targets: &[Target], losses: &[f32], reduction: Reduction, t: usize) -> Result<Tensor> {
    let sum: f64 = losses.iter().copied().map(f64::from).sum();
    match reduction {
        Reduction::Mean => Tensor::new((sum / targets.len().max(1) as f64) as f32, &Device::Cpu),
        Reduction::Sum => Tensor::new(sum as f32, &Device::Cpu),
        Reduction::None => {
            let mut rows = vec![0.0f32; t];
            targets.iter().zip(losses).for_each(|(target, &loss)| rows[target.row] = loss);
            Tensor::from_vec(rows, t, &Device::Cpu)
        }
    }
}
