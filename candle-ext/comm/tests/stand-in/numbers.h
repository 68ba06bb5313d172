// bf16 and f16, rounded to nearest, ties to even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct Bf16 {
    uint16_t bits;
    Bf16() = default;
    explicit Bf16(float x) {
        uint32_t wide;
        memcpy(&wide, &x, 4);
        bits = std::isnan(x) ? 0x7FC0 : uint16_t((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
    }
    explicit operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        float x;
        memcpy(&x, &wide, 4);
        return x;
    }
};

struct F16 {
    uint16_t bits;
    F16() = default;
    explicit F16(float x) {
        uint16_t sign = std::signbit(x) ? 0x8000 : 0;
        float size = std::fabs(x);
        if (std::isnan(x)) {
            bits = 0x7E00;
        } else if (size >= 65520.0f) {
            bits = sign | 0x7C00;
        } else {
            // Units in the last place: 2^-24 for subnormals, 11 significant bits otherwise.
            int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
            auto units = uint16_t(std::nearbyint(std::ldexp(size, 10 - exponent)));
            bits = sign | uint16_t((exponent + 14) * 1024 + units);
        }
    }
    explicit operator float() const {
        int exponent = bits >> 10 & 31, units = bits & 1023;
        float size = exponent == 31 ? (units ? NAN : INFINITY)
                     : exponent     ? std::ldexp(float(1024 + units), exponent - 25)
                                    : std::ldexp(float(units), -24);
        return bits & 0x8000 ? -size : size;
    }
};

// Conversion to the compute type.
template <class T>
T wide(T x) {
    return x;
}
inline float wide(Bf16 x) { return float(x); }
inline float wide(F16 x) { return float(x); }
