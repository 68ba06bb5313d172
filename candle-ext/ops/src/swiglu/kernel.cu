// swiglu: n_rows rows of `width` elements, W at a time. Rows of gate and up start `stride` elements apart, those of y
// `width`. A block has some columns of every gridDim.y-th row.
#include "common.cuh"
#include "gated.cuh"

// y = gate sigmoid(gate) up
template <int W, typename T>
__device__ void forward(const T* gate, const T* up, T* y, int n_rows, long long width, long long stride) {
    for (long long row = blockIdx.y; row < n_rows; row += gridDim.y) {
        for (long long i = flat_begin<W>(); i < width; i += flat_step<W>()) {
            auto pack = load<W>(gate + row * stride + i);
            const auto up_pack = load<W>(up + row * stride + i);
#pragma unroll
            for (int j = 0; j < W; ++j) {
                pack.at[j] = narrow<T>(gated(widen(pack.at[j]), widen(up_pack.at[j])));
            }
            store(y + row * width + i, pack);
        }
    }
}

// d_up = dy gate s, d_gate = dy up s (1 + gate (1 - s)) for s = sigmoid(gate), in the layout of gate and up. Also the forward's y,
// unless its address is null. It may be that of dy.
template <int W, typename T>
__device__ void backward(const T* gate, const T* up, const T* dy, T* d_gate, T* d_up, T* y, int n_rows, long long width,
                         long long stride) {
    for (long long row = blockIdx.y; row < n_rows; row += gridDim.y) {
        for (long long i = flat_begin<W>(); i < width; i += flat_step<W>()) {
            const long long at = row * stride + i;
            auto gate_pack = load<W>(gate + at), up_pack = load<W>(up + at);
            auto dy_pack = load<W>(dy + row * width + i);
#pragma unroll
            for (int j = 0; j < W; ++j) {
                const float g = widen(gate_pack.at[j]), u = widen(up_pack.at[j]);
                const GatedGrad grad(g, u, widen(dy_pack.at[j]));
                dy_pack.at[j] = narrow<T>(gated(g, u));
                gate_pack.at[j] = narrow<T>(grad.gate);
                up_pack.at[j] = narrow<T>(grad.up);
            }
            store(d_gate + at, gate_pack);
            store(d_up + at, up_pack);
            if (y != nullptr) store(y + row * width + i, dy_pack);
        }
    }
}

// The stride is the width, or twice that.
#define KERNELS(T, suffix)                                                                                          \
    KERNEL(256) forward_##suffix(const T* gate, const T* up, T* y, int n_rows, long long width, long long stride) { \
        if (is_wide<T>(width, gate, up, y)) forward<WIDE<T>>(gate, up, y, n_rows, width, stride);                   \
        else forward<1>(gate, up, y, n_rows, width, stride);                                                        \
    }                                                                                                               \
    KERNEL(256) backward_##suffix(const T* gate, const T* up, const T* dy, T* d_gate, T* d_up, T* y, int n_rows,    \
            long long width, long long stride) {                                                                    \
        if (is_wide<T>(width, gate, up, dy, d_gate, d_up, y)) {                                                     \
            backward<WIDE<T>>(gate, up, dy, d_gate, d_up, y, n_rows, width, stride);                                \
        } else {                                                                                                    \
            backward<1>(gate, up, dy, d_gate, d_up, y, n_rows, width, stride);                                      \
        }                                                                                                           \
    }
FOR_EACH_FLOAT(KERNELS)
