//! CPU kernel of the router: tokens in parallel, in f64. Each task sums the statistics of its tokens.

use candle_core::WithDType;
use rayon::prelude::*;

use super::scores::{log_sum_exp, normalize, normalize_backward, softmax};
use super::spec::{GroupLimit, RouterSpec, ScoreFunction, TopKOrder};
use super::statistics::{Columns, CountedExperts};

/// Tokens per task. Sums of tasks are added in order, so the result does not depend on the number of threads.
const TOKENS: usize = 64;

/// Experts and weights of all tokens, k of each.
pub(super) struct Routed {
    pub(super) experts: Vec<u32>,
    pub(super) weights: Vec<f32>,
    /// Experts by score alone, if they are a second choice.
    pub(super) best: Vec<u32>,
    /// Sums of [`Columns`].
    pub(super) sums: Vec<f64>,
}

/// Tokens whose statistics are summed.
#[derive(Clone, Copy)]
pub(super) struct CountedTokens<'a> {
    /// 1 for each token that counts; `None` if all do.
    pub(super) token_mask: Option<&'a [u32]>,
    pub(super) best: CountedExperts,
    pub(super) columns: Columns,
}

impl CountedTokens<'_> {
    fn count(&self, token: usize) -> bool {
        self.token_mask.is_none_or(|token_mask| token_mask[token] != 0)
    }
}

/// Scores by which experts are chosen.
#[derive(Clone, Copy)]
pub(super) enum SelectionScores<'a> {
    /// Scores of the logits, plus a bias [e].
    OfLogits { bias: Option<&'a [f32]> },
    /// Scores [t, e] of the caller.
    Given(&'a [f32]),
}

/// Routes each row of logits [t, e].
pub(super) fn route<T: WithDType>(
    logits: &[T],
    selection: SelectionScores<'_>,
    n_experts: usize,
    spec: &RouterSpec,
    counted: Option<CountedTokens<'_>>,
) -> Routed {
    let k = spec.top_k;
    let n = logits.len() / n_experts * k;
    let has_best = counted.is_some_and(|counted| counted.best == CountedExperts::TopScores);
    let mut routed = Routed {
        experts: vec![0; n],
        weights: vec![0.0; n],
        best: vec![0; if has_best { n } else { 0 }],
        sums: vec![],
    };
    // A task without best experts gets an empty slice of them.
    let mut best: Vec<&mut [u32]> = routed.best.chunks_mut(TOKENS * k).collect();
    best.resize_with(n.div_ceil(TOKENS * k), Default::default);
    let outputs = routed.experts.par_chunks_mut(TOKENS * k).zip(routed.weights.par_chunks_mut(TOKENS * k)).zip(best);
    let tasks = logits.par_chunks(TOKENS * n_experts).zip(outputs).enumerate();
    let partials = tasks.map(|(task, (logits, ((experts, weights), best)))| {
        let mut router = TokenRouter::new(spec, n_experts);
        let mut sums = TokenSums::new(counted);
        let outputs = experts.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k));
        for (i, (logits, (experts, weights))) in logits.chunks_exact(n_experts).zip(outputs).enumerate() {
            let token = task * TOKENS + i;
            router.read(logits);
            router.score(selection, counted.is_some());
            router.set_selection(selection, token);
            router.select(experts);
            router.weigh(experts);
            weights.iter_mut().zip(&router.weights).for_each(|(out, w)| *out = (w * spec.scaling) as f32);
            let best = if has_best { &mut best[i * k..(i + 1) * k] } else { &mut [] };
            router.select_best(best);
            sums.add(&router, token, experts, best);
        }
        sums.columns
    });
    let partials: Vec<Vec<f64>> = partials.collect();
    routed.sums = TokenSums::new(counted).columns;
    partials.iter().for_each(|partial| routed.sums.iter_mut().zip(partial).for_each(|(sum, x)| *sum += x));
    routed
}

/// Statistics of a task's tokens.
struct TokenSums<'a> {
    counted: Option<CountedTokens<'a>>,
    /// Sums of [`Columns`]; empty without statistics.
    columns: Vec<f64>,
    /// Buffer of a token's normalized scores.
    normalized: Vec<f64>,
}

impl<'a> TokenSums<'a> {
    fn new(counted: Option<CountedTokens<'a>>) -> Self {
        let n_columns = counted.map_or(0, |counted| counted.columns.len());
        Self { counted, columns: vec![0.0; n_columns], normalized: Vec::new() }
    }

    /// Adds a token with its chosen and its best experts, if it counts.
    fn add(&mut self, router: &TokenRouter, token: usize, experts: &[u32], best: &[u32]) {
        let Some(counted) = self.counted.filter(|counted| counted.count(token)) else { return };
        let (at, score) = (counted.columns, router.spec.score);
        self.normalized.clone_from(&router.scores);
        let lse = match score {
            ScoreFunction::Softmax => router.lse,
            ScoreFunction::Sigmoid | ScoreFunction::SqrtSoftplus => {
                normalize(&mut self.normalized, score.epsilon());
                log_sum_exp(&router.logits)
            }
        };
        let sums = &mut self.columns;
        sums.iter_mut().zip(&self.normalized).for_each(|(sum, x)| *sum += x);
        sums[at.lse_squares()] += lse * lse;
        experts.iter().for_each(|expert| sums[at.chosen() + *expert as usize] += 1.0);
        sums[at.tokens()] += 1.0;
        sums[at.tokens() + 1] += router.logits.iter().sum::<f64>();
        sums[at.tokens() + 2] += router.logits.iter().map(|x| x * x).sum::<f64>();
        best.iter().for_each(|expert| sums[at.best() + *expert as usize] += 1.0);
    }
}

/// Returns the gradient of the logits from that of the weights.
pub(super) fn backward<T: WithDType>(
    logits: &[T],
    experts: &[u32],
    d_weights: &[f32],
    n_experts: usize,
    spec: &RouterSpec,
) -> Vec<T> {
    let k = spec.top_k;
    let mut d_logits = vec![T::zero(); logits.len()];
    let inputs = logits.par_chunks(TOKENS * n_experts).zip(experts.par_chunks(TOKENS * k));
    let inputs = inputs.zip(d_weights.par_chunks(TOKENS * k));
    d_logits.par_chunks_mut(TOKENS * n_experts).zip(inputs).for_each(|(d_logits, ((logits, experts), d_weights))| {
        let mut router = TokenRouter::new(spec, n_experts);
        let inputs = logits.chunks_exact(n_experts).zip(experts.chunks_exact(k)).zip(d_weights.chunks_exact(k));
        for (d_logits, ((logits, experts), d_weights)) in d_logits.chunks_exact_mut(n_experts).zip(inputs) {
            router.read(logits);
            if !is_local(spec) {
                router.score_all();
            }
            router.weigh(experts);
            router.backward(experts, d_weights, d_logits);
        }
    });
    d_logits
}

/// Buffers for one token at a time.
struct TokenRouter<'a> {
    spec: &'a RouterSpec,
    logits: Vec<f64>,
    /// Scores of all experts, if they were computed.
    scores: Vec<f64>,
    /// Log-sum-exp of the logits, if softmax scores were computed.
    lse: f64,
    /// Scores by which experts are chosen.
    selection: Vec<f64>,
    /// Logits of the chosen experts.
    chosen: Vec<f64>,
    /// Scores of the chosen experts.
    chosen_scores: Vec<f64>,
    /// Weights of the chosen experts, unscaled.
    weights: Vec<f64>,
    /// Divisor of the weights.
    divisor: f64,
    top: TopK,
}

impl<'a> TokenRouter<'a> {
    fn new(spec: &'a RouterSpec, n_experts: usize) -> Self {
        Self {
            spec,
            logits: vec![0.0; n_experts],
            scores: vec![0.0; n_experts],
            lse: 0.0,
            selection: vec![0.0; n_experts],
            chosen: vec![0.0; spec.top_k],
            chosen_scores: vec![0.0; spec.top_k],
            weights: vec![0.0; spec.top_k],
            divisor: 1.0,
            top: TopK::default(),
        }
    }

    fn read<T: WithDType>(&mut self, logits: &[T]) {
        self.logits.iter_mut().zip(logits).for_each(|(to, from)| *to = from.to_f64());
    }

    /// Computes the scores of all experts if the selection, the weights or statistics need them.
    fn score(&mut self, selection: SelectionScores<'_>, is_counted: bool) {
        let by_scores = matches!(selection, SelectionScores::OfLogits { .. }) && !selects_by_logits(self.spec);
        if by_scores || is_counted || !is_local(self.spec) {
            self.score_all();
        }
    }

    fn score_all(&mut self) {
        match self.spec.score {
            ScoreFunction::Softmax => self.lse = softmax(&self.logits, &mut self.scores),
            other => other.scores(&self.logits, &mut self.scores),
        }
    }

    fn set_selection(&mut self, selection: SelectionScores<'_>, token: usize) {
        let bias = match selection {
            SelectionScores::OfLogits { bias } => bias,
            SelectionScores::Given(scores) => {
                let row = &scores[token * self.selection.len()..];
                return self.selection.iter_mut().zip(row).for_each(|(to, from)| *to = f64::from(*from));
            }
        };
        let scores = if selects_by_logits(self.spec) { &self.logits } else { &self.scores };
        self.selection.copy_from_slice(scores);
        if let Some(bias) = bias {
            self.selection.iter_mut().zip(bias).for_each(|(score, bias)| *score += f64::from(*bias));
        }
    }

    /// Chooses the experts with the highest selection scores, in descending order; of equal ones, the first.
    fn select(&mut self, experts: &mut [u32]) {
        let selection = &self.selection;
        let chosen = match self.spec.groups {
            None => self.top.of(self.spec.top_k, (0..).zip(selection.iter().copied())),
            Some(limit) => {
                let groups = selected_groups(selection, limit, &mut self.top);
                let size = (selection.len() / limit.n_groups) as u32;
                let candidates = groups.iter().flat_map(|group| group * size..(group + 1) * size);
                self.top.of(self.spec.top_k, candidates.map(|expert| (expert, selection[expert as usize])))
            }
        };
        experts.iter_mut().zip(chosen).for_each(|(expert, (chosen, _))| *expert = *chosen);
    }

    /// Chooses the experts with the highest scores, without bias and groups. Needs [`score_all`](Self::score_all).
    fn select_best(&mut self, experts: &mut [u32]) {
        if !experts.is_empty() {
            let best = self.top.of(self.spec.top_k, (0..).zip(self.scores.iter().copied()));
            experts.iter_mut().zip(best).for_each(|(expert, (best, _))| *expert = *best);
        }
    }

    /// Computes the weights of chosen experts. If they depend on all logits, it needs [`score_all`](Self::score_all).
    fn weigh(&mut self, experts: &[u32]) {
        let score = self.spec.score;
        let at = |values: &[f64], to: &mut [f64]| {
            to.iter_mut().zip(experts).for_each(|(to, expert)| *to = values[*expert as usize]);
        };
        if is_local(self.spec) {
            at(&self.logits, &mut self.chosen);
            score.scores(&self.chosen, &mut self.chosen_scores);
        } else {
            at(&self.scores, &mut self.chosen_scores);
        }
        self.weights.copy_from_slice(&self.chosen_scores);
        if self.spec.normalize {
            self.divisor = normalize(&mut self.weights, score.epsilon());
        }
    }

    /// Writes the gradient of the logits, after [`weigh`](Self::weigh).
    fn backward<T: WithDType>(&mut self, experts: &[u32], d_weights: &[f32], d_logits: &mut [T]) {
        let mut grads: Vec<f64> = d_weights.iter().map(|d| f64::from(*d) * self.spec.scaling).collect();
        if self.spec.normalize {
            normalize_backward(&self.weights, self.divisor, &mut grads);
        }
        if is_local(self.spec) {
            self.spec.score.backward(&self.chosen, &self.chosen_scores, &mut grads);
            experts.iter().zip(grads).for_each(|(expert, grad)| d_logits[*expert as usize] = T::from_f64(grad));
            return;
        }
        let of_all = &mut self.selection;
        of_all.fill(0.0);
        experts.iter().zip(grads).for_each(|(expert, grad)| of_all[*expert as usize] = grad);
        self.spec.score.backward(&self.logits, &self.scores, of_all);
        d_logits.iter_mut().zip(of_all).for_each(|(out, grad)| *out = T::from_f64(*grad));
    }
}

/// Returns true if experts are chosen by their logits instead of their scores.
fn selects_by_logits(spec: &RouterSpec) -> bool {
    spec.score == ScoreFunction::Softmax && spec.order == TopKOrder::TopKFirst
}

/// Returns true if weights depend on the logits of the chosen experts only.
fn is_local(spec: &RouterSpec) -> bool {
    spec.score != ScoreFunction::Softmax || spec.order == TopKOrder::TopKFirst
}

/// Returns the groups with the highest sums, in ascending order.
fn selected_groups(selection: &[f64], limit: GroupLimit, top: &mut TopK) -> Vec<u32> {
    let size = selection.len() / limit.n_groups;
    let mut sum = |scores: &[f64]| -> f64 {
        top.of(limit.n_scores_per_group, (0..).zip(scores.iter().copied())).iter().map(|(_, score)| score).sum()
    };
    let sums: Vec<f64> = selection.chunks_exact(size).map(&mut sum).collect();
    let mut groups: Vec<u32> = top.of(limit.n_selected, (0..).zip(sums)).iter().map(|(group, _)| *group).collect();
    groups.sort_unstable();
    groups
}

/// Finder of the largest values, which keeps its buffer.
#[derive(Default)]
struct TopK(Vec<(u32, f64)>);

impl TopK {
    /// Returns the k largest of some values with their indices, in descending order; of equal ones, the earlier.
    ///
    /// NaN counts as the smallest value, so that there are always k.
    fn of(&mut self, k: usize, values: impl Iterator<Item = (u32, f64)>) -> &[(u32, f64)] {
        let best = &mut self.0;
        best.clear();
        for (index, value) in values {
            let value = if value.is_nan() { f64::NEG_INFINITY } else { value };
            if best.len() == k && value <= best[k - 1].1 {
                continue;
            }
            best.truncate(k - 1);
            let place = best.partition_point(|(_, other)| *other >= value);
            best.insert(place, (index, value));
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn top(k: usize, values: &[f64]) -> Vec<u32> {
        TopK::default().of(k, (0..).zip(values.iter().copied())).iter().map(|(index, _)| *index).collect()
    }

    #[test]
    fn the_largest_come_first_and_equal_ones_in_order() {
        assert_eq!(top(3, &[1.0, 5.0, 2.0, 5.0, 7.0]), [4, 1, 3]);
        assert_eq!(top(2, &[3.0, 3.0, 3.0]), [0, 1]);
        assert_eq!(top(4, &[0.0, 1.0, 0.0, 1.0]), [1, 3, 0, 2]);
    }

    #[test]
    fn nan_is_chosen_last() {
        assert_eq!(top(3, &[f64::NAN, -1.0, f64::NAN, 2.0]), [3, 1, 0]);
    }
}
