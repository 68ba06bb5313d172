// Quantization of the rows of groups to the values of codes. Scales are powers of two: a scale per group, or per block of a
// group's rows.
#pragma once

#include "../moe/row_tile.cuh"
#include "codes.cuh"

// First row of each group: a table, or equally many rows.
struct GroupRows {
    const uint* offsets;
    int rows_per_group;

    __device__ __forceinline__ int operator[](int group) const {
        return offsets ? static_cast<int>(offsets[group]) : group * rows_per_group;
    }
};

// Returns the value of a code that encoding has returned.
template <typename F> __device__ __forceinline__ float code_value(uint code) {
    const uint magnitude = code & 0x7f;
    if (magnitude == 0x7f) return __uint_as_float(0x7fc00000u);
    const float normal = __uint_as_float((magnitude << DROPPED<F>) + ((127u - F::EXPONENT_BIAS) << 23));
    const float subnormal = static_cast<float>(magnitude) * (F::SMALLEST / (1 << F::MANTISSA_BITS));
    const float value = magnitude >> F::MANTISSA_BITS ? normal : subnormal;
    return code & 0x80 ? -value : value;
}

// Rows [n, columns] in groups, and the rounding of their codes.
template <typename T> struct GroupInput {
    const T* x;
    GroupRows rows;
    int n, e, columns;
    Rounding rounding;

    template <typename F> __device__ __forceinline__ uint code(long long place, float scale) const {
        const float values[1] = {__fmul_rn(widen(x[place]), scale)};
        return encode<F, 1>(values, rounding, [=](int) { return place; }).at[0];
    }

    __device__ __forceinline__ float magnitude(long long place) const { return fabsf(widen(x[place])); }
};

// Output of a quantization: the values of the codes.
template <typename T> struct GroupValues {
    T* y;

    template <typename F> __device__ __forceinline__ void put(long long place, uint code, float scale_inv) const {
        y[place] = narrow<T>(__fmul_rn(code_value<F>(code), scale_inv));
    }
    __device__ __forceinline__ void clear(long long place) const { y[place] = narrow<T>(0.0f); }
    __device__ __forceinline__ void set_scale(long long, float) const {}
};

// Output of a quantization: codes, and an inverse scale per group or per block of a tile.
struct GroupCodes {
    unsigned char* codes;
    float* scale_inv;

    template <typename F> __device__ __forceinline__ void put(long long place, uint code, float) const {
        codes[place] = static_cast<unsigned char>(code);
    }
    __device__ __forceinline__ void clear(long long place) const { codes[place] = 0; }
    __device__ __forceinline__ void set_scale(long long i, float scale) const { scale_inv[i] = 1.0f / scale; }
};

// Rows of a tile with one scale, and blocks that share a tile.
constexpr int GROUP_TILE_ROWS = 64;
// Rows and columns of a tile with scales of blocks.
constexpr int GROUP_SIDE = 128;

// Returns the place of the inverse scale of row or column i of a tile of blocks.
template <int BLOCK> __device__ __forceinline__ long long group_scale_place(int i, int columns) {
    const long long tile = blockIdx.x;
    if constexpr (BLOCK == 1) return (tile * GROUP_SIDE + i) * gridDim.y + blockIdx.y;
    if constexpr (BLOCK == 2) return tile * columns + blockIdx.y * GROUP_SIDE + i;
    return tile * gridDim.y + blockIdx.y;
}

// Raises the amax of each group, and that of its slot. amaxes [e]; slots, every `stride` elements, may be null.
template <typename T>
__device__ __forceinline__ void group_amaxes(const GroupInput<T>& input, float* amaxes, float* slots, int stride) {
    const RowTile tile = row_tile<GROUP_TILE_ROWS>(input.rows, input.e, input.n, blockIdx.x);
    if (tile.group >= input.e || tile.end <= tile.first) return;
    const long long end = static_cast<long long>(tile.end) * input.columns;
    float most = 0.0f;
    long long place = static_cast<long long>(tile.first) * input.columns + blockIdx.y * blockDim.x + threadIdx.x;
    for (; place < end; place += gridDim.y * blockDim.x) most = fmaxf(most, input.magnitude(place));
    most = block_max(most);
    if (threadIdx.x > 0 || most == 0.0f) return;
    raise(amaxes + tile.group, most);
    if (slots) raise(slots + static_cast<long long>(tile.group) * stride, most);
}

// Quantizes with a scale per group: the given one, every `stride` elements, or by `rule` from the group's amax. A given 0 is no
// scale.
template <typename F, typename T, typename Output>
__device__ __forceinline__ void round_groups(const GroupInput<T>& input, const float* scales, int stride, const float* amaxes,
                                             Rule rule, const Output& output) {
    const RowTile tile = row_tile<GROUP_TILE_ROWS>(input.rows, input.e, input.n, blockIdx.x);
    if (tile.end <= tile.first) return;
    const long long end = static_cast<long long>(tile.end) * input.columns;
    long long place = static_cast<long long>(tile.first) * input.columns + blockIdx.y * blockDim.x + threadIdx.x;
    const bool is_in_group = tile.group < input.e;
    float scale = 1.0f;
    if (is_in_group) {
        const float given = scales ? scales[static_cast<long long>(tile.group) * stride] : 0.0f;
        scale = given == 0.0f ? rule.scale<F>(amaxes[tile.group]) : __uint_as_float(__float_as_uint(given) & 0x7f800000u);
    }
    // All tiles of a group write the same number.
    if (is_in_group && threadIdx.x == 0) output.set_scale(tile.group, scale);
    for (; place < end; place += gridDim.y * blockDim.x) {
        if (is_in_group) output.template put<F>(place, input.template code<F>(place, scale), 1.0f / scale);
        else output.clear(place);
    }
}

// y = values of codes with an inverse scale per group.
template <typename F, typename T>
__device__ __forceinline__ void group_values(const unsigned char* codes, const float* scale_inv, const GroupRows& rows, int n,
                                             int e, int columns, T* y) {
    const RowTile tile = row_tile<GROUP_TILE_ROWS>(rows, e, n, blockIdx.x);
    if (tile.end <= tile.first) return;
    const long long end = static_cast<long long>(tile.end) * columns;
    long long place = static_cast<long long>(tile.first) * columns + blockIdx.y * blockDim.x + threadIdx.x;
    const float factor = tile.group < e ? scale_inv[tile.group] : 0.0f;
    for (; place < end; place += gridDim.y * blockDim.x) GroupValues<T>{y}.template put<F>(place, codes[place], factor);
}

// Quantizes tiles of 128 x 128 by blocks of 256 threads. BLOCK 1: a scale per row of a tile; 2: per column; 3: per tile.
template <int BLOCK, typename F, typename T, typename Output>
__device__ __forceinline__ void round_group_blocks(const GroupInput<T>& input, Rule rule, const Output& output) {
    constexpr int SIDE = GROUP_SIDE;
    __shared__ float scales[SIDE], of_half[SIDE];
    const RowTile tile = row_tile<SIDE>(input.rows, input.e, input.n, blockIdx.x);
    const int n_rows = tile.end - tile.first, first_column = blockIdx.y * SIDE;
    if (n_rows <= 0) return;
    const int n_columns = min(SIDE, input.columns - first_column);
    const auto place = [&](int row, int column) {
        return static_cast<long long>(tile.first + row) * input.columns + first_column + column;
    };
    const bool is_in_group = tile.group < input.e;
    if (is_in_group) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float most = 0.0f;
        if constexpr (BLOCK == 2) {
            const int column = threadIdx.x % SIDE, half = threadIdx.x / SIDE;
            if (column < n_columns) {
                for (int row = half; row < n_rows; row += 2) most = fmaxf(most, input.magnitude(place(row, column)));
            }
            if (half == 1) of_half[column] = most;
            __syncthreads();
            if (half == 0) scales[column] = rule.scale<F>(fmaxf(most, of_half[column]));
        } else {
            for (int row = warp; row < SIDE; row += 8) {
                float of_row = 0.0f;
                for (int column = lane; column < n_columns && row < n_rows; column += 32) {
                    of_row = fmaxf(of_row, input.magnitude(place(row, column)));
                }
                if constexpr (BLOCK == 1) {
                    of_row = warp_max(of_row);
                    if (lane == 0) scales[row] = rule.scale<F>(of_row);
                }
                most = fmaxf(most, of_row);
            }
            if constexpr (BLOCK == 3) {
                most = block_max(most);
                if (threadIdx.x == 0) scales[0] = rule.scale<F>(most);
            }
        }
        __syncthreads();
        const int i = threadIdx.x, n_scales = BLOCK == 1 ? n_rows : BLOCK == 2 ? n_columns : 1;
        if (i < n_scales) output.set_scale(group_scale_place<BLOCK>(i, input.columns), scales[i]);
    }
    for (int i = threadIdx.x; i < SIDE * SIDE; i += blockDim.x) {
        const int row = i / SIDE, column = i % SIDE;
        if (row >= n_rows || column >= n_columns) continue;
        const long long at = place(row, column);
        if (!is_in_group) {
            output.clear(at);
            continue;
        }
        const float scale = scales[BLOCK == 1 ? row : BLOCK == 2 ? column : 0];
        output.template put<F>(at, input.template code<F>(at, scale), 1.0f / scale);
    }
}

// y = values of codes with inverse scales of the blocks of tiles.
template <int BLOCK, typename F, typename T>
__device__ __forceinline__ void group_block_values(const unsigned char* codes, const float* scale_inv, const GroupRows& rows,
                                                   int n, int e, int columns, T* y) {
    const RowTile tile = row_tile<GROUP_SIDE>(rows, e, n, blockIdx.x);
    const int n_rows = tile.end - tile.first, first_column = blockIdx.y * GROUP_SIDE;
    if (n_rows <= 0) return;
    const int n_columns = min(GROUP_SIDE, columns - first_column);
    for (int i = threadIdx.x; i < GROUP_SIDE * GROUP_SIDE; i += blockDim.x) {
        const int row = i / GROUP_SIDE, column = i % GROUP_SIDE;
        if (row >= n_rows || column >= n_columns) continue;
        const long long at = static_cast<long long>(tile.first + row) * columns + first_column + column;
        const long long block = group_scale_place<BLOCK>(BLOCK == 1 ? row : BLOCK == 2 ? column : 0, columns);
        GroupValues<T>{y}.template put<F>(at, codes[at], tile.group < e ? scale_inv[block] : 0.0f);
    }
}
