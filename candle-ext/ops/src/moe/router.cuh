// Router: a warp per token chooses k experts, of which lane j has the j-th, and computes their weights and statistics.
#pragma once

#include <ptx.cuh>

#include "scores.cuh"

constexpr int NONE = 0x7fffffff;
// Tokens of a block, one per warp.
constexpr int ROUTER_WARPS = 4;

struct RouterSpec {
    int top_k, function, scores_first, normalize;
    // 0 without groups.
    int n_groups, n_selected, n_scores;
};

// Finder of the largest of n <= 1024 values that are not taken; of equal ones, the first.
template <typename C> struct Choice {
    const C* values;
    int n;
    // Bit i: value lane + 32 i is taken.
    uint taken;

    // Takes one and returns its index. All lanes must call.
    __device__ __forceinline__ int take() {
        const int lane = threadIdx.x % 32;
        C best = -INFINITY;
        int index = NONE;
        for (int i = lane, bit = 0; i < n; i += 32, ++bit) {
            if (!(taken >> bit & 1) && (index == NONE || values[i] > best)) {
                best = values[i];
                index = i;
            }
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) {
            const C other = __shfl_xor_sync(0xffffffffu, best, offset);
            const int other_index = __shfl_xor_sync(0xffffffffu, index, offset);
            const bool is_better = other > best || (other == best && other_index < index);
            if (other_index != NONE && (index == NONE || is_better)) {
                best = other;
                index = other_index;
            }
        }
        if (index % 32 == lane) taken |= 1u << index / 32;
        return index;
    }
};

// Sum of the n_scores largest of `size` values, from the largest on.
template <typename C> __device__ __forceinline__ C sum_of_largest(const C* values, int size, int n_scores) {
    C sum = C(0), last = INFINITY;
    int last_index = -1;
    for (int k = 0; k < n_scores; ++k) {
        C best = -INFINITY;
        int index = NONE;
        for (int i = 0; i < size; ++i) {
            const bool follows = values[i] < last || (values[i] == last && i > last_index);
            if (follows && (index == NONE || values[i] > best)) {
                best = values[i];
                index = i;
            }
        }
        sum += best;
        last = best;
        last_index = index;
    }
    return sum != sum ? C(-INFINITY) : sum;
}

// Takes the experts of all groups but the best ones. `groups` holds a value per group.
template <typename C>
__device__ __forceinline__ void limit_groups(Choice<C>& choice, C* groups, const RouterSpec& spec) {
    const int lane = threadIdx.x % 32, size = choice.n / spec.n_groups;
    for (int g = lane; g < spec.n_groups; g += 32) {
        groups[g] = sum_of_largest(choice.values + g * size, size, spec.n_scores);
    }
    __syncwarp();
    Choice<C> of_groups{groups, spec.n_groups, 0};
    for (int k = 0; k < spec.n_selected; ++k) of_groups.take();
    __syncwarp();
    for (int g = lane, bit = 0; g < spec.n_groups; g += 32, ++bit) groups[g] = of_groups.taken >> bit & 1;
    __syncwarp();
    for (int i = lane, bit = 0; i < choice.n; i += 32, ++bit) {
        if (groups[i / size] == C(0)) choice.taken |= 1u << bit;
    }
}

// Weights of a token's chosen experts; lanes from k on have zeros.
template <typename C> struct Weights {
    Scores<C> scores;
    C logit, score, weight, divisor;

    // True if weights depend on the logits of the chosen experts only.
    __device__ __forceinline__ static bool is_local(const RouterSpec& spec) {
        return spec.function != SOFTMAX || !spec.scores_first;
    }

    // All lanes must call.
    __device__ __forceinline__ static Weights of(const RouterSpec& spec, const Scores<C>& of_row, const C* logits,
                                                 int expert) {
        const bool is_chosen = threadIdx.x % 32 < spec.top_k;
        Weights w{of_row, is_chosen ? logits[expert] : C(-INFINITY), C(0), C(0), C(1)};
        if (spec.function == SOFTMAX && !spec.scores_first) {
            w.scores.max = max_lanes(w.logit);
            w.scores.sum = sum_lanes(is_chosen ? exp_of(w.logit - w.scores.max) : C(0));
        }
        w.score = is_chosen ? w.scores.of(w.logit) : C(0);
        if (spec.normalize) w.divisor = sum_lanes(w.score) + w.scores.epsilon();
        w.weight = w.score / w.divisor;
        return w;
    }
};

// Statistics of the tokens that count, as columns: sums of the normalized scores [e] and of the squared log-sum-exps, tokens of
// each chosen expert [e], tokens, sums of the logits and of their squares, 0, and with `best` the tokens of each of those [e].
struct Counted {
    // 1 for a token that counts, 0 for another; null if all count.
    const uint* marks;
    // Experts with the highest scores [t, k]; null if nothing needs them.
    uint* best;
    // Sums of each block [blocks, columns]; null without statistics.
    double* partial;

    __device__ __forceinline__ bool counts(long long token) const { return partial && (!marks || marks[token]); }
};

// Sums of a warp's tokens. Each lane adds to its own elements, in the order of the tokens.
template <typename C> struct TokenSums {
    // Sums of the normalized scores [e], in shared memory.
    double* scores;
    // Of the warp.
    double lse_squares, tokens;
    // Of the lane.
    double logits, squares;

    // Adds a token with its scores [e], in shared memory, and the softmax of its logits. All lanes must call.
    __device__ __forceinline__ void add(const C* values, const Scores<C>& own, const Scores<C>& softmax, const C* row,
                                        int e) {
        C sum = C(0);
        for (int i = threadIdx.x % 32; i < e; i += 32) sum += values[i];
        const C divisor = own.function == SOFTMAX ? C(1) : sum_lanes(sum) + own.epsilon();
        for (int i = threadIdx.x % 32; i < e; i += 32) {
            const double x = row[i];
            scores[i] += static_cast<double>(values[i] / divisor);
            logits += x;
            squares += x * x;
        }
        const double lse = softmax.max + log_of(softmax.sum);
        lse_squares += lse * lse;
        tokens += 1.0;
    }
};

// Fills `selection` with the values by which experts are chosen; NaN counts as the smallest.
template <typename C, typename F> __device__ __forceinline__ void fill_selection(C* selection, int e, F value_of) {
    __syncwarp();
    for (int i = threadIdx.x % 32; i < e; i += 32) {
        const C value = value_of(i);
        selection[i] = value != value ? C(-INFINITY) : value;
    }
    __syncwarp();
}

// The k chosen experts, of which each lane below k gets one. All lanes must call.
template <typename C> __device__ __forceinline__ int choose(Choice<C>& choice, int top_k) {
    int expert = 0;
    for (int k = 0; k < top_k; ++k) {
        const int chosen = choice.take();
        if (threadIdx.x % 32 == k) expert = chosen;
    }
    return expert;
}

// Writes the sums of a block's warps, in their order.
__device__ __forceinline__ void write_block_sums(const double* scores, const double (&totals)[ROUTER_WARPS][4],
                                                 const uint* counts, const Counted& counted, int e) {
    const int n_columns = 2 * e + 5 + (counted.best ? e : 0);
    double* partial = counted.partial + static_cast<long long>(blockIdx.x) * n_columns;
    for (int i = threadIdx.x; i < n_columns; i += ROUTER_WARPS * 32) {
        double sum = 0.0;
        if (i < e) {
            for (int warp = 0; warp < ROUTER_WARPS; ++warp) sum += scores[warp * e + i];
        } else if (i == e || (i > 2 * e && i < 2 * e + 4)) {
            const int total = i == e ? 0 : i - 2 * e;
            for (int warp = 0; warp < ROUTER_WARPS; ++warp) sum += totals[warp][total];
        } else if (i <= 2 * e) {
            sum = counts[i - e - 1];
        } else if (i > 2 * e + 4) {
            sum = counts[i - e - 5];
        }
        partial[i] = sum;
    }
}

// Writes experts and weights [t, k] of logits [t, e]. `given` is null, a bias [e], or the selection scores [t, e].
template <typename C>
__device__ __forceinline__ void route(const C* logits, const float* given, uint* experts, float* weights,
                                      const Counted& counted, int t, int e, int given_is_selection, double scaling,
                                      const RouterSpec& spec) {
    __shared__ double totals[ROUTER_WARPS][4];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double* sums = reinterpret_cast<double*>(dynamic_shared());
    C* selections = reinterpret_cast<C*>(sums + (counted.partial ? ROUTER_WARPS * e : 0));
    // Tokens of each chosen expert, and of each best one.
    uint* counts = reinterpret_cast<uint*>(selections + ROUTER_WARPS * (e + spec.n_groups));
    C* selection = selections + warp * (e + spec.n_groups);
    TokenSums<C> of_warp{sums + warp * e, 0.0, 0.0, 0.0, 0.0};
    if (counted.partial) {
        for (int i = lane; i < e; i += 32) of_warp.scores[i] = 0.0;
        for (int i = threadIdx.x; i < 2 * e; i += ROUTER_WARPS * 32) counts[i] = 0;
        __syncthreads();
    }
    const bool by_logits = spec.function == SOFTMAX && !spec.scores_first;
    const long long step = static_cast<long long>(gridDim.x) * ROUTER_WARPS;
    for (long long token = static_cast<long long>(blockIdx.x) * ROUTER_WARPS + warp; token < t; token += step) {
        const C* row = logits + token * e;
        const bool is_counted = counted.counts(token), is_chosen = lane < spec.top_k;
        Scores<C> softmax{SOFTMAX, C(0), C(1)};
        if (counted.partial || (spec.function == SOFTMAX && !by_logits)) softmax = Scores<C>::of_row(SOFTMAX, row, e);
        const auto scores = spec.function == SOFTMAX ? softmax : Scores<C>{spec.function, C(0), C(1)};
        __syncwarp();
        if (counted.partial || !by_logits) {
            for (int i = lane; i < e; i += 32) selection[i] = scores.of(row[i]);
        }
        if (is_counted) of_warp.add(selection, scores, softmax, row, e);
        if (counted.best) {
            fill_selection(selection, e, [&](int i) { return selection[i]; });
            Choice<C> by_score{selection, e, 0};
            const int best = choose(by_score, spec.top_k);
            if (is_chosen) counted.best[token * spec.top_k + lane] = best;
            // Sums of integers do not depend on their order.
            if (is_counted && is_chosen) atomicAdd(&counts[e + best], 1u);
        }
        fill_selection(selection, e, [&](int i) {
            if (given_is_selection) return C(given[token * e + i]);
            const C value = by_logits ? row[i] : selection[i];
            return given ? value + C(given[i]) : value;
        });
        Choice<C> choice{selection, e, 0};
        if (spec.n_groups > 0) limit_groups(choice, selection + e, spec);
        const int expert = choose(choice, spec.top_k);
        const auto own = Weights<C>::of(spec, scores, row, expert);
        if (is_chosen) {
            experts[token * spec.top_k + lane] = expert;
            weights[token * spec.top_k + lane] = static_cast<float>(own.weight * C(scaling));
        }
        if (is_counted && is_chosen) atomicAdd(&counts[expert], 1u);
    }
    if (!counted.partial) return;
    const double of_lanes[2] = {sum_lanes(of_warp.logits), sum_lanes(of_warp.squares)};
    if (lane == 0) {
        totals[warp][0] = of_warp.lse_squares;
        totals[warp][1] = of_warp.tokens;
        totals[warp][2] = of_lanes[0];
        totals[warp][3] = of_lanes[1];
    }
    __syncthreads();
    write_block_sums(sums, totals, counts, counted, e);
}

// Writes the gradient of the logits [t, e] for that of the weights.
template <typename C>
__device__ __forceinline__ void route_backward(const C* logits, const uint* experts, const float* d_weights, C* d_logits,
                                               int t, int e, double scaling, const RouterSpec& spec) {
    const int lane = threadIdx.x % 32;
    const long long token = static_cast<long long>(blockIdx.x) * ROUTER_WARPS + threadIdx.x / 32;
    if (token >= t) return;
    logits += token * e;
    d_logits += token * e;
    const bool is_chosen = lane < spec.top_k, is_local = Weights<C>::is_local(spec);
    const int expert = is_chosen ? experts[token * spec.top_k + lane] : 0;
    const auto row = is_local ? Scores<C>{spec.function, C(0), C(1)} : Scores<C>::of_row(spec.function, logits, e);
    const auto own = Weights<C>::of(spec, row, logits, expert);
    C grad = is_chosen ? C(d_weights[token * spec.top_k + lane]) * C(scaling) : C(0);
    if (spec.normalize) grad = (grad - sum_lanes(grad * own.weight)) / own.divisor;
    const C mean = spec.function == SOFTMAX ? sum_lanes(grad * own.score) : C(0);
    for (int i = lane; i < e; i += 32) d_logits[i] = is_local ? C(0) : -mean * row.of(logits[i]);
    __syncwarp();
    if (!is_chosen) return;
    const C slope = spec.function == SOFTMAX ? own.score : own.scores.slope(own.logit, own.score);
    d_logits[expert] = slope * (grad - mean);
}

#define ROUTER_PARAMETERS int top_k, int function, int scores_first, int normalize
#define ROUTER(C, suffix)                                                                                           \
    KERNEL(128) route_##suffix(const C* logits, const float* given, uint* experts, float* weights,                  \
            const uint* marks, uint* best, double* partial, int t, int e, int given_is_selection, double scaling,   \
            ROUTER_PARAMETERS, int n_groups, int n_selected, int n_scores) {                                        \
        const RouterSpec spec{top_k, function, scores_first, normalize, n_groups, n_selected, n_scores};            \
        const Counted counted{marks, best, partial};                                                                \
        route(logits, given, experts, weights, counted, t, e, given_is_selection, scaling, spec);                   \
    }                                                                                                               \
    KERNEL(128) route_backward_##suffix(const C* logits, const uint* experts, const float* d_weights, C* d_logits,  \
            int t, int e, double scaling, ROUTER_PARAMETERS) {                                                      \
        const RouterSpec spec{top_k, function, scores_first, normalize, 0, 0, 0};                                   \
        route_backward(logits, experts, d_weights, d_logits, t, e, scaling, spec);                                  \
    }
ROUTER(float, f32)
ROUTER(double, f64)

// The sums of all blocks, in f64 and rounded [columns]: a warp per column.
KERNEL(128) sum_router_statistics(const double* partial, double* sums, float* rounded, int n_blocks, int n_columns) {
    const int lane = threadIdx.x % 32, column = blockIdx.x * ROUTER_WARPS + threadIdx.x / 32;
    if (column >= n_columns) return;
    double sum = 0.0;
    for (int i = lane; i < n_blocks; i += 32) sum += partial[static_cast<long long>(i) * n_columns + column];
    sum = sum_lanes(sum);
    if (lane > 0) return;
    sums[column] = sum;
    rounded[column] = static_cast<float>(sum);
}
