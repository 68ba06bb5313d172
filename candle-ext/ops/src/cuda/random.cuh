// Random numbers of a counter: equal keys and positions give equal numbers on every thread and device.
#pragma once

#include <stdint.h>

// SplitMix64's output at a position of the stream that begins at `key`, as in dropout/mask.rs.
__device__ __forceinline__ uint64_t random_bits(uint64_t key, uint64_t position) {
    uint64_t z = key + (position + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
