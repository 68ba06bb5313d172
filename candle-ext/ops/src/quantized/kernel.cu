// dequantize: y [n, k] = scale * code value, one scale per block of rows and columns, W elements of a row at a time.
//
// A warp has 4 x 32 W columns of one row, a block of 256 threads eight rows. Blocks are numbered by rows in x and columns in y.
#include "common.cuh"
#include "ptx.cuh"

// Values of codes from a table of 256.
struct TableValues {
    const float* values;

    template <int W> __device__ __forceinline__ void decode(const Pack<unsigned char, W>& codes, float (&x)[W]) const {
#pragma unroll
        for (int j = 0; j < W; ++j) x[j] = values[codes.at[j]];
    }
};

// Values of E4M3 codes. The smallest exponent has the subnormal numbers, in E4M3 as in f32.
struct E4m3Values {
    static constexpr float EXPONENTS = 0x1p120f;  // between the exponent biases 7 and 127

    __device__ __forceinline__ static float of(unsigned char code) {
        const uint magnitude = code & 0x7f, sign = static_cast<uint>(code & 0x80) << 24;
        if (magnitude == 0x7f) return __uint_as_float(0x7fc00000u);
        const float x = __uint_as_float(magnitude << 20) * EXPONENTS;
        return __uint_as_float(__float_as_uint(x) | sign);
    }

    template <int W> __device__ __forceinline__ void decode(const Pack<unsigned char, W>& codes, float (&x)[W]) const {
#if __CUDA_ARCH__ >= 890
        if constexpr (W % 2 == 0) {
#pragma unroll
            for (int j = 0; j < W; j += 2) e4m3_values(codes.at[j] | codes.at[j + 1] << 8, x[j], x[j + 1]);
            return;
        }
#endif
#pragma unroll
        for (int j = 0; j < W; ++j) x[j] = of(codes.at[j]);
    }
};

// Packs of a thread, whose loads are independent.
constexpr uint PACKS = 4;

template <int W, typename T, typename V>
__device__ void dequantize(const unsigned char* bytes, const float* scales, V values, T* y, uint n, uint k,
                           uint block_rows, uint block_columns, uint blocks_a_row) {
    const uint row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= n) return;
    scales += static_cast<long long>(row / block_rows) * blocks_a_row;
    bytes += static_cast<long long>(row) * k;
    y += static_cast<long long>(row) * k;
#pragma unroll
    for (uint pack = 0; pack < PACKS; ++pack) {
        const uint column = ((blockIdx.y * PACKS + pack) * 32 + threadIdx.x % 32) * W;
        if (column >= k) return;
        const float scale = scales[column / block_columns];
        float x[W];
        values.decode(load<W>(bytes + column), x);
        Pack<T, W> out;
#pragma unroll
        for (int j = 0; j < W; ++j) out.at[j] = narrow<T>(scale * x[j]);
        store(y + column, out);
    }
}

// `values` is null for codes of E4M3. `width` is WIDE<T> if rows and blocks are multiples of it at aligned addresses, else 1.
template <typename T, typename V>
__device__ __forceinline__ void dequantize_any(const unsigned char* bytes, const float* scales, V values, T* y, uint n,
                                               uint k, uint block_rows, uint block_columns, uint blocks_a_row,
                                               int width) {
    constexpr int W = WIDE<T>;
    if (width == W) dequantize<W>(bytes, scales, values, y, n, k, block_rows, block_columns, blocks_a_row);
    else dequantize<1>(bytes, scales, values, y, n, k, block_rows, block_columns, blocks_a_row);
}

#define KERNELS(T, suffix)                                                                                            \
    KERNEL(256) dequantize_##suffix(const unsigned char* bytes, const float* scales, const float* values, T* y,       \
                                    int n, int k, int block_rows, int block_columns, int blocks_a_row, int width) {   \
        if (values == nullptr)                                                                                        \
            dequantize_any(bytes, scales, E4m3Values{}, y, n, k, block_rows, block_columns, blocks_a_row, width);     \
        else                                                                                                          \
            dequantize_any(bytes, scales, TableValues{values}, y, n, k, block_rows, block_columns, blocks_a_row, width); \
    }
FOR_EACH_FLOAT(KERNELS)
