// attention: kernels for each dtype and maximum head dim, after FlashAttention 2. The grid has a tile per x and a KV
// head per y.
#include "backward.cuh"
#include "backward_mma.cuh"
#include "delta.cuh"
#include "forward.cuh"
#include "forward_mma.cuh"
#include "merge.cuh"

#define SAVED_PARAMETERS(T) \
    const T *q, const T *k, const T *v, const T *d_o, const float *lse, const float *delta
#define PROBLEM_PARAMETERS const uint *seqs, int n_seqs, int group, int dim, int causal, int window, float scale
#define SAVED(T) Saved<T>{q, k, v, d_o, lse, delta}
#define PROBLEM Problem{seqs, n_seqs, {group, dim}, causal, window, scale}

static_assert(plain::THREADS == 256 && mma::THREADS == 128, "the kernels below declare these numbers of threads");

// `way` is the arithmetic: plain (CUDA cores) or mma (tensor cores).
#define KERNELS(way, threads, T, suffix, DIM)                                                                  \
    KERNEL(threads, way::ROW_BLOCKS<DIM>) forward_##way##_##suffix##_##DIM(const T* q, const T* k, const T* v, \
            T* o, float* lse, PROBLEM_PARAMETERS) {                                                            \
        way::forward<DIM>(q, k, v, o, lse, PROBLEM);                                                           \
    }                                                                                                          \
    KERNEL(threads, way::ROW_BLOCKS<DIM>) grad_q_##way##_##suffix##_##DIM(SAVED_PARAMETERS(T), T* dq,          \
            PROBLEM_PARAMETERS) {                                                                              \
        way::grad_q<DIM>(SAVED(T), dq, PROBLEM);                                                               \
    }                                                                                                          \
    KERNEL(threads, way::KEY_BLOCKS<DIM>) grad_kv_##way##_##suffix##_##DIM(SAVED_PARAMETERS(T), T* dk, T* dv,  \
            PROBLEM_PARAMETERS) {                                                                              \
        way::grad_kv<DIM>(SAVED(T), dk, dv, PROBLEM);                                                          \
    }

#define DELTA(T, suffix)                                                                 \
    KERNEL(256) delta_##suffix(const T* o, const T* d_o, float* delta, int n, int dim) { \
        if (is_wide<T>(dim, o, d_o)) row_products<WIDE<T>>(o, d_o, delta, n, dim);       \
        else row_products<1>(o, d_o, delta, n, dim);                                     \
    }
FOR_EACH_FLOAT(DELTA)

#define MERGE(T, suffix)                                                                                             \
    KERNEL(256) merge_##suffix(float* out, float* lse, const T* other_out, const float* other_lse, int n, int dim) { \
        if (is_wide<float>(dim, out) && is_wide<T>(dim, other_out)) {                                                \
            merge_rows<4>(out, lse, other_out, other_lse, n, dim);                                                   \
        } else {                                                                                                     \
            merge_rows<1>(out, lse, other_out, other_lse, n, dim);                                                   \
        }                                                                                                            \
    }
FOR_EACH_FLOAT(MERGE)

KERNELS(plain, 256, float, f32, 64)
KERNELS(plain, 256, float, f32, 96)
KERNELS(plain, 256, float, f32, 128)
KERNELS(plain, 256, float, f32, 256)

#define KERNELS_OF_FORMAT(T, suffix)  \
    KERNELS(mma, 128, T, suffix, 64)  \
    KERNELS(mma, 128, T, suffix, 96)  \
    KERNELS(mma, 128, T, suffix, 128) \
    KERNELS(plain, 256, T, suffix, 256)
KERNELS_OF_FORMAT(__nv_bfloat16, bf16)
KERNELS_OF_FORMAT(__half, f16)
