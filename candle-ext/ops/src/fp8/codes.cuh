// Encoding to FP8, with the bits of format.rs.
#pragma once

#include "common.cuh"
#include "ptx.cuh"
#include "random.cuh"

// An FP8 format: SMALLEST is its smallest normal number. A step of its subnormal numbers is the last bit of ALIGNED.
struct E4m3 {
    static constexpr int MANTISSA_BITS = 3, EXPONENT_BIAS = 7;
    static constexpr float MAX = 448.0f, SMALLEST = 1.0f / 64, ALIGNED = 16384.0f;
};

struct E5m2 {
    static constexpr int MANTISSA_BITS = 2, EXPONENT_BIAS = 15;
    static constexpr float MAX = 57344.0f, SMALLEST = 1.0f / 16384, ALIGNED = 128.0f;
};

// Rounding of codes: to nearest, or stochastic with the random numbers of a key.
struct Rounding {
    unsigned long long key;
    bool is_stochastic;
};

// Sign and saturated magnitude of a number. NaN has its own code.
template <typename F> struct Parts {
    uint sign;
    float magnitude;
    bool is_nan;

    __device__ __forceinline__ Parts(float x)
        : sign(__float_as_uint(x) >> 24 & 0x80), magnitude(fabsf(x) > F::MAX ? F::MAX : fabsf(x)), is_nan(x != x) {}

    __device__ __forceinline__ uint code(uint normal, uint subnormal) const {
        const uint code = magnitude >= F::SMALLEST ? normal - ((127 - F::EXPONENT_BIAS) << F::MANTISSA_BITS) : subnormal;
        return is_nan ? 0x7f : sign | code;
    }
};

// Bits of f32 that a code drops.
template <typename F> constexpr int DROPPED = 23 - F::MANTISSA_BITS;

// Rounds to the nearest code, ties to even.
template <typename F> __device__ __forceinline__ uint nearest(float x) {
    const Parts<F> parts(x);
    const uint bits = __float_as_uint(parts.magnitude);
    const uint rounded = bits + ((1u << (DROPPED<F> - 1)) - 1) + (bits >> DROPPED<F> & 1);
    const uint steps = __float_as_uint(parts.magnitude + F::ALIGNED) - __float_as_uint(F::ALIGNED);
    return parts.code(rounded >> DROPPED<F>, steps);
}

// Rounds up if a number of 32 random bits is below the distance to the code below.
template <typename F> __device__ __forceinline__ uint stochastic(float x, uint random) {
    const Parts<F> parts(x);
    random >>= 32 - DROPPED<F>;
    const uint shifted = __float_as_uint(parts.magnitude + F::SMALLEST) + random;
    const uint steps = (shifted >> DROPPED<F>) - (__float_as_uint(F::SMALLEST) >> DROPPED<F>);
    return parts.code((__float_as_uint(parts.magnitude) + random) >> DROPPED<F>, steps);
}

template <typename F> __device__ __forceinline__ unsigned short nearest_pair(float first, float second) {
#if __CUDA_ARCH__ >= 890
    if constexpr (F::MANTISSA_BITS == 3) return e4m3_pair(first, second);
    else return e5m2_pair(first, second);
#else
    return static_cast<unsigned short>(nearest<F>(first) | nearest<F>(second) << 8);
#endif
}

// Encodes W numbers. `position` returns the place of number j in the stream of random numbers.
template <typename F, int W, typename P>
__device__ __forceinline__ Pack<unsigned char, W> encode(const float (&x)[W], Rounding rounding, P position) {
    Pack<unsigned char, W> codes;
    if (rounding.is_stochastic) {
#pragma unroll
        for (int j = 0; j < W; ++j) codes.at[j] = stochastic<F>(x[j], static_cast<uint>(random_bits(rounding.key, position(j))));
    } else if constexpr (W == 1) {
        codes.at[0] = nearest_pair<F>(x[0], 0.0f) & 0xff;
    } else {
#pragma unroll
        for (int j = 0; j < W; j += 2) {
            const unsigned short pair = nearest_pair<F>(x[j], x[j + 1]);
            codes.at[j] = pair & 0xff, codes.at[j + 1] = pair >> 8;
        }
    }
    return codes;
}

// Rule of a scale from the amax of the same elements, as ScaleRule in recipe.rs.
struct Rule {
    float epsilon;
    bool power_of_two;
    // Scale if the quotient is infinite.
    float largest;

    template <typename F> __device__ __forceinline__ float scale(float amax) const { return scale(amax, F::MAX); }

    __device__ __forceinline__ float scale(float amax, float format_max) const {
        amax = amax < epsilon ? epsilon : amax;
        if (amax == 0.0f || isinf(amax)) return 1.0f;
        float scale = format_max / amax;
        if (isinf(scale)) scale = largest;
        return power_of_two ? __uint_as_float(__float_as_uint(scale) & 0x7f800000u) : scale;
    }
};

// Maximum over a block of at most 1024 threads; thread 0 gets it. All threads must call.
__device__ __forceinline__ float block_max(float x) {
    __shared__ float of_warp[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_warps = blockDim.x >> 5;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_max(lane < n_warps ? of_warp[lane] : 0.0f);
}

// Raises a maximum of numbers that are not negative, whose bits are ordered like integers. A maximum never falls, so an old
// value that is large enough saves the atomic operation.
__device__ __forceinline__ void raise(float* maximum, float x) {
    if (x > *maximum) atomicMax(reinterpret_cast<int*>(maximum), static_cast<int>(__float_as_uint(x)));
}
