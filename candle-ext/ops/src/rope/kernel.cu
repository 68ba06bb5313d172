// rope and split.
#include "common.cuh"
#include "split.cuh"

// (a, b) = (x_i, x_{i + half}) becomes (a cos - b sin, b cos + a sin); sign -1 inverts the rotation. Without a table x
// is copied, and so are the elements of a head from 2 half on.
template <int W, typename T>
__device__ void rotate(const T* x, const float* cos, const float* sin, T* y, int h, int k, int half,
                       long long x_stride, long long y_stride, float sign) {
    const long long token = blockIdx.x;
    const int packs = half / W, rest = (k - 2 * half) / W;
    x += token * x_stride;
    y += token * y_stride;
    for (int item = threadIdx.x; item < h * packs; item += blockDim.x) {
        const int head = item / packs, i = item % packs * W, at = head * k + i;
        auto a = load<W>(x + at), b = load<W>(x + at + half);
        if (cos != nullptr) {
            float c[W], s[W];
            load_floats(cos + token * half + i, c);
            load_floats(sin + token * half + i, s);
#pragma unroll
            for (int j = 0; j < W; ++j) {
                const float left = widen(a.at[j]), right = widen(b.at[j]), turned = sign * s[j];
                a.at[j] = narrow<T>(left * c[j] - right * turned);
                b.at[j] = narrow<T>(right * c[j] + left * turned);
            }
        }
        store(y + at, a);
        store(y + at + half, b);
    }
    for (int item = threadIdx.x; item < h * rest; item += blockDim.x) {
        const int at = item / rest * k + 2 * half + item % rest * W;
        store(y + at, load<W>(x + at));
    }
}

// Strides are multiples of k.
#define KERNELS(T, suffix)                                                                                              \
    KERNEL(256) rotate_##suffix(const T* x, const float* cos, const float* sin, T* y, int h, int k, int half,           \
            long long x_stride, long long y_stride, float sign) {                                                       \
        if (k % WIDE<T> == 0 && is_wide<T>(half, x, y) && is_wide<float>(half, cos, sin)) {                             \
            rotate<WIDE<T>>(x, cos, sin, y, h, k, half, x_stride, y_stride, sign);                                      \
        } else {                                                                                                        \
            rotate<1>(x, cos, sin, y, h, k, half, x_stride, y_stride, sign);                                            \
        }                                                                                                               \
    }
FOR_EACH_FLOAT(KERNELS)

#define ADD_PARTS(G, suffix)                                                          \
    KERNEL(256) add_parts_##suffix(const float* partial, G* dw, int n_parts, int d) { \
        add_parts_to(dw, partial, n_parts, d);                                        \
    }
FOR_EACH_GRAD(ADD_PARTS)

// In forward q, k and v are written. Heads without a norm have a null weight.
#define SPLIT(P, W, T, suffix)                                                                                          \
    KERNEL(256) split_##P##_##suffix(const T* x, T* q, T* k, T* v, const T* w_q, const T* w_k, const float* cos,        \
            const float* sin, int t, int n_q, int n_kv, int d, int half, long long stride, float eps, int lanes) {      \
        const RotaryTable table{cos, sin, half};                                                                        \
        split<P, W>(x, HeadRows<T>(q, k, v, w_q, w_k, nullptr, nullptr, table, t, n_q, n_kv, d, stride, eps), lanes);   \
    }                                                                                                                   \
    KERNEL(256) join_grads_##P##_##suffix(const T* x, T* q, T* k, T* v, const T* w_q, const T* w_k, const float* cos,   \
            const float* sin, int t, int n_q, int n_kv, int d, int half, long long stride, float eps, int lanes, T* dx, \
            float* partial_q, float* partial_k, int of_q, int of_k) {                                                   \
        const RotaryTable table{cos, sin, half};                                                                        \
        const HeadRows<T> rows(q, k, v, w_q, w_k, partial_q, partial_k, table, t, n_q, n_kv, d, stride, eps);           \
        join_grads<P, W>(x, dx, rows, of_q, of_k, lanes);                                                               \
    }
#define SPLITS(T, suffix)                                                                                               \
    SPLIT(1, WIDE<T>, T, suffix)                                                                                        \
    SPLIT(2, WIDE<T>, T, suffix)                                                                                        \
    KERNEL(1024) split_long_##suffix(const T* x, T* q, T* k, T* v, const T* w_q, const T* w_k, const float* cos,        \
            const float* sin, int t, int n_q, int n_kv, int d, int half, long long stride, float eps) {                 \
        const RotaryTable table{cos, sin, half};                                                                        \
        split_long(x, HeadRows<T>(q, k, v, w_q, w_k, nullptr, nullptr, table, t, n_q, n_kv, d, stride, eps));           \
    }                                                                                                                   \
    KERNEL(1024) join_grads_long_##suffix(const T* x, T* q, T* k, T* v, const T* w_q, const T* w_k, const float* cos,   \
            const float* sin, int t, int n_q, int n_kv, int d, int half, long long stride, float eps, T* dx,            \
            float* partial_q, float* partial_k, int of_q, int of_k) {                                                   \
        const RotaryTable table{cos, sin, half};                                                                        \
        const HeadRows<T> rows(q, k, v, w_q, w_k, partial_q, partial_k, table, t, n_q, n_kv, d, stride, eps);           \
        join_grads_long(x, dx, rows, of_q, of_k);                                                                       \
    }
FOR_EACH_FLOAT(SPLITS)
