// Matrices that patches quantize: in memory, or computed from others where they are quantized. Computed elements are
// rounded to bf16, as if they had been in memory.
#pragma once

#include "../swiglu/gated.cuh"
#include "common.cuh"

using Packed = Pack<__nv_bfloat16, 8>;

// A source reads 8 elements of each of its N matrices, at a place of a row and a column.

// Contiguous matrix.
struct InMemory {
    static constexpr int N = 1;
    const __nv_bfloat16* x;

    __device__ __forceinline__ void read(long long place, int, int, Packed (&packs)[N]) const {
        packs[0] = load<8>(x + place);
    }
};

// SwiGLU of gate and up.
struct GatedInput {
    static constexpr int N = 1;
    const __nv_bfloat16 *gate, *up;

    __device__ __forceinline__ void read(long long place, int, int, Packed (&packs)[N]) const {
        const auto g = load<8>(gate + place), u = load<8>(up + place);
#pragma unroll
        for (int j = 0; j < 8; ++j) packs[0].at[j] = narrow<__nv_bfloat16>(gated(widen(g.at[j]), widen(u.at[j])));
    }
};

// RMSNorm of x, from 1 / sqrt(mean(x^2) + eps) of each row.
struct NormedInput {
    static constexpr int N = 1;
    const __nv_bfloat16 *x, *w;
    const float* rstd;

    __device__ __forceinline__ void read(long long place, int row, int column, Packed (&packs)[N]) const {
        const auto x_pack = load<8>(x + place), w_pack = load<8>(w + column);
        const float r = rstd[row];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float normed = widen(narrow<__nv_bfloat16>(widen(x_pack.at[j]) * r));
            packs[0].at[j] = narrow<__nv_bfloat16>(normed * widen(w_pack.at[j]));
        }
    }
};

// Gradients of gate and up, from the gradient of their SwiGLU.
struct GatedGrads {
    static constexpr int N = 2;
    const __nv_bfloat16 *gate, *up, *dy;

    __device__ __forceinline__ void read(long long place, int, int, Packed (&packs)[N]) const {
        const auto g = load<8>(gate + place), u = load<8>(up + place), d = load<8>(dy + place);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const GatedGrad grad(widen(g.at[j]), widen(u.at[j]), widen(d.at[j]));
            packs[0].at[j] = narrow<__nv_bfloat16>(grad.gate);
            packs[1].at[j] = narrow<__nv_bfloat16>(grad.up);
        }
    }
};
