// Tensor cores, for 16-bit dtypes: tiles in shared memory, and matmuls of a warp's 32 rows with a tile.
#pragma once

#include "common.cuh"
#include <ptx.cuh>

namespace mma {

// Rows of DIM elements in shared memory, starting at a multiple of eight rows. Groups of eight columns are swizzled, so
// that the same columns of eight rows fall into different banks.
template <typename T, int DIM> struct Tile {
    static constexpr int GROUPS = DIM / 8;
    T* data;

    __device__ __forceinline__ T* at(int row, int column) const {
        const int mask = GROUPS % 8 == 0 ? row % 8 : row / 2 % 4;
        return data + row * DIM + (column / 8 ^ mask) * 8 + column % 8;
    }

    __device__ __forceinline__ Tile from(int row) const { return {data + row * DIM}; }

    // Loads 16 rows and 16 columns as the left operand of a matmul.
    __device__ __forceinline__ void load_left(uint (&to)[4], int row, int column) const {
        const int lane = threadIdx.x % 32;
        load_matrices(to, at(row + lane % 16, column + lane / 16 * 8));
    }

    // Loads the transpose of 16 rows and 16 columns as the left operand.
    __device__ __forceinline__ void load_left_transposed(uint (&to)[4], int row, int column) const {
        const int lane = threadIdx.x % 32;
        load_matrices_transposed(to, at(row + lane / 16 * 8 + lane % 8, column + lane / 8 % 2 * 8));
    }

    // Loads 16 rows and 16 columns as the right operand.
    __device__ __forceinline__ void load_right(uint (&to)[4], int row, int column) const {
        const int lane = threadIdx.x % 32;
        load_matrices_transposed(to, at(row + lane % 16, column + lane / 16 * 8));
    }

    // Loads the transpose of 16 rows and 16 columns as the right operand.
    __device__ __forceinline__ void load_right_transposed(uint (&to)[4], int row, int column) const {
        const int lane = threadIdx.x % 32;
        load_matrices(to, at(row + lane / 16 * 8 + lane % 8, column + lane / 8 % 2 * 8));
    }
};

// A warp's 32 rows of a matrix. A thread holds four rows, and of every eight columns two neighbours.
template <int COLUMNS> struct Matrix {
    float at[4][COLUMNS / 4] = {};

    __device__ __forceinline__ static int row_of(int i) { return threadIdx.x % 32 / 4 + 8 * i; }
    __device__ __forceinline__ static int column_of(int j) { return j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2; }

    // Adds a b for the 16 rows and 16 columns with these indices.
    template <typename T>
    __device__ __forceinline__ void add(int row, int column, const uint (&a)[4], const uint (&b)[4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 2 * row, j = 4 * column + 2 * half;
            multiply_add<T>(at[i][j], at[i][j + 1], at[i + 1][j], at[i + 1][j + 1], a, b[2 * half], b[2 * half + 1]);
        }
    }

    // Rounds the 16 rows and 16 columns with these indices, as the left operand of a matmul.
    template <typename T> __device__ __forceinline__ void get_left(uint (&to)[4], int row, int column) const {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const float* pair = &at[2 * row + part % 2][4 * column + part / 2 * 2];
            to[part] = narrow_pair<T>(pair[0], pair[1]);
        }
    }
};

// sums += a b^T for the warp's rows a and the COLUMNS rows of b.
template <int COLUMNS, typename T, int DIM>
__device__ __forceinline__ void multiply_rows(Matrix<COLUMNS>& sums, const Tile<T, DIM>& a, const Tile<T, DIM>& b) {
#pragma unroll
    for (int k = 0; k < DIM; k += 16) {
        uint left[2][4], right[4];
#pragma unroll
        for (int row = 0; row < 2; ++row) a.load_left(left[row], 16 * row, k);
#pragma unroll
        for (int column = 0; column < COLUMNS / 16; ++column) {
            b.load_right_transposed(right, 16 * column, k);
#pragma unroll
            for (int row = 0; row < 2; ++row) sums.template add<T>(row, column, left[row], right);
        }
    }
}

// sums += the rounded scores times the TERMS rows of b.
template <int TERMS, typename T, int DIM>
__device__ __forceinline__ void add_product(Matrix<DIM>& sums, const Matrix<TERMS>& scores, const Tile<T, DIM>& b) {
#pragma unroll
    for (int k = 0; k < TERMS / 16; ++k) {
        uint left[2][4], right[4];
#pragma unroll
        for (int row = 0; row < 2; ++row) scores.template get_left<T>(left[row], row, k);
#pragma unroll
        for (int column = 0; column < DIM / 16; ++column) {
            b.load_right(right, 16 * k, 16 * column);
#pragma unroll
            for (int row = 0; row < 2; ++row) sums.template add<T>(row, column, left[row], right);
        }
    }
}

}  // namespace mma
