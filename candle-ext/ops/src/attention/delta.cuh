// Attention: delta = sum(do o), which the backward kernels need first.
#pragma once

#include "common.cuh"

// Computes delta of each row [n, dim], one warp per row.
template <int W, typename T>
__device__ void row_products(const T* o, const T* d_o, float* delta, int n, int dim) {
    const int lane = threadIdx.x & 31, row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (row >= n) return;
    o += static_cast<long long>(row) * dim;
    d_o += static_cast<long long>(row) * dim;
    float sum = 0.0f;
    for (int i = lane * W; i < dim; i += 32 * W) {
        const auto o_pack = load<W>(o + i), d_o_pack = load<W>(d_o + i);
#pragma unroll
        for (int j = 0; j < W; ++j) sum += widen(o_pack.at[j]) * widen(d_o_pack.at[j]);
    }
    sum = warp_sum(sum);
    if (lane == 0) delta[row] = sum;
}
