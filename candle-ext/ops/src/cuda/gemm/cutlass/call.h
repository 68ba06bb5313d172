// Interface of a tile's shared object: the call, its version, and the functions. object.rs has the same layout and version.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Increase it with each change of the call or of a function's type.
#define CANDLEWICK_CUTLASS_ABI 1

// A call. All pointers but the stream are addresses on the device.
struct CandlewickGroupedCall {
    // Rows, columns and terms of each group [n_groups, 3].
    int* sizes;
    // Addresses of each group's matrices [n_groups]. Runs begin at multiples of 16 bytes.
    void** left;
    void** right;
    void** output;
    // Elements between the rows of each group's matrices in memory [n_groups].
    int64_t* left_strides;
    int64_t* right_strides;
    int64_t* output_strides;
    // Null in a call that only queries the workspace's size.
    void* workspace;
    // A cudaStream_t.
    void* stream;
    int n_groups;
    int n_multiprocessors;
    // Factor of the output's old values, 0 or 1.
    float beta;
};

static_assert(sizeof(CandlewickGroupedCall) == 88, "CANDLEWICK_CUTLASS_ABI numbers this layout");

#define CANDLEWICK_EXPORT extern "C" __attribute__((visibility("default")))

// Every object has the first three functions. One with the use `multiply` has y and x, one with the use `dw` the others.
// These compute, or only write the size of the workspace. They return 0, or write a message.
CANDLEWICK_EXPORT unsigned candlewick_cutlass_abi();
// The tile's line of tiles.txt.
CANDLEWICK_EXPORT const char* candlewick_cutlass_tile();
// The compiler and the version of CUTLASS.
CANDLEWICK_EXPORT const char* candlewick_cutlass_build();

#define CANDLEWICK_FORM(name) \
    CANDLEWICK_EXPORT int candlewick_cutlass_##name(const CandlewickGroupedCall* call, size_t* workspace_bytes, char* error, size_t size)
CANDLEWICK_FORM(y);
CANDLEWICK_FORM(x);
CANDLEWICK_FORM(w_f32);
CANDLEWICK_FORM(w_bf16);
