// Objects of tiles for tests of their loader and of the call. Macros leave out functions, or change the version of the interface.
#include "../../src/cuda/gemm/cutlass/call.h"

#include <cstdio>

#ifndef STAND_IN_ABI
#define STAND_IN_ABI CANDLEWICK_CUTLASS_ABI
#endif

#ifndef STAND_IN_EMPTY
unsigned candlewick_cutlass_abi() { return STAND_IN_ABI; }

const char* candlewick_cutlass_tile() { return CANDLEWICK_TILE; }

const char* candlewick_cutlass_build() { return "a stand-in"; }
#endif

// With STAND_IN_MULTIPLY a kernel returns the sum of the call's fields, each times its number, as the size of the workspace.
#ifdef STAND_IN_MULTIPLY
static int sum(const CandlewickGroupedCall& call, size_t* workspace_bytes, char* error, size_t size) {
    const auto at = [](const void* pointer) { return reinterpret_cast<size_t>(pointer); };
    if (call.n_groups < 0) return snprintf(error, size, "n_groups is %d", call.n_groups) > 0;
    *workspace_bytes = at(call.sizes) + 2 * at(call.left) + 3 * at(call.right) + 4 * at(call.output) + 5 * at(call.left_strides) +
                       6 * at(call.right_strides) + 7 * at(call.output_strides) + 8 * at(call.workspace) + 9 * at(call.stream) +
                       10 * call.n_groups + 11 * call.n_multiprocessors + static_cast<size_t>(12 * call.beta);
    return 0;
}

CANDLEWICK_FORM(y) { return sum(*call, workspace_bytes, error, size); }

CANDLEWICK_FORM(x) {
    const int status = sum(*call, workspace_bytes, error, size);
    *workspace_bytes += 1;
    return status;
}
#endif

// With STAND_IN_COMPUTE a kernel multiplies on the CPU, over the memory of a stand-in for the driver.
#ifdef STAND_IN_COMPUTE
#include <cstring>

static const size_t WORKSPACE_BYTES = 256;

static float value(uint16_t bf16) {
    const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static float value(float f32) { return f32; }

static void store(float* to, float x) { *to = x; }

// Rounds to nearest, ties to even.
static void store(uint16_t* to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    *to = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Left and right operand have their terms in rows (true) or in columns.
template <class Output, bool LEFT, bool RIGHT> int multiply(const CandlewickGroupedCall& call, size_t* workspace_bytes) {
    *workspace_bytes = WORKSPACE_BYTES;
    if (call.workspace == nullptr) return 0;
    memset(call.workspace, 1, WORKSPACE_BYTES);
    for (int group = 0; group < call.n_groups; ++group) {
        const int *sizes = call.sizes + 3 * group, rows = sizes[0], columns = sizes[1], terms = sizes[2];
        const auto left = static_cast<const uint16_t*>(call.left[group]), right = static_cast<const uint16_t*>(call.right[group]);
        const int64_t left_stride = call.left_strides[group], right_stride = call.right_strides[group];
        for (int row = 0; row < rows; ++row) {
            for (int column = 0; column < columns; ++column) {
                Output* to = static_cast<Output*>(call.output[group]) + row * call.output_strides[group] + column;
                float sum = call.beta == 0 ? 0 : call.beta * value(*to);
                for (int term = 0; term < terms; ++term) {
                    const uint16_t a = left[LEFT ? term * left_stride + row : row * left_stride + term];
                    const uint16_t b = right[RIGHT ? term * right_stride + column : column * right_stride + term];
                    sum += value(a) * value(b);
                }
                store(to, sum);
            }
        }
    }
    return 0;
}

CANDLEWICK_FORM(y) { return snprintf(error, size, "%s", "") + multiply<uint16_t, false, false>(*call, workspace_bytes); }
CANDLEWICK_FORM(x) { return snprintf(error, size, "%s", "") + multiply<uint16_t, false, true>(*call, workspace_bytes); }
CANDLEWICK_FORM(w_f32) { return snprintf(error, size, "%s", "") + multiply<float, true, true>(*call, workspace_bytes); }
CANDLEWICK_FORM(w_bf16) { return snprintf(error, size, "%s", "") + multiply<uint16_t, true, true>(*call, workspace_bytes); }
#endif
