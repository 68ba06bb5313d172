//! Joined rows of heads.

use candle_core::Tensor;

use super::heads::{HeadSlice, RopeHeads};
use crate::weight::Weight;

/// Part of each row: queries, keys or values.
#[derive(Clone)]
pub(super) struct HeadPart {
    pub(super) heads: RopeHeads,
    pub(super) slice: HeadSlice,
    pub(super) is_rotated: bool,
    /// Weight [k] of the heads' norm.
    pub(super) norm: Option<Weight>,
}

/// Joined rows of heads, and what is computed of them.
pub(super) struct HeadRows {
    pub(super) n_tokens: usize,
    /// Elements of a row.
    pub(super) stride: usize,
    /// One to three parts in the order of their elements, each rotated and normed except the third.
    pub(super) parts: Vec<HeadPart>,
    /// Cosines and sines [t, r/2].
    pub(super) table: [Tensor; 2],
    /// Epsilon of all norms.
    pub(super) eps: f32,
}
