//! Score functions of one token and their derivatives, in f64.

use super::spec::ScoreFunction;

/// Summand of the divisor of sigmoid-like scores, as in Megatron-LM.
pub(in crate::moe) const EPSILON: f64 = 1e-20;

impl ScoreFunction {
    /// Computes the scores of a row of logits.
    pub(in crate::moe) fn scores(self, logits: &[f64], scores: &mut [f64]) {
        match self {
            Self::Softmax => _ = softmax(logits, scores),
            Self::Sigmoid => scores.iter_mut().zip(logits).for_each(|(s, x)| *s = sigmoid(*x)),
            Self::SqrtSoftplus => scores.iter_mut().zip(logits).for_each(|(s, x)| *s = softplus(*x).sqrt()),
        }
    }

    /// Replaces the gradients of the scores by those of the logits.
    pub(in crate::moe) fn backward(self, logits: &[f64], scores: &[f64], grads: &mut [f64]) {
        match self {
            Self::Softmax => {
                let mean: f64 = grads.iter().zip(scores).map(|(d, s)| d * s).sum();
                grads.iter_mut().zip(scores).for_each(|(d, s)| *d = s * (*d - mean));
            }
            Self::Sigmoid => grads.iter_mut().zip(scores).for_each(|(d, s)| *d *= s * (1.0 - s)),
            Self::SqrtSoftplus => {
                for ((d, s), x) in grads.iter_mut().zip(scores).zip(logits) {
                    // A score underflows to 0 only where its slope does.
                    *d = if *s == 0.0 { 0.0 } else { *d * sigmoid(*x) / (2.0 * s) };
                }
            }
        }
    }

    /// Returns the summand of the divisor that makes scores sum to 1.
    pub(in crate::moe) fn epsilon(self) -> f64 {
        if self == Self::Softmax { 0.0 } else { EPSILON }
    }
}

/// Divides values by their sum plus `epsilon`. Returns the divisor.
pub(in crate::moe) fn normalize(values: &mut [f64], epsilon: f64) -> f64 {
    let divisor = values.iter().sum::<f64>() + epsilon;
    values.iter_mut().for_each(|value| *value /= divisor);
    divisor
}

/// Replaces the gradients of normalized values by those of the values before [`normalize`].
pub(in crate::moe) fn normalize_backward(normalized: &[f64], divisor: f64, grads: &mut [f64]) {
    let mean: f64 = grads.iter().zip(normalized).map(|(d, value)| d * value).sum();
    grads.iter_mut().for_each(|d| *d = (*d - mean) / divisor);
}

/// Returns log(sum(e^x)).
pub(in crate::moe) fn log_sum_exp(logits: &[f64]) -> f64 {
    let max = largest(logits);
    max + logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}

/// Computes the softmax of a row. Returns log(sum(e^x)).
pub(in crate::moe) fn softmax(logits: &[f64], scores: &mut [f64]) -> f64 {
    let max = largest(logits);
    scores.iter_mut().zip(logits).for_each(|(s, x)| *s = (x - max).exp());
    max + normalize(scores, 0.0).ln()
}

fn largest(logits: &[f64]) -> f64 {
    logits.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns log(1 + e^x).
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
