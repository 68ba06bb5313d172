// The functions of src/cuda/ptx.cuh for emulated kernels. The program stops where a GPU's behaviour would be undefined.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emulator.h"

inline char* dynamic_shared() { return emulated_shared(); }

// The bytes arrive when the thread waits for them; until then they are NaN.
template <int BYTES> void copy_async(void* to, const void* from, bool exists) {
    emulated_check(reinterpret_cast<uintptr_t>(to) % BYTES == 0, "a copy to a misaligned address");
    emulated_check(!exists || reinterpret_cast<uintptr_t>(from) % BYTES == 0, "a copy from a misaligned address");
    std::memset(to, 0xff, BYTES);
    emulated_copies().push_back({to, exists ? from : nullptr, BYTES});
}

inline void wait_for_copies() {
    for (const Copy& copy : emulated_copies()) {
        if (copy.from) std::memcpy(copy.to, copy.from, copy.n);
        else std::memset(copy.to, 0, copy.n);
    }
    emulated_copies().clear();
}

struct MatrixLoad {
    unsigned* to;
    const char* row;
};

// Fails on bank conflicts: rows of one matrix that start in the same four banks are read one after another.
inline void check_rows(const MatrixLoad* const (&lanes)[32]) {
    for (int matrix = 0; matrix < 4; ++matrix) {
        unsigned banks = 0;
        for (int row = 0; row < 8; ++row) {
            const auto address = reinterpret_cast<uintptr_t>(lanes[8 * matrix + row]->row);
            emulated_check(address % 16 == 0, "a matrix with a misaligned row");
            banks |= 1u << address / 16 % 8;
        }
        emulated_check(banks == 0xff, "a matrix with two rows in the same banks");
    }
}

template <bool TRANSPOSED> void emulated_load_matrices(unsigned (&to)[4], const void* row) {
    MatrixLoad own{to, static_cast<const char*>(row)};
    emulated_together(own, [](MatrixLoad* const (&lanes)[32]) {
        check_rows(lanes);
        for (int lane = 0; lane < 32; ++lane) {
            for (int matrix = 0; matrix < 4; ++matrix) {
                uint16_t pair[2];
                for (int i = 0; i < 2; ++i) {
                    const int along = lane % 4 * 2 + i, across = lane / 4;
                    const int y = TRANSPOSED ? along : across, x = TRANSPOSED ? across : along;
                    std::memcpy(&pair[i], lanes[8 * matrix + y]->row + 2 * x, 2);
                }
                std::memcpy(&lanes[lane]->to[matrix], pair, 4);
            }
        }
    });
}

inline void load_matrices(unsigned (&to)[4], const void* row) { emulated_load_matrices<false>(to, row); }
inline void load_matrices_transposed(unsigned (&to)[4], const void* row) { emulated_load_matrices<true>(to, row); }

inline float emulated_widen(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float emulated_widen(__half x) { return __half2float(x); }

template <typename T> float emulated_half(unsigned pair, int i) {
    const uint16_t bits = pair >> 16 * i;
    T value;
    std::memcpy(&value, &bits, sizeof(value));
    return emulated_widen(value);
}

struct Product {
    float* c[4];
    const unsigned* a;
    unsigned b[2];
};

template <typename T>
void multiply_add(float& c0, float& c1, float& c2, float& c3, const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Product own{{&c0, &c1, &c2, &c3}, a, {b0, b1}};
    emulated_together(own, [](Product* const (&lanes)[32]) {
        float a[16][16], b[16][8], c[16][8];
        for (int lane = 0; lane < 32; ++lane) {
            const int group = lane / 4, first = lane % 4 * 2;
            for (int i = 0; i < 2; ++i) {
                for (int part = 0; part < 4; ++part) {
                    a[group + part % 2 * 8][first + i + part / 2 * 8] = emulated_half<T>(lanes[lane]->a[part], i);
                    c[group + part / 2 * 8][first + part % 2] = *lanes[lane]->c[part];
                }
                for (int part = 0; part < 2; ++part) {
                    b[first + i + part * 8][group] = emulated_half<T>(lanes[lane]->b[part], i);
                }
            }
        }
        for (int row = 0; row < 16; ++row) {
            for (int k = 0; k < 16; ++k) {
                for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
            }
        }
        for (int lane = 0; lane < 32; ++lane) {
            for (int part = 0; part < 4; ++part) {
                *lanes[lane]->c[part] = c[lane / 4 + part / 2 * 8][lane % 4 * 2 + part % 2];
            }
        }
    });
}

template <typename T> unsigned narrow_pair(float first, float second);

inline unsigned emulated_pair(const void* first, const void* second) {
    unsigned pair;
    std::memcpy(&pair, first, 2);
    std::memcpy(reinterpret_cast<char*>(&pair) + 2, second, 2);
    return pair;
}

template <> inline unsigned narrow_pair<__nv_bfloat16>(float first, float second) {
    const auto low = __float2bfloat16_rn(first), high = __float2bfloat16_rn(second);
    return emulated_pair(&low, &high);
}

template <> inline unsigned narrow_pair<__half>(float first, float second) {
    const auto low = __float2half_rn(first), high = __float2half_rn(second);
    return emulated_pair(&low, &high);
}

inline float fast_exp2(float x) {
    const float y = std::exp2(x);
    return y < 1.1754944e-38f ? 0.0f : y;
}
