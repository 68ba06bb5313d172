// Attention forward: a block computes a tile of query rows over the key tiles that they may attend to.
#pragma once

#include "tile.cuh"

namespace plain {

// Largest value among the 16 threads that share rows.
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
    for (int offset = 8; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int offset = 8; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Online softmax (Milakov and Gimelshein 2018); lse is [t, n_kv, group]. A fully masked row gives zeros and an lse of
// -inf.
template <int DIM, typename T>
__device__ void forward(const T* q, const T* k, const T* v, T* o, float* lse, const Problem& problem) {
    __shared__ Scratch scratch;
    const Heads heads = problem.heads;
    const Sequence sequence = find_rows(problem);
    const View view = sequence.view;
    const bool wide = is_wide<T>(heads.dim, q, k, v, o);
    const auto q_rows = query_rows(q, sequence, heads);
    const auto k_rows = key_rows(k, sequence, heads), v_rows = key_rows(v, sequence, heads);
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int first = sequence.tile * TILE, last = min(first + TILE, q_rows.n) - 1;

    Range visible[4];
    float maxima[4], sums[4];
    Sums<DIM> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        visible[i] = view.keys_of(min(first + 4 * y + i, last) / heads.group);
        maxima[i] = -INFINITY;
        sums[i] = 0.0f;
    }
    const int end = view.keys_of(last / heads.group).end;
    for (int key = view.keys_of(first / heads.group).start; key < end; key += TILE) {
        float scores[4][4] = {};
        multiply_rows(scores, scratch, q_rows, first, k_rows, key, wide);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float max = maxima[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                scores[i][j] = visible[i].holds(key + x + 16 * j) ? scores[i][j] * problem.scale : -INFINITY;
                max = fmaxf(max, scores[i][j]);
            }
            max = row_max(max);
            // So far the row may be fully masked.
            const float shift = max == -INFINITY ? 0.0f : max;
            const float shrink = expf(maxima[i] - shift);
            maxima[i] = max;
            sums[i] *= shrink;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                scores[i][j] = expf(scores[i][j] - shift);
                sums[i] += scores[i][j];
            }
#pragma unroll
            for (int column = 0; column < DIM / 16; ++column) out.at[i][column] *= shrink;
        }
        put_scores(scratch, scores);
        out.add_product(scratch, v_rows, key, wide);
    }

    const auto o_rows = query_rows(o, sequence, heads);
    const auto lse_rows = query_rows(lse, sequence, Heads{heads.group, 1});
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first + 4 * y + i;
        const float sum = row_sum(sums[i]);
        out.write(i, sum == 0.0f ? 0.0f : 1.0f / sum, o_rows, row, wide);
        if (x == 0 && row <= last) lse_rows.data[lse_rows.offset(row)] = maxima[i] + logf(sum);
    }
}

}  // namespace plain
