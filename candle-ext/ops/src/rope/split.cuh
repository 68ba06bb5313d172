// split: the heads of joined rows [q | k | v], q and k with an optional norm and rotated, each to a tensor of its own; and the
// gradients of these tensors to joined rows. Sums have the order of rms_norm's kernels, so results have the bits of that op and
// of `rotate`. The mean of squares is computed again in backward.
//
// `lanes` threads of a warp, a power of two, share a head, each with P packs of W elements. W = 1: a block has one head in a loop.
#pragma once

#include "common.cuh"

// Cosines and sines [t, half].
struct RotaryTable {
    const float *cos, *sin;
    int half;

    // Loads the factors of W elements from `column` on of a head.
    template <int W> __device__ __forceinline__ void factors(int token, int column, float (&c)[W], float (&s)[W]) const {
        const long long row = static_cast<long long>(token) * half;
        if (W > 1 && is_wide<float>(half, cos, sin) && half % W == 0) {
            const int i = column < half ? column : column - half;
            load_floats(cos + row + i, c);
            load_floats(sin + row + i, s);
            return;
        }
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const int i = column + j;
            if (i >= 2 * half) continue;
            c[j] = cos[row + (i < half ? i : i - half)];
            s[j] = sin[row + (i < half ? i : i - half)];
        }
    }

    // Loads the partners of W elements from `column` on of a head.
    template <int W, typename T> __device__ __forceinline__ Pack<T, W> partners(const T* head, int column) const {
        if (half % W == 0) return load<W>(head + (column < half ? column + half : column - half));
        Pack<T, W> pack;
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const int i = column + j;
            pack.at[j] = head[i < half ? i + half : i < 2 * half ? i - half : i];
        }
        return pack;
    }

    // Rotates W elements from `column` on of a head, given their partners. Sign -1 inverts the rotation.
    template <int W, typename T>
    __device__ __forceinline__ void rotate(Pack<T, W>& own, const Pack<T, W>& partner, int token, int column, float sign) const {
        float c[W], s[W];
        factors(token, column, c, s);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            if (column + j >= 2 * half) continue;
            const float x = widen(own.at[j]), other = widen(partner.at[j]), turned = sign * s[j];
            own.at[j] = narrow<T>(column + j < half ? x * c[j] - other * turned : x * c[j] + other * turned);
        }
    }
};

// Heads of a part of each row: n from element `first` on. `heads` is the tensor [t, n, d] that holds them alone.
template <typename T> struct HeadPart {
    T* heads;
    const T* weight;
    float* partial;
    int first, n;
    bool is_rotated;
};

// Joined rows of t tokens, `stride` elements apart, whose parts have heads of d elements.
template <typename T> struct HeadRows {
    HeadPart<T> parts[3];
    RotaryTable table;
    int t, d;
    long long stride;
    float eps;

    __device__ __forceinline__ HeadRows(T* q, T* k, T* v, const T* w_q, const T* w_k, float* partial_q, float* partial_k,
                                        RotaryTable table, int t, int n_q, int n_kv, int d, long long stride, float eps)
        : parts{{q, w_q, partial_q, 0, n_q, true}, {k, w_k, partial_k, n_q * d, n_kv, true},
                {v, nullptr, nullptr, (n_q + n_kv) * d, n_kv, false}},
          table(table), t(t), d(d), stride(stride), eps(eps) {}
};

// Sum over `lanes` neighbours of a warp, a power of two; each gets it. All threads must call.
__device__ __forceinline__ float head_sum(float x, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Rounds the normalised elements, multiplies them by the weight and rounds again.
template <int W, typename T>
__device__ __forceinline__ Pack<T, W> normed(const Pack<T, W>& x, const Pack<T, W>& w, float r) {
    Pack<T, W> y;
#pragma unroll
    for (int j = 0; j < W; ++j) y.at[j] = narrow<T>(widen(narrow<T>(widen(x.at[j]) * r)) * widen(w.at[j]));
    return y;
}

// Sum of the squares of a thread's packs.
template <int P, int W, typename T>
__device__ __forceinline__ float squares(const Pack<T, W> (&packs)[P], int lane, int lanes, int d) {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < P; ++p) {
        if ((p * lanes + lane) * W >= d) continue;
#pragma unroll
        for (int j = 0; j < W; ++j) sum += widen(packs[p].at[j]) * widen(packs[p].at[j]);
    }
    return sum;
}

// Copies the heads of `x` to the parts, normed and rotated.
template <int P, int W, typename T>
__device__ __forceinline__ void split(const T* x, const HeadRows<T>& rows, int lanes) {
    const int lane = threadIdx.x % lanes, n_groups = blockDim.x / lanes, d = rows.d;
    const int n_heads = rows.parts[0].n + rows.parts[1].n + rows.parts[2].n;
    const long long row = static_cast<long long>(blockIdx.x) * n_groups + threadIdx.x / lanes;
    const bool is_row = row < static_cast<long long>(rows.t) * n_heads;
    const int token = is_row ? static_cast<int>(row / n_heads) : 0, head = is_row ? static_cast<int>(row % n_heads) : 0;
    const int which = (head >= rows.parts[0].n) + (head >= rows.parts[0].n + rows.parts[1].n);
    const HeadPart<T> part = which == 0 ? rows.parts[0] : which == 1 ? rows.parts[1] : rows.parts[2];
    const T* from = x + token * rows.stride + static_cast<long long>(head) * d;
    const int own_head = head - part.first / d;
    T* to = part.heads + (static_cast<long long>(token) * part.n + own_head) * d;
    Pack<T, W> packs[P];
#pragma unroll
    for (int p = 0; p < P; ++p) {
        const int column = (p * lanes + lane) * W;
        if (is_row && column < d) packs[p] = load<W>(from + column);
    }
    float r = 0.0f;
    if (rows.parts[0].weight != nullptr) {
        // All lanes of a warp take part in the sum, also those of values.
        const float sum = is_row && part.weight != nullptr ? squares<P, W>(packs, lane, lanes, d) : 0.0f;
        r = rsqrtf(head_sum(sum, lanes) / d + rows.eps);
    }
    if (!is_row) return;
#pragma unroll
    for (int p = 0; p < P; ++p) {
        const int column = (p * lanes + lane) * W;
        if (column >= d) continue;
        const bool is_turned = part.is_rotated && column < 2 * rows.table.half;
        Pack<T, W> partner;
        if (is_turned) partner = rows.table.template partners<W>(from, column);
        if (part.weight != nullptr) {
            packs[p] = normed(packs[p], load<W>(part.weight + column), r);
            if (is_turned) partner = normed(partner, rows.table.template partners<W>(part.weight, column), r);
        }
        if (is_turned) rows.table.rotate(packs[p], partner, token, column, 1.0f);
        store(to + column, packs[p]);
    }
}

// Variant for heads that are not aligned for packs: a block has one head.
template <typename T> __device__ __forceinline__ void split_long(const T* x, const HeadRows<T>& rows) {
    const int n_heads = rows.parts[0].n + rows.parts[1].n + rows.parts[2].n, d = rows.d;
    const int token = blockIdx.x / n_heads, head = blockIdx.x % n_heads;
    const int which = (head >= rows.parts[0].n) + (head >= rows.parts[0].n + rows.parts[1].n);
    const HeadPart<T> part = which == 0 ? rows.parts[0] : which == 1 ? rows.parts[1] : rows.parts[2];
    const T* from = x + token * rows.stride + static_cast<long long>(head) * d;
    T* to = part.heads + (static_cast<long long>(token) * part.n + head - part.first / d) * d;
    float r = 0.0f;
    if (part.weight != nullptr) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < d; i += blockDim.x) sum += widen(from[i]) * widen(from[i]);
        r = rsqrtf(block_sum(sum) / d + rows.eps);
    }
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        const bool is_turned = part.is_rotated && i < 2 * rows.table.half;
        auto own = load<1>(from + i), partner = own;
        if (is_turned) partner = rows.table.template partners<1>(from, i);
        if (part.weight != nullptr) {
            own = normed(own, load<1>(part.weight + i), r);
            if (is_turned) partner = normed(partner, rows.table.template partners<1>(part.weight, i), r);
        }
        if (is_turned) rows.table.rotate(own, partner, token, i, 1.0f);
        store(to + i, own);
    }
}

// Part and position of a block in a backward: `of_q` blocks have the queries, `of_k` the keys, the rest the values.
template <typename T> struct BlockOfPart {
    HeadPart<T> part;
    int block, n_blocks;

    __device__ __forceinline__ BlockOfPart(const HeadRows<T>& rows, int of_q, int of_k) {
        const int at = blockIdx.x, all = gridDim.x;
        part = at < of_q ? rows.parts[0] : at < of_q + of_k ? rows.parts[1] : rows.parts[2];
        block = at < of_q ? at : at < of_q + of_k ? at - of_q : at - of_q - of_k;
        n_blocks = at < of_q ? of_q : at < of_q + of_k ? of_k : all - of_q - of_k;
    }
};

// Gradients of the parts, rotated back and through the norm, to the joined rows `dx`. Each block also sums the gradient of its
// part's norm over its heads, every n_blocks-th group of them. `x` is read for norms alone.
template <int P, int W, typename T>
__device__ __forceinline__ void join_grads(const T* x, T* dx, const HeadRows<T>& rows, int of_q, int of_k, int lanes) {
    const BlockOfPart<T> at(rows, of_q, of_k);
    const HeadPart<T> part = at.part;
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, n_groups = blockDim.x / lanes, d = rows.d;
    const bool is_normed = part.weight != nullptr;
    const long long n_rows = static_cast<long long>(rows.t) * part.n;
    Pack<T, W> w_packs[P];
    float sums[P][W] = {};
#pragma unroll
    for (int p = 0; p < P; ++p) {
        const int column = (p * lanes + lane) * W;
        if (is_normed && column < d) w_packs[p] = load<W>(part.weight + column);
    }
    for (long long first = static_cast<long long>(at.block) * n_groups; first < n_rows;
         first += static_cast<long long>(at.n_blocks) * n_groups) {
        const long long row = first + group;
        const bool is_row = row < n_rows;
        const int token = is_row ? static_cast<int>(row / part.n) : 0, head = is_row ? static_cast<int>(row % part.n) : 0;
        const long long joined = token * rows.stride + part.first + static_cast<long long>(head) * d;
        const T* from = part.heads + row * d;
        Pack<T, W> x_packs[P], dy_packs[P];
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int column = (p * lanes + lane) * W;
            if (!is_row || column >= d) continue;
            dy_packs[p] = load<W>(from + column);
            if (is_normed) x_packs[p] = load<W>(x + joined + column);
            if (part.is_rotated && column < 2 * rows.table.half) {
                rows.table.rotate(dy_packs[p], rows.table.template partners<W>(from, column), token, column, -1.0f);
            }
        }
        if (!is_normed) {
#pragma unroll
            for (int p = 0; p < P; ++p) {
                const int column = (p * lanes + lane) * W;
                if (is_row && column < d) store(dx + joined + column, dy_packs[p]);
            }
            continue;
        }
        const float of_squares = is_row ? squares<P, W>(x_packs, lane, lanes, d) : 0.0f;
        const float r = rsqrtf(head_sum(of_squares, lanes) / d + rows.eps);
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            if (!is_row || (p * lanes + lane) * W >= d) continue;
#pragma unroll
            for (int j = 0; j < W; ++j) {
                const float n = widen(x_packs[p].at[j]) * r, dy = widen(dy_packs[p].at[j]);
                sum += dy * widen(w_packs[p].at[j]) * n;
                sums[p][j] += dy * widen(narrow<T>(n));
            }
        }
        const float mean = head_sum(sum, lanes) / d;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int column = (p * lanes + lane) * W;
            if (!is_row || column >= d) continue;
#pragma unroll
            for (int j = 0; j < W; ++j) {
                const float g = widen(dy_packs[p].at[j]) * widen(w_packs[p].at[j]), n = widen(x_packs[p].at[j]) * r;
                // The sum with no other gradient, as in rms_norm, turns -0 into 0.
                x_packs[p].at[j] = narrow<T>(r * (g - n * mean) + 0.0f);
            }
            store(dx + joined + column, x_packs[p]);
        }
    }
    if (part.partial != nullptr) sum_groups(sums, part.partial + static_cast<long long>(at.block) * d, d, lanes);
}

// Variant as `split_long`: the sums are kept in memory.
template <typename T>
__device__ __forceinline__ void join_grads_long(const T* x, T* dx, const HeadRows<T>& rows, int of_q, int of_k) {
    const BlockOfPart<T> at(rows, of_q, of_k);
    const HeadPart<T> part = at.part;
    const int d = rows.d;
    float* partial = part.partial == nullptr ? nullptr : part.partial + static_cast<long long>(at.block) * d;
    const long long n_rows = static_cast<long long>(rows.t) * part.n;
    for (long long row = at.block; row < n_rows; row += at.n_blocks) {
        const int token = static_cast<int>(row / part.n), head = static_cast<int>(row % part.n);
        const long long joined = token * rows.stride + part.first + static_cast<long long>(head) * d;
        const T *from = part.heads + row * d, *x_head = x + joined;
        const auto grad = [&](int i) {
            auto own = load<1>(from + i);
            if (part.is_rotated && i < 2 * rows.table.half) {
                rows.table.rotate(own, rows.table.template partners<1>(from, i), token, i, -1.0f);
            }
            return own.at[0];
        };
        if (part.weight == nullptr) {
            for (int i = threadIdx.x; i < d; i += blockDim.x) dx[joined + i] = grad(i);
            continue;
        }
        float of_squares = 0.0f;
        for (int i = threadIdx.x; i < d; i += blockDim.x) of_squares += widen(x_head[i]) * widen(x_head[i]);
        const float r = rsqrtf(block_sum(of_squares) / d + rows.eps);
        float sum = 0.0f;
        for (int i = threadIdx.x; i < d; i += blockDim.x) {
            const float dy = widen(grad(i)), n = widen(x_head[i]) * r;
            sum += dy * widen(part.weight[i]) * n;
            if (partial != nullptr) partial[i] = (row == at.block ? 0.0f : partial[i]) + dy * widen(narrow<T>(n));
        }
        const float mean = block_sum(sum) / d;
        for (int i = threadIdx.x; i < d; i += blockDim.x) {
            const float g = widen(grad(i)) * widen(part.weight[i]), n = widen(x_head[i]) * r;
            dx[joined + i] = narrow<T>(r * (g - n * mean) + 0.0f);
        }
    }
}
