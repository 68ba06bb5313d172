// attention, what its kernels share. A tile of rows meets a tile of keys. The rows of a sequence are its queries, and
// of each query the heads that read one key head, side by side: row r is query r / group.
#pragma once

#include "common.cuh"

constexpr int TILE = 64;      // rows or keys in a tile
constexpr int THREADS = 256;  // 16 by 16 of them; each has 4 by 4 scores of a tile
constexpr int SLICE = 32;     // columns staged at once for scores

// Between rows in shared memory: four more than the banks' 32, so that neighbours lie in other banks, and aligned.
constexpr int SLICE_STRIDE = SLICE + 4;
constexpr int SCORE_STRIDE = TILE + 4;
constexpr int STAGED = 2 * TILE * SLICE_STRIDE;

// Keys or rows of DIM columns staged at once.
template <int DIM> constexpr int CHUNK = DIM > 128 ? 16 : 32;

// Columns of a pack.
template <int DIM> constexpr int VECTOR = DIM % 64 == 0 ? 4 : 2;

// Shared by the threads of a block.
struct Scratch {
    alignas(16) float staged[STAGED];
    alignas(16) float scores[TILE * SCORE_STRIDE];
};

struct Range {
    int start, end;
    __device__ bool holds(int i) const { return start <= i && i < end; }
};

struct Heads {
    int group, dim;
    __device__ int key_head() const { return blockIdx.y; }
    __device__ int n_kv() const { return gridDim.y; }
};

// One sequence, and which of its tiles is the block's.
struct Sequence {
    int first_query, n_queries, first_key, n_keys, tile;
};

// seqs [4, n_seqs + 1]: the queries, keys, tiles of rows and tiles of keys before each sequence, and of all.
enum { TILES_OF_ROWS = 2, TILES_OF_KEYS = 3 };

__device__ __forceinline__ Sequence find_sequence(const uint* seqs, int n_seqs, int tiles, int tile) {
    const uint* cu_q = seqs;
    const uint* cu_k = seqs + n_seqs + 1;
    const uint* cu_tiles = seqs + tiles * static_cast<long long>(n_seqs + 1);
    int low = 0, high = n_seqs;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (cu_tiles[middle] <= static_cast<uint>(tile)) low = middle;
        else high = middle;
    }
    const int first_query = cu_q[low], first_key = cu_k[low];
    return {first_query, static_cast<int>(cu_q[low + 1]) - first_query, first_key,
            static_cast<int>(cu_k[low + 1]) - first_key, tile - static_cast<int>(cu_tiles[low])};
}

// What the queries of a sequence see of its keys. They are its last positions.
struct View {
    int n_queries, n_keys, causal, window;

    __device__ Range keys_of(int query) const {
        const int position = n_keys - n_queries + query;
        return {max(0, position + 1 - window), causal ? position + 1 : n_keys};
    }

    // The queries that see something of the keys [first, last].
    __device__ Range queries_of(int first, int last) const {
        const int before = n_keys - n_queries;
        return {causal ? max(0, first - before) : 0, last + min(window, n_keys - last) - before};
    }
};

// n rows of `dim` elements for `group` heads of each token.
template <typename T> struct Rows {
    T* data;
    int n, group, dim;
    long long token;  // elements from one to the next

    __device__ long long offset(int row) const { return row / group * token + row % group * dim; }
};

// The queries of a sequence for the block's key head, in a tensor [t, n_kv, group, dim].
template <typename T> __device__ Rows<T> query_rows(T* x, const Sequence& sequence, const Heads& heads) {
    const long long token = static_cast<long long>(heads.n_kv()) * heads.group * heads.dim;
    x += sequence.first_query * token + static_cast<long long>(heads.key_head()) * heads.group * heads.dim;
    return {x, sequence.n_queries * heads.group, heads.group, heads.dim, token};
}

// The keys of a sequence for the block's key head, in a tensor [s, n_kv, dim].
template <typename T> __device__ Rows<T> key_rows(T* x, const Sequence& sequence, const Heads& heads) {
    const long long token = static_cast<long long>(heads.n_kv()) * heads.dim;
    return {x + sequence.first_key * token + heads.key_head() * heads.dim, sequence.n_keys, 1, heads.dim, token};
}

template <int COLUMNS, int STRIDE, int W, typename T>
__device__ __forceinline__ void stage_packs(float* to, const Rows<const T>& rows, int first, int n, int column) {
    constexpr int V = W < 4 ? W : 4;
#pragma unroll 1
    for (int i = threadIdx.x * W; i < n * COLUMNS; i += THREADS * W) {
        const int row = i / COLUMNS, at = i % COLUMNS;
        Pack<T, W> pack{};
        if (first + row < rows.n && column + at < rows.dim) {
            pack = load<W>(rows.data + rows.offset(first + row) + column + at);
        }
#pragma unroll
        for (int j = 0; j < W; j += V) {
            Pack<float, V> wide;
#pragma unroll
            for (int e = 0; e < V; ++e) wide.at[e] = widen(pack.at[j + e]);
            store(to + row * STRIDE + at + j, wide);
        }
    }
}

// Puts COLUMNS columns of n rows, from these on, into shared memory; what does not exist is zero.
template <int COLUMNS, int STRIDE, typename T>
__device__ __forceinline__ void stage(float* to, const Rows<const T>& rows, int first, int n, int column, bool wide) {
    if (wide) stage_packs<COLUMNS, STRIDE, WIDE<T>>(to, rows, first, n, column);
    else stage_packs<COLUMNS, STRIDE, 1>(to, rows, first, n, column);
}

// sums += a b^T for a tile of each. A thread has rows 4 y + i of a and x + 16 j of b.
template <typename T>
__device__ __forceinline__ void multiply_rows(float (&sums)[4][4], Scratch& scratch, const Rows<const T>& a,
                                              int first_a, const Rows<const T>& b, int first_b, bool wide) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float* a_slice = scratch.staged;
    float* b_slice = scratch.staged + TILE * SLICE_STRIDE;
    for (int column = 0; column < a.dim; column += SLICE) {
        __syncthreads();
        stage<SLICE, SLICE_STRIDE>(a_slice, a, first_a, TILE, column, wide);
        stage<SLICE, SLICE_STRIDE>(b_slice, b, first_b, TILE, column, wide);
        __syncthreads();
#pragma unroll 1
        for (int at = 0; at < SLICE && column + at < a.dim; at += 4) {
            Pack<float, 4> a_packs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a_packs[i] = load<4>(a_slice + (4 * y + i) * SLICE_STRIDE + at);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto b_pack = load<4>(b_slice + (x + 16 * j) * SLICE_STRIDE + at);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[i][j] += a_packs[i].at[e] * b_pack.at[e];
                }
            }
        }
    }
}

// Shares what the threads have of a tile, laid out as multiply_rows leaves it.
__device__ __forceinline__ void put_scores(Scratch& scratch, const float (&scores)[4][4]) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scratch.scores[(4 * y + i) * SCORE_STRIDE + x + 16 * j] = scores[i][j];
    }
}

// Four rows of a tile's result, 4 y + i, and DIM / 16 columns of each: for every 16 packs the one at x.
template <int DIM> struct Sums {
    float at[4][DIM / 16] = {};

    // Which of the DIM columns a thread's own one is.
    __device__ __forceinline__ static int column_of(int own) {
        constexpr int V = VECTOR<DIM>;
        return own / V * V * 16 + threadIdx.x % 16 * V + own % V;
    }

    // += the shared scores times the rows of b from `first` on.
    template <typename T>
    __device__ __forceinline__ void add_product(Scratch& scratch, const Rows<const T>& b, int first, bool wide) {
        for (int start = 0; start < TILE && first + start < b.n; start += CHUNK<DIM>) {
            const int n = min(CHUNK<DIM>, b.n - first - start);
            __syncthreads();
            stage<DIM, DIM>(scratch.staged, b, first + start, CHUNK<DIM>, 0, wide);
            __syncthreads();
#pragma unroll
            for (int column = 0; column < DIM / 16; column += VECTOR<DIM>) {
                if (column_of(column) < b.dim) add_columns(scratch, column, start, n);
            }
        }
    }

    // The columns of one pack, for a chunk of n rows of b. Its sum is taken by itself, so that thousands of rows add up
    // with less error.
    __device__ __forceinline__ void add_columns(const Scratch& scratch, int column, int start, int n) {
        constexpr int V = VECTOR<DIM>;
        const int y = threadIdx.x / 16;
        float sums[4][V] = {};
#pragma unroll 1
        for (int key = 0; key < n; key += 4) {
            Pack<float, 4> scores[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[i] = load<4>(scratch.scores + (4 * y + i) * SCORE_STRIDE + start + key);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const auto pack = load<V>(scratch.staged + (key + e) * DIM + column_of(column));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int v = 0; v < V; ++v) sums[i][v] += scores[i].at[e] * pack.at[v];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int v = 0; v < V; ++v) at[i][column + v] += sums[i][v];
        }
    }

    // Writes the thread's row i times `scale`, rounded, to this row.
    template <int W, typename T>
    __device__ __forceinline__ void write_packs(int i, float scale, const Rows<T>& to, int row) const {
        T* data = to.data + to.offset(row);
#pragma unroll
        for (int column = 0; column < DIM / 16; column += W) {
            const int first = column_of(column);
            Pack<T, W> pack;
#pragma unroll
            for (int w = 0; w < W; ++w) pack.at[w] = narrow<T>(at[i][column + w] * scale);
            if (first < to.dim) store(data + first, pack);
        }
    }

    template <typename T>
    __device__ __forceinline__ void write(int i, float scale, const Rows<T>& to, int row, bool wide) const {
        if (row >= to.n) return;
        if (wide) write_packs<VECTOR<DIM>>(i, scale, to, row);
        else write_packs<1>(i, scale, to, row);
    }
};
