// Grouped matmuls on tensor cores, for 16-bit dtypes: output tiles of 128 rows and columns, with three stages of 32 terms
// in shared memory. Rows are multiples of eight elements, aligned to 16 bytes.
#pragma once

#include <tiles.cuh>

#include "grouped.cuh"

namespace grouped_mma {

constexpr int THREADS = 128;
constexpr int ROWS = 128, COLUMNS = 128, TERMS = 32, STAGES = 3;
// A warp has a quarter of the output tile.
constexpr int WARP_ROWS = ROWS / 2, WARP_COLUMNS = COLUMNS / 2;

// Rows in memory, `stride` elements apart.
template <typename T> struct Source {
    const T* data;
    long long stride;
    // Rows and columns that exist.
    int n_rows, n_columns;
};

// Starts a copy of N rows and DIM columns, from the given ones on; missing ones become zero.
template <int N, typename T, int DIM>
__device__ __forceinline__ void stage(const mma::Tile<T, DIM>& to, const Source<T>& from, int first_row, int first_column) {
    constexpr int GROUPS = DIM / 8;
#pragma unroll
    for (int i = 0; i < N * GROUPS / THREADS; ++i) {
        const int at = i * THREADS + threadIdx.x, row = at / GROUPS, column = at % GROUPS * 8;
        const bool exists = first_row + row < from.n_rows && first_column + column < from.n_columns;
        copy_async<16>(to.at(row, column), from.data + (first_row + row) * from.stride + first_column + column, exists);
    }
}

// Calls `copy(stage, step)` for each step, two steps ahead of `multiply(stage)`.
template <typename Copy, typename Multiply>
__device__ __forceinline__ void pipeline(int n_steps, const Copy& copy, const Multiply& multiply) {
    const auto start = [&](int step) {
        if (step < n_steps) copy(step % STAGES, step);
        end_copy_group();
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) start(step);
    for (int step = 0; step < n_steps; ++step) {
        wait_for_copies_but<STAGES - 2>();
        // All warps have multiplied the step before, whose stage is filled next.
        __syncthreads();
        start(step + STAGES - 1);
        multiply(step % STAGES);
    }
    wait_for_copies();
}

__device__ __forceinline__ int warp_row() { return threadIdx.x / 64 * WARP_ROWS; }
__device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % 2 * WARP_COLUMNS; }

// Sums of a warp.
struct Sums {
    mma::Matrix<WARP_COLUMNS> rows[WARP_ROWS / 32];

    // Adds the matmul of one stage: `left(to, term, row)` and `right(to, term, column)` load 16 rows or columns and 16 terms.
    template <typename T, typename Left, typename Right>
    __device__ __forceinline__ void add(const Left& left, const Right& right) {
#pragma unroll
        for (int k = 0; k < TERMS; k += 16) {
            uint of_a[WARP_ROWS / 16][4], of_b[4];
#pragma unroll
            for (int row = 0; row < WARP_ROWS / 16; ++row) left(of_a[row], k, warp_row() + 16 * row);
#pragma unroll
            for (int column = 0; column < WARP_COLUMNS / 16; ++column) {
                right(of_b, k, warp_column() + 16 * column);
#pragma unroll
                for (int row = 0; row < WARP_ROWS / 16; ++row) {
                    rows[row / 2].template add<T>(row % 2, column, of_a[row], of_b);
                }
            }
        }
    }

    // Calls `write(row, column, sums)` for each row of the calling thread, within the output tile: sums[j] is that of column
    // `column` + mma::Matrix::column_of(j), less column_of(0).
    template <typename Write> __device__ __forceinline__ void for_each_row(const Write& write) const {
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 8; ++i) {
            const auto& sums = rows[i / 4];
            write(warp_row() + i / 4 * 32 + sums.row_of(i % 4), warp_column() + sums.column_of(0), sums.at[i % 4]);
        }
    }
};

// Pairs of neighbours in a thread's row, and their columns from the first one on.
constexpr int PAIRS = WARP_COLUMNS / 8;
__device__ __forceinline__ int column_of_pair(int pair) { return 8 * pair; }

// Right operand with the given terms: rows of columns' terms, or rows of terms.
template <bool FORWARD, typename T> struct Right;

template <typename T> struct Right<true, T> {
    using Tile = mma::Tile<T, TERMS>;
    static constexpr int N = COLUMNS;
    __device__ __forceinline__ static void stage_at(const Tile& to, const Source<T>& w, int column, int term) {
        stage<N>(to, w, column, term);
    }
    __device__ __forceinline__ static void load(uint (&to)[4], const Tile& tile, int term, int column) {
        tile.load_right_transposed(to, column, term);
    }
};

template <typename T> struct Right<false, T> {
    using Tile = mma::Tile<T, COLUMNS>;
    static constexpr int N = TERMS;
    __device__ __forceinline__ static void stage_at(const Tile& to, const Source<T>& w, int column, int term) {
        stage<N>(to, w, term, column);
    }
    __device__ __forceinline__ static void load(uint (&to)[4], const Tile& tile, int term, int column) {
        tile.load_right(to, term, column);
    }
};

// y [n, columns] = x [n, terms] times the group's weight; see multiply_groups.
template <bool FORWARD, typename T>
__device__ __forceinline__ void multiply_groups(const T* x, const T* w, const uint* offsets, T* y, int n, int e, int columns,
                                                int terms) {
    using Of = Right<FORWARD, T>;
    const RowTile tile = row_tile<ROWS>(offsets, e, n, blockIdx.x);
    const int n_rows = tile.end - tile.first, first_column = blockIdx.y * COLUMNS;
    if (n_rows <= 0) return;
    Sums sums;
    if (tile.group < e) {
        T* shared = reinterpret_cast<T*>(dynamic_shared());
        const auto left_at = [&](int i) { return mma::Tile<T, TERMS>{shared + i * ROWS * TERMS}; };
        const auto right_at = [&](int i) {
            return typename Of::Tile{shared + STAGES * ROWS * TERMS + i * COLUMNS * TERMS};
        };
        w += static_cast<long long>(tile.group) * columns * terms;
        const Source<T> left{x + static_cast<long long>(tile.first) * terms, terms, n_rows, terms};
        const Source<T> right{w, FORWARD ? terms : columns, FORWARD ? columns : terms, FORWARD ? terms : columns};
        const auto copy = [&](int i, int step) {
            stage<ROWS>(left_at(i), left, 0, step * TERMS);
            Of::stage_at(right_at(i), right, first_column, step * TERMS);
        };
        const auto multiply = [&](int i) {
            const auto a = left_at(i);
            const auto b = right_at(i);
            sums.template add<T>([&](uint (&to)[4], int k, int row) { a.load_left(to, row, k); },
                                 [&](uint (&to)[4], int k, int column) { Of::load(to, b, k, column); });
        };
        pipeline((terms + TERMS - 1) / TERMS, copy, multiply);
    }
    sums.for_each_row([&](int row, int column, const float* values) {
        column += first_column;
        if (row >= n_rows) return;
        T* to = y + static_cast<long long>(tile.first + row) * columns + column;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            if (column + column_of_pair(pair) >= columns) break;
            *reinterpret_cast<uint*>(to + column_of_pair(pair)) = narrow_pair<T>(values[2 * pair], values[2 * pair + 1]);
        }
    });
}

// dw [e * out, in] = [dw +] dy^T x of each group, one group per blockIdx.z.
template <typename T, typename G>
__device__ __forceinline__ void add_outer(const T* dy, const T* x, const uint* offsets, G* dw, int out, int in,
                                          int overwrite) {
    const int group = blockIdx.z, first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
    if (first_row >= out) return;
    const long long start = offsets[group];
    const int n_terms = offsets[group + 1] - start;
    if (n_terms == 0 && !overwrite) return;
    T* shared = reinterpret_cast<T*>(dynamic_shared());
    const auto left_at = [&](int i) { return mma::Tile<T, ROWS>{shared + i * ROWS * TERMS}; };
    const auto right_at = [&](int i) {
        return mma::Tile<T, COLUMNS>{shared + STAGES * ROWS * TERMS + i * COLUMNS * TERMS};
    };
    const Source<T> left{dy + start * out, out, n_terms, out};
    const Source<T> right{x + start * in, in, n_terms, in};
    Sums sums;
    const auto copy = [&](int i, int step) {
        stage<TERMS>(left_at(i), left, step * TERMS, first_row);
        stage<TERMS>(right_at(i), right, step * TERMS, first_column);
    };
    const auto multiply = [&](int i) {
        const auto a = left_at(i);
        const auto b = right_at(i);
        sums.template add<T>([&](uint (&to)[4], int k, int row) { a.load_left_transposed(to, k, row); },
                             [&](uint (&to)[4], int k, int column) { b.load_right(to, k, column); });
    };
    pipeline((n_terms + TERMS - 1) / TERMS, copy, multiply);
    dw += static_cast<long long>(group) * out * in;
    sums.for_each_row([&](int row, int column, const float* values) {
        row += first_row;
        column += first_column;
        if (row >= out) return;
        G* to = dw + static_cast<long long>(row) * in + column;
        // All loads of a row precede its stores: the compiler cannot tell that they do not overlap.
        float sum[PAIRS][2] = {};
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            if (!overwrite && column + column_of_pair(pair) < in) load_floats(to + column_of_pair(pair), sum[pair]);
        }
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            sum[pair][0] += values[2 * pair];
            sum[pair][1] += values[2 * pair + 1];
            if (column + column_of_pair(pair) < in) store_floats(to + column_of_pair(pair), sum[pair]);
        }
    });
}

}  // namespace grouped_mma

#define GROUPED_MMA_GRAD_W(T, suffix, G, grad)                                                                       \
    KERNEL(128) grouped_mma_grad_w_##suffix##_##grad(const T* dy, const T* x, const uint* offsets, G* dw, int out,   \
            int in, int overwrite) {                                                                                 \
        grouped_mma::add_outer(dy, x, offsets, dw, out, in, overwrite);                                              \
    }
#define GROUPED_MMA(T, suffix)                                                                                       \
    KERNEL(128) grouped_mma_forward_##suffix(const T* x, const T* w, const uint* offsets, T* y, int n, int e,        \
            int columns, int terms) {                                                                                \
        grouped_mma::multiply_groups<true>(x, w, offsets, y, n, e, columns, terms);                                  \
    }                                                                                                                \
    KERNEL(128) grouped_mma_grad_x_##suffix(const T* dy, const T* w, const uint* offsets, T* dx, int n, int e,       \
            int columns, int terms) {                                                                                \
        grouped_mma::multiply_groups<false>(dy, w, offsets, dx, n, e, columns, terms);                               \
    }                                                                                                                \
    GROUPED_MMA_GRAD_W(T, suffix, float, f32)                                                                        \
    GROUPED_MMA_GRAD_W(T, suffix, __nv_bfloat16, bf16)
GROUPED_MMA(__nv_bfloat16, bf16)
GROUPED_MMA(__half, f16)
