// attention, backward. With p = e^(score - lse) and delta = sum(do o): dv = p^T do, ds = p (do v^T - delta),
// dq = scale ds k, dk = scale ds^T q.
#pragma once

#include "tile.cuh"

namespace plain {

// Turns dp into ds and unscaled scores into p.
__device__ __forceinline__ void softmax_backward(float& p, float& ds, bool is_visible, float scale, float lse,
                                                 float delta) {
    p = is_visible ? expf(p * scale - lse) : 0.0f;
    ds = is_visible ? p * (ds - delta) : 0.0f;
}

// dq: a block computes a tile of query rows over the key tiles that they may attend to.
template <int DIM, typename T> __device__ void grad_q(const Saved<T>& saved, T* dq, const Problem& problem) {
    __shared__ Scratch scratch;
    const Heads heads = problem.heads;
    const Sequence sequence = find_rows(problem);
    const View view = sequence.view;
    const bool wide = is_wide<T>(heads.dim, saved.q, saved.k, saved.v, saved.d_o, dq);
    const SavedRows<T> rows(saved, sequence, heads);
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int first = sequence.tile * TILE, last = min(first + TILE, rows.q.n) - 1;

    Range visible[4];
    float row_lse[4], row_delta[4];
    Sums<DIM> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = min(first + 4 * y + i, last);
        visible[i] = view.keys_of(row / heads.group);
        row_lse[i] = rows.lse.data[rows.lse.offset(row)];
        row_delta[i] = rows.delta.data[rows.delta.offset(row)];
    }
    const int end = view.keys_of(last / heads.group).end;
    for (int key = view.keys_of(first / heads.group).start; key < end; key += TILE) {
        float p[4][4] = {}, ds[4][4] = {};
        multiply_rows(p, scratch, rows.q, first, rows.k, key, wide);
        multiply_rows(ds, scratch, rows.d_o, first, rows.v, key, wide);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const bool is_visible = visible[i].holds(key + x + 16 * j);
                softmax_backward(p[i][j], ds[i][j], is_visible, problem.scale, row_lse[i], row_delta[i]);
            }
        }
        put_scores(scratch, ds);
        out.add_product(scratch, rows.k, key, wide);
    }
    const auto dq_rows = query_rows(dq, sequence, heads);
#pragma unroll
    for (int i = 0; i < 4; ++i) out.write(i, problem.scale, dq_rows, first + 4 * y + i, wide);
}

// dk and dv: a block computes a tile of keys over the query tiles that may attend to them, one after another.
template <int DIM, typename T> __device__ void grad_kv(const Saved<T>& saved, T* dk, T* dv, const Problem& problem) {
    __shared__ Scratch scratch;
    const Heads heads = problem.heads;
    const Sequence sequence = find_keys(problem);
    const View view = sequence.view;
    const bool wide = is_wide<T>(heads.dim, saved.q, saved.k, saved.v, saved.d_o, dk, dv);
    const SavedRows<T> rows(saved, sequence, heads);
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int first = sequence.tile * TILE, last = min(first + TILE, rows.k.n) - 1;
    const Range queries = view.queries_of(first, last);

    Sums<DIM> dk_sums, dv_sums;
    const int end = queries.end * heads.group;
    for (int start = queries.start * heads.group; start < end; start += TILE) {
        float p[4][4] = {}, ds[4][4] = {};
        multiply_rows(p, scratch, rows.k, first, rows.q, start, wide);
        multiply_rows(ds, scratch, rows.v, first, rows.d_o, start, wide);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = start + x + 16 * j;
            const int known = min(row, rows.q.n - 1);
            const Range visible = view.keys_of(known / heads.group);
            const float row_lse = rows.lse.data[rows.lse.offset(known)];
            const float row_delta = rows.delta.data[rows.delta.offset(known)];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool is_visible = row < rows.q.n && visible.holds(first + 4 * y + i);
                softmax_backward(p[i][j], ds[i][j], is_visible, problem.scale, row_lse, row_delta);
            }
        }
        put_scores(scratch, p);
        dv_sums.add_product(scratch, rows.d_o, start, wide);
        put_scores(scratch, ds);
        dk_sums.add_product(scratch, rows.q, start, wide);
    }
    const auto dk_rows = key_rows(dk, sequence, heads), dv_rows = key_rows(dv, sequence, heads);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int key = first + 4 * y + i;
        dk_sums.write(i, problem.scale, dk_rows, key, wide);
        dv_sums.write(i, 1.0f, dv_rows, key, wide);
    }
}

}  // namespace plain
