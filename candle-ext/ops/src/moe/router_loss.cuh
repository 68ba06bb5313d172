// Router losses, as sums over tokens: a warp per token. Without counts [e] it is the z-loss, of which only backward is here.
#pragma once

#include "scores.cuh"

constexpr int LOSS_WARPS = 4;

// Sum of the scores times the counts, and of the scores. All lanes must call.
template <typename C>
__device__ __forceinline__ void weighted_sum(const Scores<C>& scores, const C* logits, const float* counts, int e,
                                             C& weighted, C& divisor) {
    C of_counts = C(0), of_scores = C(0);
    for (int i = threadIdx.x % 32; i < e; i += 32) {
        const C score = scores.of(logits[i]);
        of_counts += score * C(counts[i]);
        of_scores += score;
    }
    weighted = sum_lanes(of_counts);
    divisor = scores.function == SOFTMAX ? C(1) : sum_lanes(of_scores) + scores.epsilon();
}

// The counts of a token's sequence, a row of counts [s, e]; without sequences [t], the first row.
__device__ __forceinline__ const float* counts_of(const float* counts, const uint* sequences, long long token, int e) {
    return sequences ? counts + static_cast<long long>(sequences[token]) * e : counts;
}

// partial [blocks]: the loss of each block's tokens
template <typename C>
__device__ __forceinline__ void token_losses(const C* logits, const float* counts, const uint* sequences, double* partial,
                                             int t, int e, int function) {
    __shared__ double of_warp[LOSS_WARPS];
    const int warp = threadIdx.x / 32;
    double sum = 0.0;
    for (long long token = blockIdx.x * LOSS_WARPS + warp; token < t; token += gridDim.x * LOSS_WARPS) {
        const C* row = logits + token * e;
        const auto scores = Scores<C>::of_row(function, row, e);
        C weighted, divisor;
        weighted_sum(scores, row, counts_of(counts, sequences, token, e), e, weighted, divisor);
        sum += weighted / divisor;
    }
    if (threadIdx.x % 32 == 0) of_warp[warp] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    double total = 0.0;
    for (int i = 0; i < LOSS_WARPS; ++i) total += of_warp[i];
    partial[blockIdx.x] = total;
}

// Writes the gradient of the logits, times the upstream gradient dy [1].
template <typename C>
__device__ __forceinline__ void loss_backward(const C* logits, const float* counts, const uint* sequences, const float* dy,
                                              C* d_logits, int t, int e, int function) {
    const long long token = static_cast<long long>(blockIdx.x) * LOSS_WARPS + threadIdx.x / 32;
    if (token >= t) return;
    logits += token * e;
    d_logits += token * e;
    const auto scores = Scores<C>::of_row(function, logits, e);
    const C upstream = C(*dy);
    if (!counts) {
        const C factor = C(2) * (scores.max + log_of(scores.sum)) * upstream;
        for (int i = threadIdx.x % 32; i < e; i += 32) d_logits[i] = factor * scores.of(logits[i]);
        return;
    }
    counts = counts_of(counts, sequences, token, e);
    C weighted, divisor;
    weighted_sum(scores, logits, counts, e, weighted, divisor);
    const C mean = weighted / divisor;
    for (int i = threadIdx.x % 32; i < e; i += 32) {
        const C score = scores.of(logits[i]), grad = (C(counts[i]) - mean) / divisor * upstream;
        d_logits[i] = grad * (function == SOFTMAX ? score : scores.slope(logits[i], score));
    }
}

#define ROUTER_LOSS(C, suffix)                                                                                        \
    KERNEL(128) token_losses_##suffix(const C* logits, const float* counts, const uint* sequences, double* partial,   \
            int t, int e, int function) {                                                                             \
        token_losses(logits, counts, sequences, partial, t, e, function);                                             \
    }                                                                                                                 \
    KERNEL(128) loss_backward_##suffix(const C* logits, const float* counts, const uint* sequences, const float* dy,  \
            C* d_logits, int t, int e, int function) {                                                                \
        loss_backward(logits, counts, sequences, dy, d_logits, t, e, function);                                       \
    }
ROUTER_LOSS(float, f32)
ROUTER_LOSS(double, f64)

// loss [1]: the sum of n partial losses, by one warp
KERNEL(32) sum_losses(const double* partial, float* loss, int n) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < n; i += 32) sum += partial[i];
    sum = sum_lanes(sum);
    if (threadIdx.x == 0) *loss = static_cast<float>(sum);
}

// loss [1]: the dot product of the sums [e] of the normalized scores with factors [e], by one warp
KERNEL(32) balance_loss(const double* sums, const float* factors, float* loss, int e) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < e; i += 32) sum += sums[i] * factors[i];
    sum = sum_lanes(sum);
    if (threadIdx.x == 0) *loss = static_cast<float>(sum);
}

// factors [s, e]: e times the fraction of each count of counts [s, e] in its row; a warp per row
KERNEL(32) balance_factors(const float* counts, float* factors, int e) {
    const long long row = static_cast<long long>(blockIdx.x) * e;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < e; i += 32) sum += counts[row + i];
    // Counts are integers, whose sums are exact.
    const float total = fmaxf(sum_lanes(sum), 1.0f);
    for (int i = threadIdx.x; i < e; i += 32) factors[row + i] = counts[row + i] / total * static_cast<float>(e);
}
