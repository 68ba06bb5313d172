//! Linear layers of a sublayer that are computed together.

use crate::LinearSpec;

/// Linear layers that share work.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearGroup<'l> {
    /// The layers in forward order.
    pub linears: Vec<&'l LinearSpec>,
    /// Work that they share.
    pub fusion: LinearFusion,
}

/// Work that the layers of a group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearFusion {
    /// None: a layer reads a tensor alone.
    None,
    /// The layers read one tensor.
    SharedInput {
        /// True if one matmul computes them without FP8.
        joined: bool,
        /// True if a GPU quantizes the norm before them as forward computes it.
        quantizes_norm: bool,
    },
    /// Gate, up and down projection of a SwiGLU MLP in FP8. A GPU quantizes its activations where it computes them.
    GatedMlp,
}

impl<'l> LinearGroup<'l> {
    /// Returns the group of a layer that shares no work.
    pub fn single(linear: &'l LinearSpec) -> Self {
        Self { linears: vec![linear], fusion: LinearFusion::None }
    }
}
