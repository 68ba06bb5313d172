//! The values of config.json.

use candle_core::DType;

use super::{moe::MoeConfig, rope::RopeKind};
use crate::{Family, family::QkNorm};

/// The values of config.json, with the family's defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Typed {
    pub(crate) family: Family,
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) n_layers: usize,
    pub(crate) n_heads: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) max_positions: usize,
    pub(crate) rms_norm_eps: f64,
    pub(crate) initializer_range: f64,
    pub(crate) rope_theta: f64,
    pub(crate) rope: RopeKind,
    /// Rotated elements of a head, from the first on.
    pub(crate) rotary_dim: usize,
    pub(crate) tied: bool,
    pub(crate) qkv_bias: bool,
    pub(crate) o_bias: bool,
    pub(crate) mlp_bias: bool,
    pub(crate) qk_norm: QkNorm,
    /// Mixture of experts, if the family has one.
    pub(crate) moe: Option<MoeConfig>,
    /// Sliding window of each layer, if it has one.
    pub(crate) windows: Vec<Option<usize>>,
    pub(crate) bos_id: Option<u32>,
    pub(crate) eos_ids: Vec<u32>,
    pub(crate) pad_id: Option<u32>,
    pub(crate) dtype: Option<DType>,
}
