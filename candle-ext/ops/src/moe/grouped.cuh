// Grouped matmuls: rows of x, sorted by group, with a weight [out, in] per group. Group g has rows offsets[g] to
// offsets[g + 1]. Sizes of groups stay on the device: the grid covers the most tiles of rows, and blocks without
// a tile end at once.
#pragma once

#include "common.cuh"
#include "row_tile.cuh"

// Rows or columns of an output tile, and terms per step.
constexpr int SIDE = 64, DEPTH = 16;
constexpr int GROUPED_THREADS = 256;
// Rows and columns of a thread.
constexpr int OWN = 4;

// Operands in shared memory: DEPTH terms of SIDE rows of a, and of SIDE columns of b.
struct Operands {
    float a[DEPTH][SIDE + 4], b[DEPTH][SIDE + 4];
};

// Sums of a thread's rows threadIdx.x / 16 + 16 i and columns threadIdx.x % 16 + 16 j.
struct Sums {
    float at[OWN][OWN] = {};

    __device__ __forceinline__ static int row(int i) { return threadIdx.x / 16 + 16 * i; }
    __device__ __forceinline__ static int column(int j) { return threadIdx.x % 16 + 16 * j; }

    __device__ __forceinline__ void add(const Operands& operands) {
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
#pragma unroll
                for (int j = 0; j < OWN; ++j) at[i][j] += operands.a[k][row(i)] * operands.b[k][column(j)];
            }
        }
    }
};

// Fills `to` with terms `first` on of SIDE rows, where a row's terms are contiguous: element (row, term) is at
// data[row * stride + term]. Missing rows and terms become zero.
template <typename T>
__device__ __forceinline__ void fill_by_rows(float (&to)[DEPTH][SIDE + 4], const T* data, long long stride, int n_rows,
                                             int first, int n_terms) {
#pragma unroll
    for (int i = 0; i < SIDE * DEPTH / GROUPED_THREADS; ++i) {
        const int row = threadIdx.x / DEPTH + i * (GROUPED_THREADS / DEPTH), k = threadIdx.x % DEPTH;
        const bool exists = row < n_rows && first + k < n_terms;
        to[k][row] = exists ? widen(data[row * stride + first + k]) : 0.0f;
    }
}

// Fills `to` likewise, where a term's columns are contiguous: element (term, column) is at data[term * stride + column].
template <typename T>
__device__ __forceinline__ void fill_by_terms(float (&to)[DEPTH][SIDE + 4], const T* data, long long stride,
                                              int n_columns, int first, int n_terms) {
#pragma unroll
    for (int i = 0; i < SIDE * DEPTH / GROUPED_THREADS; ++i) {
        const int k = threadIdx.x / SIDE + i * (GROUPED_THREADS / SIDE), column = threadIdx.x % SIDE;
        const bool exists = column < n_columns && first + k < n_terms;
        to[k][column] = exists ? widen(data[(first + k) * stride + column]) : 0.0f;
    }
}

// y [n, columns] = x [n, terms] times the group's weight. FORWARD: w [e * columns, terms], transposed; else w
// [e * terms, columns].
template <bool FORWARD, typename T>
__device__ __forceinline__ void multiply_groups(const T* x, const T* w, const uint* offsets, T* y, int n, int e, int columns,
                                                int terms) {
    __shared__ Operands operands;
    const RowTile tile = row_tile<SIDE>(offsets, e, n, blockIdx.x);
    const int n_rows = tile.end - tile.first, first_column = blockIdx.y * SIDE;
    if (n_rows <= 0) return;
    Sums sums;
    if (tile.group < e) {
        const int n_columns = min(SIDE, columns - first_column);
        x += static_cast<long long>(tile.first) * terms;
        w += static_cast<long long>(tile.group) * columns * terms;
        w += FORWARD ? static_cast<long long>(first_column) * terms : first_column;
        for (int first = 0; first < terms; first += DEPTH) {
            __syncthreads();
            fill_by_rows(operands.a, x, terms, n_rows, first, terms);
            if (FORWARD) fill_by_rows(operands.b, w, terms, n_columns, first, terms);
            else fill_by_terms(operands.b, w, columns, n_columns, first, terms);
            __syncthreads();
            sums.add(operands);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            const int row = sums.row(i), column = first_column + sums.column(j);
            if (row < n_rows && column < columns) {
                y[static_cast<long long>(tile.first + row) * columns + column] = narrow<T>(sums.at[i][j]);
            }
        }
    }
}

// dw [e * out, in] = [dw +] dy^T x of each group, one group per blockIdx.z.
template <typename T, typename G>
__device__ __forceinline__ void add_outer(const T* dy, const T* x, const uint* offsets, G* dw, int out, int in,
                                          int overwrite) {
    __shared__ Operands operands;
    const int group = blockIdx.z, first_row = blockIdx.y * SIDE, first_column = blockIdx.x * SIDE;
    const long long start = offsets[group];
    const int n_terms = offsets[group + 1] - start;
    if (n_terms == 0 && !overwrite) return;
    dy += start * out + first_row;
    x += start * in + first_column;
    Sums sums;
    for (int first = 0; first < n_terms; first += DEPTH) {
        __syncthreads();
        fill_by_terms(operands.a, dy, out, min(SIDE, out - first_row), first, n_terms);
        fill_by_terms(operands.b, x, in, min(SIDE, in - first_column), first, n_terms);
        __syncthreads();
        sums.add(operands);
    }
    dw += static_cast<long long>(group) * out * in;
    const auto at = [&](int i, int j) {
        return dw + static_cast<long long>(first_row + sums.row(i)) * in + first_column + sums.column(j);
    };
    const auto exists = [&](int i, int j) { return first_row + sums.row(i) < out && first_column + sums.column(j) < in; };
    // All old values are loaded before the first store: the loads overlap.
    float old[OWN][OWN] = {};
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            if (!overwrite && exists(i, j)) old[i][j] = widen(*at(i, j));
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            if (exists(i, j)) *at(i, j) = narrow<G>(sums.at[i][j] + old[i][j]);
        }
    }
}

#define GROUPED_GRAD_W(T, suffix, G, grad)                                                                          \
    KERNEL(256) grouped_grad_w_##suffix##_##grad(const T* dy, const T* x, const uint* offsets, G* dw, int out, int in, \
            int overwrite) {                                                                                        \
        add_outer(dy, x, offsets, dw, out, in, overwrite);                                                          \
    }
#define GROUPED(T, suffix)                                                                                          \
    KERNEL(256) grouped_forward_##suffix(const T* x, const T* w, const uint* offsets, T* y, int n, int e, int columns, \
            int terms) {                                                                                            \
        multiply_groups<true>(x, w, offsets, y, n, e, columns, terms);                                              \
    }                                                                                                               \
    KERNEL(256) grouped_grad_x_##suffix(const T* dy, const T* w, const uint* offsets, T* dx, int n, int e, int columns, \
            int terms) {                                                                                            \
        multiply_groups<false>(dy, w, offsets, dx, n, e, columns, terms);                                           \
    }                                                                                                               \
    GROUPED_GRAD_W(T, suffix, float, f32)                                                                           \
    GROUPED_GRAD_W(T, suffix, __nv_bfloat16, bf16)
FOR_EACH_FLOAT(GROUPED)
