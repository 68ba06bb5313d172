//! Description of a tensor to receive.

use std::fmt;

use candle_core::{DType, Tensor};

use crate::call::tensor;

/// Tensor to receive: the sender, and the expected dtype and shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recv {
    /// Rank of the sender.
    pub from: usize,
    /// Expected dtype.
    pub dtype: DType,
    /// Expected shape.
    pub shape: Vec<usize>,
}

impl Recv {
    /// Describes a tensor of the dtype and shape of `x` that rank `from` sends.
    pub fn like(x: &Tensor, from: usize) -> Self {
        Self { from, dtype: x.dtype(), shape: x.dims().to_vec() }
    }

    /// Returns true if a tensor of this dtype and shape is expected.
    pub(crate) fn matches(&self, dtype: Option<DType>, shape: &[usize]) -> bool {
        dtype == Some(self.dtype) && shape == self.shape
    }

    /// Returns the message for a sender of another tensor, or of none.
    pub(crate) fn mismatch(&self, sent: Option<(DType, &[usize])>, [sender, receiver]: [String; 2]) -> String {
        let sent = sent.map_or_else(|| "no tensor".to_owned(), |(dtype, shape)| tensor(dtype, shape));
        format!("{sender} sends {sent}, {receiver} expects {self}")
    }
}

/// Formats the expected tensor: `f32 [3, 4]`.
impl fmt::Display for Recv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&tensor(self.dtype, &self.shape))
    }
}
