// gemm: initial value of c [m, n] before a matmul is added to it, with row stride `stride`.
#include "common.cuh"

// c = plus + bias, either of which may be null; c may be plus.
template <typename T>
__device__ void fill(const T* plus, const T* bias, T* c, long long m, long long n, long long stride) {
    for (long long i = flat_begin<1>(); i < m * n; i += flat_step<1>()) {
        const long long column = i % n, at = i / n * stride + column;
        const float first = plus ? widen(plus[at]) : 0.0f;
        c[at] = narrow<T>(bias ? first + widen(bias[column]) : first);
    }
}

#define KERNELS(T, suffix)                                                                                        \
    KERNEL(256) fill_##suffix(const T* plus, const T* bias, T* c, long long m, long long n, long long stride) {   \
        fill(plus, bias, c, m, n, stride);                                                                        \
    }
FOR_EACH_FLOAT(KERNELS)
