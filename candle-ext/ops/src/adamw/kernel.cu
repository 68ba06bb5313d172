// adamw: flat buffers of n elements, W at a time, in one pass. Master and gradient have type M, the moments type S, the
// optional compute copy type T.
//
// Fused multiply-adds are explicit. Left to itself, the compiler might fuse differently for each W, and a parameter's
// bits would depend on its offset in the buffer.
#include "common.cuh"
#include "grad_scaler.cuh"
#include "random.cuh"

// Layout of the bias corrections of update n: c = sqrt(1 - beta2^n), and c / (1 - beta1^n).
enum { ROOT, STEP_SIZE };

struct Factors {
    float grad_scale, shrink, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, eps;
};

__device__ __forceinline__ Factors factors_of(const float* scaler, const float* corrections, float lr, float shrink,
        float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float eps) {
    return {scaler[FACTOR], shrink, beta1, one_minus_beta1, beta2, one_minus_beta2, lr * corrections[STEP_SIZE],
            eps * corrections[ROOT]};
}

// m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p = shrink p - step_size m / (sqrt(v) + eps)
__device__ __forceinline__ void update(float& p, float g, float& m, float& v, const Factors& f) {
    g *= f.grad_scale;
    m = fmaf(m, f.beta1, g * f.one_minus_beta1);
    v = fmaf(v, f.beta2, g * g * f.one_minus_beta2);
    p = fmaf(p, f.shrink, -f.step_size * (m / (sqrtf(v) + f.eps)));
}

// Rounds consecutive elements to the nearest numbers.
struct Nearest {
    __device__ __forceinline__ Nearest from(long long) const { return {}; }
    template <typename M> __device__ __forceinline__ M round(float p) { return narrow<M>(p); }
};

// Rounds consecutive elements to bf16 as stochastic_bf16 of floats.rs, by their positions in the whole parameter.
struct StochasticRow {
    unsigned long long key;
    // Position of the next element, its column in the shard, and the number of elements between two rows of the shard.
    long long position, column, n_columns, gap;

    template <typename M> __device__ __forceinline__ M round(float p) {
        const uint random = static_cast<uint>(random_bits(key, position));
        ++position;
        if (++column == n_columns) column = 0, position += gap;
        if (p != p) return narrow<M>(p);
        const uint rounded = (__float_as_uint(p) + (random >> 16)) & 0xffff0000u;
        return narrow<M>(__uint_as_float(rounded));
    }
};

// Position of a shard's elements in the whole parameter (ShardPosition).
struct Stochastic {
    unsigned long long key;
    long long row_len, first_column, n_columns, first;

    // Rounds from element i on. A 64-bit division takes as long as the update of several elements.
    __device__ __forceinline__ StochasticRow from(long long i) const {
        const long long row = (first + i) / n_columns, column = (first + i) - row * n_columns;
        return {key, row * row_len + first_column + column, column, n_columns, row_len - n_columns};
    }
};

// `copy` may be null.
template <int W, typename M, typename T, typename S, typename R>
__device__ void step(M* master, const M* grad, S* mean, S* square, T* copy, long long n, Factors f, R rounding) {
    for (long long i = flat_begin<W>(); i < n; i += flat_step<W>()) {
        auto p_pack = load<W>(master + i);
        auto m_pack = load<W>(mean + i), v_pack = load<W>(square + i);
        const auto g = load<W>(grad + i);
        auto rounded = rounding.from(i);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            float p = widen(p_pack.at[j]), m = widen(m_pack.at[j]), v = widen(v_pack.at[j]);
            update(p, widen(g.at[j]), m, v, f);
            p_pack.at[j] = rounded.template round<M>(p);
            m_pack.at[j] = narrow<S>(m);
            v_pack.at[j] = narrow<S>(v);
        }
        store(master + i, p_pack);
        store(mean + i, m_pack);
        store(square + i, v_pack);
        if (copy != nullptr) {
            Pack<T, W> copies;
#pragma unroll
            for (int j = 0; j < W; ++j) copies.at[j] = narrow<T>(widen(p_pack.at[j]));
            store(copy + i, copies);
        }
    }
}

template <typename M, typename T, typename S, typename R>
__device__ __forceinline__ void step_any(M* master, const M* grad, S* mean, S* square, T* copy, long long n, Factors f,
                                         R rounding) {
    if (is_wide<float>(n, master, grad, mean, square, copy)) {
        step<WIDE<float>>(master, grad, mean, square, copy, n, f, rounding);
    } else {
        step<1>(master, grad, mean, square, copy, n, f, rounding);
    }
}

#define STEP(M, master_suffix, T, copy_suffix, S, moments)                                                         \
    KERNEL(256) step_##master_suffix##_##copy_suffix##_##moments(M* master, const M* grad, S* mean, S* square,     \
            T* copy, const float* scaler, const float* corrections, long long n, float lr, float shrink,           \
            float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float eps) {                   \
        if (scaler[OUTCOME] != APPLIED) return;                                                                    \
        const Factors factors = factors_of(scaler, corrections, lr, shrink, beta1, one_minus_beta1, beta2,         \
                                           one_minus_beta2, eps);                                                  \
        step_any(master, grad, mean, square, copy, n, factors, Nearest{});                                         \
    }
#define KERNELS(T, suffix)                  \
    STEP(float, f32, T, suffix, float, f32) \
    STEP(float, f32, T, suffix, __nv_bfloat16, bf16)
FOR_EACH_FLOAT(KERNELS)
STEP(__nv_bfloat16, bf16, __nv_bfloat16, bf16, float, f32)
STEP(__nv_bfloat16, bf16, __nv_bfloat16, bf16, __nv_bfloat16, bf16)

// `copy` is null.
#define STOCHASTIC_STEP(S, moments)                                                                                    \
    KERNEL(256) stochastic_step_##moments(__nv_bfloat16* master, const __nv_bfloat16* grad, S* mean, S* square,        \
            __nv_bfloat16* copy, const float* scaler, const float* corrections, long long n, float lr, float shrink,   \
            float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float eps, unsigned long long key, \
            long long row_len, long long first_column, long long n_columns, long long first) {                         \
        if (scaler[OUTCOME] != APPLIED) return;                                                                        \
        const Factors factors = factors_of(scaler, corrections, lr, shrink, beta1, one_minus_beta1, beta2,             \
                                           one_minus_beta2, eps);                                                      \
        step_any(master, grad, mean, square, copy, n, factors, Stochastic{key, row_len, first_column, n_columns, first}); \
    }
STOCHASTIC_STEP(float, f32)
STOCHASTIC_STEP(__nv_bfloat16, bf16)

// One thread computes the bias corrections of the update that the scaler has decided on.
KERNEL(32) bias_corrections(const float* scaler, float* corrections, double beta1, double beta2) {
    if (threadIdx.x != 0) return;
    const double n = scaler[N_UPDATES];
    const double root = sqrt(1.0 - pow(beta2, n));
    corrections[ROOT] = static_cast<float>(root);
    corrections[STEP_SIZE] = static_cast<float>(root / (1.0 - pow(beta1, n)));
}
