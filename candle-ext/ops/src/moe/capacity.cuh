// Expert capacity: a slot's rank among those of its expert is counted, by one thread per row.
#pragma once

#include "sort.cuh"

// limited [t, k]: the expert of each slot, or DROPPED if at least `capacity` slots of it come first: those of earlier
// rows, or with `by_weight` those of larger weights and earlier ones of equal weight.
KERNEL(256) limit_capacity(const float* weights, const uint* experts, const uint* order, const uint* offsets, uint* limited,
        int n, int e, uint capacity, int by_weight) {
    const uint row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    const uint slot = order[row];
    if (slot == DROPPED) return;
    const uint expert = experts[slot];
    if (expert >= e) {
        limited[slot] = DROPPED;
        return;
    }
    const uint first = offsets[expert], end = offsets[expert + 1];
    uint rank = row - first;
    if (by_weight && end - first > capacity) {
        const float own = weights[slot];
        rank = 0;
        for (uint other = first; other < end; ++other) {
            const float weight = weights[order[other]];
            rank += weight > own || (weight == own && other < row);
        }
    }
    limited[slot] = rank < capacity ? expert : DROPPED;
}
