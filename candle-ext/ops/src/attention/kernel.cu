// attention: a kernel for each format and each largest head dim, in the manner of FlashAttention 2. The grid has a tile
// for each x and a key head for each y.
#include "backward.cuh"
#include "forward.cuh"

#define KERNELS(T, suffix, DIM)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, DIM > 128 ? 1 : 2)                                       \
        forward_##suffix##_##DIM(const T* q, const T* k, const T* v, T* o, float* lse, const uint* seqs,           \
                                 int n_seqs, int group, int dim, int causal, int window, float scale) {            \
        forward<DIM>(q, k, v, o, lse, seqs, n_seqs, Heads{group, dim}, causal, window, scale);                     \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, DIM > 128 ? 1 : 2)                                       \
        grad_q_##suffix##_##DIM(const T* q, const T* k, const T* v, const T* d_o, const float* lse,                \
                                const float* delta, T* dq, const uint* seqs, int n_seqs, int group, int dim,       \
                                int causal, int window, float scale) {                                             \
        grad_q<DIM>(q, k, v, d_o, lse, delta, dq, seqs, n_seqs, Heads{group, dim}, causal, window, scale);         \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, DIM > 64 ? 1 : 2)                                        \
        grad_kv_##suffix##_##DIM(const T* q, const T* k, const T* v, const T* d_o, const float* lse,               \
                                 const float* delta, T* dk, T* dv, const uint* seqs, int n_seqs, int group,        \
                                 int dim, int causal, int window, float scale) {                                   \
        grad_kv<DIM>(q, k, v, d_o, lse, delta, dk, dv, seqs, n_seqs, Heads{group, dim}, causal, window, scale);    \
    }

#define KERNELS_OF_FORMAT(T, suffix)                                                                               \
    extern "C" __global__ void delta_##suffix(const T* o, const T* d_o, float* delta, int n, int dim) {            \
        if (is_wide<T>(dim, o, d_o)) row_products<WIDE<T>>(o, d_o, delta, n, dim);                                 \
        else row_products<1>(o, d_o, delta, n, dim);                                                               \
    }                                                                                                              \
    KERNELS(T, suffix, 64)                                                                                         \
    KERNELS(T, suffix, 96)                                                                                         \
    KERNELS(T, suffix, 128)                                                                                        \
    KERNELS(T, suffix, 256)
FOR_EACH_FLOAT(KERNELS_OF_FORMAT)
