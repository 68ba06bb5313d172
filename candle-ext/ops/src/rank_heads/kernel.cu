// rank_heads: the layouts x [tokens, groups, len] and y [groups * copies, tokens, len]. A warp writes a row of len elements;
// a block of 256 threads has eight rows. There are less than 2^31 rows.
#include "common.cuh"

__device__ __forceinline__ uint row_of_warp() { return blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; }

// y[rank, token] = x[token, rank / copies]
template <int W, typename T>
__device__ void by_rank(const T* x, T* y, uint row, uint tokens, uint groups, uint copies, int len) {
    const uint rank = row / tokens, token = row - rank * tokens;
    const T* from = x + (static_cast<long long>(token) * groups + rank / copies) * len;
    T* to = y + static_cast<long long>(row) * len;
    for (int i = threadIdx.x % 32 * W; i < len; i += 32 * W) store(to + i, load<W>(from + i));
}

// x[token, group] = the sum of y[group * copies + copy, token], rounded after each addition
template <int W, typename T>
__device__ void of_ranks(const T* y, T* x, uint row, uint tokens, uint groups, int copies, int len) {
    const uint token = row / groups, group = row - token * groups;
    const long long stride = static_cast<long long>(tokens) * len;
    const T* from = y + group * copies * stride + static_cast<long long>(token) * len;
    T* to = x + static_cast<long long>(row) * len;
    for (int i = threadIdx.x % 32 * W; i < len; i += 32 * W) {
        auto sum = load<W>(from + i);
        for (int copy = 1; copy < copies; ++copy) {
            const auto next = load<W>(from + copy * stride + i);
#pragma unroll
            for (int j = 0; j < W; ++j) sum.at[j] = narrow<T>(widen(sum.at[j]) + widen(next.at[j]));
        }
        store(to + i, sum);
    }
}

#define KERNELS(T, suffix)                                                                                           \
    KERNEL(256) by_rank_##suffix(const T* x, T* y, int tokens, int groups, int copies, int len) {                    \
        const uint row = row_of_warp();                                                                              \
        if (row >= static_cast<uint>(tokens) * groups * copies) return;                                              \
        if (is_wide<T>(len, x, y)) by_rank<WIDE<T>>(x, y, row, tokens, groups, copies, len);                         \
        else by_rank<1>(x, y, row, tokens, groups, copies, len);                                                     \
    }                                                                                                                \
    KERNEL(256) of_ranks_##suffix(const T* y, T* x, int tokens, int groups, int copies, int len) {                   \
        const uint row = row_of_warp();                                                                              \
        if (row >= static_cast<uint>(tokens) * groups) return;                                                       \
        if (is_wide<T>(len, x, y)) of_ranks<WIDE<T>>(y, x, row, tokens, groups, copies, len);                        \
        else of_ranks<1>(y, x, row, tokens, groups, copies, len);                                                    \
    }
FOR_EACH_FLOAT(KERNELS)
