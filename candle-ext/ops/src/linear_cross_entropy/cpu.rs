//! CPU kernel of `linear_cross_entropy`: one chunk of tokens after another.

use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;

use super::args::{Sizes, Target};
use super::chunk::rows_per_chunk;
use super::vocab_shard::{NOT_IN_SHARD, VocabShard};
use crate::cost::DeviceKind;
use crate::exp;
use crate::floats::{Floats, FloatsMut};
use crate::gemm::Accumulate;
use crate::simd::vectorised;
use crate::transfer::to_host;
use crate::weight_matmul::{self, Dims};

/// Hidden states and LM head weight.
pub(super) struct CpuLmHead<'a> {
    pub(super) x: Floats<'a>,
    pub(super) w: Floats<'a>,
    pub(super) sizes: Sizes,
    pub(super) chunk: usize,
    /// Shard of the vocabulary; `None` for the whole.
    pub(super) shard: Option<&'a VocabShard<'a>>,
}

impl CpuLmHead<'_> {
    /// Returns the loss of each target.
    pub(super) fn losses(&self, targets: &[Target]) -> Result<Vec<f32>> {
        if let Some(shard) = self.shard {
            return self.losses_of_shard(shard, targets);
        }
        Ok(self.rows(targets, |logits, class| -logprob(logits, class, exp::max(logits))))
    }

    fn losses_of_shard(&self, shard: &VocabShard, targets: &[Target]) -> Result<Vec<f32>> {
        let mut losses = vec![0.0; targets.len()];
        let (mut x, mut logits) = (Vec::new(), Vec::new());
        let n = self.tokens_per_chunk(targets.len());
        for (targets, losses) in targets.chunks(n).zip(losses.chunks_mut(n)) {
            self.logits(targets, &mut x, &mut logits);
            self.merge(shard, targets, &mut logits, losses)?;
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
        let (mut x, mut logits) = (Vec::new(), Vec::new());
        let n = self.tokens_per_chunk(targets.len());
        for (targets, results) in targets.chunks(n).zip(results.chunks_mut(n)) {
            self.logits(targets, &mut x, &mut logits);
            let rows = logits.par_chunks_mut(self.sizes.v).zip(targets).zip(results);
            rows.for_each(|((logits, target), result)| *result = of(logits, target.class));
        }
        results
    }

    /// Returns the loss of each target. Writes the gradient of x; overwrites or adds to that of w.
    ///
    /// d(loss) / d(logits) = softmax - onehot, times the row's weight.
    pub(super) fn backward(
        &self,
        targets: &[Target],
        weights: &[f32],
        mut dx: FloatsMut<'_>,
        mut dw: Option<(&mut [f32], Accumulate)>,
    ) -> Result<Vec<f32>> {
        let Sizes { v, d, .. } = self.sizes;
        let mut losses = vec![0.0; targets.len()];
        let (mut x, mut logits, mut dx_chunk) = (Vec::new(), Vec::new(), Vec::new());
        let n = self.tokens_per_chunk(targets.len());
        let chunks = targets.chunks(n).zip(weights.chunks(n)).zip(losses.chunks_mut(n));
        for ((targets, weights), losses) in chunks {
            self.logits(targets, &mut x, &mut logits);
            match self.shard {
                None => {
                    let rows = logits.par_chunks_mut(v).zip(targets).zip(weights).zip(losses);
                    rows.for_each(|(((logits, target), &weight), loss)| {
                        *loss = softmax_minus_onehot(logits, target.class, weight);
                    });
                }
                Some(shard) => {
                    let shares = self.merge(shard, targets, &mut logits, losses)?;
                    let rows = logits.par_chunks_mut(v).zip(targets).zip(weights).zip(shares);
                    rows.for_each(|(((exps, target), &weight), share)| {
                        exps_minus_onehot(exps, target.class, weight, share);
                    });
                }
            }
            let dims = self.dims(targets.len());
            dx_chunk.resize(targets.len() * d, 0.0);
            weight_matmul::grad_x(&logits, self.w.into(), &[v], &mut dx_chunk, 1.0, dims);
            for (target, row) in targets.iter().zip(dx_chunk.chunks_exact(d.max(1))) {
                dx.write(target.row * d, row);
            }
            if let Some((dw, accumulate)) = &mut dw {
                weight_matmul::grad_w(&logits, &x, dw, std::mem::replace(accumulate, Accumulate::Add), 1.0, dims);
            }
        }
        Ok(losses)
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
        let n = targets.len();
        let rows = logits.par_chunks_mut(self.sizes.v).zip(targets);
        let known: Vec<[f32; 3]> = rows
            .map(|(logits, target)| {
                let at_target = if target.class == NOT_IN_SHARD { 0.0 } else { logits[target.class] };
                let max = exp::max(logits);
                [max, exp::exp_shifted(logits, max), at_target]
            })
            .collect();
        let by_kind: Vec<f32> = (0..3).flat_map(|kind| known.iter().map(move |of_token| of_token[kind])).collect();
        let merged = shard.merge(&Tensor::from_vec(by_kind, (3, n), &Device::Cpu)?)?;
        losses.copy_from_slice(&to_host(&merged.loss)?.to_vec1::<f32>()?);
        let (max, sum) = (to_host(&merged.max)?.to_vec1::<f32>()?, to_host(&merged.sum)?.to_vec1::<f32>()?);
        Ok((0..n).map(|i| (known[i][0] - max[i]).exp() / sum[i]).collect())
    }

    /// Gathers the targets' rows of x and computes their logits.
    fn logits(&self, targets: &[Target], x: &mut Vec<f32>, logits: &mut Vec<f32>) {
        let Sizes { v, d, .. } = self.sizes;
        x.resize(targets.len() * d, 0.0);
        for (target, x) in targets.iter().zip(x.chunks_exact_mut(d.max(1))) {
            self.x.slice(target.row * d..(target.row + 1) * d).read_into(x);
        }
        logits.resize(targets.len() * v, 0.0);
        weight_matmul::forward(x, self.w.into(), logits, Accumulate::Overwrite, 1.0, self.dims(targets.len()));
    }

    fn dims(&self, t: usize) -> Dims {
        Dims { t, n: self.sizes.v, k: self.sizes.d }
    }

    fn tokens_per_chunk(&self, n_targets: usize) -> usize {
        let v = self.shard.map_or(self.sizes.v, |shard| shard.max_shard_rows);
        rows_per_chunk(DeviceKind::Cpu, n_targets, v, self.chunk)
    }
}

/// Returns log softmax(logits)[class], given the largest logit. Overwrites the logits.
fn logprob(logits: &mut [f32], class: usize, max: f32) -> f32 {
    let at_target = logits[class];
    at_target - max - exp::exp_shifted(logits, max).ln()
}

/// Replaces logits by weight (softmax - onehot) and returns the loss.
fn softmax_minus_onehot(logits: &mut [f32], class: usize, weight: f32) -> f32 {
    let at_target = logits[class];
    let max = exp::max(logits);
    let sum = exp::exp_shifted(logits, max);
    let scale = weight / sum;
    vectorised!(logits.iter_mut().for_each(|p| *p *= scale));
    logits[class] -= weight;
    max - at_target + sum.ln()
}

/// Replaces exponentials by weight (share exp - onehot).
fn exps_minus_onehot(exps: &mut [f32], class: usize, weight: f32, share: f32) {
    let scale = weight * share;
    vectorised!(exps.iter_mut().for_each(|p| *p *= scale));
    if class != NOT_IN_SHARD {
        exps[class] -= weight;
    }
}
