// linear: the gradient of the bias. t rows, n columns.
#include "common.cuh"

#define ADD_PARTS(G, suffix)                                                          \
    KERNEL(256) add_parts_##suffix(const float* partial, G* db, int n_parts, int n) { \
        add_parts_to(db, partial, n_parts, n);                                        \
    }
FOR_EACH_GRAD(ADD_PARTS)

#define KERNELS(T, suffix)                                                              \
    KERNEL(256) partial_sums_##suffix(const T* dy, float* partial, int t, int n) {      \
        sum_columns<1>(dy, partial, t, n);                                              \
    }                                                                                   \
    KERNEL(256) partial_sums_wide_##suffix(const T* dy, float* partial, int t, int n) { \
        sum_columns<WIDE<T>>(dy, partial, t, n);                                        \
    }
FOR_EACH_FLOAT(KERNELS)
