//! Description of an attention call: mask, scale, implementation.

use std::fmt;

use serde::{Serialize, Serializer};

/// Mask, scale and implementation of an attention call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Multiplies q k^T; 1 / sqrt(head dim) in most models.
    pub scale: f32,
    /// Query i sees no key after i.
    pub causal: bool,
    /// Query i sees key j only if i - j < window.
    pub window: Option<usize>,
    /// Implementation.
    pub choice: AttentionChoice,
}

/// An implementation by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionImpl {
    /// cuDNN where it is there and takes the case, else [`AttentionImpl::Fused`].
    #[default]
    Auto,
    /// NVIDIA's library.
    Cudnn,
    /// Our kernels: the CPU's on a CPU, CUDA's on a GPU.
    Fused,
    /// Plain tensor operations with all scores of a sequence in memory, to compare with.
    Reference,
    /// FlashAttention 2 by the candle-flash-attn crate: the forward on a GPU, in 16 bits.
    Flash,
}

/// Choice of an implementation. It changes rounding only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AttentionChoice {
    /// Implementation, by name.
    pub implementation: AttentionImpl,
    /// True if equal inputs must give equal bits. cuDNN adds up dq in the order in which blocks come; in a fixed order it
    /// takes memory that grows with the square of the length on Hopper, so `auto` then means `fused`.
    pub deterministic: bool,
}

/// The heads of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionHeads {
    /// Query heads.
    pub n_query: usize,
    /// KV heads.
    pub n_kv: usize,
    /// Elements of a head.
    pub dim: usize,
}

/// Passes that attention must support.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionPasses {
    /// Forward only.
    Forward,
    /// Forward and backward.
    Both,
}

impl fmt::Display for AttentionImpl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Cudnn => "cudnn",
            Self::Fused => "fused",
            Self::Reference => "reference",
            Self::Flash => "flash",
        })
    }
}

impl Serialize for AttentionImpl {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
