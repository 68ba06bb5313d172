// linear_cross_entropy: one block per target. n tokens, v vocabulary, d model, W logits at a time; `stride` is the row
// stride of logits and their gradients.
#include "common.cuh"

#include <math.h>

// Largest value of a block; every thread gets it.
__device__ __forceinline__ float block_max(float x) {
    __shared__ float of_warp[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_warps = blockDim.x >> 5;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_max(lane < n_warps ? of_warp[lane] : -INFINITY);
}

struct MaxAndSum {
    float max, sum;
};

// True if a row of logits allows loads of WIDE elements, except for a remainder at its end.
__device__ __forceinline__ bool is_wide_row(const float* logits) { return is_wide<float>(0, logits); }

// True if the row's gradient also allows stores of WIDE elements.
template <typename T> __device__ __forceinline__ bool is_wide_row(const float* logits, const T* d_logits) {
    return is_wide_row(logits) && reinterpret_cast<uintptr_t>(d_logits) % sizeof(Pack<T, WIDE<float>>) == 0;
}

template <int W> __device__ __forceinline__ void add_to(MaxAndSum& found, const Pack<float, W>& pack) {
    const float before = found.max;
#pragma unroll
    for (int j = 0; j < W; ++j) found.max = fmaxf(found.max, pack.at[j]);
    found.sum = before == -INFINITY && found.sum == 0.0f ? 0.0f : found.sum * expf(before - found.max);
    // A NaN is never the maximum; it propagates through the sum.
#pragma unroll
    for (int j = 0; j < W; ++j) found.sum += pack.at[j] == -INFINITY ? 0.0f : expf(pack.at[j] - found.max);
}

// Largest logit and sum of exp(logit - largest) of the thread's elements of a row.
template <int W> __device__ __forceinline__ MaxAndSum max_and_sum_of_thread(const float* logits, int v) {
    MaxAndSum found = {-INFINITY, 0.0f};
    const int end = v - v % W;
    for (int i = threadIdx.x * W; i < end; i += blockDim.x * W) add_to(found, load<W>(logits + i));
    if (W > 1 && threadIdx.x < v % W) add_to(found, load<1>(logits + end + threadIdx.x));
    return found;
}

// Largest logit and sum of exp(logit - largest) of a row, in one pass (online softmax).
__device__ __forceinline__ MaxAndSum max_and_sum(const float* logits, int v) {
    const auto [largest, sum] = is_wide_row(logits) ? max_and_sum_of_thread<WIDE<float>>(logits, v)
                                                    : max_and_sum_of_thread<1>(logits, v);
    const float all = block_max(largest);
    const float scale = largest == -INFINITY && sum == 0.0f ? 0.0f : expf(largest - all);
    return {all, block_sum(sum * scale)};
}

// Sum of a row of logits; every thread gets it.
__device__ __forceinline__ float sum_of_row(const float* logits, int v) {
    float sum = 0.0f;
    const int end = is_wide_row(logits) ? v - v % WIDE<float> : 0;
    for (int i = threadIdx.x * WIDE<float>; i < end; i += blockDim.x * WIDE<float>) {
        const auto pack = load<WIDE<float>>(logits + i);
#pragma unroll
        for (int j = 0; j < WIDE<float>; ++j) sum += pack.at[j];
    }
    for (int i = end + threadIdx.x; i < v; i += blockDim.x) sum += logits[i];
    return block_sum(sum);
}

// Writes the loss of a row: log sum exp(logits) - logits[target]. Label smoothing e adds e (logits[target] - mean
// logit). All threads of the block call it.
__device__ __forceinline__ void write_loss(const float* logits, int v, int target, MaxAndSum row, float smoothing,
                                           float* loss) {
    const float mean = smoothing > 0.0f ? sum_of_row(logits, v) / v : 0.0f;
    if (threadIdx.x > 0) return;
    const float unsmoothed = row.max - logits[target] + logf(row.sum);
    *loss = smoothing > 0.0f ? unsmoothed + smoothing * (logits[target] - mean) : unsmoothed;
}

// Weight of a row times its target distribution: `per_class` for every class, plus `at_target` for the target.
struct WeightedTarget {
    float per_class, at_target;
};

// The target distribution is (1 - smoothing) onehot + per_class.
__device__ __forceinline__ WeightedTarget weighted_target(float weight, float smoothing, float per_class) {
    // Without smoothing +0: a weight below 0 times 0 is -0.
    return {smoothing > 0.0f ? weight * per_class : 0.0f, weight * (1.0f - smoothing)};
}

// d_logits = scale exp(logit - largest) - distribution. d_logits may overwrite the logits.
template <int W, typename T>
__device__ __forceinline__ void write_gradients_of_packs(const float* logits, T* d_logits, int v, int target,
                                                         WeightedTarget distribution, float largest, float scale) {
    for (int i = threadIdx.x * W; i < v; i += blockDim.x * W) {
        const auto pack = load<W>(logits + i);
        Pack<T, W> gradients;
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const float p = expf(pack.at[j] - largest) * scale;
            gradients.at[j] = narrow<T>((i + j == target ? p - distribution.at_target : p) - distribution.per_class);
        }
        store(d_logits + i, gradients);
    }
}

template <typename T>
__device__ __forceinline__ void write_gradients(const float* logits, T* d_logits, int v, int target,
                                                WeightedTarget distribution, float largest, float scale) {
    const int end = is_wide_row(logits, d_logits) ? v - v % WIDE<float> : 0;
    write_gradients_of_packs<WIDE<float>>(logits, d_logits, end, target, distribution, largest, scale);
    write_gradients_of_packs<1>(logits + end, d_logits + end, v - end, target - end, distribution, largest, scale);
}

// loss = log sum exp(logits) - logits[class], with label smoothing
KERNEL(1024) losses(const float* logits, const unsigned* classes, float* loss, int v, int stride, float smoothing) {
    logits += static_cast<long long>(blockIdx.x) * stride;
    write_loss(logits, v, classes[blockIdx.x], max_and_sum(logits, v), smoothing, loss + blockIdx.x);
}

// As losses without smoothing. Also sets is_greedy if the class is the first of those with the largest logit.
KERNEL(1024) scores(const float* logits, const unsigned* classes, float* loss, float* is_greedy, int v, int stride) {
    __shared__ int is_beaten;
    logits += static_cast<long long>(blockIdx.x) * stride;
    const int target = classes[blockIdx.x];
    const auto [largest, sum] = max_and_sum(logits, v);
    const bool is_largest = logits[target] == largest;
    if (threadIdx.x == 0) is_beaten = !is_largest;
    __syncthreads();
    // All threads that find one write the same value.
    for (int i = threadIdx.x; is_largest && i < target; i += blockDim.x)
        if (logits[i] == largest) is_beaten = 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = largest - logits[target] + logf(sum);
        is_greedy[blockIdx.x] = is_beaten ? 0.0f : 1.0f;
    }
}

// As losses. Also d_logits = weight (softmax - (1 - smoothing) onehot - per_class), which may overwrite the logits.
template <typename T>
__device__ void gradients(const float* logits, const unsigned* classes, const float* weights, float* loss,
                          T* d_logits, int v, int stride, float smoothing, float per_class) {
    const long long start = static_cast<long long>(blockIdx.x) * stride;
    logits += start;
    d_logits += start;
    const int target = classes[blockIdx.x];
    const float weight = weights[blockIdx.x];
    const MaxAndSum row = max_and_sum(logits, v);
    write_loss(logits, v, target, row, smoothing, loss + blockIdx.x);
    __syncthreads();
    write_gradients(logits, d_logits, v, target, weighted_target(weight, smoothing, per_class), row.max,
                    weight / row.sum);
}

// Statistics of a vocabulary shard, [n_statistics, n]: the largest logit, the sum of exp(logit - largest), the target's
// logit, and of four the sum of logits. If another shard has the target, the logit is 0 and the class is no row.
KERNEL(1024) known(const float* logits, const unsigned* classes, float* numbers, int n, int v, int stride,
                   int n_statistics) {
    logits += static_cast<long long>(blockIdx.x) * stride;
    const auto [largest, sum] = max_and_sum(logits, v);
    const float sum_of_logits = n_statistics > 3 ? sum_of_row(logits, v) : 0.0f;
    if (threadIdx.x > 0) return;
    const unsigned target = classes[blockIdx.x];
    numbers[blockIdx.x] = largest;
    numbers[n + blockIdx.x] = sum;
    numbers[2 * n + blockIdx.x] = target < static_cast<unsigned>(v) ? logits[target] : 0.0f;
    if (n_statistics > 3) numbers[3 * n + blockIdx.x] = sum_of_logits;
}

// d_logits = weight (softmax - (1 - smoothing) onehot - per_class) of a shard, from the largest logit and the sum over all
// shards
template <typename T>
__device__ void part_gradients(const float* logits, const unsigned* classes, const float* weights,
                               const float* largest, const float* sums, T* d_logits, int v, int stride,
                               float smoothing, float per_class) {
    const long long start = static_cast<long long>(blockIdx.x) * stride;
    logits += start;
    d_logits += start;
    const int target = classes[blockIdx.x];
    const float weight = weights[blockIdx.x], max = largest[blockIdx.x];
    write_gradients(logits, d_logits, v, target, weighted_target(weight, smoothing, per_class), max,
                    weight / sums[blockIdx.x]);
}

// to[i] = from[rows[i]], one block per row of d elements
template <typename T> __device__ void gather(const T* from, const unsigned* rows, T* to, int d) {
    copy_row(from + static_cast<long long>(rows[blockIdx.x]) * d, to + static_cast<long long>(blockIdx.x) * d, d);
}

// to[rows[i]] = from[i]
template <typename T> __device__ void scatter(const T* from, const unsigned* rows, T* to, int d) {
    copy_row(from + static_cast<long long>(blockIdx.x) * d, to + static_cast<long long>(rows[blockIdx.x]) * d, d);
}

// total = scale * the sum of losses, in f64 by one block, so that the order is fixed
KERNEL(256) total(const float* loss, float* sum_of_losses, int n, float scale) {
    __shared__ double of_thread[256];
    double sum = 0.0;
    for (int i = threadIdx.x; i < n; i += 256) sum += loss[i];
    of_thread[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) of_thread[threadIdx.x] += of_thread[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *sum_of_losses = static_cast<float>(of_thread[0] * scale);
}

#define KERNELS(T, suffix)                                                                                   \
    KERNEL(1024) gradients_##suffix(const float* logits, const unsigned* classes, const float* weights,      \
            float* loss, T* d_logits, int v, int stride, float smoothing, float per_class) {                 \
        gradients<T>(logits, classes, weights, loss, d_logits, v, stride, smoothing, per_class);             \
    }                                                                                                        \
    KERNEL(1024) part_gradients_##suffix(const float* logits, const unsigned* classes, const float* weights, \
            const float* largest, const float* sums, T* d_logits, int v, int stride, float smoothing,        \
            float per_class) {                                                                               \
        part_gradients<T>(logits, classes, weights, largest, sums, d_logits, v, stride, smoothing,           \
                          per_class);                                                                        \
    }                                                                                                        \
    KERNEL(256) gather_##suffix(const T* from, const unsigned* rows, T* to, int d) {                         \
        gather<T>(from, rows, to, d);                                                                        \
    }                                                                                                        \
    KERNEL(256) scatter_##suffix(const T* from, const unsigned* rows, T* to, int d) {                        \
        scatter<T>(from, rows, to, d);                                                                       \
    }
FOR_EACH_FLOAT(KERNELS)
