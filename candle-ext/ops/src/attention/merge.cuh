// Attention: merges the outputs over two sets of keys.
#pragma once

#include "common.cuh"

// With weights e^lse: out [n, dim] becomes the weighted mean, lse [n] the log of the summed weights. One warp per row.
template <int W, typename T>
__device__ void merge_rows(float* out, float* lse, const T* other_out, const float* other_lse, int n, int dim) {
    const int lane = threadIdx.x & 31, row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (row >= n) return;
    const float own = lse[row], other = other_lse[row];
    if (own == -INFINITY && other == -INFINITY) return;
    const float max = fmaxf(own, other), own_share = expf(own - max), other_share = expf(other - max);
    const float sum = own_share + other_share, own_weight = own_share / sum, other_weight = other_share / sum;
    out += static_cast<long long>(row) * dim;
    other_out += static_cast<long long>(row) * dim;
    for (int i = lane * W; i < dim; i += 32 * W) {
        auto pack = load<W>(out + i);
        const auto other_pack = load<W>(other_out + i);
#pragma unroll
        for (int j = 0; j < W; ++j) pack.at[j] = pack.at[j] * own_weight + widen(other_pack.at[j]) * other_weight;
        store(out + i, pack);
    }
    __syncwarp();
    if (lane == 0) lse[row] = max + logf(sum);
}
