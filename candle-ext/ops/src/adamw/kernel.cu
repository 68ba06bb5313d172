// adamw: flat buffers of n elements, W at a time, in one pass. Master and gradient have type M, the moments type S, the
// optional compute copy type T.
//
// Fused multiply-adds are explicit. Left to itself, the compiler might fuse differently for each W, and a parameter's
// bits would depend on its offset in the buffer.
#include "common.cuh"
#include "grad_scaler.cuh"

struct Factors {
    float grad_scale, shrink, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, eps;
};

// m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p = shrink p - step_size m / (sqrt(v) + eps)
__device__ __forceinline__ void update(float& p, float g, float& m, float& v, const Factors& f) {
    g *= f.grad_scale;
    m = fmaf(m, f.beta1, g * f.one_minus_beta1);
    v = fmaf(v, f.beta2, g * g * f.one_minus_beta2);
    p = fmaf(p, f.shrink, -f.step_size * (m / (sqrtf(v) + f.eps)));
}

// `copy` may be null.
template <int W, typename M, typename T, typename S>
__device__ void step(M* master, const M* grad, S* mean, S* square, T* copy, long long n, Factors f) {
    for (long long i = flat_begin<W>(); i < n; i += flat_step<W>()) {
        auto p_pack = load<W>(master + i);
        auto m_pack = load<W>(mean + i), v_pack = load<W>(square + i);
        const auto g = load<W>(grad + i);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            float p = widen(p_pack.at[j]), m = widen(m_pack.at[j]), v = widen(v_pack.at[j]);
            update(p, widen(g.at[j]), m, v, f);
            p_pack.at[j] = narrow<M>(p);
            m_pack.at[j] = narrow<S>(m);
            v_pack.at[j] = narrow<S>(v);
        }
        store(master + i, p_pack);
        store(mean + i, m_pack);
        store(square + i, v_pack);
        if (copy != nullptr) {
            Pack<T, W> rounded;
#pragma unroll
            for (int j = 0; j < W; ++j) rounded.at[j] = narrow<T>(widen(p_pack.at[j]));
            store(copy + i, rounded);
        }
    }
}

#define STEP(M, master_suffix, T, copy_suffix, S, moments)                                                         \
    KERNEL(256) step_##master_suffix##_##copy_suffix##_##moments(M* master, const M* grad, S* mean, S* square,     \
            T* copy, const float* scaler, long long n, float lr, float shrink, float beta1, float one_minus_beta1, \
            float beta2, float one_minus_beta2, float eps) {                                                       \
        if (scaler[OUTCOME] != APPLIED) return;                                                                    \
        const Factors factors = {scaler[FACTOR], shrink,           beta1,             one_minus_beta1,             \
                                 beta2,          one_minus_beta2,  lr * scaler[STEP], eps * scaler[ROOT]};         \
        if (is_wide<float>(n, master, grad, mean, square, copy)) {                                                 \
            step<WIDE<float>>(master, grad, mean, square, copy, n, factors);                                       \
        } else {                                                                                                   \
            step<1>(master, grad, mean, square, copy, n, factors);                                                 \
        }                                                                                                          \
    }
#define KERNELS(T, suffix)                  \
    STEP(float, f32, T, suffix, float, f32) \
    STEP(float, f32, T, suffix, __nv_bfloat16, bf16)
FOR_EACH_FLOAT(KERNELS)
STEP(__nv_bfloat16, bf16, __nv_bfloat16, bf16, float, f32)
STEP(__nv_bfloat16, bf16, __nv_bfloat16, bf16, __nv_bfloat16, bf16)
