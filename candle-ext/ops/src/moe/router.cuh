// Router: a warp per token chooses k experts, of which lane j has the j-th, and computes their weights.
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

// Writes experts and weights [t, k] of logits [t, e]. `given` is null, a bias [e], or the selection scores [t, e].
template <typename C>
__device__ __forceinline__ void route(const C* logits, const float* given, uint* experts, float* weights, int t, int e,
                                      int given_is_selection, double scaling, const RouterSpec& spec) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long token = static_cast<long long>(blockIdx.x) * ROUTER_WARPS + warp;
    if (token >= t) return;
    C* selection = reinterpret_cast<C*>(dynamic_shared()) + warp * (e + spec.n_groups);
    logits += token * e;
    const bool by_logits = spec.function == SOFTMAX && !spec.scores_first;
    const auto scores = by_logits ? Scores<C>{SOFTMAX, C(0), C(1)} : Scores<C>::of_row(spec.function, logits, e);
    for (int i = lane; i < e; i += 32) {
        C value = by_logits ? logits[i] : scores.of(logits[i]);
        if (given_is_selection) value = given[token * e + i];
        else if (given) value += given[i];
        selection[i] = value != value ? C(-INFINITY) : value;
    }
    __syncwarp();
    Choice<C> choice{selection, e, 0};
    if (spec.n_groups > 0) limit_groups(choice, selection + e, spec);
    int expert = 0;
    for (int k = 0; k < spec.top_k; ++k) {
        const int chosen = choice.take();
        if (lane == k) expert = chosen;
    }
    const auto own = Weights<C>::of(spec, scores, logits, expert);
    if (lane < spec.top_k) {
        experts[token * spec.top_k + lane] = expert;
        weights[token * spec.top_k + lane] = static_cast<float>(own.weight * C(scaling));
    }
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
    KERNEL(128) route_##suffix(const C* logits, const float* given, uint* experts, float* weights, int t, int e,    \
            int given_is_selection, double scaling, ROUTER_PARAMETERS, int n_groups, int n_selected, int n_scores) { \
        const RouterSpec spec{top_k, function, scores_first, normalize, n_groups, n_selected, n_scores};            \
        route(logits, given, experts, weights, t, e, given_is_selection, scaling, spec);                            \
    }                                                                                                               \
    KERNEL(128) route_backward_##suffix(const C* logits, const uint* experts, const float* d_weights, C* d_logits,  \
            int t, int e, double scaling, ROUTER_PARAMETERS) {                                                      \
        const RouterSpec spec{top_k, function, scores_first, normalize, 0, 0, 0};                                   \
        route_backward(logits, experts, d_weights, d_logits, t, e, scaling, spec);                                  \
    }
ROUTER(float, f32)
ROUTER(double, f64)
