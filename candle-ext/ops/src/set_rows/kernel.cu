// set_rows: one block per row of d elements.
#include "common.cuh"

// to[rows[i]] = from[i]
template <typename T> __device__ void set_rows(const T* from, const unsigned* rows, T* to, int d) {
    copy_row(from + static_cast<long long>(blockIdx.x) * d, to + static_cast<long long>(rows[blockIdx.x]) * d, d);
}

#define KERNELS(T, suffix)                                                             \
    KERNEL(128) set_rows_##suffix(const T* from, const unsigned* rows, T* to, int d) { \
        set_rows<T>(from, rows, to, d);                                                \
    }
FOR_EACH_FLOAT(KERNELS)
