// Permutation of tokens. A row is empty if its slot is dropped, or if it is padding.
#pragma once

#include "sort.cuh"

__device__ __forceinline__ bool is_kept(uint row, uint slot, const uint* offsets, int e) {
    return row < offsets[e] && slot != DROPPED;
}

// y [n, d]: the row of x [t, d] of each slot's token, or zeros. One block per row.
template <typename T>
__device__ __forceinline__ void gather(const T* x, const uint* order, const uint* offsets, T* y, int e, int top_k, int d) {
    const long long row = blockIdx.x;
    const uint slot = order[row];
    y += row * d;
    if (is_kept(row, slot, offsets, e)) return copy_row(x + static_cast<long long>(slot / top_k) * d, y, d);
    for (int i = threadIdx.x; i < d; i += blockDim.x) y[i] = narrow<T>(0.0f);
}

// y [t, d]: the sum of the rows of x [n, d] of each token's slots, in their order. One block per token.
template <int W, typename T>
__device__ __forceinline__ void sum_slots(const T* x, const uint* rows, uint n_kept, T* y, int top_k, int d) {
    const long long token = blockIdx.x;
    rows += token * top_k;
    for (int i = threadIdx.x * W; i < d; i += blockDim.x * W) {
        float sums[W] = {};
        for (int k = 0; k < top_k; ++k) {
            const uint row = rows[k];
            if (row >= n_kept) continue;
            const auto pack = load<W>(x + static_cast<long long>(row) * d + i);
#pragma unroll
            for (int j = 0; j < W; ++j) sums[j] += widen(pack.at[j]);
        }
        store_floats(y + token * d + i, sums);
    }
}

#define PERMUTE(T, suffix)                                                                                           \
    KERNEL(256) gather_##suffix(const T* x, const uint* order, const uint* offsets, T* y, int e, int top_k, int d) { \
        gather(x, order, offsets, y, e, top_k, d);                                                                   \
    }                                                                                                                \
    KERNEL(256) sum_slots_##suffix(const T* x, const uint* rows, const uint* offsets, T* y, int e, int top_k,        \
            int d) {                                                                                                 \
        if (is_wide<T>(d, x, y)) sum_slots<WIDE<T>>(x, rows, offsets[e], y, top_k, d);                               \
        else sum_slots<1>(x, rows, offsets[e], y, top_k, d);                                                         \
    }
FOR_EACH_FLOAT(PERMUTE)

// The value of each row's slot, or 0.
KERNEL(256) values_of_rows(const float* of_slots, const uint* order, const uint* offsets, float* of_rows, int n, int e) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    const uint slot = order[row];
    of_rows[row] = is_kept(row, slot, offsets, e) ? of_slots[slot] : 0.0f;
}

// The value of each slot's row, or 0.
KERNEL(256) values_of_slots(const float* of_rows, const uint* rows, const uint* offsets, float* of_slots, int n, int e) {
    const int slot = blockIdx.x * blockDim.x + threadIdx.x;
    if (slot >= n) return;
    const uint row = rows[slot];
    of_slots[slot] = row < offsets[e] ? of_rows[row] : 0.0f;
}
