// Stable sort of slots by expert: count per tile of slots, scan, then place each slot. Dropped slots form bucket e.
#pragma once

#include "common.cuh"

constexpr uint DROPPED = 0xffffffffu;
// Slots per block, one per thread.
constexpr int SORT_TILE = 256;
// Buckets, at most: one per expert and one of dropped slots.
constexpr int MOST_BUCKETS = 1024;

__device__ __forceinline__ uint bucket_of(uint expert, int e) { return min(expert, static_cast<uint>(e)); }

// counts [tiles, e + 1]: the number of slots of each tile and bucket
KERNEL(256) count_experts(const uint* experts, uint* counts, int n, int e) {
    __shared__ uint of_tile[MOST_BUCKETS];
    for (int i = threadIdx.x; i <= e; i += SORT_TILE) of_tile[i] = 0;
    __syncthreads();
    const int slot = blockIdx.x * SORT_TILE + threadIdx.x;
    if (slot < n) atomicAdd(&of_tile[bucket_of(experts[slot], e)], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i <= e; i += SORT_TILE) {
        counts[static_cast<long long>(blockIdx.x) * (e + 1) + i] = of_tile[i];
    }
}

// Replaces each count by that of earlier tiles, and writes the first row of each bucket. One block, a thread per bucket.
KERNEL(1024) scan_counts(uint* counts, uint* offsets, int n_tiles, int e) {
    __shared__ uint ends[MOST_BUCKETS];
    const int bucket = threadIdx.x;
    uint total = 0;
    if (bucket <= e) {
        for (int tile = 0; tile < n_tiles; ++tile) {
            uint* count = counts + static_cast<long long>(tile) * (e + 1) + bucket;
            const uint own = *count;
            *count = total;
            total += own;
        }
    }
    ends[bucket] = total;
    __syncthreads();
    for (int step = 1; step < MOST_BUCKETS; step *= 2) {
        const uint before = bucket >= step ? ends[bucket - step] : 0;
        __syncthreads();
        ends[bucket] += before;
        __syncthreads();
    }
    if (bucket <= e) offsets[bucket] = ends[bucket] - total;
}

// Each slot's row: that of its bucket, plus its earlier slots in other tiles and in its own.
KERNEL(256) place_slots(const uint* experts, const uint* counts, const uint* offsets, uint* order, uint* rows, int n,
        int e) {
    __shared__ uint keys[SORT_TILE];
    const int self = threadIdx.x, slot = blockIdx.x * SORT_TILE + self;
    const uint key = slot < n ? bucket_of(experts[slot], e) : 0;
    keys[self] = key;
    __syncthreads();
    if (slot >= n) return;
    uint row = offsets[key] + counts[static_cast<long long>(blockIdx.x) * (e + 1) + key];
    for (int i = 0; i < self; ++i) row += keys[i] == key;
    order[row] = slot;
    rows[slot] = row;
}

// Moves the first row of each expert to a multiple of `multiple`. One block; thread 0 works.
KERNEL(32) pad_offsets(const uint* offsets, uint* padded, int e, int multiple) {
    if (threadIdx.x > 0) return;
    uint start = 0;
    padded[0] = 0;
    for (int i = 0; i < e; ++i) {
        const uint size = offsets[i + 1] - offsets[i];
        start += (size + multiple - 1) / multiple * multiple;
        padded[i + 1] = start;
    }
}

KERNEL(256) clear_order(uint* order, int n) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) order[row] = DROPPED;
}

// Moves the rows of slots from experts that begin at `offsets` to experts that begin at `padded`.
KERNEL(256) move_rows(const uint* offsets, const uint* padded, const uint* rows, uint* order, uint* moved, int n, int e) {
    const int slot = blockIdx.x * blockDim.x + threadIdx.x;
    if (slot >= n) return;
    const uint row = rows[slot];
    // The last expert that begins at or before the row; rows of dropped slots follow the last.
    int low = 0, high = e + 1;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (offsets[middle] <= row) low = middle;
        else high = middle;
    }
    const uint to = padded[low] + (row - offsets[low]);
    moved[slot] = to;
    order[to] = slot;
}
