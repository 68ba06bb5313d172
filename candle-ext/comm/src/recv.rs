//! The description of a tensor that a rank receives.

use std::fmt;

use candle_core::{DType, Tensor};

use crate::call::tensor;

/// A tensor to receive: its sender, and the dtype and shape that it must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recv {
    /// The rank that sends it.
    pub from: usize,
    /// Its dtype.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl Recv {
    /// Describes a tensor of the dtype and shape of `x` that rank `from` sends.
    pub fn like(x: &Tensor, from: usize) -> Self {
        Self { from, dtype: x.dtype(), shape: x.dims().to_vec() }
    }

    /// Returns whether a tensor of this dtype and shape is the one to receive.
    pub(crate) fn matches(&self, dtype: Option<DType>, shape: &[usize]) -> bool {
        dtype == Some(self.dtype) && shape == self.shape
    }

    /// Says that a rank sends another tensor; `None` is none at all.
    pub(crate) fn mismatch(&self, sent: Option<(DType, &[usize])>, [sender, receiver]: [String; 2]) -> String {
        let sent = sent.map_or_else(|| "no tensor".to_owned(), |(dtype, shape)| tensor(dtype, shape));
        format!("{sender} sends {sent}, {receiver} expects {self}")
    }
}

/// `f32 [3, 4]`
impl fmt::Display for Recv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&tensor(self.dtype, &self.shape))
    }
}
