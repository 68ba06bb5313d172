// Sinkhorn balancing of logits [t, e], e <= 512, by one block: the number of iterations stays on the device.
#pragma once

#include "warp.cuh"

constexpr int SINKHORN_THREADS = 512;
constexpr int MAX_ITERATIONS = 10000;
constexpr double SINKHORN_EPSILON = 1e-8, SINKHORN_TOLERANCE = 1e-4;

// Scales each token's row to the sum 1 / t: a warp per token.
__device__ __forceinline__ void set_token_factors(const double* cost, const double* of_experts, double* of_tokens, int t,
                                                  int e) {
    const int lane = threadIdx.x % 32;
    for (int token = threadIdx.x / 32; token < t; token += SINKHORN_THREADS / 32) {
        double sum = 0.0;
        for (int i = lane; i < e; i += 32) sum += cost[static_cast<long long>(token) * e + i] * of_experts[i];
        sum = sum_lanes(sum);
        if (lane == 0) of_tokens[token] = 1.0 / t / (sum + SINKHORN_EPSILON);
    }
}

// sums [e]: each column's sum, with each row times its factor. Threads divide rows and columns in a fixed order.
__device__ __forceinline__ void column_sums(const double* cost, const double* of_tokens, double* sums, int t, int e) {
    const int n_parts = SINKHORN_THREADS / e, part = threadIdx.x / e, column = threadIdx.x % e;
    double sum = 0.0;
    if (part < n_parts) {
        for (int token = part; token < t; token += n_parts) {
            sum += cost[static_cast<long long>(token) * e + column] * of_tokens[token];
        }
    }
    __syncthreads();
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (part > 0) return;
    for (int other = 1; other < n_parts; ++other) sum += sums[other * e + column];
    sums[column] = sum;
}

// Sets the factors of experts and returns their mean change to every thread. All threads must call.
__device__ __forceinline__ double set_expert_factors(const double* sums, double* of_experts, int e) {
    __shared__ double mean;
    __syncthreads();
    if (threadIdx.x < 32) {
        double change = 0.0;
        for (int i = threadIdx.x; i < e; i += 32) {
            const double next = 1.0 / e / (sums[i] + SINKHORN_EPSILON);
            change += fabs(next - of_experts[i]);
            of_experts[i] = next;
        }
        change = sum_lanes(change);
        if (threadIdx.x == 0) mean = change / e;
    }
    __syncthreads();
    return mean;
}

// balanced [t, e]; cost [t, e] and of_tokens [t] are scratch.
template <typename C>
__device__ __forceinline__ void balance(const C* logits, double* cost, double* of_tokens, float* balanced, int t, int e) {
    __shared__ double of_experts[SINKHORN_THREADS], sums[SINKHORN_THREADS];
    const long long n = static_cast<long long>(t) * e;
    for (long long i = threadIdx.x; i < n; i += SINKHORN_THREADS) cost[i] = exp(static_cast<double>(logits[i]));
    of_experts[threadIdx.x] = 1.0;
    __syncthreads();
    for (int i = 0; i < MAX_ITERATIONS; ++i) {
        set_token_factors(cost, of_experts, of_tokens, t, e);
        __syncthreads();
        column_sums(cost, of_tokens, sums, t, e);
        const double change = set_expert_factors(sums, of_experts, e);
        // NaN ends the iteration, too.
        if (!(change > SINKHORN_TOLERANCE)) break;
    }
    for (long long i = threadIdx.x; i < n; i += SINKHORN_THREADS) {
        balanced[i] = static_cast<float>(cost[i] * of_experts[i % e] * of_tokens[i / e]);
    }
}

#define SINKHORN(C, suffix)                                                                                             \
    KERNEL(512) sinkhorn_##suffix(const C* logits, double* cost, double* of_tokens, float* balanced, int t, int e) {   \
        balance(logits, cost, of_tokens, balanced, t, e);                                                               \
    }
SINKHORN(float, f32)
SINKHORN(double, f64)
