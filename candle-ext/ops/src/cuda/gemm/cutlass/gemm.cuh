// Grouped GEMMs on Hopper by CUTLASS's collectives for arrays of pointers. Sizes and addresses of all groups are on the
// device. Compile with NDEBUG: a call of assert within a kernel serializes its tensor core operations.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <stdio.h>

#include "call.h"

namespace candlewick {

using Bf16 = cutlass::bfloat16_t;
using Problem = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;
// Layouts of the left operand [rows, terms] and of the right operand [terms, columns].
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

// Tiles by one warp group each. It stores a tile while the other warp group multiplies the next one.
struct Pingpong {
    using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
    using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

// Tiles by two warp groups, each with half of the rows: fewer loads per multiplication.
struct Cooperative {
    using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
    using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

// Elements in 16 bytes, the alignment of TMA.
template <class Element> constexpr int ALIGNED = 16 / sizeof(Element);

// A kernel. The tile has Shape, Cluster and a schedule. The form has the operands' layouts, and Source, the type of the output's
// old values: void if it is overwritten always.
template <class Tile, class Form> struct Grouped {
    using Arch = cutlass::arch::Sm90;
    using Operator = cutlass::arch::OpClassTensorOp;
    using Source = typename Form::Source;
    using Output = typename Form::Output;
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        Arch, Operator, typename Tile::Shape, typename Tile::Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float,
        float, Source, RowMajor*, ALIGNED<Output>, Output, RowMajor*, ALIGNED<Output>, typename Tile::Epilogue,
        cutlass::epilogue::fusion::LinearCombination<Output, float, Source, float>>::CollectiveOp;
    using Stages = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        Arch, Operator, Bf16, typename Form::Left*, ALIGNED<Bf16>, Bf16, typename Form::Right*, ALIGNED<Bf16>, float,
        typename Tile::Shape, typename Tile::Cluster, Stages, typename Tile::Mainloop>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
    using LeftStride = typename Kernel::InternalStrideA;
    using RightStride = typename Kernel::InternalStrideB;
    using SourceStride = typename Kernel::InternalStrideC;
    using OutputStride = typename Kernel::InternalStrideD;
    using Sizes = typename Problem::UnderlyingProblemShape;

    // The kernel `grouped_problems` writes these as three i32 and as one i64.
    static_assert(sizeof(Sizes) == 3 * sizeof(int));
    static_assert(sizeof(LeftStride) == sizeof(int64_t) && sizeof(RightStride) == sizeof(int64_t));
    static_assert(sizeof(SourceStride) == sizeof(int64_t) && sizeof(OutputStride) == sizeof(int64_t));

    static typename Gemm::Arguments arguments(const CandlewickGroupedCall& call) {
        typename Gemm::Arguments arguments{
            cutlass::gemm::GemmUniversalMode::kGrouped,
            {call.n_groups, reinterpret_cast<Sizes*>(call.sizes), nullptr},
            {const_cast<const Bf16**>(reinterpret_cast<Bf16**>(call.left)), reinterpret_cast<LeftStride*>(call.left_strides),
             const_cast<const Bf16**>(reinterpret_cast<Bf16**>(call.right)), reinterpret_cast<RightStride*>(call.right_strides)},
            {{},
             const_cast<const Source**>(reinterpret_cast<Source**>(call.output)),
             reinterpret_cast<SourceStride*>(call.output_strides),
             reinterpret_cast<Output**>(call.output),
             reinterpret_cast<OutputStride*>(call.output_strides)}};
        arguments.epilogue.thread.alpha = 1.0f;
        arguments.epilogue.thread.beta = call.beta;
        arguments.hw_info.sm_count = call.n_multiprocessors;
        return arguments;
    }

    static cutlass::Status run(const CandlewickGroupedCall& call, size_t* workspace_bytes) {
        const auto of_call = arguments(call);
        *workspace_bytes = Gemm::get_workspace_size(of_call);
        const auto supported = Gemm::can_implement(of_call);
        if (supported != cutlass::Status::kSuccess || call.workspace == nullptr) return supported;
        const auto stream = static_cast<cudaStream_t>(call.stream);
        Gemm gemm;
        const auto initialized = gemm.initialize(of_call, call.workspace, stream);
        return initialized == cutlass::Status::kSuccess ? gemm.run(stream) : initialized;
    }
};

// Writes the reason of a failure to `error` and returns 1; returns 0 after a success.
inline int explained(cutlass::Status status, char* error, size_t size) {
    if (status == cutlass::Status::kSuccess) return 0;
    snprintf(error, size, "%s (CUDA: %s)", cutlassGetStatusString(status), cudaGetErrorString(cudaGetLastError()));
    return 1;
}

}  // namespace candlewick
