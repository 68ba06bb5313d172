// Elements of SwiGLU and of its gradients, in f32. Kernels that fuse them have the bits of kernel.cu.
#pragma once

#include "common.cuh"

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// gate sigmoid(gate) up
__device__ __forceinline__ float gated(float gate, float up) { return gate * sigmoid(gate) * up; }

// Gradients of gate and up: dy up s (1 + gate (1 - s)) and dy gate s, for s = sigmoid(gate).
struct GatedGrad {
    float gate, up;

    __device__ __forceinline__ GatedGrad(float g, float u, float dy) {
        const float s = sigmoid(g);
        gate = dy * u * s * (1.0f + g * (1.0f - s));
        up = dy * g * s;
    }
};
