// FP8: amax, scales, quantization of a matrix [rows, columns], row-major and transposed, and delayed scaling.
//
// Transposed codes are [columns, padded_rows]. Rows from `rows` to `padded_rows` are zeros.
#include "blocks.cuh"
#include "codes.cuh"
#include "groups.cuh"
#include "patches.cuh"
#include "tensor.cuh"

#define AMAX_KERNELS(T, suffix)                                                        \
    KERNEL(256) amax_parts_##suffix(const T* x, float* parts, long long n) {           \
        if (is_wide<T>(n, x)) amax_parts<WIDE<T>>(x, parts, n);                        \
        else amax_parts<1>(x, parts, n);                                               \
    }
FOR_EACH_FLOAT(AMAX_KERNELS)

// amax = the largest of n parts. With `scale`, also the scale of the matrix for a format with this maximum.
KERNEL(256) finish_amax(const float* parts, int n, float* amax, float* scale, float format_max, float epsilon,
                        int power_of_two, float largest) {
    float most = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) most = fmaxf(most, parts[i]);
    most = block_max(most);
    if (threadIdx.x > 0) return;
    amax[0] = most;
    if (scale) scale[0] = Rule{epsilon, power_of_two != 0, largest}.scale(most, format_max);
}

#define GROUP_AMAXES_KERNEL(T, suffix)                                                                                 \
    KERNEL(256) group_amaxes_##suffix(const T* x, const uint* offsets, int rows_per_group, float* amaxes,              \
                                      float* slots, int stride, int n, int e, int columns) {                           \
        group_amaxes(GroupInput<T>{x, {offsets, rows_per_group}, n, e, columns, {}}, amaxes, slots, stride);           \
    }
FOR_EACH_FLOAT(GROUP_AMAXES_KERNEL)

// slot = max(slot, amax)
KERNEL(32) record_amax(const float* amax, float* slot) {
    if (threadIdx.x == 0) raise(slot, amax[0]);
}

// Parameters of one output of a quantization with a scale, and with a scale per block.
#define CAST_OUTPUT(n)                                                                                                \
    const float *scale##n, float *scale_inv##n, unsigned char *codes##n, unsigned char *transposed##n, float *amax##n, \
        float *slot##n, unsigned long long key##n
#define CAST_OF(n)                                                                                                    \
    {                                                                                                                 \
        scale##n, scale_inv##n, codes##n, transposed##n, amax##n, slot##n, rows, padded_rows, columns,                \
            {key##n, is_stochastic != 0}                                                                              \
    }
#define BLOCKS_OUTPUT(n)                                                                                              \
    unsigned char *codes##n, float *scale_inv##n, long long row_stride##n, long long column_stride##n,                \
        unsigned char *transposed##n, float *transposed_scale_inv##n, long long transposed_row_stride##n,             \
        long long transposed_column_stride##n, unsigned long long key##n
#define BLOCKS_OF(n)                                                                                                  \
    {                                                                                                                 \
        {codes##n, scale_inv##n, row_stride##n, column_stride##n},                                                    \
            {transposed##n, transposed_scale_inv##n, transposed_row_stride##n, transposed_column_stride##n}, rows,    \
            padded_rows, columns, {epsilon, power_of_two != 0, largest}, {key##n, is_stochastic != 0}                 \
    }
#define BLOCK_RULE float epsilon, int power_of_two, float largest

#define CAST_KERNEL(F, format, T, suffix)                                                                             \
    KERNEL(256) cast_##format##_##suffix(const T* x, CAST_OUTPUT(0), int rows, int padded_rows, int columns,          \
                                         int is_stochastic) {                                                         \
        const Cast cast CAST_OF(0);                                                                                   \
        if (is_wide_tile(x, codes0, columns)) cast.tile<F, 8>(x);                                                     \
        else cast.tile<F, 1>(x);                                                                                      \
    }
#define BLOCKS_KERNEL(BLOCK, block, F, format, T, suffix)                                                             \
    KERNEL(256) blocks_##block##_##format##_##suffix(const T* x, BLOCKS_OUTPUT(0), int rows, int padded_rows,         \
                                                     int columns, int is_stochastic, BLOCK_RULE) {                    \
        const Blocks blocks BLOCKS_OF(0);                                                                             \
        if (is_wide_tile(x, codes0, columns)) blocks.tile<BLOCK, F, 8>(x);                                            \
        else blocks.tile<BLOCK, F, 1>(x);                                                                             \
    }
#define GROUPS_KERNEL(F, format, T, suffix)                                                                            \
    KERNEL(256) groups_##format##_##suffix(                                                                            \
        const T* x, const uint* offsets, int rows_per_group, T* y, unsigned char* codes, float* scale_inv,             \
        const float* scales, int stride, const float* amaxes, int n, int e, int columns, float epsilon, float largest, \
        unsigned long long key, int is_stochastic) {                                                                   \
        const GroupInput<T> input{x, {offsets, rows_per_group}, n, e, columns, {key, is_stochastic != 0}};             \
        const Rule rule{epsilon, true, largest};                                                                       \
        if (y) round_groups<F>(input, scales, stride, amaxes, rule, GroupValues<T>{y});                                \
        else round_groups<F>(input, scales, stride, amaxes, rule, GroupCodes{codes, scale_inv});                       \
    }                                                                                                                  \
    KERNEL(256) group_values_##format##_##suffix(const unsigned char* codes, const float* scale_inv,                   \
                                                 const uint* offsets, int rows_per_group, T* y, int n, int e,          \
                                                 int columns) {                                                        \
        group_values<F>(codes, scale_inv, {offsets, rows_per_group}, n, e, columns, y);                                \
    }
#define GROUP_BLOCKS_KERNEL(BLOCK, block, F, format, T, suffix)                                                        \
    KERNEL(256) group_blocks_##block##_##format##_##suffix(                                                            \
        const T* x, const uint* offsets, int rows_per_group, T* y, unsigned char* codes, float* scale_inv, int n,      \
        int e, int columns, float epsilon, float largest, unsigned long long key, int is_stochastic) {                 \
        const GroupInput<T> input{x, {offsets, rows_per_group}, n, e, columns, {key, is_stochastic != 0}};             \
        const Rule rule{epsilon, true, largest};                                                                       \
        if (y) round_group_blocks<BLOCK, F>(input, rule, GroupValues<T>{y});                                           \
        else round_group_blocks<BLOCK, F>(input, rule, GroupCodes{codes, scale_inv});                                  \
    }                                                                                                                  \
    KERNEL(256) group_block_values_##block##_##format##_##suffix(                                                      \
        const unsigned char* codes, const float* scale_inv, const uint* offsets, int rows_per_group, T* y, int n,      \
        int e, int columns) {                                                                                          \
        group_block_values<BLOCK, F>(codes, scale_inv, {offsets, rows_per_group}, n, e, columns, y);                   \
    }
#define FORMAT_KERNELS(F, format, T, suffix)                \
    GROUPS_KERNEL(F, format, T, suffix)                     \
    GROUP_BLOCKS_KERNEL(1, 1x128, F, format, T, suffix)     \
    GROUP_BLOCKS_KERNEL(2, 128x1, F, format, T, suffix)     \
    GROUP_BLOCKS_KERNEL(3, 128x128, F, format, T, suffix)   \
    CAST_KERNEL(F, format, T, suffix)                       \
    BLOCKS_KERNEL(1, 1x128, F, format, T, suffix)           \
    BLOCKS_KERNEL(2, 128x1, F, format, T, suffix)           \
    BLOCKS_KERNEL(3, 128x128, F, format, T, suffix)
#define QUANTIZE_KERNELS(T, suffix)       \
    FORMAT_KERNELS(E4m3, e4m3, T, suffix) \
    FORMAT_KERNELS(E5m2, e5m2, T, suffix)
FOR_EACH_FLOAT(QUANTIZE_KERNELS)

// Patches of matrices in memory.
#define PATCHES_KERNELS(F, format)                                                                                    \
    KERNEL(256, 2) cast_patches_##format(const __nv_bfloat16* x, CAST_OUTPUT(0), int rows, int padded_rows,           \
                                         int columns, int is_stochastic) {                                            \
        cast_patches<F>(InMemory{x}, {CAST_OF(0)});                                                                   \
    }                                                                                                                 \
    KERNEL(256, 2) block_patches_1x128_##format(const __nv_bfloat16* x, BLOCKS_OUTPUT(0), int rows, int padded_rows,  \
                                                int columns, int is_stochastic, BLOCK_RULE) {                         \
        block_patches<1, F>(InMemory{x}, {BLOCKS_OF(0)});                                                             \
    }                                                                                                                 \
    KERNEL(256, 2) block_patches_128x128_##format(const __nv_bfloat16* x, BLOCKS_OUTPUT(0), int rows,                 \
                                                  int padded_rows, int columns, int is_stochastic, BLOCK_RULE) {      \
        block_patches<3, F>(InMemory{x}, {BLOCKS_OF(0)});                                                             \
    }                                                                                                                 \
    KERNEL(256) cast_gated_grads_##format(const __nv_bfloat16* gate, const __nv_bfloat16* up,                         \
                                             const __nv_bfloat16* dy, CAST_OUTPUT(0), CAST_OUTPUT(1), int rows,       \
                                             int padded_rows, int columns, int is_stochastic) {                       \
        cast_patches<F>(GatedGrads{gate, up, dy}, {CAST_OF(0), CAST_OF(1)});                                          \
    }                                                                                                                 \
    KERNEL(256) block_gated_grads_##format(const __nv_bfloat16* gate, const __nv_bfloat16* up,                     \
                                              const __nv_bfloat16* dy, BLOCKS_OUTPUT(0), BLOCKS_OUTPUT(1), int rows,  \
                                              int padded_rows, int columns, int is_stochastic, BLOCK_RULE) {          \
        block_patches<1, F>(GatedGrads{gate, up, dy}, {BLOCKS_OF(0), BLOCKS_OF(1)});                                  \
    }
PATCHES_KERNELS(E4m3, e4m3)
PATCHES_KERNELS(E5m2, e5m2)

// The SwiGLU of gate and up; inputs are E4M3 with every recipe.
KERNEL(256, 2) cast_gated_input(const __nv_bfloat16* gate, const __nv_bfloat16* up, CAST_OUTPUT(0), int rows,
                                int padded_rows, int columns, int is_stochastic) {
    cast_patches<E4m3>(GatedInput{gate, up}, {CAST_OF(0)});
}

KERNEL(256, 2) block_gated_input(const __nv_bfloat16* gate, const __nv_bfloat16* up, BLOCKS_OUTPUT(0), int rows,
                                 int padded_rows, int columns, int is_stochastic, BLOCK_RULE) {
    block_patches<1, E4m3>(GatedInput{gate, up}, {BLOCKS_OF(0)});
}

// Amaxes of the SwiGLU of gate and up, and of the gradients of gate and up.
KERNEL(256) amax_gated_input(const __nv_bfloat16* gate, const __nv_bfloat16* up, float* parts, long long n) {
    amax_source_parts(GatedInput{gate, up}, {parts}, n);
}

KERNEL(256) amax_gated_grads(const __nv_bfloat16* gate, const __nv_bfloat16* up, const __nv_bfloat16* dy,
                             float* gate_parts, float* up_parts, long long n) {
    amax_source_parts(GatedGrads{gate, up, dy}, {gate_parts, up_parts}, n);
}

// The RMSNorm of x, from 1 / sqrt(mean(x^2) + eps) of each row.
KERNEL(256, 2) cast_normed_input(const __nv_bfloat16* x, const __nv_bfloat16* w, const float* rstd, CAST_OUTPUT(0),
                                 int rows, int padded_rows, int columns, int is_stochastic) {
    cast_patches<E4m3>(NormedInput{x, w, rstd}, {CAST_OF(0)});
}

KERNEL(256, 2) block_normed_input(const __nv_bfloat16* x, const __nv_bfloat16* w, const float* rstd, BLOCKS_OUTPUT(0),
                                  int rows, int padded_rows, int columns, int is_stochastic, BLOCK_RULE) {
    block_patches<1, E4m3>(NormedInput{x, w, rstd}, {BLOCKS_OF(0)});
}

// transposed [columns, rows] = codes [rows, columns]; both are multiples of 16, and the codes are aligned to 16 bytes.
KERNEL(256) transpose_codes(const unsigned char* codes, unsigned char* transposed, int rows, int columns) {
    Cast{nullptr, nullptr, nullptr, transposed, nullptr, nullptr, rows, rows, columns, {0, false}}.transpose_tile(codes);
}

// ordered [n / padded, padded] = scales, whose blocks along both dims have these strides, and zeros after the `inner` scales of a row.
KERNEL(256) order_scales(const float* scales, float* ordered, int n, int padded, int inner, int outer_stride, int inner_stride) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    const int row = i / padded, column = i % padded;
    ordered[i] = column < inner ? scales[row * outer_stride + column * inner_stride] : 0.0f;
}

// Updates delayed scaling, a warp per slot. Amaxes that are 0 or not finite change nothing. `max_0` to `max_2` are the
// maxima of the formats of a layer's three slots; `is_max` selects the amax of the history, or its newest.
KERNEL(256) update_delayed(const float* amaxes, float* history, float* scales, int n_slots, int length, int is_max,
                           float margin, float max_0, float max_1, float max_2) {
    const int slot = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (slot >= n_slots) return;
    const float newest = amaxes[slot];
    if (newest == 0.0f || !isfinite(newest)) return;
    float* past = history + static_cast<long long>(slot) * length;
    float most = fmaxf(newest, 0.0f);
    // From the oldest on, so that no amax is overwritten before it has moved.
    for (int first = (length - 1) / 32 * 32; first >= 0; first -= 32) {
        const int i = first + lane;
        const float moved = i == 0 ? newest : i < length ? past[i - 1] : 0.0f;
        __syncwarp();
        if (i < length) past[i] = moved;
        most = fmaxf(most, moved);
    }
    most = warp_max(most);
    if (lane > 0) return;
    const float amax = is_max ? most : newest;
    const int operand = slot % 3;
    const float scale = (operand == 0 ? max_0 : operand == 1 ? max_1 : max_2) / amax / margin;
    scales[slot] = isinf(scale) ? 3.402823466e38f : scale;
}
