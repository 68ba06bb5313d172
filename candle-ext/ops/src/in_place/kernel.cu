// in_place: flat buffers of n elements, W of them at a time.
#include "common.cuh"

// Threads of a block that sums.
constexpr int THREADS = 256;
// Vector loads in flight per thread of `sum_terms`.
constexpr int LOADS = 4;

// x = 0 for n elements of two bytes
template <int W> __device__ void zero(uint16_t* x, long long n) {
    for (long long i = flat_begin<W>(); i < n; i += flat_step<W>()) store(x + i, Pack<uint16_t, W>{});
}

KERNEL(256) zero_16_bits(uint16_t* x, long long n) {
    if (is_wide<uint16_t>(n, x)) zero<WIDE<uint16_t>>(x, n);
    else zero<1>(x, n);
}

// dst = src, rounded
template <int W, typename T, typename S>
__device__ void copy(T* dst, const S* src, long long n) {
    for (long long i = flat_begin<W>(); i < n; i += flat_step<W>()) {
        const auto pack = load<W>(src + i);
        Pack<T, W> rounded;
#pragma unroll
        for (int j = 0; j < W; ++j) rounded.at[j] = narrow<T>(widen(pack.at[j]));
        store(dst + i, rounded);
    }
}

// Sum over a block of THREADS; every thread gets it. All threads must call, once per kernel.
__device__ __forceinline__ double sum_block(double x) {
    __shared__ double of_warp[THREADS / 32];
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = x;
    __syncthreads();
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) sum += of_warp[i];
    return sum;
}

struct Square {
    __device__ __forceinline__ static double of(double x) { return x * x; }
};
struct IsZero {
    __device__ __forceinline__ static double of(double x) { return x == 0.0 ? 1.0 : 0.0; }
};

// parts[block] = the sum of Term over the block's elements. A thread issues LOADS vector loads before it adds the first;
// it adds them in the order of their addresses.
template <typename Term, int W, typename T> __device__ void sum_terms(const T* x, double* parts, long long n) {
    const long long step = flat_step<W>();
    double sum = 0.0;
    for (long long i = flat_begin<W>(); i < n; i += LOADS * step) {
        Pack<T, W> packs[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            if (i + k * step < n) packs[k] = load<W>(x + i + k * step);
        }
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            if (i + k * step >= n) continue;
#pragma unroll
            for (int j = 0; j < W; ++j) sum += Term::of(widen(packs[k].at[j]));
        }
    }
    sum = sum_block(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// total = the sum over n parts, by one block
KERNEL(256) add_parts(const double* parts, double* total, int n) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += parts[i];
    sum = sum_block(sum);
    if (threadIdx.x == 0) *total = sum;
}

// Packs sized for both dtypes.
#define COPY(S, from, T, to)                                                              \
    KERNEL(256) copy_##from##_##to(const S* src, T* dst, long long n) {                   \
        constexpr int W = WIDE<S> < WIDE<T> ? WIDE<S> : WIDE<T>;                          \
        if (n % W == 0 && is_wide<S>(0, src) && is_wide<T>(0, dst)) copy<W>(dst, src, n); \
        else copy<1>(dst, src, n);                                                        \
    }
#define SUM(name, Term, T, suffix)                                         \
    KERNEL(256) name##_##suffix(const T* x, double* parts, long long n) {  \
        if (is_wide<T>(n, x)) sum_terms<Term, WIDE<T>>(x, parts, n);       \
        else sum_terms<Term, 1>(x, parts, n);                              \
    }
#define KERNELS(T, suffix)               \
    COPY(T, suffix, float, f32)          \
    COPY(T, suffix, __nv_bfloat16, bf16) \
    COPY(T, suffix, __half, f16)         \
    SUM(sum_squares, Square, T, suffix)  \
    SUM(count_zeros, IsZero, T, suffix)
FOR_EACH_FLOAT(KERNELS)
