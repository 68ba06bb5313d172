//! A parameter as the ops see it: a value, and perhaps a place where its gradient is summed.

use candle_core::{DType, Result, Tensor, bail};

use crate::floats::FloatsMut;
use crate::storage;

/// The main gradient of one parameter, f32 or bf16. Ops add to it in place; cloning shares it.
#[derive(Clone, Debug)]
pub struct GradSink {
    grad: Tensor,
}

impl GradSink {
    /// Wraps `grad`, a contiguous view of any buffer. Its present values are added to; what is added is summed in f32 and,
    /// in a bf16 gradient, rounded once for each use of the weight.
    pub fn new(grad: Tensor) -> Result<Self> {
        if !matches!(grad.dtype(), DType::F32 | DType::BF16) || !grad.is_contiguous() {
            bail!(
                "gradient sink: want a contiguous f32 or bf16 view, got {:?} with shape {:?} and strides {:?}",
                grad.dtype(),
                grad.dims(),
                grad.stride()
            )
        }
        Ok(Self { grad })
    }

    /// The gradient summed so far.
    pub fn grad(&self) -> &Tensor {
        &self.grad
    }

    /// Hands the gradient's elements to `add`, which must only add to them.
    pub(crate) fn add(&self, op: &'static str, add: impl FnOnce(&mut [f32])) -> Result<()> {
        storage::update(&self.grad, op, |grad| {
            match grad {
                FloatsMut::F32(grad) => add(grad),
                mut rounded => {
                    let mut grad = vec![0.0; rounded.len()];
                    rounded.floats().read_into(&mut grad);
                    add(&mut grad);
                    rounded.write(0, &grad);
                }
            }
            Ok(())
        })
    }
}

/// One parameter: its value in the compute dtype, often a view of a flat buffer, and its sink.
#[derive(Clone, Debug)]
pub struct Weight {
    value: Tensor,
    sink: Option<GradSink>,
}

impl Weight {
    /// A parameter that is only read; its gradient is never computed.
    pub fn frozen(value: Tensor) -> Self {
        Self { value, sink: None }
    }

    /// A parameter whose gradient every use adds to `sink`.
    pub fn trainable(value: Tensor, sink: GradSink) -> Self {
        Self { value, sink: Some(sink) }
    }

    /// The value that ops compute with.
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// Where the gradient goes, if it is wanted.
    pub fn sink(&self) -> Option<&GradSink> {
        self.sink.as_ref()
    }

    /// Fails if the weight's shape is not what `op` needs or the sink's differs from it.
    pub(crate) fn check(&self, op: &str, want: &[usize]) -> Result<()> {
        if self.value.dims() != want {
            bail!("{op}: weight has shape {:?}, want {want:?}", self.value.dims())
        }
        if !self.value.is_contiguous() {
            bail!("{op}: the weight must be a contiguous view, its strides are {:?}", self.value.stride())
        }
        match &self.sink {
            Some(sink) if sink.grad.elem_count() != self.value.elem_count() => {
                bail!("{op}: weight has shape {:?}, its gradient sink {:?}", self.value.dims(), sink.grad.dims())
            }
            _ => Ok(()),
        }
    }
}
