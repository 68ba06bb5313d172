// dw = [dw +] dy^T x of each group: the groups' numbers of terms differ. Storing f32 takes as long as multiplying, so the
// tiles are those whose stores overlap with multiplications.
#include "gemm.cuh"

using namespace candlewick;

// Adds to dw, or only writes the workspace's size. `is_f32` is 1 for an f32 gradient, 0 for bf16.
extern "C" int candlewick_cutlass_grad_w(const CandlewickGroupedCall* call, int is_f32, size_t* workspace_bytes, char* error,
                                         size_t size) {
    const auto status = is_f32 ? Grouped<Narrow, ColumnMajor, RowMajor, float, float>::run(*call, workspace_bytes)
                               : Grouped<Narrow, ColumnMajor, RowMajor, Bf16, Bf16>::run(*call, workspace_bytes);
    return explained(status, error, size);
}
