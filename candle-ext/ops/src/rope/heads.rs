//! The heads that a rotation reads or writes, and its direction.

/// The direction of a rotation. The backward of a rotation is the rotation back.
#[derive(Clone, Copy)]
pub(super) enum RotationDirection {
    Forward,
    Inverse,
}

impl RotationDirection {
    /// The factor of the sine.
    pub(super) fn sign(self) -> f32 {
        match self {
            Self::Forward => 1.0,
            Self::Inverse => -1.0,
        }
    }
}

/// The heads that are rotated: `n` of `dim` elements each.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) n: usize,
    pub(super) dim: usize,
}

impl Heads {
    /// Returns the place of heads that have a tensor to themselves.
    pub(super) fn slice(self) -> Slice {
        Slice { first: 0, stride: self.n * self.dim }
    }
}

/// The place of heads in a tensor: tokens begin `stride` elements apart, their heads `first` elements later.
#[derive(Clone, Copy)]
pub(super) struct Slice {
    pub(super) first: usize,
    pub(super) stride: usize,
}
