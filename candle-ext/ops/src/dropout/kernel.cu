// dropout: n elements in lines of `width`, W at a time. Lines begin `stride` elements apart in the whole tensor, the first at `start`.
#include "common.cuh"
#include "random.cuh"

// Elements that share 64 random bits, as in mask.rs.
constexpr int ELEMENTS_PER_HASH = 4;

// y = x mask scale. The mask is 1 where an element's 16 random bits reach the threshold. A line holds whole packs.
// A pack of more than one element begins at a multiple of ELEMENTS_PER_HASH in the whole tensor.
// With `keys`, each line has a mask of its own, whose key is derived from its element of `keys` and from `key`.
template <int W, typename T>
__device__ void apply(const T* x, T* y, const unsigned long long* keys, long long n, long long width, long long start,
                      long long stride, uint64_t key, int threshold, float scale) {
    for (long long i = flat_begin<W>(); i < n; i += flat_step<W>()) {
        auto pack = load<W>(x + i);
        const long long place = start + (i < width ? i : i / width * stride + i % width);
        const uint64_t line_key = keys ? random_bits(keys[i / width], key) : key;
        uint64_t word = 0;
#pragma unroll
        for (int j = 0; j < W; ++j) {
            if (j % ELEMENTS_PER_HASH == 0) word = random_bits(line_key, place / ELEMENTS_PER_HASH + j / ELEMENTS_PER_HASH);
            const int shift = 16 * (W == 1 ? static_cast<int>(place % ELEMENTS_PER_HASH) : j % ELEMENTS_PER_HASH);
            const bool keeps = static_cast<int>(word >> shift & 0xffff) >= threshold;
            pack.at[j] = narrow<T>(keeps ? widen(pack.at[j]) * scale : 0.0f);
        }
        store(y + i, pack);
    }
}

#define KERNELS(T, suffix)                                                                                       \
    KERNEL(256) apply_##suffix(const T* x, T* y, const unsigned long long* keys, long long n, long long width,   \
            long long start, long long stride, unsigned long long key, int threshold, float scale) {             \
        static_assert(WIDE<T> % ELEMENTS_PER_HASH == 0, "a pack has whole words");                                        \
        if (start % ELEMENTS_PER_HASH == 0 && stride % ELEMENTS_PER_HASH == 0 && is_wide<T>(width, x, y))                          \
            apply<WIDE<T>>(x, y, keys, n, width, start, stride, key, threshold, scale);                          \
        else                                                                                                     \
            apply<1>(x, y, keys, n, width, start, stride, key, threshold, scale);                                \
    }
FOR_EACH_FLOAT(KERNELS)
