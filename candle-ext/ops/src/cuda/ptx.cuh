// PTX instructions without a CUDA C++ intrinsic. The emulator has its own file of this name.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Dynamic shared memory of the block, of the size given at launch.
__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ __align__(128) char shared[];
    return shared;
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Starts an asynchronous copy of BYTES, 4 or 16 and aligned, to shared memory; writes zeros if `exists` is false.
template <int BYTES> __device__ __forceinline__ void copy_async(void* to, const void* from, bool exists) {
    const int n = exists ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(n)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(n)
                     : "memory");
    }
}

// Waits for the copies that the calling thread has started.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Loads four 8 by 8 matrices of 16-bit elements (ldmatrix): lane i points to row i % 8 of matrix i / 8. Of each matrix
// a lane gets, in one register, columns 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Loads the transposes of the matrices.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c += a b for a [16, 16], b [16, 8] and c [16, 8] in f32, distributed over a warp (mma.m16n8k16).
//
// A lane holds pairs of neighbours from column (in b: row) 2 (lane % 4) on. In a: rows lane / 4 and lane / 4 + 8, then
// the same 8 columns later. In b: column lane / 4, then 8 rows later. In c: row lane / 4, then 8 rows later.
template <typename T>
__device__ __forceinline__ void multiply_add(float& c0, float& c1, float& c2, float& c3, const unsigned (&a)[4],
                                             unsigned b0, unsigned b1);

#define MULTIPLY_ADD(T, type)                                                                                  \
    template <>                                                                                                \
    __device__ __forceinline__ void multiply_add<T>(float& c0, float& c1, float& c2, float& c3,                \
                                                    const unsigned (&a)[4], unsigned b0, unsigned b1) {        \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                             \
            ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                             \
            : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)                                                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                   \
    }
MULTIPLY_ADD(__nv_bfloat16, "bf16")
MULTIPLY_ADD(__half, "f16")

// Rounds two numbers to 16 bits, the first in the lower half.
template <typename T> __device__ __forceinline__ unsigned narrow_pair(float first, float second);

#define NARROW_PAIR(T, type)                                                                      \
    template <> __device__ __forceinline__ unsigned narrow_pair<T>(float first, float second) {   \
        unsigned pair;                                                                            \
        asm("cvt.rn." type ".f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));            \
        return pair;                                                                              \
    }
NARROW_PAIR(__nv_bfloat16, "bf16x2")
NARROW_PAIR(__half, "f16x2")

// Rounds two numbers to FP8 codes, saturated: the first in the lower byte (sm_89).
#if __CUDA_ARCH__ >= 890
#define FP8_PAIR(name, type)                                                                          \
    __device__ __forceinline__ unsigned short name(float first, float second) {                       \
        unsigned short pair;                                                                          \
        asm("cvt.rn.satfinite." type ".f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));      \
        return pair;                                                                                  \
    }
FP8_PAIR(e4m3_pair, "e4m3x2")
FP8_PAIR(e5m2_pair, "e5m2x2")

// Values of two E4M3 codes, the first in the lower byte (sm_89). f16 has all of them.
__device__ __forceinline__ void e4m3_values(unsigned pair, float& first, float& second) {
    unsigned values;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(values) : "h"(static_cast<unsigned short>(pair)));
    first = __half2float(__ushort_as_half(values & 0xffff));
    second = __half2float(__ushort_as_half(values >> 16));
}
#endif

// 2^x, to 2 units in the last place; 0 instead of subnormal results.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
