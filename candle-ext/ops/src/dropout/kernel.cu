// dropout: n elements in lines of `width`, W at a time; lines begin `stride` elements apart in the whole tensor.
#include "common.cuh"
#include "random.cuh"

// y = x mask scale. The mask is 1 where 32 random bits reach the threshold. A line holds whole packs.
template <int W, typename T>
__device__ void apply(const T* x, T* y, long long n, long long width, long long stride, uint64_t key, uint64_t threshold,
                      float scale) {
    for (long long i = flat_begin<W>(); i < n; i += flat_step<W>()) {
        auto pack = load<W>(x + i);
        const long long place = i < width ? i : i / width * stride + i % width;
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const bool keeps = random_bits(key, place + j) >> 32 >= threshold;
            pack.at[j] = narrow<T>(keeps ? widen(pack.at[j]) * scale : 0.0f);
        }
        store(y + i, pack);
    }
}

#define KERNELS(T, suffix)                                                                          \
    KERNEL(256) apply_##suffix(const T* x, T* y, long long n, long long width, long long stride,    \
            unsigned long long key, unsigned long long threshold, float scale) {                    \
        if (is_wide<T>(width, x, y)) apply<WIDE<T>>(x, y, n, width, stride, key, threshold, scale); \
        else apply<1>(x, y, n, width, stride, key, threshold, scale);                               \
    }
FOR_EACH_FLOAT(KERNELS)
