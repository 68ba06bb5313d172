//! Treatment of a matmul's output.

/// Treatment of the output's present values: BLAS's beta is 0 (overwrite) or 1 (add).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accumulate {
    Overwrite,
    Add,
}
