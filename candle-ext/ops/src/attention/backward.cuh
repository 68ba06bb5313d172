// attention, backward. With p = e^(score - lse) and delta = sum(do o): dv = p^T do, ds = p (do v^T - delta),
// dq = scale ds k, dk = scale ds^T q.
#pragma once

#include "tile.cuh"

// delta of each row [n, dim], a warp for each.
template <int W, typename T>
__device__ void row_products(const T* o, const T* d_o, float* delta, int n, int dim) {
    const int lane = threadIdx.x & 31, row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (row >= n) return;
    o += static_cast<long long>(row) * dim;
    d_o += static_cast<long long>(row) * dim;
    float sum = 0.0f;
    for (int i = lane * W; i < dim; i += 32 * W) {
        const auto o_pack = load<W>(o + i), d_o_pack = load<W>(d_o + i);
#pragma unroll
        for (int j = 0; j < W; ++j) sum += widen(o_pack.at[j]) * widen(d_o_pack.at[j]);
    }
    sum = warp_sum(sum);
    if (lane == 0) delta[row] = sum;
}

// dp, and the score before it is scaled, become ds and p.
__device__ __forceinline__ void softmax_backward(float& p, float& ds, bool is_visible, float scale, float lse,
                                                 float delta) {
    p = is_visible ? expf(p * scale - lse) : 0.0f;
    ds = is_visible ? p * (ds - delta) : 0.0f;
}

// dq: a block takes a tile of rows over the tiles of keys that they see.
template <int DIM, typename T>
__device__ void grad_q(const T* q, const T* k, const T* v, const T* d_o, const float* lse, const float* delta, T* dq,
                       const uint* seqs, int n_seqs, Heads heads, int causal, int window, float scale) {
    __shared__ Scratch scratch;
    const Sequence sequence = find_sequence(seqs, n_seqs, TILES_OF_ROWS, gridDim.x - 1 - blockIdx.x);
    const View view{sequence.n_queries, sequence.n_keys, causal, window};
    const bool wide = is_wide<T>(heads.dim, q, k, v, d_o, dq);
    const auto q_rows = query_rows(q, sequence, heads), d_o_rows = query_rows(d_o, sequence, heads);
    const auto k_rows = key_rows(k, sequence, heads), v_rows = key_rows(v, sequence, heads);
    const auto lse_rows = query_rows(lse, sequence, Heads{heads.group, 1});
    const auto delta_rows = query_rows(delta, sequence, Heads{heads.group, 1});
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int first = sequence.tile * TILE, last = min(first + TILE, q_rows.n) - 1;

    Range visible[4];
    float row_lse[4], row_delta[4];
    Sums<DIM> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = min(first + 4 * y + i, last);
        visible[i] = view.keys_of(row / heads.group);
        row_lse[i] = lse_rows.data[lse_rows.offset(row)];
        row_delta[i] = delta_rows.data[delta_rows.offset(row)];
    }
    const int end = view.keys_of(last / heads.group).end;
    for (int key = view.keys_of(first / heads.group).start; key < end; key += TILE) {
        float p[4][4] = {}, ds[4][4] = {};
        multiply_rows(p, scratch, q_rows, first, k_rows, key, wide);
        multiply_rows(ds, scratch, d_o_rows, first, v_rows, key, wide);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const bool is_visible = visible[i].holds(key + x + 16 * j);
                softmax_backward(p[i][j], ds[i][j], is_visible, scale, row_lse[i], row_delta[i]);
            }
        }
        put_scores(scratch, ds);
        out.add_product(scratch, k_rows, key, wide);
    }
    const auto dq_rows = query_rows(dq, sequence, heads);
#pragma unroll
    for (int i = 0; i < 4; ++i) out.write(i, scale, dq_rows, first + 4 * y + i, wide);
}

// dk and dv: a block takes a tile of keys over the tiles of rows that see them, one after the other.
template <int DIM, typename T>
__device__ void grad_kv(const T* q, const T* k, const T* v, const T* d_o, const float* lse, const float* delta, T* dk,
                        T* dv, const uint* seqs, int n_seqs, Heads heads, int causal, int window, float scale) {
    __shared__ Scratch scratch;
    const Sequence sequence = find_sequence(seqs, n_seqs, TILES_OF_KEYS, blockIdx.x);
    const View view{sequence.n_queries, sequence.n_keys, causal, window};
    const bool wide = is_wide<T>(heads.dim, q, k, v, d_o, dk, dv);
    const auto q_rows = query_rows(q, sequence, heads), d_o_rows = query_rows(d_o, sequence, heads);
    const auto k_rows = key_rows(k, sequence, heads), v_rows = key_rows(v, sequence, heads);
    const auto lse_rows = query_rows(lse, sequence, Heads{heads.group, 1});
    const auto delta_rows = query_rows(delta, sequence, Heads{heads.group, 1});
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int first = sequence.tile * TILE, last = min(first + TILE, k_rows.n) - 1;
    const Range queries = view.queries_of(first, last);

    Sums<DIM> dk_sums, dv_sums;
    const int end = queries.end * heads.group;
    for (int start = queries.start * heads.group; start < end; start += TILE) {
        float p[4][4] = {}, ds[4][4] = {};
        multiply_rows(p, scratch, k_rows, first, q_rows, start, wide);
        multiply_rows(ds, scratch, v_rows, first, d_o_rows, start, wide);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = start + x + 16 * j;
            const int known = min(row, q_rows.n - 1);
            const Range visible = view.keys_of(known / heads.group);
            const float row_lse = lse_rows.data[lse_rows.offset(known)];
            const float row_delta = delta_rows.data[delta_rows.offset(known)];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool is_visible = row < q_rows.n && visible.holds(first + 4 * y + i);
                softmax_backward(p[i][j], ds[i][j], is_visible, scale, row_lse, row_delta);
            }
        }
        put_scores(scratch, p);
        dv_sums.add_product(scratch, d_o_rows, start, wide);
        put_scores(scratch, ds);
        dk_sums.add_product(scratch, q_rows, start, wide);
    }
    const auto dk_rows = key_rows(dk, sequence, heads), dv_rows = key_rows(dv, sequence, heads);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int key = first + 4 * y + i;
        dk_sums.write(i, scale, dk_rows, key, wide);
        dv_sums.write(i, 1.0f, dv_rows, key, wide);
    }
}
