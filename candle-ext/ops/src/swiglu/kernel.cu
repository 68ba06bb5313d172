// swiglu: flat buffers of n elements, W of them at a time.
#include "common.cuh"

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// y = gate sigmoid(gate) up
template <int W, typename T>
__device__ void forward(const T* gate, const T* up, T* y, long long n) {
    for (long long i = flat_begin<W>(); i < n; i += flat_step<W>()) {
        auto pack = load<W>(gate + i);
        const auto up_pack = load<W>(up + i);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const float g = widen(pack.at[j]);
            pack.at[j] = narrow<T>(g * sigmoid(g) * widen(up_pack.at[j]));
        }
        store(y + i, pack);
    }
}

// d_up = dy gate s, d_gate = dy up s (1 + gate (1 - s)) for s = sigmoid(gate)
template <int W, typename T>
__device__ void backward(const T* gate, const T* up, const T* dy, T* d_gate, T* d_up, long long n) {
    for (long long i = flat_begin<W>(); i < n; i += flat_step<W>()) {
        auto gate_pack = load<W>(gate + i), up_pack = load<W>(up + i);
        const auto dy_pack = load<W>(dy + i);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const float g = widen(gate_pack.at[j]), u = widen(up_pack.at[j]), dy = widen(dy_pack.at[j]);
            const float s = sigmoid(g);
            gate_pack.at[j] = narrow<T>(dy * u * s * (1.0f + g * (1.0f - s)));
            up_pack.at[j] = narrow<T>(dy * g * s);
        }
        store(d_gate + i, gate_pack);
        store(d_up + i, up_pack);
    }
}

#define KERNELS(T, suffix)                                                                                    \
    KERNEL(256) forward_##suffix(const T* gate, const T* up, T* y, long long n) {                             \
        if (is_wide<T>(n, gate, up, y)) forward<WIDE<T>>(gate, up, y, n);                                     \
        else forward<1>(gate, up, y, n);                                                                      \
    }                                                                                                         \
    KERNEL(256) backward_##suffix(const T* gate, const T* up, const T* dy, T* d_gate, T* d_up, long long n) { \
        if (is_wide<T>(n, gate, up, dy, d_gate, d_up)) backward<WIDE<T>>(gate, up, dy, d_gate, d_up, n);      \
        else backward<1>(gate, up, dy, d_gate, d_up, n);                                                      \
    }
FOR_EACH_FLOAT(KERNELS)
