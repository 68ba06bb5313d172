// Reductions over a warp, in float or double.
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
