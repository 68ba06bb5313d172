//! CPU kernel of `linear_cross_entropy`: one chunk of tokens after another.

use candle_core::{Device, Result, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::args::{LabelSmoothing, Sizes, Target};
use super::chunk::rows_per_chunk;
use super::vocab_shard::{NOT_IN_SHARD, VocabShard};
use crate::batch_invariance::is_batch_invariant;
use crate::cost::DeviceKind;
use crate::exp;
use crate::floats::{Floats, FloatsMut, write_bf16};
use crate::gemm::{Accumulate, Mat, MatMut, Output, Threads, gemm_bf16, has_bf16_unit};
use crate::simd::vectorised;
use crate::transfer::to_host;
use crate::weight_matmul::{self, Dims, bf16_operands};

/// Elements between rows of logits, a cache line.
const LOGIT_PADDING: usize = 16;

/// Hidden states and LM head weight.
pub(super) struct CpuLmHead<'a> {
    pub(super) x: Floats<'a>,
    pub(super) w: Floats<'a>,
    pub(super) sizes: Sizes,
    pub(super) chunk: usize,
    pub(super) smoothing: LabelSmoothing,
    /// Shard of the vocabulary; `None` for the whole.
    pub(super) shard: Option<&'a VocabShard<'a>>,
}

impl CpuLmHead<'_> {
    /// Returns the loss of each target.
    pub(super) fn losses(&self, targets: &[Target]) -> Result<Vec<f32>> {
        if let Some(shard) = self.shard {
            return self.losses_of_shard(shard, targets);
        }
        let smoothing = self.smoothing;
        Ok(self.rows(targets, |logits, class| {
            let excess = excess_loss(logits, class, smoothing);
            add_excess(-logprob(logits, class, exp::max(logits)), excess)
        }))
    }

    fn losses_of_shard(&self, shard: &VocabShard, targets: &[Target]) -> Result<Vec<f32>> {
        let mut losses = vec![0.0; targets.len()];
        let mut chunk = Chunk::default();
        let n = self.tokens_per_chunk(targets.len());
        for (targets, losses) in targets.chunks(n).zip(losses.chunks_mut(n)) {
            self.logits(targets, &mut chunk);
            self.merge(shard, targets, &mut chunk.logits, losses)?;
        }
        Ok(losses)
    }

    /// Returns the log-probability of each target, and whether greedy decoding would choose it.
    pub(super) fn scores(&self, targets: &[Target]) -> Vec<(f32, bool)> {
        self.rows(targets, |logits, class| {
            let max = exp::max(logits);
            let is_greedy = logits[class] == max && logits[..class].iter().all(|logit| *logit < max);
            (logprob(logits, class, max), is_greedy)
        })
    }

    /// Applies `of` to each target's logits.
    fn rows<T: Clone + Default + Send>(
        &self,
        targets: &[Target],
        of: impl Fn(&mut [f32], usize) -> T + Sync,
    ) -> Vec<T> {
        let mut results = vec![T::default(); targets.len()];
        let mut chunk = Chunk::default();
        let n = self.tokens_per_chunk(targets.len());
        for (targets, results) in targets.chunks(n).zip(results.chunks_mut(n)) {
            self.logits(targets, &mut chunk);
            let rows = self.logit_rows(&mut chunk.logits).zip(targets).zip(results);
            rows.for_each(|((logits, target), result)| *result = of(logits, target.class));
        }
        results
    }

    /// Returns the loss of each target. Writes the gradient of x; overwrites or adds to that of w.
    ///
    /// d(loss) / d(logits) = softmax - (1 - e) onehot - e / v, times the row's weight, for label smoothing e. If x and w
    /// are bf16, it is rounded to bf16.
    pub(super) fn backward(
        &self,
        targets: &[Target],
        weights: &[f32],
        dx: FloatsMut<'_>,
        dw: Option<(FloatsMut<'_>, Accumulate)>,
    ) -> Result<Vec<f32>> {
        match dw {
            Some((dw, accumulate)) if self.bf16().is_none() => {
                let mut losses = Ok(Vec::new());
                dw.change_in_f32(accumulate, |dw| {
                    losses = self.backward_chunks(targets, weights, dx, Some((FloatsMut::F32(dw), accumulate)));
                });
                losses
            }
            dw => self.backward_chunks(targets, weights, dx, dw),
        }
    }

    /// Computes [`CpuLmHead::backward`], with a gradient of w that is f32 unless x and w are bf16.
    fn backward_chunks(
        &self,
        targets: &[Target],
        weights: &[f32],
        mut dx: FloatsMut<'_>,
        mut dw: Option<(FloatsMut<'_>, Accumulate)>,
    ) -> Result<Vec<f32>> {
        let (Sizes { d, .. }, smoothing) = (self.sizes, self.smoothing);
        let mut losses = vec![0.0; targets.len()];
        let (mut chunk, mut dx_chunk) = (Chunk::default(), Vec::new());
        let n = self.tokens_per_chunk(targets.len());
        let chunks = targets.chunks(n).zip(weights.chunks(n)).zip(losses.chunks_mut(n));
        for ((targets, weights), losses) in chunks {
            self.logits(targets, &mut chunk);
            match self.shard {
                None => {
                    let rows = self.logit_rows(&mut chunk.logits).zip(targets).zip(weights).zip(losses);
                    rows.for_each(|(((logits, target), &weight), loss)| {
                        let excess = excess_loss(logits, target.class, smoothing);
                        *loss = add_excess(softmax_minus_target(logits, target.class, weight, smoothing), excess);
                    });
                }
                Some(shard) => {
                    let shares = self.merge(shard, targets, &mut chunk.logits, losses)?;
                    let rows = self.logit_rows(&mut chunk.logits).zip(targets).zip(weights).zip(shares);
                    rows.for_each(|(((exps, target), &weight), share)| {
                        scaled_minus_target(exps, target.class, weight * share, weight, smoothing);
                    });
                }
            }
            dx_chunk.resize(targets.len() * d, 0.0);
            let dw = dw.as_mut().map(|(dw, accumulate)| (dw.view(), std::mem::replace(accumulate, Accumulate::Add)));
            self.grads(targets, &mut chunk, &mut dx_chunk, dw);
            for (target, row) in targets.iter().zip(dx_chunk.chunks_exact(d.max(1))) {
                dx.write(target.row * d, row);
            }
        }
        Ok(losses)
    }

    /// Computes dx = d_logits w and dw = [dw +] d_logits^T x for a chunk whose logits are replaced by d_logits.
    fn grads(&self, targets: &[Target], chunk: &mut Chunk, dx: &mut [f32], dw: Option<(FloatsMut<'_>, Accumulate)>) {
        let (Sizes { v, d, .. }, t) = (self.sizes, targets.len());
        let Some((_, w)) = self.bf16() else {
            weight_matmul::grad_x(&chunk.logits, self.w.into(), &[v], dx, 1.0, self.dims(t));
            if let Some((FloatsMut::F32(dw), accumulate)) = dw {
                weight_matmul::grad_w(&chunk.logits, &chunk.x, dw, accumulate, 1.0, self.dims(t));
            }
            return;
        };
        self.logit_rows(&mut chunk.logits).for_each(round_in_place);
        let d_logits = Mat::with_stride(bytemuck::cast_slice(&chunk.logits), t, v, 2 * self.logit_stride());
        let dx = MatMut::new(dx, t, d);
        gemm_bf16(dx, Accumulate::Overwrite, d_logits, Mat::new(w, v, d), 1.0, Threads::All);
        if let Some((dw, accumulate)) = dw {
            let x = Mat::new(&chunk.x_bf16, t, d);
            gemm_bf16(Output::new(dw, v, d), accumulate, d_logits.t(), x, 1.0, Threads::All);
        }
    }

    /// Replaces logits by exp(logit - local maximum) and sets the losses. Returns the factors that turn each token's
    /// exponentials into probabilities.
    fn merge(
        &self,
        shard: &VocabShard,
        targets: &[Target],
        logits: &mut [f32],
        losses: &mut [f32],
    ) -> Result<Vec<f32>> {
        let (n, smoothing) = (targets.len(), self.smoothing);
        let rows = self.logit_rows(logits).zip(targets);
        let known: Vec<[f32; 4]> = rows
            .map(|(logits, target)| {
                let at_target = if target.class == NOT_IN_SHARD { 0.0 } else { logits[target.class] };
                let sum_of_logits = if smoothing.is_off() { 0.0 } else { sum(logits) as f32 };
                let max = exp::max(logits);
                [max, exp::exp_shifted(logits, max), at_target, sum_of_logits]
            })
            .collect();
        let n_kinds = VocabShard::n_statistics(smoothing);
        let by_kind: Vec<f32> =
            (0..n_kinds).flat_map(|kind| known.iter().map(move |of_token| of_token[kind])).collect();
        let merged = shard.merge(&Tensor::from_vec(by_kind, (n_kinds, n), &Device::Cpu)?, smoothing)?;
        losses.copy_from_slice(&to_host(&merged.loss)?.to_vec1::<f32>()?);
        let (max, sum) = (to_host(&merged.max)?.to_vec1::<f32>()?, to_host(&merged.sum)?.to_vec1::<f32>()?);
        Ok((0..n).map(|i| (known[i][0] - max[i]).exp() / sum[i]).collect())
    }

    /// Gathers the targets' rows of x and computes their logits. The matmul of a single row reads each weight once.
    fn logits(&self, targets: &[Target], chunk: &mut Chunk) {
        let (Sizes { v, d, .. }, t) = (self.sizes, targets.len());
        let Chunk { x, x_bf16, logits } = chunk;
        logits.resize(t * self.logit_stride(), 0.0);
        let bf16 = self.bf16();
        if let Some((from, w)) = bf16 {
            x_bf16.clear();
            targets.iter().for_each(|target| x_bf16.extend_from_slice(&from[target.row * d..(target.row + 1) * d]));
            if t > 1 || is_batch_invariant() {
                let (x, w) = (Mat::new(x_bf16, t, d), Mat::new(w, v, d));
                let logits = MatMut::with_stride(logits, t, v, self.logit_stride());
                return gemm_bf16(logits, Accumulate::Overwrite, x, w.t(), 1.0, Threads::All);
            }
        }
        x.resize(t * d, 0.0);
        for (target, x) in targets.iter().zip(x.chunks_exact_mut(d.max(1))) {
            self.x.slice(target.row * d..(target.row + 1) * d).read_into(x);
        }
        weight_matmul::forward(x, self.w.into(), &mut logits[..t * v], Accumulate::Overwrite, 1.0, self.dims(t));
    }

    /// Returns the row stride of logits. bf16 gradients are read column by column: a stride that is a multiple of a page
    /// would put the elements of a column into few cache sets.
    fn logit_stride(&self) -> usize {
        self.sizes.v + if self.bf16().is_some() { LOGIT_PADDING } else { 0 }
    }

    /// Returns the rows of logits.
    fn logit_rows<'l>(&self, logits: &'l mut [f32]) -> impl IndexedParallelIterator<Item = &'l mut [f32]> + use<'l> {
        let v = self.sizes.v;
        logits.par_chunks_mut(self.logit_stride().max(1)).map(move |row| &mut row[..v])
    }

    /// Returns x and w if they are multiplied as bf16.
    fn bf16(&self) -> Option<(&[bf16], &[bf16])> {
        bf16_operands(self.x, self.w).filter(|_| has_bf16_unit())
    }

    fn dims(&self, t: usize) -> Dims {
        Dims { t, n: self.sizes.v, k: self.sizes.d }
    }

    fn tokens_per_chunk(&self, n_targets: usize) -> usize {
        let v = self.shard.map_or(self.sizes.v, |shard| shard.max_shard_rows);
        rows_per_chunk(DeviceKind::Cpu, n_targets, v, self.chunk)
    }
}

/// Buffers of a chunk of tokens.
#[derive(Default)]
struct Chunk {
    /// Hidden states, f32 [t, d]; unused if more than one is multiplied as bf16.
    x: Vec<f32>,
    /// Hidden states that are multiplied as bf16 [t, d].
    x_bf16: Vec<bf16>,
    /// Logits, f32 [t, v], with [`CpuLmHead::logit_stride`].
    logits: Vec<f32>,
}

/// Rounds a row to bf16, in the first half of its memory.
fn round_in_place(row: &mut [f32]) {
    const CHUNK: usize = 256;
    let mut values = [0.0; CHUNK];
    for start in (0..row.len()).step_by(CHUNK) {
        let len = CHUNK.min(row.len() - start);
        values[..len].copy_from_slice(&row[start..start + len]);
        let rounded = &mut bytemuck::cast_slice_mut::<f32, bf16>(row)[start..start + len];
        vectorised!(write_bf16(&values[..len], rounded, Accumulate::Overwrite));
    }
}

/// Returns log softmax(logits)[class], given the largest logit. Overwrites the logits.
fn logprob(logits: &mut [f32], class: usize, max: f32) -> f32 {
    let at_target = logits[class];
    at_target - max - exp::exp_shifted(logits, max).ln()
}

/// Returns the loss that label smoothing e adds to -log p of a class: e (its logit - mean logit). `None` if off.
fn excess_loss(logits: &[f32], class: usize, smoothing: LabelSmoothing) -> Option<f32> {
    let LabelSmoothing { factor, n_vocab } = smoothing;
    let excess = || f64::from(logits[class]) - sum(logits) / n_vocab as f64;
    (!smoothing.is_off()).then(|| factor * excess() as f32)
}

/// Adds the loss of label smoothing. Without it the bits are those of `loss`.
fn add_excess(loss: f32, excess: Option<f32>) -> f32 {
    excess.map_or(loss, |excess| loss + excess)
}

/// Replaces logits by weight (softmax - target distribution) and returns -log p of the target.
fn softmax_minus_target(logits: &mut [f32], class: usize, weight: f32, smoothing: LabelSmoothing) -> f32 {
    let at_target = logits[class];
    let max = exp::max(logits);
    let sum = exp::exp_shifted(logits, max);
    scaled_minus_target(logits, class, weight / sum, weight, smoothing);
    max - at_target + sum.ln()
}

/// Replaces exponentials by scale exp - weight (target distribution).
fn scaled_minus_target(exps: &mut [f32], class: usize, scale: f32, weight: f32, smoothing: LabelSmoothing) {
    if smoothing.is_off() {
        vectorised!(exps.iter_mut().for_each(|p| *p *= scale));
    } else {
        let of_class = weight * smoothing.per_class();
        vectorised!(exps.iter_mut().for_each(|p| *p = *p * scale - of_class));
    }
    if class != NOT_IN_SHARD {
        exps[class] -= weight * (1.0 - smoothing.factor);
    }
}

/// Returns the sum of a row. The order is the same on every machine.
fn sum(row: &[f32]) -> f64 {
    vectorised!(sum_by_lanes(row))
}

#[inline(always)]
fn sum_by_lanes(row: &[f32]) -> f64 {
    let mut sums = [0.0f64; 16];
    let mut chunks = row.chunks_exact(16);
    for chunk in &mut chunks {
        chunk.iter().zip(&mut sums).for_each(|(x, sum)| *sum += f64::from(*x));
    }
    sums.iter().sum::<f64>() + chunks.remainder().iter().copied().map(f64::from).sum::<f64>()
}
