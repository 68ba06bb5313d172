// Reductions and prefix sums over a warp.
#pragma once

#include "common.cuh"

template <typename C> __device__ __forceinline__ C sum_lanes(C x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

template <typename C> __device__ __forceinline__ C max_lanes(C x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        const C other = __shfl_xor_sync(0xffffffffu, x, offset);
        x = other > x ? other : x;
    }
    return x;
}

// The sum of the lanes up to each lane.
template <typename C> __device__ __forceinline__ C scan_lanes(C x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const C other = __shfl_sync(0xffffffffu, x, lane >= step ? lane - step : lane);
        if (lane >= step) x += other;
    }
    return x;
}
