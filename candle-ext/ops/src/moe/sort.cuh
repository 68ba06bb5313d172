// Stable sort of slots by expert: count per tile of slots, scan, then place each slot. Dropped slots form bucket e.
#pragma once

#include "common.cuh"
#include "warp.cuh"

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

// Warps of a block of scan_tiles, and tiles of each at a time.
constexpr int SCAN_WARPS = 32, OWN_TILES = 16;

// Replaces each count by that of earlier tiles, and writes the number of slots of each bucket [e + 1]. A block has 32 buckets,
// one per lane. Its warps divide the tiles, and read the counts of all of them before they write.
KERNEL(1024) scan_tiles(uint* counts, uint* totals, int n_tiles, int e) {
    __shared__ uint of_warp[SCAN_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, bucket = blockIdx.x * 32 + lane;
    uint total = 0;
    for (int first = 0; first < n_tiles; first += SCAN_WARPS * OWN_TILES) {
        const int first_own = first + warp * OWN_TILES, n_own = bucket <= e ? min(OWN_TILES, n_tiles - first_own) : 0;
        uint* count = counts + static_cast<long long>(first_own) * (e + 1) + bucket;
        uint own[OWN_TILES], sum = 0;
#pragma unroll
        for (int i = 0; i < OWN_TILES; ++i) {
            own[i] = i < n_own ? count[i * (e + 1)] : 0;
            sum += own[i];
        }
        of_warp[warp][lane] = sum;
        __syncthreads();
        uint before = total;
        for (int i = 0; i < SCAN_WARPS; ++i) {
            if (i < warp) before += of_warp[i][lane];
            total += of_warp[i][lane];
        }
#pragma unroll
        for (int i = 0; i < OWN_TILES; ++i) {
            if (i < n_own) count[i * (e + 1)] = before;
            before += own[i];
        }
        __syncthreads();
    }
    if (warp == 0 && bucket <= e) totals[bucket] = total;
}

// Replaces each bucket's number of slots by its first row. One block, a thread per bucket.
KERNEL(1024) scan_buckets(uint* offsets, int e) {
    __shared__ uint of_warp[MOST_BUCKETS / 32];
    const int bucket = threadIdx.x, lane = bucket % 32, warp = bucket / 32;
    const uint own = bucket <= e ? offsets[bucket] : 0, end = scan_lanes(own);
    if (lane == 31) of_warp[warp] = end;
    __syncthreads();
    const uint end_of_warp = scan_lanes(of_warp[lane]);
    const uint before = __shfl_sync(0xffffffffu, end_of_warp, warp > 0 ? warp - 1 : 0);
    if (bucket <= e) offsets[bucket] = (warp > 0 ? before : 0) + end - own;
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
