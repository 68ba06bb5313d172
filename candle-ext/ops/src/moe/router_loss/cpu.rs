//! CPU kernels of the router losses: tokens in parallel, in f64.

use candle_core::WithDType;
use rayon::prelude::*;

use crate::moe::router::ScoreFunction;
use crate::moe::router::scores::{normalize, normalize_backward, softmax};

/// Tokens per task. Sums of tasks are added in order, so the result does not depend on the number of threads.
const TOKENS: usize = 64;

/// Gradient of a loss that is a sum over tokens.
pub(super) trait TokenGrad: Sync {
    /// Computes the gradient of a token's logits.
    fn grad(&self, token: usize, logits: &[f64], buffer: &mut [f64], grads: &mut [f64]);
}

/// Returns the sum of the loss over rows of `n_experts` logits.
pub(super) fn sum<T: WithDType>(loss: &Balance<'_>, logits: &[T], n_experts: usize) -> f64 {
    let partial = |(task, logits): (usize, &[T])| {
        let (mut row, mut buffer) = (vec![0.0; n_experts], vec![0.0; n_experts]);
        let of_token = |(token, logits): (usize, &[T])| {
            read(logits, &mut row);
            loss.loss(token, &row, &mut buffer)
        };
        (task * TOKENS..).zip(logits.chunks_exact(n_experts)).map(of_token).sum::<f64>()
    };
    let partials: Vec<f64> = logits.par_chunks(TOKENS * n_experts).enumerate().map(partial).collect();
    partials.iter().sum()
}

/// Returns the gradient of the logits, times `upstream`.
pub(super) fn backward<T: WithDType>(loss: &impl TokenGrad, logits: &[T], n_experts: usize, upstream: f64) -> Vec<T> {
    let mut d_logits = vec![T::zero(); logits.len()];
    let tasks = d_logits.par_chunks_mut(TOKENS * n_experts).zip(logits.par_chunks(TOKENS * n_experts));
    tasks.enumerate().for_each(|(task, (d_logits, logits))| {
        let [mut row, mut buffer, mut grads] = [(); 3].map(|()| vec![0.0; n_experts]);
        let rows = d_logits.chunks_exact_mut(n_experts).zip(logits.chunks_exact(n_experts));
        for (token, (d_logits, logits)) in (task * TOKENS..).zip(rows) {
            read(logits, &mut row);
            loss.grad(token, &row, &mut buffer, &mut grads);
            d_logits.iter_mut().zip(&grads).for_each(|(out, grad)| *out = T::from_f64(grad * upstream));
        }
    });
    d_logits
}

fn read<T: WithDType>(logits: &[T], row: &mut [f64]) {
    row.iter_mut().zip(logits).for_each(|(to, from)| *to = from.to_f64());
}

/// Counts of the experts, weighted by a token's probabilities.
pub(super) struct Balance<'a> {
    /// Counts of each sequence [s, e].
    pub(super) counts: &'a [f32],
    /// Sequence of each token; `None` if all are of the first.
    pub(super) sequences: Option<&'a [u32]>,
    pub(super) score: ScoreFunction,
}

impl Balance<'_> {
    /// Returns the counts of a token's sequence.
    fn counts_of(&self, token: usize, n_experts: usize) -> &[f32] {
        let sequence = self.sequences.map_or(0, |sequences| sequences[token] as usize);
        &self.counts[sequence * n_experts..(sequence + 1) * n_experts]
    }

    /// Returns the loss of a token.
    fn loss(&self, token: usize, logits: &[f64], p: &mut [f64]) -> f64 {
        self.score.scores(logits, p);
        let divisor =
            if self.score == ScoreFunction::Softmax { 1.0 } else { p.iter().sum::<f64>() + self.score.epsilon() };
        p.iter().zip(self.counts_of(token, logits.len())).map(|(p, count)| p * f64::from(*count)).sum::<f64>() / divisor
    }
}

impl TokenGrad for Balance<'_> {
    fn grad(&self, token: usize, logits: &[f64], scores: &mut [f64], grads: &mut [f64]) {
        self.score.scores(logits, scores);
        grads.iter_mut().zip(self.counts_of(token, logits.len())).for_each(|(grad, count)| *grad = f64::from(*count));
        if self.score != ScoreFunction::Softmax {
            let mut p = scores.to_vec();
            let divisor = normalize(&mut p, self.score.epsilon());
            normalize_backward(&p, divisor, grads);
        }
        self.score.backward(logits, scores, grads);
    }
}

/// Square of a token's log-sum-exp.
pub(super) struct ZLoss;

impl TokenGrad for ZLoss {
    fn grad(&self, _: usize, logits: &[f64], _: &mut [f64], grads: &mut [f64]) {
        let factor = 2.0 * softmax(logits, grads);
        grads.iter_mut().for_each(|grad| *grad *= factor);
    }
}
