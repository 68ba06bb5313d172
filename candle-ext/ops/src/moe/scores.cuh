// Score functions of routers, in the dtype C of the logits. A warp has one token; its logits are strided over the lanes.
#pragma once

#include "warp.cuh"

// Values of ScoreFunction.
constexpr int SOFTMAX = 0, SIGMOID = 1, SQRT_SOFTPLUS = 2;

__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float log1p_of(float x) { return log1pf(x); }
__device__ __forceinline__ double log1p_of(double x) { return log1p(x); }
__device__ __forceinline__ float sqrt_of(float x) { return sqrtf(x); }
__device__ __forceinline__ double sqrt_of(double x) { return sqrt(x); }

template <typename C> __device__ __forceinline__ C sigmoid_of(C x) { return C(1) / (C(1) + exp_of(-x)); }

template <typename C> __device__ __forceinline__ C softplus_of(C x) {
    return (x > C(0) ? x : C(0)) + log1p_of(exp_of(x > C(0) ? -x : x));
}

// Scores of a token: an elementwise function, or the softmax with the row's maximum and sum.
template <typename C> struct Scores {
    int function;
    C max, sum;

    // All lanes must call.
    __device__ __forceinline__ static Scores of_row(int function, const C* logits, int e) {
        Scores scores{function, C(0), C(1)};
        if (function != SOFTMAX) return scores;
        C max = -INFINITY, sum = C(0);
        for (int i = threadIdx.x % 32; i < e; i += 32) max = logits[i] > max ? logits[i] : max;
        scores.max = max_lanes(max);
        for (int i = threadIdx.x % 32; i < e; i += 32) sum += exp_of(logits[i] - scores.max);
        scores.sum = sum_lanes(sum);
        return scores;
    }

    __device__ __forceinline__ C of(C x) const {
        if (function == SOFTMAX) return exp_of(x - max) / sum;
        return function == SIGMOID ? sigmoid_of(x) : sqrt_of(softplus_of(x));
    }

    // Slope of an elementwise score s at x. A score underflows to 0 only where its slope does.
    __device__ __forceinline__ C slope(C x, C s) const {
        if (function == SIGMOID) return s * (C(1) - s);
        return s == C(0) ? C(0) : sigmoid_of(x) / (C(2) * s);
    }

    // Summand of the divisor that makes scores sum to 1.
    __device__ __forceinline__ C epsilon() const { return function == SOFTMAX ? C(0) : C(1e-20); }
};
