// Numbers of slots of each expert, by sequence.
#pragma once

#include "sort.cuh"

KERNEL(256) zero_counts(float* counts, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) counts[i] = 0.0f;
}

// Adds the slots [t, k] to counts [s, e]; without sequences [t] all tokens are of the first. Sums of ones are exact up to 2^24.
KERNEL(256) count_by_sequence(const uint* experts, const uint* sequences, float* counts, int n, int top_k, int e) {
    const int slot = blockIdx.x * blockDim.x + threadIdx.x;
    if (slot >= n || experts[slot] >= static_cast<uint>(e)) return;
    const long long sequence = sequences ? sequences[slot / top_k] : 0;
    atomicAdd(&counts[sequence * e + experts[slot]], 1.0f);
}
