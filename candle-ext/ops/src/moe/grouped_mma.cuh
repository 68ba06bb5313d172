// Grouped matmuls on tensor cores, for 16-bit dtypes: output tiles of 64 rows and 128 columns, with two stages of 64 terms
// in shared memory. Rows are multiples of eight elements, aligned to 16 bytes.
#pragma once

#include <tiles.cuh>

#include "grouped.cuh"

namespace grouped_mma {

constexpr int THREADS = 128;
constexpr int ROWS = SIDE, COLUMNS = 128, TERMS = 64;
// A warp has 32 rows and WARP_COLUMNS columns of the output tile.
constexpr int WARP_COLUMNS = COLUMNS / 2;

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

// Calls `copy(stage, step)` for each step, one step ahead of `multiply(stage)`.
template <typename Copy, typename Multiply>
__device__ __forceinline__ void pipeline(int n_steps, const Copy& copy, const Multiply& multiply) {
    if (n_steps > 0) copy(0, 0);
    for (int step = 0; step < n_steps; ++step) {
        wait_for_copies();
        __syncthreads();
        if (step + 1 < n_steps) copy((step + 1) % 2, step + 1);
        multiply(step % 2);
    }
}

__device__ __forceinline__ int warp_row() { return threadIdx.x / 64 * 32; }
__device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % 2 * WARP_COLUMNS; }

// Calls `write(row, column, first, second)` for each pair of neighbours of the warp's sums, within the output tile.
template <typename Write>
__device__ __forceinline__ void for_each_pair(const mma::Matrix<WARP_COLUMNS>& sums, const Write& write) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < WARP_COLUMNS / 4; j += 2) {
            write(warp_row() + sums.row_of(i), warp_column() + sums.column_of(j), sums.at[i][j], sums.at[i][j + 1]);
        }
    }
}

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
    const RowTile tile = row_tile<SIDE>(offsets, e, n, blockIdx.x);
    const int n_rows = tile.end - tile.first, first_column = blockIdx.y * COLUMNS;
    if (n_rows <= 0) return;
    mma::Matrix<WARP_COLUMNS> sums;
    if (tile.group < e) {
        T* shared = reinterpret_cast<T*>(dynamic_shared());
        const auto left_at = [&](int i) { return mma::Tile<T, TERMS>{shared + i * ROWS * TERMS}; };
        const auto right_at = [&](int i) {
            return typename Of::Tile{shared + 2 * ROWS * TERMS + i * COLUMNS * TERMS};
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
#pragma unroll
            for (int k = 0; k < TERMS; k += 16) {
                uint of_a[2][4], of_b[4];
#pragma unroll
                for (int row = 0; row < 2; ++row) a.load_left(of_a[row], warp_row() + 16 * row, k);
#pragma unroll
                for (int column = 0; column < WARP_COLUMNS / 16; ++column) {
                    Of::load(of_b, b, k, warp_column() + 16 * column);
#pragma unroll
                    for (int row = 0; row < 2; ++row) sums.template add<T>(row, column, of_a[row], of_b);
                }
            }
        };
        pipeline((terms + TERMS - 1) / TERMS, copy, multiply);
    }
    for_each_pair(sums, [&](int row, int column, float first, float second) {
        column += first_column;
        if (row >= n_rows || column >= columns) return;
        T* to = y + static_cast<long long>(tile.first + row) * columns + column;
        *reinterpret_cast<uint*>(to) = narrow_pair<T>(first, second);
    });
}

// Writes the warp's sums to `to`, 32 rows and WARP_COLUMNS columns, of which n_rows and n_columns exist; all do if WHOLE. If ADDS,
// adds the old values, which are all loaded before the first store: the loads overlap.
template <bool WHOLE, bool ADDS, typename G>
__device__ __forceinline__ void write_sums(const mma::Matrix<WARP_COLUMNS>& sums, G* to, long long stride, int n_rows,
                                           int n_columns) {
    constexpr int N = WARP_COLUMNS / 8;
    const auto exists = [&](int i, int j) {
        return WHOLE || (sums.row_of(i) < n_rows && sums.column_of(2 * j) < n_columns);
    };
    const auto at = [&](int i, int j) { return to + sums.row_of(i) * stride + sums.column_of(2 * j); };
    float values[4][N][2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (ADDS && exists(i, j)) load_floats(at(i, j), values[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            values[i][j][0] += sums.at[i][2 * j];
            values[i][j][1] += sums.at[i][2 * j + 1];
            if (exists(i, j)) store_floats(at(i, j), values[i][j]);
        }
    }
}

// dw [e * out, in] = [dw +] dy^T x of each group, one group per blockIdx.z.
template <typename T, typename G>
__device__ __forceinline__ void add_outer(const T* dy, const T* x, const uint* offsets, G* dw, int out, int in,
                                          int overwrite) {
    const int group = blockIdx.z, first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
    const long long start = offsets[group];
    const int n_terms = offsets[group + 1] - start;
    if (n_terms == 0 && !overwrite) return;
    T* shared = reinterpret_cast<T*>(dynamic_shared());
    const auto left_at = [&](int i) { return mma::Tile<T, ROWS>{shared + i * ROWS * TERMS}; };
    const auto right_at = [&](int i) {
        return mma::Tile<T, COLUMNS>{shared + 2 * ROWS * TERMS + i * COLUMNS * TERMS};
    };
    const Source<T> left{dy + start * out, out, n_terms, out};
    const Source<T> right{x + start * in, in, n_terms, in};
    mma::Matrix<WARP_COLUMNS> sums;
    const auto copy = [&](int i, int step) {
        stage<TERMS>(left_at(i), left, step * TERMS, first_row);
        stage<TERMS>(right_at(i), right, step * TERMS, first_column);
    };
    const auto multiply = [&](int i) {
        const auto a = left_at(i);
        const auto b = right_at(i);
#pragma unroll
        for (int k = 0; k < TERMS; k += 16) {
            uint of_a[2][4], of_b[4];
#pragma unroll
            for (int row = 0; row < 2; ++row) a.load_left_transposed(of_a[row], k, warp_row() + 16 * row);
#pragma unroll
            for (int column = 0; column < WARP_COLUMNS / 16; ++column) {
                b.load_right(of_b, k, warp_column() + 16 * column);
#pragma unroll
                for (int row = 0; row < 2; ++row) sums.template add<T>(row, column, of_a[row], of_b);
            }
        }
    };
    pipeline((n_terms + TERMS - 1) / TERMS, copy, multiply);
    const int row = first_row + warp_row(), column = first_column + warp_column();
    dw += (static_cast<long long>(group) * out + row) * in + column;
    if (overwrite) write_sums<false, false>(sums, dw, in, out - row, in - column);
    else if (row + 32 <= out && column + WARP_COLUMNS <= in) write_sums<true, true>(sums, dw, in, out - row, in - column);
    else write_sums<false, true>(sums, dw, in, out - row, in - column);
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
