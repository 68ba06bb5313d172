// Attention forward on tensor cores: a block computes a tile of query rows over the key tiles that they may attend to.
#pragma once

#include "mma.cuh"

namespace mma {

// Largest value among the four threads that share rows.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Online softmax of the thread's four rows, in powers of two.
struct Softmax {
    float scale;  // > 0, multiplied by log2 e
    float maxima[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    float sums[4] = {};

    // Turns scores into unnormalised powers of two and rescales the earlier sums. The final division comes last.
    template <int COLUMNS, int DIM>
    __device__ __forceinline__ void add(Matrix<COLUMNS>& scores, Matrix<DIM>& out) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float max = maxima[i];
#pragma unroll
            for (int j = 0; j < COLUMNS / 4; ++j) max = fmaxf(max, scores.at[i][j]);
            max = row_max(max);
            // So far the row may be fully masked.
            const float shift = max == -INFINITY ? 0.0f : max * scale;
            const float shrink = fast_exp2(maxima[i] * scale - shift);
            maxima[i] = max;
            sums[i] *= shrink;
#pragma unroll
            for (int j = 0; j < COLUMNS / 4; ++j) {
                scores.at[i][j] = fast_exp2(scores.at[i][j] * scale - shift);
                sums[i] += scores.at[i][j];
            }
#pragma unroll
            for (int j = 0; j < DIM / 4; ++j) out.at[i][j] *= shrink;
        }
    }
};

// lse [t, n_kv, group]
template <int DIM, typename T>
__device__ void forward(const T* q, const T* k, const T* v, T* o, float* lse, const Problem& problem) {
    constexpr int KEYS = 64;
    const Heads heads = problem.heads;
    const Sequence sequence = find_rows(problem);
    const View view = sequence.view;
    const auto q_rows = query_rows(q, sequence, heads);
    const auto k_rows = key_rows(k, sequence, heads), v_rows = key_rows(v, sequence, heads);
    const int first = sequence.tile * TILE_ROWS, last = min(first + TILE_ROWS, q_rows.n) - 1;
    const int own_row = threadIdx.x / 32 * WARP_ROWS;

    // Shared memory: the query rows, and double-buffered tiles of keys and values.
    const Tile<T, DIM> q_tile{reinterpret_cast<T*>(dynamic_shared())};
    const Tile<T, DIM> own = q_tile.from(own_row), stages = q_tile.from(TILE_ROWS);
    const auto stage_keys = [&](int number, int key) {
        stage<KEYS>(stages.from(2 * KEYS * number), k_rows, key);
        stage<KEYS>(stages.from(2 * KEYS * number + KEYS), v_rows, key);
    };

    Matrix<DIM> out;
    Softmax softmax{problem.scale * LOG2_E};
    const auto visible = [&](int row) { return view.keys_of(min(first + own_row + row, last) / heads.group); };

    const Range of_first = view.keys_of(first / heads.group), of_last = view.keys_of(last / heads.group);
    if (of_first.start < of_last.end) {
        stage<TILE_ROWS>(q_tile, q_rows, first);
        stage_keys(0, of_first.start);
    }
    for (int key = of_first.start, number = 0; key < of_last.end; key += KEYS, number ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (key + KEYS < of_last.end) stage_keys(number ^ 1, key + KEYS);
        const Tile<T, DIM> k_tile = stages.from(2 * KEYS * number), v_tile = k_tile.from(KEYS);

        Matrix<KEYS> scores;
        multiply_rows(scores, own, k_tile);
        if (key < of_last.start || key + KEYS > of_first.end) hide(scores, visible, key);
        softmax.add(scores, out);
        add_product(out, scores, v_tile);
    }

    const auto lse_rows = query_rows(lse, sequence, Heads{heads.group, 1});
    float factors[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first + own_row + out.row_of(i);
        const float sum = row_sum(softmax.sums[i]);
        factors[i] = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (threadIdx.x % 4 == 0 && row <= last) {
            lse_rows.data[lse_rows.offset(row)] = softmax.maxima[i] * problem.scale + logf(sum);
        }
    }
    write_rows(out, factors, own, query_rows(o, sequence, heads), first + own_row);
}

}  // namespace mma
