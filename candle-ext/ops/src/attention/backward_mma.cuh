// Attention backward on tensor cores. Computes the same as backward.cuh.
#pragma once

#include "mma.cuh"

namespace mma {

// Keys (for dq) or query rows (for dk and dv) per step of a block. Registers and 99 KiB of shared memory hold no more.
// cuda.rs has the same numbers.
template <int DIM> constexpr int STEP_KEYS = DIM > 64 ? 32 : 64;
template <int DIM> constexpr int STEP_ROWS = DIM > 96 ? 32 : 64;

// dq: a block computes a tile of query rows over the key tiles that they may attend to.
template <int DIM, typename T> __device__ void grad_q(const Saved<T>& saved, T* dq, const Problem& problem) {
    constexpr int KEYS = STEP_KEYS<DIM>;
    const Heads heads = problem.heads;
    const Sequence sequence = find_rows(problem);
    const View view = sequence.view;
    const SavedRows<T> rows(saved, sequence, heads);
    const int first = sequence.tile * TILE_ROWS, last = min(first + TILE_ROWS, rows.q.n) - 1;
    const int own_row = threadIdx.x / 32 * WARP_ROWS;

    // Shared memory: the rows of q and do, and double-buffered tiles of keys and values.
    const Tile<T, DIM> q_tile{reinterpret_cast<T*>(dynamic_shared())}, d_o_tile = q_tile.from(TILE_ROWS);
    const Tile<T, DIM> own_q = q_tile.from(own_row), own_d_o = d_o_tile.from(own_row);
    const Tile<T, DIM> stages = d_o_tile.from(TILE_ROWS);
    const auto stage_keys = [&](int number, int key) {
        stage<KEYS>(stages.from(2 * KEYS * number), rows.k, key);
        stage<KEYS>(stages.from(2 * KEYS * number + KEYS), rows.v, key);
    };

    Matrix<DIM> out;
    const auto visible = [&](int row) { return view.keys_of(min(first + own_row + row, last) / heads.group); };
    float row_lse[4], row_delta[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = min(first + own_row + out.row_of(i), last);
        row_lse[i] = rows.lse.data[rows.lse.offset(row)] * LOG2_E;
        row_delta[i] = rows.delta.data[rows.delta.offset(row)];
    }

    const Range of_first = view.keys_of(first / heads.group), of_last = view.keys_of(last / heads.group);
    const float scale = problem.scale * LOG2_E;
    if (of_first.start < of_last.end) {
        stage<TILE_ROWS>(q_tile, rows.q, first);
        stage<TILE_ROWS>(d_o_tile, rows.d_o, first);
        stage_keys(0, of_first.start);
    }
    for (int key = of_first.start, number = 0; key < of_last.end; key += KEYS, number ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (key + KEYS < of_last.end) stage_keys(number ^ 1, key + KEYS);
        const Tile<T, DIM> k_tile = stages.from(2 * KEYS * number), v_tile = k_tile.from(KEYS);

        Matrix<KEYS> p, ds;
        multiply_rows(p, own_q, k_tile);
        if (key < of_last.start || key + KEYS > of_first.end) hide(p, visible, key);
        multiply_rows(ds, own_d_o, v_tile);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < KEYS / 4; ++j) {
                ds.at[i][j] = fast_exp2(p.at[i][j] * scale - row_lse[i]) * (ds.at[i][j] - row_delta[i]);
            }
        }
        add_product(out, ds, k_tile);
    }
    const float factors[4] = {problem.scale, problem.scale, problem.scale, problem.scale};
    write_rows(out, factors, own_q, query_rows(dq, sequence, heads), first + own_row);
}

// lse and delta of a tile of rows, in shared memory.
template <int ROWS> struct RowValues {
    float lse[ROWS], delta[ROWS];

    template <typename T> __device__ __forceinline__ void stage(const SavedRows<T>& rows, int first) {
        static_assert(2 * ROWS <= THREADS);
        const int row = threadIdx.x % ROWS;
        const bool exists = first + row < rows.lse.n;
        const long long offset = exists ? rows.lse.offset(first + row) : 0;
        if (threadIdx.x < ROWS) copy_async<4>(&lse[row], rows.lse.data + offset, exists);
        else if (threadIdx.x < 2 * ROWS) copy_async<4>(&delta[row], rows.delta.data + offset, exists);
    }
};

// Data that two warps exchange: each lane's part of a matrix of 32 rows.
template <int COLUMNS> struct Exchange {
    Pack<float, 4> packs[COLUMNS / 4][32];

    __device__ __forceinline__ void put(const Matrix<COLUMNS>& matrix) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; ++i) {
            Pack<float, 4> pack;
#pragma unroll
            for (int row = 0; row < 4; ++row) pack.at[row] = matrix.at[row][i];
            packs[i][threadIdx.x % 32] = pack;
        }
    }
    __device__ __forceinline__ Pack<float, 4> get(int i) const { return packs[i][threadIdx.x % 32]; }
};

// dk and dv: a block computes a tile of keys over the query tiles that may attend to them, one after another.
//
// Two warps share the same 32 keys: one computes p and dv, the other ds and dk. A tile that a warp reads then serves 32
// keys. A warp that held both sums would have registers for 16.
template <int DIM, typename T> __device__ void grad_kv(const Saved<T>& saved, T* dk, T* dv, const Problem& problem) {
    constexpr int KEYS = WARPS / 2 * WARP_ROWS, ROWS = STEP_ROWS<DIM>;
    const Heads heads = problem.heads;
    const Sequence sequence = find_keys(problem);
    const View view = sequence.view;
    const SavedRows<T> rows(saved, sequence, heads);
    const int first = sequence.tile * KEYS, last = min(first + KEYS, rows.k.n) - 1;
    const int warp = threadIdx.x / 32, pair = warp / 2, own_key = pair * WARP_ROWS;
    const bool has_p = warp % 2 == 0;

    // Shared memory: the keys and values; double-buffered rows of q and do with lse and delta; p.
    const Tile<T, DIM> k_tile{reinterpret_cast<T*>(dynamic_shared())}, v_tile = k_tile.from(KEYS);
    const Tile<T, DIM> own = (has_p ? k_tile : v_tile).from(own_key), stages = v_tile.from(KEYS);
    RowValues<ROWS>* values = reinterpret_cast<RowValues<ROWS>*>(stages.from(4 * ROWS).data);
    Exchange<ROWS>& exchange = reinterpret_cast<Exchange<ROWS>*>(values + 2)[pair];
    const auto stage_rows = [&](int number, int row) {
        stage<ROWS>(stages.from(2 * ROWS * number), rows.q, row);
        stage<ROWS>(stages.from(2 * ROWS * number + ROWS), rows.d_o, row);
        values[number].stage(rows, row);
    };

    Matrix<DIM> sums;
    // Query rows that may attend to a key.
    const auto seen_by = [&](int row) -> Range {
        const int key = min(first + own_key + row, last);
        const Range queries = view.queries_of(key, key);
        return {queries.start * heads.group, queries.end * heads.group};
    };

    const Range by_first = view.queries_of(first, first), by_last = view.queries_of(last, last);
    const int end = by_last.end * heads.group;
    const float scale = problem.scale * LOG2_E;
    const int start = by_first.start * heads.group;
    if (start < end) {
        stage<KEYS>(k_tile, rows.k, first);
        stage<KEYS>(v_tile, rows.v, first);
        stage_rows(0, start);
    }
    for (int row = start, number = 0; row < end; row += ROWS, number ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (row + ROWS < end) stage_rows(number ^ 1, row + ROWS);
        const Tile<T, DIM> q_tile = stages.from(2 * ROWS * number), d_o_tile = q_tile.from(ROWS);

        Matrix<ROWS> scores;
        multiply_rows(scores, own, has_p ? q_tile : d_o_tile);
        if (has_p) {
            const bool all_visible = row >= by_last.start * heads.group && row + ROWS <= by_first.end * heads.group;
            if (!all_visible) hide(scores, seen_by, row);
#pragma unroll
            for (int j = 0; j < ROWS / 4; ++j) {
                const float lse = values[number].lse[scores.column_of(j)] * LOG2_E;
#pragma unroll
                for (int i = 0; i < 4; ++i) scores.at[i][j] = fast_exp2(scores.at[i][j] * scale - lse);
            }
            exchange.put(scores);
        }
        __syncthreads();
        if (!has_p) {
#pragma unroll
            for (int j = 0; j < ROWS / 4; ++j) {
                const float delta = values[number].delta[scores.column_of(j)];
                const auto p = exchange.get(j);
#pragma unroll
                for (int i = 0; i < 4; ++i) scores.at[i][j] = p.at[i] * (scores.at[i][j] - delta);
            }
        }
        add_product(sums, scores, has_p ? d_o_tile : q_tile);
    }
    const float factor = has_p ? 1.0f : problem.scale;
    const float factors[4] = {factor, factor, factor, factor};
    write_rows(sums, factors, own, key_rows(has_p ? dv : dk, sequence, heads), first + own_key);
}

}  // namespace mma
