// Attention on tensor cores, for 16-bit dtypes: sizes of tiles, and their loads and stores.
#pragma once

#include <tiles.cuh>

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
