// A subset of CUDA C++ that runs this package's kernels on a CPU, for tests without a GPU.
//
// Blocks run one after another. The threads of a block are fibers: each runs until it waits for the others, and warps
// run far ahead of each other. A seed draws the order of the blocks, and of a warp's lanes between two waits. Shared memory
// starts as NaN in each block.
//
// Timing says nothing, but a missing __syncthreads gives a wrong result, the same in every run. A missing __syncwarp gives
// results that depend on the seed. The compiler's alignment sanitizer checks every load and store.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// build.rs parses kernels and their launch bounds from the preprocessed source.
#ifndef CANDLEWICK_PREPROCESS
#define __global__
#define __launch_bounds__(...)
#endif
#define __device__
#define __host__
#define __shared__ static thread_local
#define __restrict__
#define __forceinline__ inline

struct dim3 {
    unsigned x, y, z;
};

extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

// Wait until every thread of the block, or of the warp, has arrived or ended.
void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);

// The block's dynamic shared memory, of the size given at launch.
char* emulated_shared();

// A pending asynchronous copy of the calling thread.
struct Copy {
    void* to;
    const void* from;
    size_t n;
};
std::vector<Copy>& emulated_copies();

// Ends the launch with this message unless `holds`.
void emulated_check(bool holds, const char* otherwise);

// A slot for each lane of the calling thread's warp; it differs from that of the last call.
uint64_t* emulated_lanes();

// True in the last lane of a warp that calls it.
bool emulated_is_last();

template <typename T> T emulated_exchange(T value, int from) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most eight bytes");
    uint64_t* lanes = emulated_lanes();
    std::memcpy(&lanes[threadIdx.x % 32], &value, sizeof(T));
    __syncwarp();
    T result;
    std::memcpy(&result, &lanes[from], sizeof(T));
    return result;
}

template <typename T> T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulated_exchange(value, (threadIdx.x % 32) ^ mask);
}

template <typename T> T __shfl_sync(unsigned, T value, int from) { return emulated_exchange(value, from & 31); }

template <typename T> T __shfl_down_sync(unsigned, T value, int delta) {
    const int lane = threadIdx.x % 32;
    return emulated_exchange(value, lane + delta < 32 ? lane + delta : lane);
}

// For warp-wide instructions: the last lane to arrive calls `f` with all lanes' values.
template <typename T, typename F> void emulated_together(T& own, F f) {
    uint64_t* lanes = emulated_lanes();
    uint64_t& slot = lanes[threadIdx.x % 32];
    slot = reinterpret_cast<uint64_t>(&own);
    if (emulated_is_last()) {
        T* all[32];
        for (int lane = 0; lane < 32; ++lane) all[lane] = reinterpret_cast<T*>(lanes[lane]);
        f(all);
        std::fill_n(lanes, 32, 0);
    }
    __syncwarp();
    emulated_check(slot == 0, "a warp-wide instruction that some lanes do not reach");
}

inline unsigned __ballot_sync(unsigned, bool holds) {
    uint64_t* lanes = emulated_lanes();
    lanes[threadIdx.x % 32] = holds;
    __syncwarp();
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(lanes[lane]) << lane;
    return votes;
}

// Fibers do not run concurrently, so every operation is atomic.
template <typename T> T atomicAdd(T* at, T value) {
    const T old = *at;
    *at += value;
    return old;
}

template <typename T> T atomicMax(T* at, T value) {
    const T old = *at;
    if (value > old) *at = value;
    return old;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
// Byte i of the result is the byte of (y, x) that nibble i of the selector names.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}

inline float __fdividef(float a, float b) { return a / b; }
inline double cospi(double x) { return std::cos(M_PI * x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <typename T> T __ldg(const T* p) { return *p; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
using std::fabs;
using std::fmax;
using std::isfinite;
using std::isinf;
using std::isnan;
