// add: flat buffers of n elements, W of them at a time.
#include "common.cuh"

// y = a + b
template <int W, typename T, typename B> __device__ void add(const T* a, const B* b, T* y, long long n) {
    for (long long i = flat_begin<W>(); i < n; i += flat_step<W>()) {
        auto pack = load<W>(a + i);
        const auto b_pack = load<W>(b + i);
#pragma unroll
        for (int j = 0; j < W; ++j) pack.at[j] = narrow<T>(widen(pack.at[j]) + widen(b_pack.at[j]));
        store(y + i, pack);
    }
}

#define ADD(T, B, suffix)                                                 \
    KERNEL(256) add_##suffix(const T* a, const B* b, T* y, long long n) { \
        if (is_wide<T>(n, a, b, y)) add<WIDE<T>>(a, b, y, n);             \
        else add<1>(a, b, y, n);                                          \
    }
#define KERNELS(T, suffix) ADD(T, T, suffix)
FOR_EACH_FLOAT(KERNELS)
ADD(float, __nv_bfloat16, f32_bf16)
ADD(float, __half, f32_f16)
