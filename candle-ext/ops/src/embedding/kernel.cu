// embedding: t positions, a table of v rows of d elements.
//
// The backward sorts the positions by id: tiles by counting, then runs of twice the length until one is left. A key
// holds an id above and a position below, so no two are equal and only the ids decide the order.
#include "common.cuh"

typedef unsigned long long Key;

constexpr int TILE = 512;
// Columns of dw that a block adds to, and warps among which it shares out a row's positions.
constexpr int COLUMNS = 256;
constexpr int WARPS = 4;

// y_i = w[ids_i]: one block a position. An id that is not in the table gives a row of NaN.
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

// keys [t], sorted within each tile: a block's threads have a key each and count the smaller ones. Ids that are not in
// the table become v.
extern "C" __global__ void sort_tiles(const uint* ids, Key* keys, long long t, int v) {
    __shared__ uint tile[TILE];
    const long long first = static_cast<long long>(blockIdx.x) * TILE;
    const int n = static_cast<int>(min(static_cast<long long>(TILE), t - first));
    const int self = threadIdx.x;
    if (self < n) tile[self] = min(ids[first + self], static_cast<uint>(v));
    __syncthreads();
    if (self >= n) return;
    const uint id = tile[self];
    int rank = 0;
    for (int other = 0; other < n; ++other) rank += tile[other] < id + (other < self);
    keys[first + rank] = static_cast<Key>(id) << 32 | static_cast<Key>(first + self);
}

// Merges neighbouring sorted runs of `from`, a thread for each key: it goes behind the smaller keys of both runs.
extern "C" __global__ void merge_runs(const Key* from, Key* to, long long t, long long run) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= t) return;
    const Key key = from[i];
    const long long own = i / run, other = min((own ^ 1) * run, t);
    long long low = other, high = min(other + run, t);
    while (low < high) {
        const long long middle = (low + high) / 2;
        if (from[middle] < key) low = middle + 1;
        else high = middle;
    }
    to[own / 2 * 2 * run + (i - own * run) + (low - other)] = key;
}

// dw[id] += the sum of dy over the positions of each id. A block for each key and COLUMNS columns: that of an id's
// first key does the work, its warps taking every WARPS-th position of each 32.
template <int W, typename T, typename G>
__device__ void add_rows(const Key* keys, const T* dy, G* dw, long long t, uint v, int d) {
    constexpr int N = COLUMNS / 32;
    __shared__ float of_warp[WARPS][COLUMNS];
    const long long first = blockIdx.x;
    const uint id = keys[first] >> 32;
    if (id >= v || (first > 0 && keys[first - 1] >> 32 == id)) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int column = blockIdx.y * COLUMNS;
    float sums[N] = {};
    for (long long base = first; base < t; base += 32) {
        const Key key = keys[min(base + lane, t - 1)];
        const int n = __popc(__ballot_sync(0xffffffffu, base + lane < t && key >> 32 == id));
        const int position = static_cast<int>(key);
#pragma unroll 4
        for (int k = warp; k < n; k += WARPS) {
            const T* row = dy + static_cast<long long>(__shfl_sync(0xffffffffu, position, k)) * d;
#pragma unroll
            for (int i = 0; i < N; i += W) {
                const int at = column + i * 32 + lane * W;
                if (at < d) {
                    const auto pack = load<W>(row + at);
#pragma unroll
                    for (int j = 0; j < W; ++j) sums[i + j] += widen(pack.at[j]);
                }
            }
        }
        if (n < 32) break;
    }
#pragma unroll
    for (int i = 0; i < N; i += W) {
#pragma unroll
        for (int j = 0; j < W; ++j) of_warp[warp][i * 32 + lane * W + j] = sums[i + j];
    }
    __syncthreads();
    dw += static_cast<long long>(id) * d + column;
    for (int i = threadIdx.x; i < COLUMNS && column + i < d; i += blockDim.x) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < WARPS; ++k) sum += of_warp[k][i];
        dw[i] = narrow<G>(widen(dw[i]) + sum);
    }
}

#define ADD_ROWS(T, suffix, G, grad)                                                                                 \
    extern "C" __global__ void add_rows_##suffix##_##grad(const Key* keys, const T* dy, G* dw, long long t, int v,   \
                                                          int d) {                                                   \
        if (is_wide<T>(d, dy)) add_rows<WIDE<T>>(keys, dy, dw, t, v, d);                                             \
        else add_rows<1>(keys, dy, dw, t, v, d);                                                                     \
    }
#define KERNELS(T, suffix)                                                                                           \
    extern "C" __global__ void gather_##suffix(const uint* ids, const T* w, T* y, int v, int d) {                    \
        if (is_wide<T>(d, w, y)) gather<WIDE<T>>(ids, w, y, v, d);                                                   \
        else gather<1>(ids, w, y, v, d);                                                                             \
    }                                                                                                                \
    ADD_ROWS(T, suffix, float, f32)                                                                                  \
    ADD_ROWS(T, suffix, __nv_bfloat16, bf16)
FOR_EACH_FLOAT(KERNELS)
