// Quantization with a scale per block of 1x128, 128x1 or 128x128 elements.
#pragma once

#include "codes.cuh"
#include "tensor.cuh"

// Codes and inverse scales of blocks; null if they are not wanted.
struct BlockCodes {
    unsigned char* codes;
    float* scale_inv;
    // Strides of the inverse scales from a block row to the next, and from a block column to the next.
    long long row_stride, column_stride;

    __device__ __forceinline__ void set_scale(long long block_row, long long block_column, float scale) const {
        scale_inv[block_row * row_stride + block_column * column_stride] = 1.0f / scale;
    }
};

// Quantization in tiles of 128 x 128 by blocks of 256 threads. BLOCK 1: rows of 128 for `plain`, columns of 128 for
// `transposed`. BLOCK 2: columns of 128 for `plain`. BLOCK 3: whole tiles for both.
struct Blocks {
    BlockCodes plain, transposed;
    int rows, padded_rows, columns;
    Rule rule;
    Rounding rounding;

    static constexpr int SIDE = 128;

    // Elements between rows in shared memory, so that neither rows nor columns share banks.
    template <typename T> static constexpr int STRIDE = SIDE + 4 / sizeof(T);

    template <int BLOCK, typename F, int W, typename T> __device__ __forceinline__ void tile(const T* x) const {
        __shared__ float row_scales[SIDE], column_scales[SIDE];
        T* shared = reinterpret_cast<T*>(dynamic_shared());
        read<W>(x, shared);
        __syncthreads();
        if constexpr (BLOCK != 2) row_amaxes(shared, row_scales);
        if constexpr (BLOCK != 3) column_amaxes(shared, column_scales);
        __syncthreads();
        if constexpr (BLOCK == 3) whole_tile(row_scales);
        if (threadIdx.x < SIDE) scales<BLOCK, F>(row_scales, column_scales);
        __syncthreads();
        if (plain.codes) write<BLOCK, F, W>(shared, row_scales, column_scales);
        if (transposed.codes) write_transposed<BLOCK, F>(shared, row_scales, column_scales);
    }

    // Replaces amaxes by scales, and writes the inverse ones.
    template <int BLOCK, typename F> __device__ __forceinline__ void scales(float* of_rows, float* of_columns) const {
        const int i = threadIdx.x, row = first_row() + i, column = first_column() + i;
        if constexpr (BLOCK != 2) of_rows[i] = rule.scale<F>(of_rows[i]);
        if constexpr (BLOCK != 3) of_columns[i] = rule.scale<F>(of_columns[i]);
        if constexpr (BLOCK == 1) {
            if (plain.codes && row < padded_rows) plain.set_scale(row, blockIdx.x, of_rows[i]);
            if (transposed.codes && column < columns) transposed.set_scale(blockIdx.y, column, of_columns[i]);
        } else if constexpr (BLOCK == 2) {
            if (column < columns) plain.set_scale(blockIdx.y, column, of_columns[i]);
        } else if (i == 0) {
            if (plain.codes) plain.set_scale(blockIdx.y, blockIdx.x, of_rows[0]);
            if (transposed.codes) transposed.set_scale(blockIdx.y, blockIdx.x, of_rows[0]);
        }
    }

  private:
    __device__ __forceinline__ int first_row() const { return blockIdx.y * SIDE; }
    __device__ __forceinline__ int first_column() const { return blockIdx.x * SIDE; }

    // Copies the tile to shared memory, with zeros outside the matrix.
    template <int W, typename T> __device__ __forceinline__ void read(const T* x, T* shared) const {
        for (int i = threadIdx.x * W; i < SIDE * SIDE; i += blockDim.x * W) {
            const int row = first_row() + i / SIDE, column = first_column() + i % SIDE;
            const bool is_inside = row < rows && column < columns;
            constexpr int N = W < WIDE<T> ? W : WIDE<T>;
#pragma unroll
            for (int j = 0; j < W; j += N) {
                Pack<T, N> pack;
                if (is_inside) {
                    pack = load<N>(x + static_cast<long long>(row) * columns + column + j);
                } else {
#pragma unroll
                    for (int k = 0; k < N; ++k) pack.at[k] = narrow<T>(0.0f);
                }
                store_words(shared + i / SIDE * STRIDE<T> + i % SIDE + j, pack);
            }
        }
    }

    // Amaxes of the rows: two neighbouring lanes share a row.
    template <typename T> __device__ __forceinline__ void row_amaxes(const T* shared, float* amaxes) const {
        const int row = threadIdx.x / 2;
        float most = 0.0f;
#pragma unroll 8
        for (int i = threadIdx.x % 2; i < SIDE; i += 2) most = fmaxf(most, fabsf(widen(shared[row * STRIDE<T> + i])));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        if (threadIdx.x % 2 == 0) amaxes[row] = most;
    }

    // Amaxes of the columns: each half of the threads reads half of the rows.
    template <typename T> __device__ __forceinline__ void column_amaxes(const T* shared, float* amaxes) const {
        __shared__ float of_half[SIDE];
        const int column = threadIdx.x % SIDE, half = threadIdx.x / SIDE;
        float most = 0.0f;
#pragma unroll 8
        for (int i = half * SIDE / 2; i < (half + 1) * SIDE / 2; ++i) {
            most = fmaxf(most, fabsf(widen(shared[i * STRIDE<T> + column])));
        }
        if (half == 1) of_half[column] = most;
        __syncthreads();
        if (half == 0) amaxes[column] = fmaxf(most, of_half[column]);
    }

    // Replaces all amaxes by the largest.
    __device__ __forceinline__ void whole_tile(float* amaxes) const {
        const float most = block_max(threadIdx.x < SIDE ? amaxes[threadIdx.x] : 0.0f);
        if (threadIdx.x < SIDE) amaxes[threadIdx.x] = most;
    }

    template <int BLOCK, typename F, int W, typename T>
    __device__ __forceinline__ void write(const T* shared, const float* of_rows, const float* of_columns) const {
        for (int i = threadIdx.x * W; i < SIDE * SIDE; i += blockDim.x * W) {
            const int row = first_row() + i / SIDE, column = first_column() + i % SIDE;
            if (row >= padded_rows || column >= columns) continue;
            const long long place = static_cast<long long>(row) * columns + column;
            float values[W];
#pragma unroll
            for (int j = 0; j < W; ++j) {
                const float scale = BLOCK == 2 ? of_columns[i % SIDE + j] : of_rows[i / SIDE];
                values[j] = __fmul_rn(widen(shared[i / SIDE * STRIDE<T> + i % SIDE + j]), scale);
            }
            store(plain.codes + place, encode<F, W>(values, rounding, [=](int j) { return place + j; }));
        }
    }

    // Writes 16 rows of a column per thread. Two neighbouring lanes write 32 contiguous bytes.
    template <int BLOCK, typename F, typename T>
    __device__ __forceinline__ void write_transposed(const T* shared, const float* of_rows,
                                                     const float* of_columns) const {
        for (int i = threadIdx.x; i < SIDE * SIDE / 16; i += blockDim.x) {
            const int in_row = (i / 256 * 2 + i % 2) * 16, in_column = i % 256 / 2;
            const int row = first_row() + in_row, column = first_column() + in_column;
            if (row >= padded_rows || column >= columns) continue;
            const float scale = BLOCK == 3 ? of_rows[0] : of_columns[in_column];
            float values[16];
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                values[j] = __fmul_rn(widen(shared[(in_row + j) * STRIDE<T> + in_column]), scale);
            }
            const long long step = columns, place = row * step + column;
            const auto pack = encode<F, 16>(values, rounding, [=](int j) { return place + j * step; });
            store(transposed.codes + static_cast<long long>(column) * padded_rows + row, pack);
        }
    }
};
