// embedding: t positions, a table of v rows of d elements.
//
// The backward sorts the positions by id: tiles by counting, then multiway merges until one run is left. A key holds an
// id in its upper and a position in its lower bits. All keys differ, so the order is deterministic.
#include "common.cuh"

typedef unsigned long long Key;

// Keys of a tile, a power of two, and runs merged at once.
constexpr int TILE_BITS = 9, TILE = 1 << TILE_BITS;
constexpr int FAN_IN = 32;
// Threads of a block that sums rows, and columns per thread.
constexpr int SUMMERS = 128, COLUMNS = 8;

// y_i = w[ids_i]: one block per position. An id outside the table gives a row of NaN.
template <int W, typename T>
__device__ void gather(const uint* ids, const T* w, T* y, uint v, int d) {
    const long long row = blockIdx.x;
    const uint id = ids[row];
    w += static_cast<long long>(id) * d;
    y += row * d;
    Pack<T, W> pack;
#pragma unroll
    for (int j = 0; j < W; ++j) pack.at[j] = narrow<T>(NAN);
    for (int i = threadIdx.x * W; i < d; i += blockDim.x * W) {
        if (id < v) pack = load<W>(w + i);
        store(y + i, pack);
    }
}

// keys [t], sorted within each tile: each thread has a key and counts the smaller ones. Padding and ids outside the
// table become v, which is less than 2^(32 - TILE_BITS).
KERNEL(512) sort_tiles(const uint* ids, Key* keys, long long t, int v, uint padding) {
    __shared__ Pack<uint, 4> tile[TILE / 4];
    const long long first = static_cast<long long>(blockIdx.x) * TILE;
    const uint self = threadIdx.x;
    const bool exists = first + self < t;
    // Missing keys sort last.
    uint id = exists ? min(ids[first + self], static_cast<uint>(v)) : ~0u >> TILE_BITS;
    if (id == padding) id = v;
    const uint own = id << TILE_BITS | self;
    tile[self / 4].at[self % 4] = own;
    __syncthreads();
    if (!exists) return;
    int rank = 0;
    for (int i = 0; i < TILE / 4; ++i) {
        const auto four = tile[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) rank += four.at[j] < own;
    }
    keys[first + rank] = static_cast<Key>(id) << 32 | static_cast<Key>(first + self);
}

// Merges each FAN_IN neighbouring sorted runs of `from`, one thread per key. A key's position is the number of smaller
// keys.
KERNEL(256) merge_runs(const Key* from, Key* to, long long t, long long run) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= t) return;
    const Key key = from[i];
    const long long own = i / run * run, group = i / (FAN_IN * run) * (FAN_IN * run);
    long long place = group + (i - own);
    for (long long other = group; other < min(group + FAN_IN * run, t); other += run) {
        if (other == own) continue;
        long long low = other, high = min(other + run, t);
        while (low < high) {
            const long long middle = (low + high) / 2;
            if (from[middle] < key) low = middle + 1;
            else high = middle;
        }
        place += low - other;
    }
    to[place] = key;
}

// dw[id] += the sum of dy over the positions of each id, in order. One block per key and column range; only the block
// of an id's first key works. It prefetches its part of dw while it reads the rows.
template <int W, typename T, typename G>
__device__ __forceinline__ void add_rows(const Key* keys, const T* dy, G* dw, long long t, uint v, int d) {
    constexpr int N = COLUMNS / W;
    const long long first = blockIdx.x;
    const int lane = threadIdx.x & 31;
    Key key = keys[min(first + lane, t - 1)];
    const uint id = __shfl_sync(0xffffffffu, static_cast<uint>(key >> 32), 0);
    if (id >= v || (first > 0 && keys[first - 1] >> 32 == id)) return;
    const int column = (blockIdx.y * SUMMERS * N + threadIdx.x) * W;
    dw += static_cast<long long>(id) * d;
    float old[N][W] = {}, sums[N][W] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int at = column + i * SUMMERS * W;
        if (at < d) load_floats(dw + at, old[i]);
    }
    for (long long base = first;; key = keys[min(base + lane, t - 1)]) {
        const int n = __popc(__ballot_sync(0xffffffffu, base + lane < t && key >> 32 == id));
        const int position = static_cast<int>(key);
#pragma unroll 4
        for (int k = 0; k < n; ++k) {
            const T* row = dy + static_cast<long long>(__shfl_sync(0xffffffffu, position, k)) * d;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const int at = column + i * SUMMERS * W;
                if (at >= d) continue;
                const auto pack = load<W>(row + at);
#pragma unroll
                for (int j = 0; j < W; ++j) sums[i][j] += widen(pack.at[j]);
            }
        }
        base += 32;
        if (n < 32 || base >= t) break;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int at = column + i * SUMMERS * W;
#pragma unroll
        for (int j = 0; j < W; ++j) old[i][j] += sums[i][j];
        if (at < d) store_floats(dw + at, old[i]);
    }
}

#define ADD_ROWS(T, suffix, G, grad)                                                                             \
    KERNEL(128, 10) add_rows_##suffix##_##grad(const Key* keys, const T* dy, G* dw, long long t, int v, int d) { \
        if (is_wide<T>(d, dy) && is_wide<G>(d, dw)) add_rows<WIDE<T>>(keys, dy, dw, t, v, d);                    \
        else add_rows<1>(keys, dy, dw, t, v, d);                                                                 \
    }
#define KERNELS(T, suffix)                                                          \
    KERNEL(1024) gather_##suffix(const uint* ids, const T* w, T* y, int v, int d) { \
        if (is_wide<T>(d, w, y)) gather<WIDE<T>>(ids, w, y, v, d);                  \
        else gather<1>(ids, w, y, v, d);                                            \
    }                                                                               \
    ADD_ROWS(T, suffix, float, f32)                                                 \
    ADD_ROWS(T, suffix, __nv_bfloat16, bf16)
FOR_EACH_FLOAT(KERNELS)
