//! FP8 training with TransformerEngine's recipes: delayed, current and blockwise scaling.
//!
//! An operand is stored as codes of a byte with the inverse scales of its blocks. On the CPU matmuls multiply the values
//! of the codes exactly and sum in f32, in the order of the bf16 GEMM, which docs/fp8.md gives for each processor; factors of
//! whole matrices are applied to the sums. Scales of blocks that are no powers of two take the f32 GEMM. On a GPU matmuls are cuBLASLt's, and quantization has the
//! CPU's bits.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) mod cuda;
mod delayed;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod early;
mod fake_quantize;
mod format;
mod groups;
mod kernels;
mod layers;
mod linear;
mod matrix;
mod normed;
mod operands;
mod recipe;
mod rounding;
mod sharded;
mod stats;
mod stored;
mod swiglu_mlp;

pub(crate) use fake_quantize::fake_quantized_linear;
pub use format::{FP8_BLOCK, FP8_WEIGHT_FORMAT, Fp8Format};
pub(crate) use groups::{GroupCodes, Groups};
pub use kernels::Fp8Kernels;
pub use layers::{Fp8Guard, Fp8LayerState, Fp8Layers, Fp8Linear, Fp8LinearScales, Fp8Module};
pub(crate) use linear::{Fp8LinearCall, fp8_linear};
pub use matrix::{Fp8Matrix, amax, fp8_quantize, fp8_quantize_current};
pub use normed::fp8_normed_linears;
pub use operands::Fp8Operands;
pub use recipe::{
    AmaxHistoryPolicy, Contraction, DelayedScaling, Fp8Config, Fp8Formats, Fp8Operand, Fp8Recipe, ScaleRule,
};
pub use rounding::Fp8Rounding;
pub use stats::{Fp8StepStats, Fp8TensorStats};
pub use swiglu_mlp::{fp8_normed_swiglu_mlp, fp8_swiglu_mlp};
