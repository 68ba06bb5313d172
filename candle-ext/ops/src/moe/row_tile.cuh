// Tiles of rows that are sorted by group.
#pragma once

#include "common.cuh"
#include "warp.cuh"

// Tile of rows of a group; group e holds the rows after the last group, whose outputs are zero.
struct RowTile {
    int group, first, end;
};

// Finds tile `index` of HEIGHT rows, counted over all groups; the first row of group i is offsets[i]. Each warp searches on its
// own.
template <int HEIGHT, typename Offsets>
__device__ __forceinline__ RowTile row_tile(const Offsets& offsets, int e, int n, int index) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int first = 0; first <= e; first += 32) {
        const int group = first + lane;
        const int start = group <= e ? offsets[group] : n, end = group < e ? offsets[group + 1] : n;
        const int tiles = scan_lanes((end - start + HEIGHT - 1) / HEIGHT);
        const int total = __shfl_sync(0xffffffffu, tiles, 31);
        if (index < before + total) {
            const int found = __popc(__ballot_sync(0xffffffffu, before + tiles <= index));
            const int earlier = __shfl_sync(0xffffffffu, tiles, found > 0 ? found - 1 : 0);
            const int row = __shfl_sync(0xffffffffu, start, found) + (index - before - (found > 0 ? earlier : 0)) * HEIGHT;
            return {first + found, row, min(row + HEIGHT, __shfl_sync(0xffffffffu, end, found))};
        }
        before += total;
    }
    return {e, n, n};
}
