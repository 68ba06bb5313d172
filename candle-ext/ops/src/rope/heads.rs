//! Heads that a rotation reads or writes, and its direction.

/// Direction of a rotation. The backward is the inverse rotation.
#[derive(Clone, Copy)]
pub(super) enum RotationDirection {
    Forward,
    Inverse,
}

impl RotationDirection {
    /// Returns the sign of the sine.
    pub(super) fn sign(self) -> f32 {
        match self {
            Self::Forward => 1.0,
            Self::Inverse => -1.0,
        }
    }
}

/// Rotated heads: `n` heads of `dim` elements each.
#[derive(Clone, Copy)]
pub(super) struct RopeHeads {
    pub(super) n: usize,
    pub(super) dim: usize,
}

impl RopeHeads {
    /// Returns the slice of a tensor that holds only these heads.
    pub(super) fn slice(self) -> HeadSlice {
        HeadSlice { first: 0, stride: self.n * self.dim }
    }
}

/// Heads within a tensor: tokens start `stride` elements apart, their heads `first` elements later.
#[derive(Clone, Copy)]
pub(super) struct HeadSlice {
    pub(super) first: usize,
    pub(super) stride: usize,
}
