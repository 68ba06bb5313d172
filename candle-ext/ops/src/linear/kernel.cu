// linear: the gradient of the bias. t rows, n columns.
#include "common.cuh"

// partial[part] = the sum of that part's rows. A block has 32 columns and 8 warps, which share out the rows of its part in
// a fixed order.
template <typename T> __device__ void partial_sums(const T* dy, float* partial, int t, int n) {
    __shared__ float of_warp[8][33];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int column = blockIdx.x * 32 + lane;
    const int n_rows = (t + gridDim.y - 1) / gridDim.y;
    const int end = min(t, static_cast<int>(blockIdx.y + 1) * n_rows);
    float sum = 0.0f;
    if (column < n) {
        for (long long row = blockIdx.y * n_rows + warp; row < end; row += 8) sum += widen(dy[row * n + column]);
    }
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < n) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) total += of_warp[i][lane];
        partial[static_cast<long long>(blockIdx.y) * n + column] = total;
    }
}

// db += the sum over parts, a thread for each column
extern "C" __global__ void add_parts(const float* partial, float* db, int n_parts, int n) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= n) return;
    float sum = 0.0f;
    for (int part = 0; part < n_parts; ++part) sum += partial[static_cast<long long>(part) * n + column];
    db[column] += sum;
}

#define KERNELS(T, suffix)                                                                             \
    extern "C" __global__ void partial_sums_##suffix(const T* dy, float* partial, int t, int n) {      \
        partial_sums<T>(dy, partial, t, n);                                                            \
    }
FOR_EACH_FLOAT(KERNELS)
