//! CPU kernel of `sinkhorn`: tokens in parallel, in f64.

use candle_core::WithDType;
use rayon::prelude::*;

/// Tokens per task. Sums of tasks are added in order, so the result does not depend on the number of threads.
const TOKENS: usize = 64;
/// Mean change of the column factors at which the iteration ends.
const TOLERANCE: f64 = 1e-4;
/// Summand of the divisors.
const EPSILON: f64 = 1e-8;
/// Iterations after which the present factors are taken.
const MAX_ITERATIONS: usize = 10_000;

/// Returns the balanced matrix of logits [t, e].
pub(super) fn balanced<T: WithDType>(logits: &[T], n_experts: usize) -> Vec<f32> {
    let cost: Vec<f64> = logits.par_iter().with_min_len(TOKENS).map(|x| x.to_f64().exp()).collect();
    let n_tokens = logits.len() / n_experts;
    let (mut of_tokens, mut of_experts) = (vec![1.0; n_tokens], vec![1.0; n_experts]);
    for _ in 0..MAX_ITERATIONS {
        set_token_factors(&cost, &of_experts, &mut of_tokens);
        let sums = column_sums(&cost, &of_tokens, n_experts);
        let next: Vec<f64> = sums.iter().map(|sum| 1.0 / n_experts as f64 / (sum + EPSILON)).collect();
        let change = next.iter().zip(&of_experts).map(|(a, b)| (a - b).abs()).sum::<f64>() / n_experts as f64;
        of_experts = next;
        if change.is_nan() || change <= TOLERANCE {
            break;
        }
    }
    let rows = cost.par_chunks(n_experts).zip(&of_tokens);
    rows.flat_map_iter(|(cost, of_token)| cost.iter().zip(&of_experts).map(move |(c, f)| (c * f * of_token) as f32))
        .collect()
}

/// Scales each token's row to the sum 1 / t.
fn set_token_factors(cost: &[f64], of_experts: &[f64], of_tokens: &mut [f64]) {
    let share = 1.0 / of_tokens.len() as f64;
    of_tokens.par_iter_mut().with_min_len(TOKENS).zip(cost.par_chunks(of_experts.len())).for_each(|(factor, cost)| {
        let sum: f64 = cost.iter().zip(of_experts).map(|(c, f)| c * f).sum();
        *factor = share / (sum + EPSILON);
    });
}

/// Returns the sum of each column, with each row times its factor.
fn column_sums(cost: &[f64], of_tokens: &[f64], n_experts: usize) -> Vec<f64> {
    let partial = |(cost, factors): (&[f64], &[f64])| {
        let mut sums = vec![0.0; n_experts];
        for (cost, factor) in cost.chunks_exact(n_experts).zip(factors) {
            sums.iter_mut().zip(cost).for_each(|(sum, c)| *sum += c * factor);
        }
        sums
    };
    let partials: Vec<Vec<f64>> =
        cost.par_chunks(TOKENS * n_experts).zip(of_tokens.par_chunks(TOKENS)).map(partial).collect();
    let mut sums = vec![0.0; n_experts];
    for partial in partials {
        sums.iter_mut().zip(partial).for_each(|(sum, part)| *sum += part);
    }
    sums
}
