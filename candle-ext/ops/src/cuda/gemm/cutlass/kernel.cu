// One kernel of a tile. scripts/build-cutlass defines the tile as TILE_M, TILE_N, TILE_K, CLUSTER_M, CLUSTER_N and SCHEDULE,
// and the kernel as FORM.
#include "gemm.cuh"

namespace candlewick {

// y = x w^T of each group: the groups' numbers of rows differ.
struct y {
    using Left = RowMajor;
    using Right = ColumnMajor;
    using Source = void;
    using Output = Bf16;
};

// dx = dy w.
struct x {
    using Left = RowMajor;
    using Right = RowMajor;
    using Source = void;
    using Output = Bf16;
};

// dw = [dw +] dy^T x in f32: the groups' numbers of terms differ.
struct w_f32 {
    using Left = ColumnMajor;
    using Right = RowMajor;
    using Source = float;
    using Output = float;
};

// The same in bf16.
struct w_bf16 {
    using Left = ColumnMajor;
    using Right = RowMajor;
    using Source = Bf16;
    using Output = Bf16;
};

struct Tile : SCHEDULE {
    using Shape = cute::Shape<cute::Int<TILE_M>, cute::Int<TILE_N>, cute::Int<TILE_K>>;
    using Cluster = cute::Shape<cute::Int<CLUSTER_M>, cute::Int<CLUSTER_N>, cute::_1>;
};

}  // namespace candlewick

// Expands the macro FORM before it is joined to the name.
#define DEFINE(form) CANDLEWICK_FORM(form)
DEFINE(FORM) { return candlewick::explained(candlewick::Grouped<candlewick::Tile, candlewick::FORM>::run(*call, workspace_bytes), error, size); }
