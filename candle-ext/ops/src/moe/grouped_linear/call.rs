//! Description of a grouped linear call: number of tokens and implementation.

use crate::batch_invariance::is_batch_invariant;

/// Name of the op in spans and errors.
pub(super) const OP: &str = "grouped_linear";

/// Number of tokens that the rows of a [`grouped_linear`](super::grouped_linear) call belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokensPerCall {
    /// One token, as in decoding. Each weight is read once, and rows round as [`linear`](crate::linear) rounds one row.
    One,
    /// Any number. With [`GroupedGemmImpl::Fused`], the bits of a row do not depend on the number of rows of its group.
    Many,
}

/// Implementation of the matmuls of experts on an NVIDIA GPU, by name. It affects rounding only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupedGemmImpl {
    /// CUTLASS in cases in which it was measured to be faster, else the kernels of this crate.
    Auto,
    /// Kernels of this crate, for CPUs and GPUs.
    #[default]
    Fused,
    /// cuBLASLt's grouped GEMM: Hopper with cuBLAS 13.4 or newer, Blackwell with 13.3 or newer, in bf16 or f16.
    Cublas,
    /// CUTLASS's grouped GEMM: Hopper, in bf16, with the objects of scripts/build-cutlass.
    Cutlass,
}

/// Number of tokens and implementation of a [`grouped_linear`](super::grouped_linear) call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupedCall {
    /// Number of tokens that the rows belong to.
    pub tokens: TokensPerCall,
    /// Implementation on a GPU.
    pub implementation: GroupedGemmImpl,
}

impl From<TokensPerCall> for GroupedCall {
    fn from(tokens: TokensPerCall) -> Self {
        Self { tokens, implementation: GroupedGemmImpl::default() }
    }
}

impl TokensPerCall {
    /// Returns the variant for `n_tokens` tokens. With batch invariance one token rounds as many do.
    pub fn of(n_tokens: usize) -> Self {
        if n_tokens == 1 && !is_batch_invariant() { Self::One } else { Self::Many }
    }
}
