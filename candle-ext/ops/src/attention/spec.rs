//! Description of an attention call: mask, scale, implementation.

use std::fmt;

use serde::{Serialize, Serializer};

/// Mask, scale and implementation of an attention call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Factor on q k^T; 1 / sqrt(head dim) in most models.
    pub scale: f32,
    /// Causal mask: query i does not see keys after i.
    pub causal: bool,
    /// Sliding window: query i sees key j only if i - j < window, in tokens.
    pub window: Option<usize>,
    /// Implementation.
    pub choice: AttentionChoice,
}

/// Attention implementation, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionImpl {
    /// cuDNN if it is installed and supports the call, else [`AttentionImpl::Fused`].
    #[default]
    Auto,
    /// cuDNN, NVIDIA's library.
    Cudnn,
    /// FlashAttention-style kernels of this crate, for CPUs and GPUs.
    Fused,
    /// Plain tensor operations that hold all scores of a sequence in memory, for comparison.
    Reference,
    /// FlashAttention 2 by the candle-flash-attn crate: forward only, on a GPU, in bf16 or f16.
    Flash,
}

/// Choice of an implementation. It affects rounding only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AttentionChoice {
    /// Implementation, by name.
    pub implementation: AttentionImpl,
    /// True to get bitwise reproducible gradients.
    ///
    /// cuDNN sums dq in the order in which blocks finish. Its deterministic variant takes memory quadratic in the
    /// length on Hopper, so `auto` then selects `fused`.
    pub deterministic: bool,
}

/// Head counts of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionHeads {
    /// Number of query heads.
    pub n_query: usize,
    /// Number of KV heads.
    pub n_kv: usize,
    /// Elements of a head.
    pub dim: usize,
}

/// Attention of a model, for [`AttentionChoice::explain`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelAttention {
    /// Head counts.
    pub heads: AttentionHeads,
    /// Narrowest sliding window of a layer, in tokens.
    pub window: Option<usize>,
    /// Tokens of the longest sequence.
    pub max_tokens: usize,
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
