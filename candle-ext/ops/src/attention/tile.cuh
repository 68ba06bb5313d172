// Attention in f32, for every dtype and head dim: tiles of rows and of keys, multiplied on CUDA cores.
#pragma once

#include "sequence.cuh"

namespace plain {

constexpr int TILE = 64;      // rows or keys in a tile
constexpr int THREADS = 256;  // 16 by 16 of them; each has 4 by 4 scores of a tile
constexpr int SLICE = 32;     // columns staged at once for scores

// Row stride in shared memory: four more than the 32 banks, so that neighbouring rows are in different banks.
constexpr int SLICE_STRIDE = SLICE + 4;
constexpr int SCORE_STRIDE = TILE + 4;
constexpr int STAGED = 2 * TILE * SLICE_STRIDE;

// Keys or rows of DIM columns staged at once.
template <int DIM> constexpr int CHUNK = DIM > 128 ? 16 : 32;

// Columns of a vector load.
template <int DIM> constexpr int VECTOR = DIM % 64 == 0 ? 4 : 2;

// Resident blocks per multiprocessor, for tiles of rows and of keys.
template <int DIM> constexpr int ROW_BLOCKS = DIM > 128 ? 1 : 2;
template <int DIM> constexpr int KEY_BLOCKS = DIM > 64 ? 1 : 2;

// Shared memory of a block.
struct Scratch {
    alignas(16) float staged[STAGED];
    alignas(16) float scores[TILE * SCORE_STRIDE];
};

template <int COLUMNS, int STRIDE, int W, typename T>
__device__ __forceinline__ void stage_packs(float* to, const Rows<const T>& rows, int first, int n, int column) {
    constexpr int V = W < 4 ? W : 4;
#pragma unroll 1
    for (int i = threadIdx.x * W; i < n * COLUMNS; i += THREADS * W) {
        const int row = i / COLUMNS, at = i % COLUMNS;
        Pack<T, W> pack{};
        if (first + row < rows.n && column + at < rows.dim) {
            pack = load<W>(rows.data + rows.offset(first + row) + column + at);
        }
#pragma unroll
        for (int j = 0; j < W; j += V) {
            Pack<float, V> wide;
#pragma unroll
            for (int e = 0; e < V; ++e) wide.at[e] = widen(pack.at[j + e]);
            store(to + row * STRIDE + at + j, wide);
        }
    }
}

// Copies COLUMNS columns of n rows to shared memory; missing elements become zero.
template <int COLUMNS, int STRIDE, typename T>
__device__ __forceinline__ void stage(float* to, const Rows<const T>& rows, int first, int n, int column, bool wide) {
    if (wide) stage_packs<COLUMNS, STRIDE, WIDE<T>>(to, rows, first, n, column);
    else stage_packs<COLUMNS, STRIDE, 1>(to, rows, first, n, column);
}

// sums += a b^T for a tile of each. A thread has rows 4 y + i of a and x + 16 j of b.
template <typename T>
__device__ __forceinline__ void multiply_rows(float (&sums)[4][4], Scratch& scratch, const Rows<const T>& a,
                                              int first_a, const Rows<const T>& b, int first_b, bool wide) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float* a_slice = scratch.staged;
    float* b_slice = scratch.staged + TILE * SLICE_STRIDE;
    for (int column = 0; column < a.dim; column += SLICE) {
        __syncthreads();
        stage<SLICE, SLICE_STRIDE>(a_slice, a, first_a, TILE, column, wide);
        stage<SLICE, SLICE_STRIDE>(b_slice, b, first_b, TILE, column, wide);
        __syncthreads();
#pragma unroll 1
        for (int at = 0; at < SLICE && column + at < a.dim; at += 4) {
            Pack<float, 4> a_packs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a_packs[i] = load<4>(a_slice + (4 * y + i) * SLICE_STRIDE + at);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto b_pack = load<4>(b_slice + (x + 16 * j) * SLICE_STRIDE + at);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[i][j] += a_packs[i].at[e] * b_pack.at[e];
                }
            }
        }
    }
}

// Writes the threads' scores to shared memory, in the layout that multiply_rows leaves.
__device__ __forceinline__ void put_scores(Scratch& scratch, const float (&scores)[4][4]) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scratch.scores[(4 * y + i) * SCORE_STRIDE + x + 16 * j] = scores[i][j];
    }
}

// Four rows of a tile's result, 4 y + i, and DIM / 16 columns of each: for every 16 vectors the one at x.
template <int DIM> struct Sums {
    float at[4][DIM / 16] = {};

    // Index among the DIM columns of a thread's own column.
    __device__ __forceinline__ static int column_of(int own) {
        constexpr int V = VECTOR<DIM>;
        return own / V * V * 16 + threadIdx.x % 16 * V + own % V;
    }

    // Adds the shared scores times the rows of b from `first` on.
    template <typename T>
    __device__ __forceinline__ void add_product(Scratch& scratch, const Rows<const T>& b, int first, bool wide) {
        for (int start = 0; start < TILE && first + start < b.n; start += CHUNK<DIM>) {
            const int n = min(CHUNK<DIM>, b.n - first - start);
            __syncthreads();
            stage<DIM, DIM>(scratch.staged, b, first + start, CHUNK<DIM>, 0, wide);
            __syncthreads();
#pragma unroll
            for (int column = 0; column < DIM / 16; column += VECTOR<DIM>) {
                if (column_of(column) < b.dim) add_columns(scratch, column, start, n);
            }
        }
    }

    // The columns of one vector, for a chunk of n rows of b. Each chunk is summed separately: sums over thousands of
    // rows then have less error.
    __device__ __forceinline__ void add_columns(const Scratch& scratch, int column, int start, int n) {
        constexpr int V = VECTOR<DIM>;
        const int y = threadIdx.x / 16;
        float sums[4][V] = {};
#pragma unroll 1
        for (int key = 0; key < n; key += 4) {
            Pack<float, 4> scores[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[i] = load<4>(scratch.scores + (4 * y + i) * SCORE_STRIDE + start + key);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const auto pack = load<V>(scratch.staged + (key + e) * DIM + column_of(column));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int v = 0; v < V; ++v) sums[i][v] += scores[i].at[e] * pack.at[v];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int v = 0; v < V; ++v) at[i][column + v] += sums[i][v];
        }
    }

    // Writes the thread's row i times `scale`, rounded, to this row.
    template <int W, typename T>
    __device__ __forceinline__ void write_packs(int i, float scale, const Rows<T>& to, int row) const {
        T* data = to.data + to.offset(row);
#pragma unroll
        for (int column = 0; column < DIM / 16; column += W) {
            const int first = column_of(column);
            Pack<T, W> pack;
#pragma unroll
            for (int w = 0; w < W; ++w) pack.at[w] = narrow<T>(at[i][column + w] * scale);
            if (first < to.dim) store(data + first, pack);
        }
    }

    template <typename T>
    __device__ __forceinline__ void write(int i, float scale, const Rows<T>& to, int row, bool wide) const {
        if (row >= to.n) return;
        if (wide) write_packs<VECTOR<DIM>>(i, scale, to, row);
        else write_packs<1>(i, scale, to, row);
    }
};

}  // namespace plain
