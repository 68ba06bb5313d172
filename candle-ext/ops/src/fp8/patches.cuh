// Quantization in patches of 8 x 8 bf16. A thread reads the rows of its patch at once, 128 bytes, and transposes the codes
// in its registers.
//
// A warp has 8 x 4 patches, a block of 256 threads 2 x 4 warps: 128 x 128 elements. Neighbouring lanes write 32 contiguous
// bytes of a row of codes, and 64 of a row of transposed codes. Codes are rounded to nearest: random numbers would take
// registers that loads need.
#pragma once

#include "blocks.cuh"
#include "codes.cuh"
#include "sources.cuh"

using CodeWords = Pack<uint, 2>;

// Position of a thread's patch in a matrix [rows, columns].
struct Patch {
    static constexpr int SIDE = 8, TILE = 128;
    int row, column;

    __device__ __forceinline__ Patch() {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        row = blockIdx.y * TILE + (warp / 4 * 8 + lane / 4) * SIDE;
        column = blockIdx.x * TILE + (warp % 4 * 4 + lane % 4) * SIDE;
    }

    // Reads row i of the patch of each of the source's matrices, with zeros outside.
    template <typename S>
    __device__ __forceinline__ void read(const S& source, int rows, int columns, int i, Packed (&packs)[S::N]) const {
        if (row + i < rows && column < columns) {
            source.read(static_cast<long long>(row + i) * columns + column, row + i, column, packs);
            return;
        }
#pragma unroll
        for (int n = 0; n < S::N; ++n) {
#pragma unroll
            for (int j = 0; j < SIDE; ++j) packs[n].at[j] = narrow<__nv_bfloat16>(0.0f);
        }
    }
};

template <typename F> __device__ __forceinline__ CodeWords encode_words(const float (&x)[8]) {
    CodeWords words;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        words.at[i] = nearest_pair<F>(x[4 * i], x[4 * i + 1]) |
                      static_cast<uint>(nearest_pair<F>(x[4 * i + 2], x[4 * i + 3])) << 16;
    }
    return words;
}

// Transposes 4 x 4 bytes, a word per row.
__device__ __forceinline__ void transpose_bytes(uint (&rows)[4]) {
    const uint low_ab = __byte_perm(rows[0], rows[1], 0x5140), low_cd = __byte_perm(rows[2], rows[3], 0x5140);
    const uint high_ab = __byte_perm(rows[0], rows[1], 0x7362), high_cd = __byte_perm(rows[2], rows[3], 0x7362);
    rows[0] = __byte_perm(low_ab, low_cd, 0x5410);
    rows[1] = __byte_perm(low_ab, low_cd, 0x7632);
    rows[2] = __byte_perm(high_ab, high_cd, 0x5410);
    rows[3] = __byte_perm(high_ab, high_cd, 0x7632);
}

// Transposes the codes of a patch, 8 x 8 bytes.
__device__ __forceinline__ void transpose_patch(const CodeWords (&rows)[8], CodeWords (&columns)[8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            uint words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = rows[half * 4 + i].at[side];
            transpose_bytes(words);
#pragma unroll
            for (int i = 0; i < 4; ++i) columns[side * 4 + i].at[half] = words[i];
        }
    }
}

__device__ __forceinline__ void store_codes(unsigned char* to, const CodeWords& words) {
    store(reinterpret_cast<uint*>(to), words);
}

// Writes 8 rows of each of 8 columns, if they are within the padded matrix.
__device__ __forceinline__ void store_columns(unsigned char* transposed, const CodeWords (&columns)[8], const Patch& at,
                                              int padded_rows) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        store_codes(transposed + static_cast<long long>(at.column + j) * padded_rows + at.row, columns[j]);
    }
}

// parts[block] of each matrix of a source = the largest magnitude that the block computes; NaN counts as nothing. The places
// of a source that reads neither rows nor columns are those of n elements, a multiple of 8.
template <typename S>
__device__ __forceinline__ void amax_source_parts(const S& source, float* const (&parts)[S::N], long long n_elements) {
    float most[S::N] = {};
#pragma unroll 2
    for (long long place = flat_begin<8>(); place < n_elements; place += flat_step<8>()) {
        Packed packs[S::N];
        source.read(place, 0, 0, packs);
#pragma unroll
        for (int n = 0; n < S::N; ++n) {
#pragma unroll
            for (int j = 0; j < 8; ++j) most[n] = fmaxf(most[n], fabsf(widen(packs[n].at[j])));
        }
    }
#pragma unroll
    for (int n = 0; n < S::N; ++n) {
        const float of_block = block_max(most[n]);
        if (threadIdx.x == 0) parts[n][blockIdx.x] = of_block;
    }
}

// Writes the codes of a patch, and the transposed ones, where they are wanted and within the padded matrix.
__device__ __forceinline__ void write_patch(const CodeWords (&words)[8], const Cast& output, const Patch& at) {
    if (at.row >= output.padded_rows || at.column >= output.columns) return;
    if (output.codes) {
#pragma unroll
        for (int i = 0; i < Patch::SIDE; ++i) {
            if (at.row + i >= output.padded_rows) continue;
            store_codes(output.codes + static_cast<long long>(at.row + i) * output.columns + at.column, words[i]);
        }
    }
    if (output.transposed) {
        CodeWords of_columns[Patch::SIDE];
        transpose_patch(words, of_columns);
        store_columns(output.transposed, of_columns, at, output.padded_rows);
    }
}

// Quantizes the matrices of a source with one scale each. Padded rows are a multiple of 8 if transposed codes are wanted.
template <typename F, typename S>
__device__ __forceinline__ void cast_patches(const S& source, const Cast (&outputs)[S::N]) {
    const Patch at;
    const int rows = outputs[0].rows, padded_rows = outputs[0].padded_rows, columns = outputs[0].columns;
    float factors[S::N], most[S::N] = {};
#pragma unroll
    for (int n = 0; n < S::N; ++n) factors[n] = outputs[n].scale[0];
    CodeWords words[S::N][Patch::SIDE];
#pragma unroll
    for (int i = 0; i < Patch::SIDE; ++i) {
        Packed packs[S::N];
        at.read(source, rows, columns, i, packs);
#pragma unroll
        for (int n = 0; n < S::N; ++n) {
            float values[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                values[j] = widen(packs[n].at[j]);
                most[n] = fmaxf(most[n], fabsf(values[j]));
                values[j] = __fmul_rn(values[j], factors[n]);
            }
            words[n][i] = encode_words<F>(values);
        }
    }
#pragma unroll
    for (int n = 0; n < S::N; ++n) {
        write_patch(words[n], outputs[n], at);
        if (outputs[n].slot) {
            // One atomic operation per block: those on one address run one after another.
            const float of_block = block_max(most[n]);
            if (threadIdx.x == 0 && of_block > 0.0f) {
                raise(outputs[n].slot, of_block);
                if (outputs[n].amax) raise(outputs[n].amax, of_block);
            }
        }
        if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) outputs[n].scale_inv[0] = 1.0f / factors[n];
    }
}

// Quantizes the matrices of a source with a scale per block. BLOCK 1: rows of 128 for `plain`, columns of 128 for
// `transposed`; 3: whole tiles for both.
template <int BLOCK, typename F, typename S>
__device__ __forceinline__ void block_patches(const S& source, const Blocks (&outputs)[S::N]) {
    constexpr int TILE = Patch::TILE, SIDE = Patch::SIDE;
    __shared__ float of_rows[TILE][4], of_columns[TILE][2], row_scales[TILE], column_scales[TILE];
    const Patch at;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int in_row = at.row % TILE, in_column = at.column % TILE;
    const int rows = outputs[0].rows, padded_rows = outputs[0].padded_rows, columns = outputs[0].columns;
    Packed packs[SIDE][S::N];
#pragma unroll
    for (int i = 0; i < SIDE; ++i) at.read(source, rows, columns, i, packs[i]);
#pragma unroll
    for (int n = 0; n < S::N; ++n) {
        const Blocks& output = outputs[n];
        // Scales of an earlier matrix are no longer read.
        if (n > 0) __syncthreads();
        float most_of_columns[SIDE] = {};
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
            float most = 0.0f;
#pragma unroll
            for (int j = 0; j < SIDE; ++j) {
                const float magnitude = fabsf(widen(packs[i][n].at[j]));
                most = fmaxf(most, magnitude);
                most_of_columns[j] = fmaxf(most_of_columns[j], magnitude);
            }
            // Four lanes share a row, eight a column.
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            if (lane % 4 == 0) of_rows[in_row + i][warp % 4] = most;
        }
        if constexpr (BLOCK == 1) {
#pragma unroll
            for (int j = 0; j < SIDE; ++j) {
                float most = most_of_columns[j];
#pragma unroll
                for (int offset = 4; offset < 32; offset *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
                if (lane / 4 == 0) of_columns[in_column + j][warp / 4] = most;
            }
        }
        __syncthreads();
        const int i = threadIdx.x % TILE;
        const float of_row = fmaxf(fmaxf(of_rows[i][0], of_rows[i][1]), fmaxf(of_rows[i][2], of_rows[i][3]));
        if constexpr (BLOCK == 3) {
            const float of_tile = block_max(of_row);
            if (threadIdx.x < TILE) row_scales[i] = of_tile;
        } else if (threadIdx.x < TILE) {
            row_scales[i] = of_row;
            column_scales[i] = fmaxf(of_columns[i][0], of_columns[i][1]);
        }
        if (threadIdx.x < TILE) output.template scales<BLOCK, F>(row_scales, column_scales);
        __syncthreads();
        if (at.row >= padded_rows || at.column >= columns) continue;
        if (output.plain.codes) {
#pragma unroll
            for (int i = 0; i < SIDE; ++i) {
                if (at.row + i >= padded_rows) continue;
                const long long place = static_cast<long long>(at.row + i) * columns + at.column;
                float values[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) values[j] = __fmul_rn(widen(packs[i][n].at[j]), row_scales[in_row + i]);
                store_codes(output.plain.codes + place, encode_words<F>(values));
            }
        }
        if (output.transposed.codes) {
            CodeWords of_patch[SIDE];
#pragma unroll
            for (int j = 0; j < SIDE; ++j) {
                const float scale = BLOCK == 3 ? row_scales[in_row] : column_scales[in_column + j];
                float values[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) values[i] = __fmul_rn(widen(packs[i][n].at[j]), scale);
                of_patch[j] = encode_words<F>(values);
            }
            store_columns(output.transposed.codes, of_patch, at, padded_rows);
        }
    }
}
