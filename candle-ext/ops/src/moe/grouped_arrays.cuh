// Arrays on the device that describe the groups of a grouped matmul to cuBLASLt or CUTLASS, and zeros that they do not
// write.
#pragma once

#include "common.cuh"

// Addresses of each group's first row of x and y and of its matrix w, in three runs of `stride` addresses. Sizes of each
// group: in, out and number of rows, in three runs of e. Factors: 1 and beta.
KERNEL(256) grouped_arrays(unsigned long long x, unsigned long long y, unsigned long long w, const uint* offsets,
                           unsigned long long* addresses, int* sizes, float* factors, long long x_row_bytes,
                           long long y_row_bytes, long long w_bytes, int in, int out, int e, int stride, float beta) {
    const int group = blockIdx.x * blockDim.x + threadIdx.x;
    if (group == 0) {
        factors[0] = 1.0f;
        factors[1] = beta;
    }
    if (group >= e) return;
    const unsigned long long first = offsets[group];
    addresses[group] = x + first * x_row_bytes;
    addresses[stride + group] = y + first * y_row_bytes;
    addresses[2 * stride + group] = w + group * w_bytes;
    sizes[group] = in;
    sizes[e + group] = out;
    sizes[2 * e + group] = static_cast<int>(offsets[group + 1] - offsets[group]);
}

// Output of a grouped matmul, as grouped.rs numbers it.
enum GroupedOutput { OUTPUT_Y, OUTPUT_X, OUTPUT_W };

// The same addresses. Sizes of each group: rows, columns and terms of its output [e, 3]. Elements between rows of x and w,
// and of y, in two runs of e. A group without rows has no output w: CUTLASS does not sum over zero terms.
KERNEL(256) grouped_problems(unsigned long long x, unsigned long long y, unsigned long long w, const uint* offsets,
                             unsigned long long* addresses, int* sizes, long long* strides, long long x_row_bytes,
                             long long y_row_bytes, long long w_bytes, int in, int out, int e, int stride, int output) {
    const int group = blockIdx.x * blockDim.x + threadIdx.x;
    if (group >= e) return;
    const unsigned long long first = offsets[group];
    const int n_rows = static_cast<int>(offsets[group + 1] - offsets[group]);
    addresses[group] = x + first * x_row_bytes;
    addresses[stride + group] = y + first * y_row_bytes;
    addresses[2 * stride + group] = w + group * w_bytes;
    strides[group] = in;
    strides[e + group] = out;
    const bool is_w = output == OUTPUT_W, has_output = !is_w || n_rows > 0;
    sizes[3 * group] = has_output ? (is_w ? out : n_rows) : 0;
    sizes[3 * group + 1] = has_output ? (output == OUTPUT_Y ? out : in) : 0;
    sizes[3 * group + 2] = output == OUTPUT_Y ? in : output == OUTPUT_X ? out : n_rows;
}

constexpr int ZEROED_ROWS = 64;

// Zeroes the rows of y [n, words] after the last group, ZEROED_ROWS of them per block.
KERNEL(256) zero_rest(const uint* offsets, unsigned long long* y, int n, int e, int words) {
    const int block_start = blockIdx.x * ZEROED_ROWS, n_kept = offsets[e];
    const int first = max(block_start, n_kept), end = min(block_start + ZEROED_ROWS, n);
    for (int row = first; row < end; ++row) {
        for (int i = threadIdx.x; i < words; i += blockDim.x) y[static_cast<long long>(row) * words + i] = 0;
    }
}

// Zeroes the matrices of groups without rows, of `words` each. Row blockIdx.y of blocks is a group's.
KERNEL(256) zero_empty_groups(const uint* offsets, unsigned long long* w, long long words) {
    const int group = blockIdx.y;
    if (offsets[group] != offsets[group + 1]) return;
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) w[group * words + i] = 0;
}
