// Attention on tensor cores, for 16-bit dtypes: tiles in shared memory, and matmuls of a warp's 32 rows with a tile.
#pragma once

#include <ptx.cuh>

#include "sequence.cuh"

namespace mma {

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int WARP_ROWS = 32;
constexpr int TILE_ROWS = WARPS * WARP_ROWS;  // query rows of a block's tile

// Resident blocks per multiprocessor, for tiles of rows and of keys.
template <int DIM> constexpr int ROW_BLOCKS = 2;
template <int DIM> constexpr int KEY_BLOCKS = 2;

constexpr float LOG2_E = 1.44269504f;

// Rows of DIM elements in shared memory, starting at a multiple of eight rows. Groups of eight columns are swizzled, so
// that the same columns of eight rows are in different banks.
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

// Starts an asynchronous copy of ROWS rows, from `first` on, into a tile; missing rows become zero. All threads must
// call.
template <int ROWS, typename T, int DIM>
__device__ __forceinline__ void stage(const Tile<T, DIM>& to, const Rows<const T>& rows, int first) {
    constexpr int GROUPS = DIM / 8;
    static_assert(ROWS * GROUPS % THREADS == 0);
#pragma unroll
    for (int i = 0; i < ROWS * GROUPS / THREADS; ++i) {
        // In PERIOD steps the block copies whole rows. As a compile-time constant it saves registers.
        constexpr int PERIOD = GROUPS % 3 == 0 ? 3 : 1;
        static_assert(PERIOD * THREADS % GROUPS == 0);
        const int at = i % PERIOD * THREADS + threadIdx.x, column = at % GROUPS * 8;
        const int row = at / GROUPS + i / PERIOD * (PERIOD * THREADS / GROUPS);
        const T* from = rows.data + rows.offset(first + row) + column;
        copy_async<16>(to.at(row, column), from, first + row < rows.n && column < rows.dim);
    }
}

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

// Masks the scores of columns from `first` on: keeps those in the range `visible(row)` of the thread's rows. The range
// is computed per tile, which saves registers; few tiles need it.
template <int COLUMNS, typename F>
__device__ __forceinline__ void hide(Matrix<COLUMNS>& scores, const F& visible, int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Range range = visible(scores.row_of(i));
#pragma unroll
        for (int j = 0; j < COLUMNS / 4; ++j) {
            if (!range.holds(first + scores.column_of(j))) scores.at[i][j] = -INFINITY;
        }
    }
}

// Writes the warp's rows, times a factor each, rounded, to rows from `first` on. `own` is shared memory of this warp
// alone.
template <typename T, int DIM>
__device__ __forceinline__ void write_rows(const Matrix<DIM>& sums, const float (&factors)[4], const Tile<T, DIM>& own,
                                           const Rows<T>& to, int first) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < DIM / 4; j += 2) {
            const uint pair = narrow_pair<T>(sums.at[i][j] * factors[i], sums.at[i][j + 1] * factors[i]);
            *reinterpret_cast<uint*>(own.at(sums.row_of(i), sums.column_of(j))) = pair;
        }
    }
    __syncwarp();
#pragma unroll 4
    for (int i = 0; i < DIM / 8; ++i) {
        const int at = i * 32 + threadIdx.x % 32, row = at / (DIM / 8), column = at % (DIM / 8) * 8;
        if (first + row < to.n && column < to.dim) {
            store(to.data + to.offset(first + row) + column, load<8>(own.at(row, column)));
        }
    }
}

}  // namespace mma
