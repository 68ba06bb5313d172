//! Fused differentiable operations for one device, on candle.
//!
//! Each op is a folder: `mod.rs` holds the maths, the checks and the backward, `cpu.rs` the kernel, and with the feature
//! `cuda` `cuda.rs` and `kernel.cu` its twin.
//! Weights are not `Var`s: a [`Weight`] is a view of somebody's flat buffer, and its gradient is
//! added in place to a [`GradSink`] in the backward of a [`Tape`]. Nothing here communicates.

mod accelerator;
pub mod adamw;
pub mod add;
pub mod attention;
mod backward;
pub mod bytes;
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
mod gemm;
pub mod grad_scaler;
pub mod in_place;
pub mod linear;
pub mod linear_cross_entropy;
mod nvidia;
mod product;
pub mod quantized;
mod recording;
mod replaced;
mod replay;
pub mod reshape;
pub mod rms_norm;
pub mod rope;
mod saved;
pub mod scale;
mod scope;
pub mod set_rows;
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

#[cfg(feature = "emulate")]
pub use cuda::emulator::{MemoryLimit, emulate, emulate_with_limit};
#[cfg(all(feature = "cuda", feature = "emulate"))]
pub use cuda::poison::poison;

pub use accelerator::{DeviceChoice, GpuInfo, gpu_memory, gpu_uuid, gpus, why_no_gpu};
pub use adamw::{AdamW, AdamWState, adamw};
pub use add::add;
pub use attention::{
    AttentionChoice, AttentionCost, AttentionHeads, AttentionImpl, AttentionPasses, AttentionSpec, Partial, Piece,
    PieceInputs, Seqs, attention, attention_piece, attention_piece_backward, kv_cache_dtype,
};
pub use backward::BackwardContext;
pub use bytes::{of_bytes, with_bytes};
pub use cost::{Cost, DeviceKind, LinearInput};
pub use device_memory::{
    DeviceMemory, GPU_CONTEXT_BYTES, GPU_HOST_BYTES, device_memory, gpu_pool_slack_bytes, is_out_of_memory,
};
pub use dropout::{Columns, Dropout, Rows, derive_key, dropout, dropout_cost, dropout_part};
pub use embedding::{embedding, embedding_part};
pub use gemm::{GemmSize, choose_cpu_product, cpu_gemm_buffer_bytes, cpu_product, cpu_product_rate, cpu_products};
pub use grad_scaler::{GradPolicy, GradScaler, LossScaling, Outcome, ScalerState, Verdict};
pub use in_place::{copy_into, sum_of_squares, zero_};
pub use linear::{LinearCost, Precision, linear};
pub use linear_cross_entropy::{
    CrossEntropy, CrossEntropyCost, LOGITS_BYTES_ON_CPU, LossAndGrad, Reduction, TokenScores, Upstream, VocabPart,
    linear_cross_entropy, linear_cross_entropy_part, logits_bytes, logits_bytes_on_gpu, rows_of_logits, token_scores,
};
pub use nvidia::{NvidiaLibrary, nvidia_libraries, tune_gemms};
pub use quantized::{QuantFormat, ScaleBlock, ScaleRounding, WeightStorage, dequantize, quantize};
pub use recording::{Input, PendingExchange, auxiliary_loss, is_tracked, record, record_exchange, untracked};
pub use replaced::replace_kernels;
pub use replay::{compute_or_replay, save_outputs};
pub use reshape::reshape;
pub use rms_norm::{add_rms_norm, rms_norm, rms_norm_cost};
pub use rope::{QkvHeads, rope, rope_cost, split_qkv};
pub use saved::SavedOutputs;
pub use scale::scale;
pub use set_rows::set_rows;
pub use span::{PROFILE, span};
pub use swiglu::{swiglu, swiglu_cost, swiglu_joined};
pub use tape::{Grads, Tape};
pub use threads::{Awake, join_compute_threads, stay_awake};
pub use tiled::{TiledCost, tile_rows, tiled};
pub use transfer::{HostCopy, Readout, send_into, to_host, to_host_contiguous, upload};
pub use weight::{Buffer, GradSink, Handle, View, Weight};
