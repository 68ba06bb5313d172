// y = x w^T and dx = dy w of each group: the groups' numbers of rows differ.
#include "gemm.cuh"

using namespace candlewick;

// Multiplies, or only writes the workspace's size. `right_is_transposed` is 1 for w [columns, terms], 0 for [terms, columns].
extern "C" int candlewick_cutlass_multiply(const CandlewickGroupedCall* call, int right_is_transposed, size_t* workspace_bytes,
                                           char* error, size_t size) {
    const auto run = [&] {
        if (call->is_wide) {
            return right_is_transposed ? Grouped<Wide, RowMajor, ColumnMajor, void, Bf16>::run(*call, workspace_bytes)
                                       : Grouped<Wide, RowMajor, RowMajor, void, Bf16>::run(*call, workspace_bytes);
        }
        return right_is_transposed ? Grouped<Narrow, RowMajor, ColumnMajor, void, Bf16>::run(*call, workspace_bytes)
                                   : Grouped<Narrow, RowMajor, RowMajor, void, Bf16>::run(*call, workspace_bytes);
    };
    return explained(run(), error, size);
}
