// Attention: maps a block to its sequence, rows and keys. A sequence's rows are its queries times the heads that share
// a KV head: row r belongs to query r / group.
#pragma once

#include "common.cuh"

struct Range {
    int start, end;
    __device__ bool holds(int i) const { return start <= i && i < end; }
};

struct Heads {
    int group, dim;
    __device__ int key_head() const { return blockIdx.y; }
    __device__ int n_kv() const { return gridDim.y; }
};

// Arguments that all blocks share.
struct Problem {
    // [5, n_seqs + 1]: cumulative counts of queries, keys, row tiles and key tiles; then the position of each
    // sequence's first query among its keys.
    const uint* seqs;
    int n_seqs;
    Heads heads;
    int causal, window;
    float scale;
};

// Visible keys of a sequence's queries. `before` is the position of the first query among the keys. Queries are the
// last positions unless this is a chunk.
struct View {
    int n_queries, n_keys, before, causal, window;

    __device__ Range keys_of(int query) const {
        const int position = before + query;
        const int end = causal ? min(max(0, position + 1), n_keys) : n_keys;
        return {min(max(0, position + 1 - window), end), end};
    }

    // Queries that see any of the keys [first, last].
    __device__ Range queries_of(int first, int last) const {
        const int end = min(max(0, last - before + window), n_queries);
        return {causal ? min(max(0, first - before), end) : 0, end};
    }
};

// One sequence, and the index of the block's tile in it.
struct Sequence {
    View view;
    int first_query, first_key, tile;
};

// Rows of `seqs`.
enum { TILES_OF_ROWS = 2, TILES_OF_KEYS = 3, FIRST_POSITIONS = 4 };

__device__ __forceinline__ Sequence find_sequence(const Problem& problem, int tiles, int tile) {
    const uint* cu_q = problem.seqs;
    const uint* cu_k = cu_q + problem.n_seqs + 1;
    const uint* cu_tiles = cu_q + tiles * static_cast<long long>(problem.n_seqs + 1);
    int low = 0, high = problem.n_seqs;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (cu_tiles[middle] <= static_cast<uint>(tile)) low = middle;
        else high = middle;
    }
    const int first_query = cu_q[low], first_key = cu_k[low];
    const int n_queries = static_cast<int>(cu_q[low + 1]) - first_query;
    const int n_keys = static_cast<int>(cu_k[low + 1]) - first_key;
    const int before = static_cast<int>(cu_q[FIRST_POSITIONS * static_cast<long long>(problem.n_seqs + 1) + low]);
    const View view{n_queries, n_keys, before, problem.causal, problem.window};
    return {view, first_query, first_key, tile - static_cast<int>(cu_tiles[low])};
}

// Finds the block's row tile. Under a causal mask the last tiles have the most work, so they come first.
__device__ __forceinline__ Sequence find_rows(const Problem& problem) {
    return find_sequence(problem, TILES_OF_ROWS, gridDim.x - 1 - blockIdx.x);
}

// Finds the block's key tile. Under a causal mask the first tiles have the most work.
__device__ __forceinline__ Sequence find_keys(const Problem& problem) {
    return find_sequence(problem, TILES_OF_KEYS, blockIdx.x);
}

// n rows of `dim` elements for `group` heads of each token.
template <typename T> struct Rows {
    T* data;
    int n, group, dim;
    int token;  // elements from one token to the next

    __device__ __forceinline__ long long offset(int row) const {
        const int of = static_cast<uint>(row) / static_cast<uint>(group);
        return static_cast<long long>(of) * token + (row - of * group) * dim;
    }
};

// Queries of a sequence for the block's KV head, in a tensor [t, n_kv, group, dim].
template <typename T> __device__ Rows<T> query_rows(T* x, const Sequence& sequence, const Heads& heads) {
    const int width = heads.group * heads.dim, token = heads.n_kv() * width;
    x += static_cast<long long>(sequence.first_query) * token + heads.key_head() * width;
    return {x, sequence.view.n_queries * heads.group, heads.group, heads.dim, token};
}

// Keys of a sequence for the block's KV head, in a tensor [s, n_kv, dim].
template <typename T> __device__ Rows<T> key_rows(T* x, const Sequence& sequence, const Heads& heads) {
    const int token = heads.n_kv() * heads.dim;
    x += static_cast<long long>(sequence.first_key) * token + heads.key_head() * heads.dim;
    return {x, sequence.view.n_keys, 1, heads.dim, token};
}

// Inputs of the backward kernels: q and d_o are [t, n_kv, group, dim], k and v [s, n_kv, dim], lse and delta
// [t, n_kv, group].
template <typename T> struct Saved {
    const T *q, *k, *v, *d_o;
    const float *lse, *delta;
};

// Those inputs for the block's sequence and KV head.
template <typename T> struct SavedRows {
    Rows<const T> q, k, v, d_o;
    Rows<const float> lse, delta;

    __device__ SavedRows(const Saved<T>& saved, const Sequence& sequence, const Heads& heads)
        : q(query_rows(saved.q, sequence, heads)),
          k(key_rows(saved.k, sequence, heads)),
          v(key_rows(saved.v, sequence, heads)),
          d_o(query_rows(saved.d_o, sequence, heads)),
          lse(query_rows(saved.lse, sequence, Heads{heads.group, 1})),
          delta(query_rows(saved.delta, sequence, Heads{heads.group, 1})) {}
};
