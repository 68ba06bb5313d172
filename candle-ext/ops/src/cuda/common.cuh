// Shared by all kernels: conversion to f32, vector loads, reductions over a warp and a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

typedef unsigned int uint;

// Begins a kernel: KERNEL(threads) name(parameters) {...}. `threads` is a literal, the most threads of a block. A
// minimum of resident blocks per multiprocessor may follow. build.rs parses both.
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)

// Instantiates a kernel for each dtype: X(float, f32) and so on.
#define FOR_EACH_FLOAT(X) \
    X(float, f32)         \
    X(__nv_bfloat16, bf16) \
    X(__half, f16)

// Instantiates a kernel for each dtype of main gradients.
#define FOR_EACH_GRAD(X) \
    X(float, f32)        \
    X(__nv_bfloat16, bf16)

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

template <typename T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }

// W elements in one load or store.
template <typename T, int W> struct alignas(sizeof(T) * W) Pack {
    T at[W];
};

template <int W, typename T> __device__ __forceinline__ Pack<T, W> load(const T* p) {
    return *reinterpret_cast<const Pack<T, W>*>(p);
}

template <typename T, int W> __device__ __forceinline__ void store(T* p, const Pack<T, W>& pack) {
    *reinterpret_cast<Pack<T, W>*>(p) = pack;
}

// Elements in 16 bytes, the widest load.
template <typename T> constexpr int WIDE = 16 / sizeof(T);

// Loads W elements as floats, in loads of at most 16 bytes.
template <int W, typename T> __device__ __forceinline__ void load_floats(const T* p, float (&values)[W]) {
    constexpr int N = W < WIDE<T> ? W : WIDE<T>;
#pragma unroll
    for (int i = 0; i < W; i += N) {
        const auto pack = load<N>(p + i);
#pragma unroll
        for (int j = 0; j < N; ++j) values[i + j] = widen(pack.at[j]);
    }
}

// Stores W floats, rounded, in stores of at most 16 bytes.
template <int W, typename T> __device__ __forceinline__ void store_floats(T* p, const float (&values)[W]) {
    constexpr int N = W < WIDE<T> ? W : WIDE<T>;
#pragma unroll
    for (int i = 0; i < W; i += N) {
        Pack<T, N> pack;
#pragma unroll
        for (int j = 0; j < N; ++j) pack.at[j] = narrow<T>(values[i + j]);
        store(p + i, pack);
    }
}

// Forces the compiler to convert a pack again from here on. Keeping the converted values would double the registers.
template <typename T, int W> __device__ __forceinline__ void forget_widened(Pack<T, W>& pack) {
    if constexpr (sizeof(T) == 2 && W % 2 == 0) {
#pragma unroll
        for (int i = 0; i < W / 2; ++i) asm volatile("" : "+r"(reinterpret_cast<unsigned*>(&pack)[i]));
    }
}

// True if rows of d elements at these addresses can be loaded in packs of WIDE.
template <typename T, typename... P> __device__ __forceinline__ bool is_wide(long long d, const P*... p) {
    return d % WIDE<T> == 0 && ((reinterpret_cast<uintptr_t>(p) % 16 == 0) && ...);
}

// Index of a thread's first element in a flat buffer, and its stride in a grid-stride loop.
template <int W> __device__ __forceinline__ long long flat_begin() {
    return (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * W;
}

template <int W> __device__ __forceinline__ long long flat_step() {
    return static_cast<long long>(gridDim.x) * blockDim.x * W;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Sum over a block of at most 1024 threads, a multiple of 32; every thread gets it. All threads must call.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float of_warp[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_warps = blockDim.x >> 5;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_sum(lane < n_warps ? of_warp[lane] : 0.0f);
}

// partial = the column sums of the groups of `lanes` threads, P packs of W, added in the order of the groups.
template <int P, int W>
__device__ __forceinline__ void sum_groups(const float (&sums)[P][W], float* partial, int d, int lanes) {
    __shared__ float of_thread[W][256];
    const int n_groups = blockDim.x / lanes;
#pragma unroll
    for (int p = 0; p < P; ++p) {
        __syncthreads();
#pragma unroll
        for (int j = 0; j < W; ++j) of_thread[j][threadIdx.x] = sums[p][j];
        __syncthreads();
        for (int i = threadIdx.x; i < lanes * W && p * lanes * W + i < d; i += blockDim.x) {
            float total = 0.0f;
            for (int group = 0; group < n_groups; ++group) total += of_thread[i % W][group * lanes + i / W];
            partial[p * lanes * W + i] = total;
        }
    }
}

// Copies a row of d elements from `from` to `to`, by one block.
template <typename T> __device__ __forceinline__ void copy_row(const T* from, T* to, int d) {
    if (is_wide<T>(d, from, to)) {
        for (int i = threadIdx.x * WIDE<T>; i < d; i += blockDim.x * WIDE<T>) store(to + i, load<WIDE<T>>(from + i));
    } else {
        for (int i = threadIdx.x; i < d; i += blockDim.x) to[i] = from[i];
    }
}

// partial[part] = the sum over that part's rows, for n columns of t rows. A block of 256 threads has 32 W columns; its
// 8 warps divide the rows of part blockIdx.y in a fixed order.
template <int W, typename T> __device__ __forceinline__ void sum_columns(const T* x, float* partial, int t, int n) {
    __shared__ float of_warp[8][32 * W];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int first = blockIdx.x * 32 * W, column = first + lane * W;
    const int n_rows = (t + gridDim.y - 1) / gridDim.y;
    const int end = min(t, static_cast<int>(blockIdx.y + 1) * n_rows);
    float sums[W] = {};
    if (column < n) {
        for (long long row = blockIdx.y * n_rows + warp; row < end; row += 8) {
            const auto pack = load<W>(x + row * n + column);
#pragma unroll
            for (int j = 0; j < W; ++j) sums[j] += widen(pack.at[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < W; ++j) of_warp[warp][j * 32 + lane] = sums[j];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * W && first + i < n; i += blockDim.x) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; ++w) total += of_warp[w][i % W * 32 + i / W];
        partial[static_cast<long long>(blockIdx.y) * n + first + i] = total;
    }
}

// total += the sum over parts for n columns. A block of 256 threads has 32 columns; its 8 warps divide the parts in a
// fixed order.
template <typename G>
__device__ __forceinline__ void add_parts_to(G* total, const float* partial, int n_parts, int n) {
    __shared__ float of_warp[8][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (column < n) {
#pragma unroll 8
        for (int part = warp; part < n_parts; part += 8) sum += partial[static_cast<long long>(part) * n + column];
    }
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= n) return;
    float all = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; ++w) all += of_warp[w][lane];
    total[column] = narrow<G>(widen(total[column]) + all);
}
