// Amax of a tensor, and quantization with one scale.
#pragma once

#include "codes.cuh"

// parts[block] = the largest magnitude that the block reads; NaN counts as nothing.
template <int W, typename T> __device__ __forceinline__ void amax_parts(const T* x, float* parts, long long n) {
    float most = 0.0f;
#pragma unroll 4
    for (long long i = flat_begin<W>(); i < n; i += flat_step<W>()) {
        const auto pack = load<W>(x + i);
#pragma unroll
        for (int j = 0; j < W; ++j) most = fmaxf(most, fabsf(widen(pack.at[j])));
    }
    most = block_max(most);
    if (threadIdx.x == 0) parts[blockIdx.x] = most;
}

// True if rows of x and of codes can be read and written eight elements at a time.
template <typename T> __device__ __forceinline__ bool is_wide_tile(const T* x, const unsigned char* codes, int columns) {
    return columns % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(codes) % 8 == 0;
}

// Copies a pack to shared memory whose rows are aligned to 4 bytes.
template <typename T, int W> __device__ __forceinline__ void store_words(T* to, const Pack<T, W>& pack) {
    constexpr int N = W * sizeof(T) < 4 ? W : 4 / sizeof(T);
#pragma unroll
    for (int j = 0; j < W; j += N) {
        Pack<T, N> word;
#pragma unroll
        for (int i = 0; i < N; ++i) word.at[i] = pack.at[j + i];
        store(to + j, word);
    }
}

// Quantization with one scale, in tiles of 64 x 64 by blocks of 256 threads.
struct Cast {
    const float* scale;
    // Outputs; codes, transposed, amax and slot may be null.
    float* scale_inv;
    unsigned char *codes, *transposed;
    float *amax, *slot;
    int rows, padded_rows, columns;
    Rounding rounding;

    static constexpr int SIDE = 64, STRIDE = SIDE + 4;

    template <typename F, int W, typename T> __device__ __forceinline__ void tile(const T* x) const {
        __shared__ uint words[SIDE * STRIDE / 4];
        unsigned char* shared = reinterpret_cast<unsigned char*>(words);
        const int first_row = blockIdx.y * SIDE, first_column = blockIdx.x * SIDE;
        const float factor = scale[0];
        float most = 0.0f;
#pragma unroll 2
        for (int i = threadIdx.x * W; i < SIDE * SIDE; i += blockDim.x * W) {
            const int row = first_row + i / SIDE, column = first_column + i % SIDE;
            const bool is_inside = row < padded_rows && column < columns;
            const long long place = static_cast<long long>(row) * columns + column;
            float values[W] = {};
            if (is_inside && row < rows) load_floats<W>(x + place, values);
#pragma unroll
            for (int j = 0; j < W; ++j) {
                most = fmaxf(most, fabsf(values[j]));
                values[j] = __fmul_rn(values[j], factor);
            }
            const auto pack = encode<F, W>(values, rounding, [=](int j) { return place + j; });
            if (is_inside && codes) store(codes + place, pack);
            if (transposed) store_words(shared + i / SIDE * STRIDE + i % SIDE, pack);
        }
        if (transposed) {
            __syncthreads();
            transpose(shared, first_row, first_column);
        }
        if (slot) {
            most = block_max(most);
            if (threadIdx.x == 0 && most > 0.0f) {
                raise(slot, most);
                if (amax) raise(amax, most);
            }
        }
        if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) scale_inv[0] = 1.0f / factor;
    }

    // Transposes a tile of row-major codes. The scale is not read.
    __device__ __forceinline__ void transpose_tile(const unsigned char* from) const {
        constexpr int W = 16;
        __shared__ uint words[SIDE * STRIDE / 4];
        unsigned char* shared = reinterpret_cast<unsigned char*>(words);
        const int first_row = blockIdx.y * SIDE, first_column = blockIdx.x * SIDE;
        for (int i = threadIdx.x * W; i < SIDE * SIDE; i += blockDim.x * W) {
            const int row = first_row + i / SIDE, column = first_column + i % SIDE;
            if (row >= rows || column >= columns) continue;
            store_words(shared + i / SIDE * STRIDE + i % SIDE, load<W>(from + static_cast<long long>(row) * columns + column));
        }
        __syncthreads();
        transpose(shared, first_row, first_column);
    }

    // Writes the tile transposed: 16 rows of a column per thread. Two neighbouring lanes write 32 contiguous bytes.
    __device__ __forceinline__ void transpose(const unsigned char* shared, int first_row, int first_column) const {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const int row = (warp % 2 * 2 + lane % 2) * 16, column = warp / 2 * 16 + lane / 2;
        if (first_row + row >= padded_rows || first_column + column >= columns) return;
        Pack<unsigned char, 16> pack;
#pragma unroll
        for (int j = 0; j < 16; ++j) pack.at[j] = shared[(row + j) * STRIDE + column];
        store(transposed + static_cast<long long>(first_column + column) * padded_rows + first_row + row, pack);
    }
};
