// SwiGLU with a weight per row. A row has f elements of gate, then f of up; one block per row.
#pragma once

#include "common.cuh"

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// y = w gate sigmoid(gate) up
template <int W, typename T>
__device__ __forceinline__ void swiglu_forward(const T* gate_up, const float* weights, T* y, int f) {
    const long long row = blockIdx.x;
    const float weight = weights[row];
    gate_up += row * 2 * f;
    for (int i = threadIdx.x * W; i < f; i += blockDim.x * W) {
        auto pack = load<W>(gate_up + i);
        const auto up = load<W>(gate_up + f + i);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const float g = widen(pack.at[j]);
            pack.at[j] = narrow<T>(weight * (g * sigmoid(g) * widen(up.at[j])));
        }
        store(y + row * f + i, pack);
    }
}

// d_up = w dy gate s, d_gate = w dy up s (1 + gate (1 - s)), d_w = sum(dy gate s up) for s = sigmoid(gate)
template <int W, typename T>
__device__ __forceinline__ void swiglu_backward(const T* gate_up, const float* weights, const T* dy, T* d_gate_up,
                                                float* d_weights, int f) {
    const long long row = blockIdx.x;
    const float weight = weights[row];
    gate_up += row * 2 * f;
    d_gate_up += row * 2 * f;
    float sum = 0.0f;
    for (int i = threadIdx.x * W; i < f; i += blockDim.x * W) {
        auto gate = load<W>(gate_up + i), up = load<W>(gate_up + f + i);
        const auto dy_pack = load<W>(dy + row * f + i);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const float g = widen(gate.at[j]), u = widen(up.at[j]), d = widen(dy_pack.at[j]);
            const float s = sigmoid(g);
            sum += d * (g * s * u);
            gate.at[j] = narrow<T>(weight * d * u * s * (1.0f + g * (1.0f - s)));
            up.at[j] = narrow<T>(weight * d * g * s);
        }
        store(d_gate_up + i, gate);
        store(d_gate_up + f + i, up);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) d_weights[row] = sum;
}

#define SWIGLU(T, suffix)                                                                                           \
    KERNEL(256) swiglu_forward_##suffix(const T* gate_up, const float* weights, T* y, int f) {                      \
        if (is_wide<T>(f, gate_up, y)) swiglu_forward<WIDE<T>>(gate_up, weights, y, f);                             \
        else swiglu_forward<1>(gate_up, weights, y, f);                                                             \
    }                                                                                                               \
    KERNEL(256) swiglu_backward_##suffix(const T* gate_up, const float* weights, const T* dy, T* d_gate_up,         \
            float* d_weights, int f) {                                                                              \
        if (is_wide<T>(f, gate_up, dy, d_gate_up)) {                                                                \
            swiglu_backward<WIDE<T>>(gate_up, weights, dy, d_gate_up, d_weights, f);                                \
        } else {                                                                                                    \
            swiglu_backward<1>(gate_up, weights, dy, d_gate_up, d_weights, f);                                      \
        }                                                                                                           \
    }
FOR_EACH_FLOAT(SWIGLU)
