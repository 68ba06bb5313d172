// rms_norm: one block a row. t rows, d elements, W of them at a time.
#include "common.cuh"

// y = x / sqrt(mean(x^2) + eps) * w; the normalised x is rounded before it meets w.
template <int W, typename T>
__device__ void forward(const T* x, const T* w, T* y, float* rstd, int d, float eps) {
    const long long row = blockIdx.x;
    x += row * d;
    y += row * d;
    float sum = 0.0f;
    for (int i = threadIdx.x * W; i < d; i += blockDim.x * W) {
        const auto x_pack = load<W>(x + i);
#pragma unroll
        for (int j = 0; j < W; ++j) sum += widen(x_pack.at[j]) * widen(x_pack.at[j]);
    }
    const float r = rsqrtf(block_sum(sum) / d + eps);
    if (threadIdx.x == 0) rstd[row] = r;
    for (int i = threadIdx.x * W; i < d; i += blockDim.x * W) {
        auto pack = load<W>(x + i);
        const auto w_pack = load<W>(w + i);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const float n = widen(narrow<T>(widen(pack.at[j]) * r));
            pack.at[j] = narrow<T>(n * widen(w_pack.at[j]));
        }
        store(y + i, pack);
    }
}

// dx = r (g - n mean(g n)) for g = dy w, n = x r
template <int W, typename T>
__device__ void grad_x(const T* x, const T* w, const T* dy, const float* rstd, T* dx, int d) {
    const long long row = blockIdx.x;
    x += row * d;
    dy += row * d;
    dx += row * d;
    const float r = rstd[row];
    float sum = 0.0f;
    for (int i = threadIdx.x * W; i < d; i += blockDim.x * W) {
        const auto x_pack = load<W>(x + i), w_pack = load<W>(w + i), dy_pack = load<W>(dy + i);
#pragma unroll
        for (int j = 0; j < W; ++j) sum += widen(dy_pack.at[j]) * widen(w_pack.at[j]) * widen(x_pack.at[j]) * r;
    }
    const float mean = block_sum(sum) / d;
    for (int i = threadIdx.x * W; i < d; i += blockDim.x * W) {
        auto pack = load<W>(x + i);
        const auto w_pack = load<W>(w + i), dy_pack = load<W>(dy + i);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const float g = widen(dy_pack.at[j]) * widen(w_pack.at[j]), n = widen(pack.at[j]) * r;
            pack.at[j] = narrow<T>(r * (g - n * mean));
        }
        store(dx + i, pack);
    }
}

// The sums of dy n over parts of the rows.
template <typename T>
__device__ void partial_grad_w(const T* x, const T* dy, const float* rstd, float* partial, int t, int d) {
    const auto product = [=](long long row, int column) {
        const long long i = row * d + column;
        return widen(dy[i]) * widen(narrow<T>(widen(x[i]) * rstd[row]));
    };
    sum_columns(product, partial, t, d);
}

#define ADD_PARTS(G, suffix)                                                                                    \
    extern "C" __global__ void add_parts_##suffix(const float* partial, G* dw, int n_parts, int d) {         \
        add_parts_to(dw, partial, n_parts, d);                                                               \
    }
FOR_EACH_GRAD(ADD_PARTS)

#define KERNELS(T, suffix)                                                                                         \
    extern "C" __global__ void forward_##suffix(const T* x, const T* w, T* y, float* rstd, int d, float eps) {     \
        if (is_wide<T>(d, x, w, y)) forward<WIDE<T>>(x, w, y, rstd, d, eps);                                       \
        else forward<1>(x, w, y, rstd, d, eps);                                                                    \
    }                                                                                                              \
    extern "C" __global__ void grad_x_##suffix(const T* x, const T* w, const T* dy, const float* rstd, T* dx,      \
                                               int d) {                                                            \
        if (is_wide<T>(d, x, w, dy, dx)) grad_x<WIDE<T>>(x, w, dy, rstd, dx, d);                                   \
        else grad_x<1>(x, w, dy, rstd, dx, d);                                                                     \
    }                                                                                                              \
    extern "C" __global__ void partial_grad_w_##suffix(const T* x, const T* dy, const float* rstd, float* partial, \
                                                       int t, int d) {                                             \
        partial_grad_w<T>(x, dy, rstd, partial, t, d);                                                             \
    }
FOR_EACH_FLOAT(KERNELS)
