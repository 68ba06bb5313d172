// rms_norm: t rows, d elements, W at a time.
//
// `lanes` threads share a row, each with P packs of W elements. `lanes` is a power of two up to a warp in a block of
// 256 threads, or a whole block. Each row is read once.
#include <ptx.cuh>

#include "common.cuh"

// Assignment of a block's threads to rows.
struct Share {
    int lane, group, n_groups;

    __device__ __forceinline__ explicit Share(int lanes) {
        const bool is_block = lanes > 32;
        const int shift = is_block ? 0 : __popc(lanes - 1);
        lane = is_block ? threadIdx.x : threadIdx.x & (lanes - 1);
        group = is_block ? 0 : threadIdx.x >> shift;
        n_groups = is_block ? 1 : blockDim.x >> shift;
    }
};

// Rounds numbers to T.
template <typename T, int W> __device__ __forceinline__ void round_all(float (&x)[W]) {
    if constexpr (sizeof(T) == 2 && W % 2 == 0) {
#pragma unroll
        for (int j = 0; j < W; j += 2) {
            const uint pair = narrow_pair<T>(x[j], x[j + 1]);
            const auto rounded = *reinterpret_cast<const Pack<T, 2>*>(&pair);
            x[j] = widen(rounded.at[0]);
            x[j + 1] = widen(rounded.at[1]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < W; ++j) x[j] = widen(narrow<T>(x[j]));
    }
}

// Sum over `lanes` neighbours of a warp, a power of two; each gets it. All threads must call.
__device__ __forceinline__ float lanes_sum(float x, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Sum over the threads that share a row.
__device__ __forceinline__ float row_sum(float x, int lanes) { return lanes > 32 ? block_sum(x) : lanes_sum(x, lanes); }

// x + plus, rounded to T.
template <typename T, typename O, int W>
__device__ __forceinline__ Pack<T, W> add_packs(const Pack<T, W>& x, const Pack<O, W>& plus) {
    Pack<T, W> sum;
#pragma unroll
    for (int j = 0; j < W; ++j) sum.at[j] = narrow<T>(widen(x.at[j]) + widen(plus.at[j]));
    return sum;
}

// y = x / sqrt(mean(x^2) + eps) * w. The normalised x is rounded to T before the multiplication by w. With `plus`, x is x +
// plus, which is written to `sum_of_both`. O is T, or narrower if T is f32. y is optional.
template <int P, int W, typename T, typename O>
__device__ __forceinline__ void forward(const T* x, const O* plus, const O* w, T* sum_of_both, O* y, float* rstd, int t,
                                        int d, int lanes, float eps) {
    const auto [lane, group, n_groups] = Share(lanes);
    const long long row = static_cast<long long>(blockIdx.x) * n_groups + group;
    const bool is_row = row < t;
    Pack<T, W> packs[P];
    Pack<O, W> w_packs[P];
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < P; ++p) {
        const int column = (p * lanes + lane) * W;
        if (!is_row || column >= d) continue;
        packs[p] = load<W>(x + row * d + column);
        if (y != nullptr) w_packs[p] = load<W>(w + column);
        if (plus == nullptr) continue;
        packs[p] = add_packs(packs[p], load<W>(plus + row * d + column));
        store(sum_of_both + row * d + column, packs[p]);
    }
#pragma unroll
    for (int p = 0; p < P; ++p) {
        if (!is_row || (p * lanes + lane) * W >= d) continue;
#pragma unroll
        for (int j = 0; j < W; ++j) sum += widen(packs[p].at[j]) * widen(packs[p].at[j]);
    }
    const float r = rsqrtf(row_sum(sum, lanes) / d + eps);
    if (!is_row) return;
    if (lane == 0) rstd[row] = r;
    if (y == nullptr) return;
#pragma unroll
    for (int p = 0; p < P; ++p) {
        const int column = (p * lanes + lane) * W;
        if (column >= d) continue;
        forget_widened(packs[p]);
        float n[W];
#pragma unroll
        for (int j = 0; j < W; ++j) n[j] = widen(packs[p].at[j]) * r;
        round_all<T>(n);
#pragma unroll
        for (int j = 0; j < W; ++j) w_packs[p].at[j] = narrow<O>(n[j] * widen(w_packs[p].at[j]));
        store(y + row * d + column, w_packs[p]);
    }
}

// Variant for rows that are too long for a block's registers or not aligned for packs.
template <typename T, typename O>
__device__ __forceinline__ void forward_long(const T* x, const O* plus, const O* w, T* sum_of_both, O* y, float* rstd,
                                             int d, float eps) {
    const long long row = blockIdx.x;
    x += row * d;
    if (plus != nullptr) {
        sum_of_both += row * d;
        // Each thread reads only elements that it has written itself.
        for (int i = threadIdx.x; i < d; i += blockDim.x) sum_of_both[i] = narrow<T>(widen(x[i]) + widen(plus[row * d + i]));
        x = sum_of_both;
    }
    float sum = 0.0f;
    for (int i = threadIdx.x; i < d; i += blockDim.x) sum += widen(x[i]) * widen(x[i]);
    const float r = rsqrtf(block_sum(sum) / d + eps);
    if (threadIdx.x == 0) rstd[row] = r;
    if (y == nullptr) return;
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        y[row * d + i] = narrow<O>(widen(narrow<T>(widen(x[i]) * r)) * widen(w[i]));
    }
}

// Copies of a thread's packs of x and dy of the next row in shared memory, which arrive while it computes a row. A thread
// reads only its own, so it needs no barrier. Two stages: the copy of a row never overwrites one that is being read.
template <int P, int W, typename T, typename O> struct NextRow {
    // Larger rows have no shared memory left, packs of two sizes no copies of 16 bytes.
    static constexpr bool IS_STAGED = P <= 2 && sizeof(T) == sizeof(O);

    const T* x;
    const O* dy;
    int d, lanes, lane;

    template <typename E> __device__ __forceinline__ static E* staged(int stage, int p, int which) {
        const int slot = ((stage * P + p) * 2 + which) * static_cast<int>(blockDim.x) + threadIdx.x;
        return reinterpret_cast<E*>(dynamic_shared() + slot * 16);
    }

    __device__ __forceinline__ void fetch(long long row, bool is_row, int stage) const {
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int column = (p * lanes + lane) * W;
            if (!is_row || column >= d) continue;
            copy_async<16>(staged<T>(stage, p, 0), x + row * d + column, true);
            copy_async<16>(staged<O>(stage, p, 1), dy + row * d + column, true);
        }
    }
};

// dx = r (g - n mean(g n)) for g = dy w, n = x r, plus another gradient if given. Also the sums of dy round(n) over
// this block's rows, every gridDim-th. dx and the partial sums are optional.
template <int P, int W, typename T, typename O>
__device__ __forceinline__ void backward(const T* x, const O* w, const O* dy, const float* rstd, const T* plus, T* dx,
                                         float* partial, int t, int d, int lanes) {
    const auto [lane, group, n_groups] = Share(lanes);
    Pack<O, W> w_packs[P];
    float sums[P][W] = {};
#pragma unroll
    for (int p = 0; p < P; ++p) {
        const int column = (p * lanes + lane) * W;
        if (column < d) w_packs[p] = load<W>(w + column);
    }
    using Next = NextRow<P, W, T, O>;
    int stage = 0;
    if constexpr (Next::IS_STAGED) {
        const long long row = static_cast<long long>(blockIdx.x) * n_groups + group;
        Next{x, dy, d, lanes, lane}.fetch(row, row < t, stage);
    }
    for (long long first = static_cast<long long>(blockIdx.x) * n_groups; first < t;
         first += static_cast<long long>(gridDim.x) * n_groups) {
        const long long row = first + group;
        const bool is_row = row < t;
        const float r = is_row ? rstd[row] : 0.0f;
        if constexpr (Next::IS_STAGED) wait_for_copies();
        Pack<T, W> x_packs[P];
        Pack<O, W> dy_packs[P];
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int column = (p * lanes + lane) * W;
            if (is_row && column < d) {
                x_packs[p] = load<W>(Next::IS_STAGED ? Next::template staged<T>(stage, p, 0) : x + row * d + column);
                dy_packs[p] = load<W>(Next::IS_STAGED ? Next::template staged<O>(stage, p, 1) : dy + row * d + column);
            }
        }
        if constexpr (Next::IS_STAGED) {
            const long long next_row = row + static_cast<long long>(gridDim.x) * n_groups;
            stage ^= 1;
            Next{x, dy, d, lanes, lane}.fetch(next_row, next_row < t, stage);
        }
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            if (!is_row || (p * lanes + lane) * W >= d) continue;
            forget_widened(w_packs[p]);
            float n[W];
#pragma unroll
            for (int j = 0; j < W; ++j) {
                n[j] = widen(x_packs[p].at[j]) * r;
                sum += widen(dy_packs[p].at[j]) * widen(w_packs[p].at[j]) * n[j];
            }
            round_all<T>(n);
#pragma unroll
            for (int j = 0; j < W; ++j) sums[p][j] += widen(dy_packs[p].at[j]) * n[j];
        }
        Pack<T, W> plus_packs[P] = {};
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int column = (p * lanes + lane) * W;
            if (plus != nullptr && is_row && column < d) plus_packs[p] = load<W>(plus + row * d + column);
        }
        const float mean = row_sum(sum, lanes) / d;
        if (dx == nullptr) continue;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int column = (p * lanes + lane) * W;
            if (!is_row || column >= d) continue;
            forget_widened(w_packs[p]);
            forget_widened(x_packs[p]);
            forget_widened(dy_packs[p]);
#pragma unroll
            for (int j = 0; j < W; ++j) {
                const float g = widen(dy_packs[p].at[j]) * widen(w_packs[p].at[j]), n = widen(x_packs[p].at[j]) * r;
                x_packs[p].at[j] = narrow<T>(r * (g - n * mean) + widen(plus_packs[p].at[j]));
            }
            store(dx + row * d + column, x_packs[p]);
        }
    }
    if (partial == nullptr) return;
    partial += static_cast<long long>(blockIdx.x) * d;
    if (n_groups > 1) {
        sum_groups(sums, partial, d, lanes);
        return;
    }
#pragma unroll
    for (int p = 0; p < P; ++p) {
        const int column = (p * lanes + lane) * W;
        for (int j = 0; j < W && column < d; ++j) partial[column + j] = sums[p][j];
    }
}

// Variant as `forward_long`: the sums are kept in memory.
template <typename T, typename O>
__device__ __forceinline__ void backward_long(const T* x, const O* w, const O* dy, const float* rstd, const T* plus,
                                              T* dx, float* partial, int t, int d) {
    if (partial != nullptr) partial += static_cast<long long>(blockIdx.x) * d;
    for (long long row = blockIdx.x; row < t; row += gridDim.x) {
        const T* x_row = x + row * d;
        const O* dy_row = dy + row * d;
        const float r = rstd[row];
        float sum = 0.0f;
        for (int i = threadIdx.x; i < d; i += blockDim.x) {
            const float dy = widen(dy_row[i]), n = widen(x_row[i]) * r;
            sum += dy * widen(w[i]) * n;
            if (partial != nullptr) partial[i] = (row == blockIdx.x ? 0.0f : partial[i]) + dy * widen(narrow<T>(n));
        }
        const float mean = block_sum(sum) / d;
        for (int i = threadIdx.x; i < d && dx != nullptr; i += blockDim.x) {
            const float g = widen(dy_row[i]) * widen(w[i]), n = widen(x_row[i]) * r;
            const float other = plus == nullptr ? 0.0f : widen(plus[row * d + i]);
            dx[row * d + i] = narrow<T>(r * (g - n * mean) + other);
        }
    }
}

#define ADD_PARTS(G, suffix)                                                          \
    KERNEL(256) add_parts_##suffix(const float* partial, G* dw, int n_parts, int d) { \
        add_parts_to(dw, partial, n_parts, d);                                        \
    }
FOR_EACH_GRAD(ADD_PARTS)

// Instantiates kernels for each dtype of the input and of the weight: X(float, float, f32) and so on. A wider input is an f32
// residual stream.
#define FOR_EACH_PAIR(X)                     \
    X(float, float, f32)                     \
    X(__nv_bfloat16, __nv_bfloat16, bf16)    \
    X(__half, __half, f16)                   \
    X(float, __nv_bfloat16, f32_bf16)        \
    X(float, __half, f32_f16)

#define LONG(T, O, suffix)                                                                                              \
    KERNEL(1024) forward_long_##suffix(const T* x, const O* plus, const O* w, T* sum_of_both, O* y, float* rstd, int d, \
            float eps) {                                                                                                \
        forward_long(x, plus, w, sum_of_both, y, rstd, d, eps);                                                         \
    }                                                                                                                   \
    KERNEL(1024) backward_long_##suffix(const T* x, const O* w, const O* dy, const float* rstd, const T* plus,          \
            T* dx, float* partial, int t, int d) {                                                                      \
        backward_long(x, w, dy, rstd, plus, dx, partial, t, d);                                                         \
    }
FOR_EACH_PAIR(LONG)

#define PACKS(P, backward_threads, T, O, suffix)                                                                        \
    KERNEL(512) forward_##P##_##suffix(const T* x, const O* plus, const O* w, T* sum_of_both, O* y, float* rstd, int t, \
            int d, int lanes, float eps) {                                                                              \
        forward<P, WIDE<T>>(x, plus, w, sum_of_both, y, rstd, t, d, lanes, eps);                                        \
    }                                                                                                                   \
    KERNEL(backward_threads) backward_##P##_##suffix(const T* x, const O* w, const O* dy, const float* rstd,            \
            const T* plus, T* dx, float* partial, int t, int d, int lanes) {                                            \
        backward<P, WIDE<T>>(x, w, dy, rstd, plus, dx, partial, t, d, lanes);                                           \
    }
#define PACKS_1(T, O, suffix) PACKS(1, 256, T, O, suffix)
#define PACKS_2(T, O, suffix) PACKS(2, 256, T, O, suffix)
#define PACKS_4(T, O, suffix) PACKS(4, 512, T, O, suffix)
FOR_EACH_PAIR(PACKS_1)
FOR_EACH_PAIR(PACKS_2)
FOR_EACH_PAIR(PACKS_4)
