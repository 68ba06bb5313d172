// rope: one block per token. x, y: h heads of k elements, tokens x_stride and y_stride elements apart; cos, sin
// [t, half]; W pairs at a time.
#include "common.cuh"

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
