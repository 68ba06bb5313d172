// dequantize: y [n, k] = scale * codes[byte], one scale per block of rows and columns, W elements of a row at a time.
#include "common.cuh"

template <int W, typename T>
__device__ void dequantize(const unsigned char* bytes, const float* scales, const float* codes, T* y, long long n,
                           long long k, long long block_rows, long long block_columns) {
    const long long blocks_a_row = (k + block_columns - 1) / block_columns;
    for (long long i = flat_begin<W>(); i < n * k; i += flat_step<W>()) {
        const long long row = i / k, column = i - row * k;
        const float scale = scales[row / block_rows * blocks_a_row + column / block_columns];
        const auto pack = load<W>(bytes + i);
        Pack<T, W> out;
#pragma unroll
        for (int j = 0; j < W; ++j) out.at[j] = narrow<T>(scale * codes[pack.at[j]]);
        store(y + i, out);
    }
}

#define KERNELS(T, suffix)                                                                                             \
    KERNEL(256) dequantize_##suffix(const unsigned char* bytes, const float* scales, const float* codes, T* y,         \
                                    long long n, long long k, long long block_rows, long long block_columns) {         \
        constexpr int W = WIDE<T>;                                                                                     \
        const bool is_wide_row = k % W == 0 && block_columns % W == 0 && reinterpret_cast<uintptr_t>(bytes) % W == 0;  \
        if (is_wide_row && is_wide<T>(k, y)) dequantize<W>(bytes, scales, codes, y, n, k, block_rows, block_columns);  \
        else dequantize<1>(bytes, scales, codes, y, n, k, block_rows, block_columns);                                  \
    }
FOR_EACH_FLOAT(KERNELS)
