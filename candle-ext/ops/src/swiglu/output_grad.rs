//! Contents of the memory of the output's gradient.

/// Contents of the output's gradient after a backward.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum OutputGrad {
    /// The gradient.
    Kept,
    /// The output y.
    BecomesOutput,
}
