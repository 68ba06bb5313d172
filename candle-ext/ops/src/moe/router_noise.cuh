// Noise of routers: numbers of SplitMix64, as on the CPU.
#pragma once

#include "common.cuh"
#include "random.cuh"

// A multiple of 2^-24 in [0, 1)
__device__ __forceinline__ double uniform(uint64_t key, uint64_t position) {
    return static_cast<double>(random_bits(key, position) >> 40) * 0x1p-24;
}

// A standard normal number, by Box and Muller.
__device__ __forceinline__ double normal(uint64_t key, uint64_t position) {
    const double radius = uniform(key, 2 * position), angle = uniform(key, 2 * position + 1);
    return sqrt(-2.0 * log(1.0 - radius)) * cospi(2.0 * angle);
}

#define JITTER(T, suffix)                                                                                          \
    KERNEL(256) jitter_##suffix(const T* x, T* y, const uint* tokens, long long n, int d, double eps,              \
            unsigned long long key) {                                                                              \
        for (long long i = flat_begin<1>(); i < n; i += flat_step<1>()) {                                          \
            const uint64_t position = static_cast<uint64_t>(tokens[i / d]) * d + i % d;                            \
            y[i] = narrow<T>(widen(x[i]) * static_cast<float>(1.0 - eps + 2.0 * eps * uniform(key, position)));    \
        }                                                                                                          \
    }
FOR_EACH_FLOAT(JITTER)

// y = x factor + std normal, with a number per element, or per column if `per_column`
#define NORMAL(C, suffix)                                                                                          \
    KERNEL(256) add_normal_##suffix(const C* x, C* y, long long n, int e, int per_column, double factor, double std, \
            unsigned long long key) {                                                                              \
        for (long long i = flat_begin<1>(); i < n; i += flat_step<1>()) {                                          \
            const double kept = factor == 0.0 ? 0.0 : factor * x[i];                                               \
            y[i] = static_cast<C>(kept + std * normal(key, per_column ? i % e : i));                               \
        }                                                                                                          \
    }
NORMAL(float, f32)
NORMAL(double, f64)
