//! Fused differentiable operations for one device, on candle.
//!
//! Each op is a folder. `mod.rs` holds the formula, the checks and the backward; `cpu.rs` holds the CPU kernel. The
//! feature `cuda` adds the GPU kernel in `cuda.rs` and `kernel.cu`.
//!
//! A [`Weight`] is a view of a flat buffer, not a `Var`. A [`Tape`]'s backward adds its gradient in place to a
//! [`GradSink`]. This crate does no communication.

mod accelerator;
pub mod adamw;
pub mod add;
pub mod add_columns;
pub mod attention;
mod backward;
mod batch_invariance;
pub mod bytes;
pub mod concat;
mod cost;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
mod device;
mod device_memory;
mod dot;
pub mod dropout;
pub mod embedding;
mod exp;
mod floats;
pub mod fp8;
mod gemm;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod gemm_output;
mod gemm_plans;
pub mod grad_scaler;
mod grouped_tile;
pub mod in_place;
pub mod linear;
pub mod linear_cross_entropy;
pub mod linear_f64;
pub mod moe;
mod nvidia;
pub mod quantized;
pub mod rank_heads;
mod recording;
mod replaced;
mod replay;
pub mod reshape;
pub mod rms_norm;
pub mod rope;
mod saved;
pub mod scale;
pub mod scale_rows;
mod scope;
pub mod select_rows;
pub mod set_rows;
pub mod sigmoid_gate;
mod simd;
mod span;
mod storage;
pub mod swiglu;
pub mod tape;
#[cfg(feature = "emulate")]
mod thread_value;
pub mod threads;
pub mod tiled;
pub mod transfer;
pub mod weight;
mod weight_matmul;

#[cfg(feature = "emulate")]
pub use cuda::emulator::{EmulatedWork, MemoryLimit, emulate, emulate_counted, emulate_with_limit, emulate_with_seed};
#[cfg(all(feature = "cuda", feature = "emulate"))]
pub use cuda::poison::poison;

pub use accelerator::{DeviceChoice, GpuInfo, gpu_memory, gpu_unavailable_reason, gpu_uuid, gpus};
pub use adamw::{AdamW, AdamWState, AdamWStep, ShardPosition, StochasticRounding, adamw, adamw_stochastic};
pub use add::add;
pub use add_columns::add_columns;
pub use attention::{
    AttentionChoice, AttentionChunk, AttentionCost, AttentionHeads, AttentionImpl, AttentionPasses, AttentionSpec,
    ChunkInputs, CuSeqlens, ModelAttention, PartialSoftmax, attention, attention_chunk, attention_chunk_backward,
    kv_cache_dtype,
};
pub use backward::{BackwardContext, PendingExchange};
pub use batch_invariance::require_batch_invariance;
pub use bytes::{tensor_from_bytes, with_bytes};
pub use concat::concat;
pub use cost::{Cost, DeviceKind, LinearInput};
pub use device_memory::{
    DeviceMemory, GPU_CONTEXT_BYTES, GPU_HOST_BYTES, device_bytes_in_use, device_memory, gpu_pool_slack_bytes,
    is_out_of_memory,
};
pub use dropout::{
    ColumnShard, Dropout, RowRanges, derive_key, dropout, dropout_backward_cost, row_dropout, sharded_dropout,
};
pub use embedding::{embedding, vocab_parallel_embedding};
pub use fp8::{
    AmaxHistoryPolicy, Contraction, DelayedScaling, FP8_BLOCK, FP8_WEIGHT_FORMAT, Fp8Config, Fp8Format, Fp8Formats,
    Fp8Guard, Fp8Kernels, Fp8LayerState, Fp8Layers, Fp8Linear, Fp8LinearScales, Fp8Matrix, Fp8Module, Fp8Operand,
    Fp8Operands, Fp8Recipe, Fp8Rounding, Fp8StepStats, Fp8TensorStats, ScaleRule, amax, fp8_normed_linears,
    fp8_normed_swiglu_mlp, fp8_quantize, fp8_quantize_current, fp8_swiglu_mlp,
};
pub use gemm::{
    GemmSize, cpu_gemm_buffer_bytes, cpu_gemm_kernel, cpu_gemm_kernels, measure_cpu_gemm_rate, select_cpu_gemm_kernel,
};
pub use gemm_plans::forget_gemms;
pub use grad_scaler::{GradPolicy, GradScaler, LossLimit, LossScaling, ScalerState, StepDecision, UpdateOutcome};
pub use grouped_tile::{GroupedTile, TileUse, force_grouped_tile, grouped_tiles, load_cutlass_from};
pub use in_place::{copy_into, count_zeros, sum_of_squares, zero_};
pub use linear::{LinearCost, OutputDtype, joins_adapters, linear, linear_plus, linear_plus_columns, linear_scaled};
pub use linear_cross_entropy::{
    CrossEntropy, CrossEntropyCost, LOGITS_BYTES_ON_CPU, LossAndGrad, LossGrad, Reduction, TokenScores, VocabShard,
    linear_cross_entropy, logits_bytes, logits_bytes_on_gpu, max_logit_rows, token_scores,
    vocab_parallel_cross_entropy,
};
pub use linear_f64::{linear_f64, linear_f64_bytes};
pub use moe::assignment::{DROPPED, ExpertAssignment};
pub use moe::capacity::{DropPolicy, expert_capacity, limit_capacity};
pub use moe::expert_bias::expert_bias_change;
pub use moe::expert_counts::{TokenSequences, expert_counts};
pub use moe::expert_labels::{relabel_experts, repeat_dropout_keys, repeat_weights};
pub use moe::grouped_linear::{GroupedCall, GroupedGemmImpl, GroupedLinearCost, TokensPerCall, grouped_linear};
pub use moe::permute::{permute, permute_cost, permute_dropout_keys, permute_weights, unpermute};
pub use moe::router::{
    CountedExperts, ExpertChoice, GroupLimit, MAX_CUDA_TOP_K, RouterSpec, RouterStatistics, RouterStatisticsSpec,
    Routing, ScoreFunction, TopKOrder, route, route_by, route_by_choice, route_cost, route_to, route_with_statistics,
};
pub use moe::router_loss::{
    balance_factors, expert_score_sums, load_balancing_loss, router_loss_cost, router_z_loss,
    sequence_load_balancing_loss,
};
pub use moe::router_noise::{InputJitter, biased_logits, input_jitter, random_logits};
pub use moe::sinkhorn::sinkhorn;
pub use moe::weighted_swiglu::{weighted_swiglu, weighted_swiglu_cost};
pub use nvidia::{NvidiaLibrary, nvidia_libraries, tune_gemms};
pub use quantized::{QuantFormat, ScaleBlock, ScaleRounding, WeightStorage, dequantize, quantize};
pub use rank_heads::{heads_by_rank, heads_of_ranks};
pub use recording::{OpInput, auxiliary_loss, no_grad, record, record_exchange, requires_grad, saved_by_readers_only};
pub use replaced::replace_kernels;
pub use replay::{compute_or_replay, save_outputs};
pub use reshape::reshape;
pub use rms_norm::{NormCall, add_rms_norm, rms_norm, rms_norm_cost};
pub use rope::{QkNorms, QkvHeads, rms_norm_rope, rope, rope_cost, split_qkv};
pub use saved::{OutputsToSave, ReplayedOutput, SavedOutputs};
pub use scale::scale;
pub use scale_rows::scale_rows;
pub use select_rows::select_rows;
pub use set_rows::set_rows;
pub use sigmoid_gate::sigmoid_gate;
pub use span::{PROFILE_TARGET, span};
pub use swiglu::{swiglu, swiglu_cost, swiglu_joined};
pub use tape::{Grads, Tape};
pub use threads::{SpinGuard, join_rayon_pool, spin_workers};
pub use tiled::{TiledCost, tile_rows, tiled, tiled_with_weights};
pub use transfer::{DeviceReadback, DeviceTimestamp, HostBuffer, to_host, to_host_contiguous, upload, upload_into};
pub use weight::{BufferView, FlatBuffer, GradSink, TensorOrView, Weight};
