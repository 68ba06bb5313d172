//! Input tensors of SwiGLU, and their sizes.

use candle_core::{Shape, Tensor};

/// Gate and up, contiguous.
#[derive(Clone)]
pub(super) enum GateUp {
    Two(Tensor, Tensor),
    /// One tensor [.., 2f], gate before up in each row.
    Joined(Tensor),
}

/// Sizes: `n_rows` rows of `width` elements. Rows of gate start `stride` elements apart, as do those of up.
#[derive(Clone, Copy)]
pub(super) struct Gated {
    pub(super) n_rows: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
}

impl GateUp {
    /// Returns the first of the tensors.
    pub(super) fn tensor(&self) -> &Tensor {
        match self {
            Self::Two(gate, _) => gate,
            Self::Joined(joined) => joined,
        }
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let up = if let Self::Two(_, up) = self { Some(up) } else { None };
        std::iter::once(self.tensor()).chain(up)
    }

    pub(super) fn gated(&self) -> Gated {
        match self {
            Self::Two(gate, _) => Gated { n_rows: 1, width: gate.elem_count(), stride: gate.elem_count() },
            Self::Joined(joined) => {
                let stride = joined.dims().last().copied().unwrap_or(0);
                Gated { n_rows: joined.elem_count() / stride.max(1), width: stride / 2, stride }
            }
        }
    }

    /// Returns the shape of y.
    pub(super) fn shape(&self) -> Shape {
        let mut dims = self.tensor().dims().to_vec();
        if let (Self::Joined(_), Some(last)) = (self, dims.last_mut()) {
            *last /= 2;
        }
        dims.into()
    }
}
