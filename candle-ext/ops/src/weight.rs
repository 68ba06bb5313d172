//! Parameters for the ops: a value, and for trainable ones a gradient sink.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{D, DType, Result, Shape, Tensor, bail};

use crate::floats::FloatsMut;
use crate::fp8::{Fp8Linear, Fp8Operands, GroupCodes};
use crate::gemm::Accumulate;
use crate::in_place::zero_;
use crate::quantized::{QuantFormat, cpu::QuantizedRows, dequantize};
use crate::storage::{self, host};
use crate::weight_matmul::WeightOperand;

/// Flat buffer that parameters or gradients are views of. Its memory may be released and allocated again.
///
/// The buffer of a ZeRO-3 parameter, for example, is released between its uses. Cloning shares the buffer.
///
/// Ops save the view for backward, not the tensor: backward reads the contents of its time.
#[derive(Clone, Debug)]
pub struct FlatBuffer {
    n: usize,
    dtype: DType,
    tensor: Arc<Mutex<Option<Tensor>>>,
    /// FP8 copies of matrices in the buffer, by their first element; dropped when the contents change.
    fp8_copies: Arc<Mutex<BTreeMap<usize, Fp8Copy>>>,
}

/// FP8 copy of a weight in a buffer.
#[derive(Clone, Debug)]
enum Fp8Copy {
    /// Operands of a linear layer.
    Linear(Fp8Operands),
    /// Codes of the matrices of a grouped linear layer.
    Groups(GroupCodes),
}

impl FlatBuffer {
    /// Creates a buffer of `n` elements without memory.
    pub fn unallocated(n: usize, dtype: DType) -> Self {
        Self { n, dtype, tensor: Arc::default(), fp8_copies: Arc::default() }
    }

    /// Creates a buffer from a flat tensor.
    pub fn from_tensor(flat: Tensor) -> Self {
        let buffer = Self::unallocated(flat.elem_count(), flat.dtype());
        *buffer.lock() = Some(flat);
        buffer
    }

    /// Returns the number of elements, allocated or not.
    #[expect(clippy::len_without_is_empty, reason = "whether there are none is nobody's question")]
    pub fn len(&self) -> usize {
        self.n
    }

    /// Sets the contents: a flat tensor of the buffer's length and dtype.
    pub fn materialize(&self, flat: Tensor) -> Result<()> {
        if flat.dims() != [self.n] || flat.dtype() != self.dtype {
            bail!(
                "flat buffer of {} {:?} elements: cannot hold {:?} {:?}",
                self.n,
                self.dtype,
                flat.dims(),
                flat.dtype()
            )
        }
        self.drop_fp8_copies();
        *self.lock() = Some(flat);
        Ok(())
    }

    /// Holds FP8 copies of matrices by their first elements, instead of contents. Linear layers in FP8 read them.
    pub fn hold_fp8_copies(&self, copies: BTreeMap<usize, Fp8Operands>) {
        self.lock().take();
        *self.lock_fp8_copies() = copies.into_iter().map(|(start, copy)| (start, Fp8Copy::Linear(copy))).collect();
    }

    /// Returns true if the buffer holds FP8 copies.
    pub fn has_fp8_copies(&self) -> bool {
        !self.lock_fp8_copies().is_empty()
    }

    /// Releases the contents and returns them, if there are any.
    pub fn release(&self) -> Option<Tensor> {
        self.drop_fp8_copies();
        self.lock().take()
    }

    /// Drops the FP8 copies of matrices. Call it after a write into the buffer's tensor.
    pub fn drop_fp8_copies(&self) {
        self.lock_fp8_copies().clear();
    }

    fn lock_fp8_copies(&self) -> std::sync::MutexGuard<'_, BTreeMap<usize, Fp8Copy>> {
        self.fp8_copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the contents. Fails while the buffer is released.
    pub fn data(&self) -> Result<Tensor> {
        match &*self.lock() {
            Some(flat) => Ok(flat.clone()),
            None => bail!("flat buffer of {} {:?} elements: used while it is released", self.n, self.dtype),
        }
    }

    /// Returns true if the buffer has contents.
    pub fn is_allocated(&self) -> bool {
        self.lock().is_some()
    }

    /// Returns a view of the elements from `start` on. The buffer need not be allocated.
    pub fn view(&self, start: usize, shape: impl Into<Shape>) -> Result<BufferView> {
        let shape = shape.into();
        if start + shape.elem_count() > self.n {
            bail!("flat buffer: a view {:?} from element {start} exceeds its {} elements", shape.dims(), self.n)
        }
        Ok(BufferView { buffer: self.clone(), start, shape })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Tensor>> {
        self.tensor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Part of a [`FlatBuffer`], with a shape.
#[derive(Clone, Debug)]
pub struct BufferView {
    buffer: FlatBuffer,
    start: usize,
    shape: Shape,
}

/// Elements of a parameter or a gradient: a tensor, or a view of a flat buffer.
#[derive(Clone, Debug)]
pub enum TensorOrView {
    /// Tensor, always allocated.
    Tensor(Tensor),
    /// View, allocated while its buffer is.
    View(BufferView),
}

impl TensorOrView {
    /// Returns the elements. Fails while the buffer is released.
    pub fn get(&self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::View(BufferView { buffer, start, shape }) => {
                buffer.data()?.narrow(0, *start, shape.elem_count())?.reshape(shape)
            }
        }
    }

    /// Returns the shape.
    pub fn dims(&self) -> &[usize] {
        match self {
            Self::Tensor(tensor) => tensor.dims(),
            Self::View(view) => view.shape.dims(),
        }
    }

    /// Returns the dtype.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Tensor(tensor) => tensor.dtype(),
            Self::View(view) => view.buffer.dtype,
        }
    }

    fn is_contiguous(&self) -> bool {
        match self {
            Self::Tensor(tensor) => tensor.is_contiguous(),
            Self::View(_) => true,
        }
    }

    /// Joins matrices whose rows are adjacent in a buffer; `None` if they are not.
    fn joined<'a>(parts: impl Iterator<Item = &'a Self>) -> Option<Self> {
        let views = parts.map(|part| if let Self::View(view) = part { Some(view) } else { None });
        let mut views = views.collect::<Option<Vec<_>>>()?.into_iter();
        let mut joined = views.next()?.clone();
        for BufferView { buffer, start, shape } in views {
            let (&[n, k], &[n_more, width]) = (joined.shape.dims(), shape.dims()) else { return None };
            let follows = Arc::ptr_eq(&buffer.tensor, &joined.buffer.tensor) && *start == joined.start + n * k;
            if !follows || width != k {
                return None;
            }
            joined.shape = (n + n_more, k).into();
        }
        Some(Self::View(joined))
    }
}

impl From<Tensor> for TensorOrView {
    fn from(tensor: Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

impl From<BufferView> for TensorOrView {
    fn from(view: BufferView) -> Self {
        Self::View(view)
    }
}

/// Main gradient of one parameter, f32 or bf16. Ops add to it in place; cloning shares it.
///
/// After [`GradSink::reset`] the first matmul of a backward overwrites the gradient (beta 0), so nothing is zeroed.
#[derive(Clone, Debug)]
pub struct GradSink {
    grad: TensorOrView,
    /// True while the elements belong to an earlier step.
    is_stale: Arc<AtomicBool>,
    /// Sinks that this one joins.
    parts: Vec<GradSink>,
}

impl GradSink {
    /// Wraps the contiguous tensor `grad`, to whose values ops will add.
    ///
    /// Sums are f32. A bf16 gradient is rounded once per use of the weight.
    pub fn new(grad: impl Into<TensorOrView>) -> Result<Self> {
        let grad = grad.into();
        if !matches!(grad.dtype(), DType::F32 | DType::BF16) || !grad.is_contiguous() {
            bail!(
                "gradient sink: want a contiguous f32 or bf16 view, got {:?} with shape {:?}{}",
                grad.dtype(),
                grad.dims(),
                if grad.is_contiguous() { "" } else { ", strided" }
            )
        }
        Ok(Self { grad, is_stale: Arc::default(), parts: Vec::new() })
    }

    /// Discards the gradient: the next op overwrites it. The elements are not touched.
    pub fn reset(&self) {
        self.is_stale.store(true, Ordering::Relaxed);
    }

    /// Returns the gradient summed since [`GradSink::reset`]; zeros if nothing was added. Fails while its buffer is
    /// released.
    pub fn grad(&self) -> Result<Tensor> {
        let (grad, accumulate) = self.grad_to_write()?;
        if accumulate == Accumulate::Overwrite {
            zero_(&grad)?;
        }
        Ok(grad)
    }

    /// Returns the gradient, and `Accumulate::Overwrite` if it is stale: the caller must then write all elements.
    pub(crate) fn grad_to_write(&self) -> Result<(Tensor, Accumulate)> {
        let grad = self.grad.get()?;
        let is_stale = |sink: &Self| sink.is_stale.load(Ordering::Relaxed);
        if self.parts.is_empty() {
            let is_stale = self.is_stale.swap(false, Ordering::Relaxed);
            return Ok((grad, if is_stale { Accumulate::Overwrite } else { Accumulate::Add }));
        }
        if self.parts.iter().all(is_stale) {
            self.parts.iter().for_each(|part| part.is_stale.store(false, Ordering::Relaxed));
            return Ok((grad, Accumulate::Overwrite));
        }
        // Ops have added to some of the joined sinks individually.
        self.parts.iter().try_for_each(|part| part.grad().map(drop))?;
        Ok((grad, Accumulate::Add))
    }

    /// Joins sinks with adjacent gradients; `None` if they are not adjacent.
    fn joined(parts: Vec<Self>) -> Option<Self> {
        let grad = TensorOrView::joined(parts.iter().map(|part| &part.grad))?;
        Some(Self { grad, is_stale: Arc::default(), parts })
    }

    /// Calls `add` with the gradient's elements in f32, which it must only add to.
    pub(crate) fn add(&self, op: &'static str, add: impl FnOnce(&mut [f32])) -> Result<()> {
        self.add_floats(op, |grad| grad.change_in_f32(Accumulate::Add, add))
    }

    /// Calls `add` with the gradient's elements in their own dtype, which it must only add to.
    pub(crate) fn add_floats(&self, op: &'static str, add: impl FnOnce(FloatsMut<'_>)) -> Result<()> {
        storage::update(&self.grad()?, op, |grad| {
            add(grad);
            Ok(())
        })
    }

    /// Calls `write` with the gradient's elements in their own dtype, which it adds to or overwrites.
    pub(crate) fn add_or_write(&self, op: &'static str, write: impl FnOnce(FloatsMut<'_>, Accumulate)) -> Result<()> {
        let (grad, accumulate) = self.grad_to_write()?;
        storage::update(&grad, op, |grad| {
            write(grad, accumulate);
            Ok(())
        })
    }
}

/// A parameter: its value, often a view of a flat buffer, and the sink of its gradient.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Elements in the compute dtype, or the bytes of a quantized matrix.
    value: TensorOrView,
    /// Format and shape of a quantized matrix.
    quantized: Option<(&'static QuantFormat, [usize; 2])>,
    sink: Option<GradSink>,
    /// Row counts of the weights that this one joins; empty if it joins none.
    part_rows: Vec<usize>,
    /// FP8 settings and state of the linear layer that has this weight.
    fp8: Option<Fp8Linear>,
}

/// Most bytes of a joined matmul's output on the CPU.
///
/// Larger ones are no faster than separate matmuls, and allocators reuse their memory less. Training on 4096 tokens of
/// a layer of width 512 took 13 % more memory.
const JOINED_BYTES: usize = 8 << 20;

impl Weight {
    /// Creates a frozen parameter, which gets no gradient.
    pub fn frozen(value: impl Into<TensorOrView>) -> Self {
        Self { value: value.into(), quantized: None, sink: None, part_rows: Vec::new(), fp8: None }
    }

    /// Creates a frozen parameter from the bytes of a quantized matrix [n, k].
    pub fn quantized(bytes: impl Into<TensorOrView>, format: &'static QuantFormat, shape: [usize; 2]) -> Result<Self> {
        let (value, n_bytes) = (bytes.into(), format.shape(&shape)?.weight_bytes());
        if value.dtype() != DType::U8 || value.dims() != [n_bytes] {
            let got = (value.dtype(), value.dims());
            bail!("a {} matrix {shape:?} has {n_bytes} bytes, got {got:?}", format.name)
        }
        Ok(Self { quantized: Some((format, shape)), ..Self::frozen(value) })
    }

    /// Creates a trainable parameter; each use adds its gradient to `sink`.
    pub fn trainable(value: impl Into<TensorOrView>, sink: GradSink) -> Self {
        Self { sink: Some(sink), ..Self::frozen(value) }
    }

    /// Makes the weight's linear layer multiply in FP8 while that is enabled.
    pub fn with_fp8(self, layer: Fp8Linear) -> Self {
        Self { fp8: Some(layer), ..self }
    }

    /// Joins matrices [n_i, k] into one of all their rows, without a copy, for one matmul with `x` [.., k].
    ///
    /// Returns `None` if values or gradients are not adjacent, or if a weight is quantized or multiplies in FP8. On the CPU it also returns
    /// `None` if the output exceeds [`JOINED_BYTES`], where one matmul is not faster.
    pub fn joined(parts: &[&Self], x: &Tensor) -> Option<Self> {
        if parts.iter().any(|part| part.quantized.is_some() || part.fp8().is_some()) {
            return None;
        }
        let n_rows = x.elem_count() / x.dim(D::Minus1).ok()?.max(1);
        let n_bytes = n_rows * parts.iter().map(|part| part.dims()[0]).sum::<usize>() * x.dtype().size_in_bytes();
        if x.device().is_cpu() && n_bytes > JOINED_BYTES {
            return None;
        }
        let value = TensorOrView::joined(parts.iter().map(|part| &part.value))?;
        let sinks: Vec<GradSink> = parts.iter().filter_map(|part| part.sink.clone()).collect();
        let sink = match sinks.len() {
            0 => None,
            n if n == parts.len() => Some(GradSink::joined(sinks)?),
            _ => return None,
        };
        Some(Self { sink, part_rows: parts.iter().map(|part| part.dims()[0]).collect(), ..Self::frozen(value) })
    }

    /// Returns the row counts of the joined matrices; one number if nothing is joined.
    pub(crate) fn part_rows(&self) -> Vec<usize> {
        if self.part_rows.is_empty() { vec![self.dims()[0]] } else { self.part_rows.clone() }
    }

    /// Returns the elements of a dense weight. Fails for a quantized weight, and while the buffer is released.
    pub fn value(&self) -> Result<Tensor> {
        match self.quantized {
            Some((format, _)) => bail!("only linear layers read {} weights; this op needs a dense one", format.name),
            None => self.value.get(),
        }
    }

    /// Returns the FP8 layer of the weight while FP8 is enabled.
    pub(crate) fn fp8(&self) -> Option<&Fp8Linear> {
        self.fp8.as_ref().filter(|layer| layer.is_enabled())
    }

    /// Returns the weight in FP8: what `complete` makes of the copy in its buffer, or `quantize` of the value. The result is
    /// then the copy.
    ///
    /// A weight that is no view of a buffer is quantized at each use.
    pub(crate) fn fp8_copy(
        &self,
        complete: impl FnOnce(&Fp8Operands) -> Result<Option<Fp8Operands>>,
        quantize: impl FnOnce(StoredWeight) -> Result<Fp8Operands>,
    ) -> Result<Fp8Operands> {
        let copy_of = || quantize(self.stored()?);
        let TensorOrView::View(BufferView { buffer, start, .. }) = &self.value else { return copy_of() };
        let known = match buffer.lock_fp8_copies().get(start) {
            Some(Fp8Copy::Linear(copy)) => Some(copy.clone()),
            _ => None,
        };
        let copy = match known.as_ref().map(complete).transpose()?.flatten() {
            Some(copy) => copy,
            None => copy_of()?,
        };
        buffer.lock_fp8_copies().insert(*start, Fp8Copy::Linear(copy.clone()));
        Ok(copy)
    }

    /// Returns the FP8 codes of a grouped layer's matrices: the copy in its buffer, or what `quantize` makes of the value, which
    /// is then the copy.
    ///
    /// A weight that is no view of a buffer is quantized at each use.
    pub(crate) fn fp8_groups(&self, quantize: impl FnOnce(StoredWeight) -> Result<GroupCodes>) -> Result<GroupCodes> {
        let TensorOrView::View(BufferView { buffer, start, .. }) = &self.value else { return quantize(self.stored()?) };
        if let Some(Fp8Copy::Groups(copy)) = buffer.lock_fp8_copies().get(start) {
            return Ok(copy.clone());
        }
        let copy = quantize(self.stored()?)?;
        buffer.lock_fp8_copies().insert(*start, Fp8Copy::Groups(copy.clone()));
        Ok(copy)
    }

    /// Returns the elements as linear layers read them. Fails while the buffer is released.
    pub(crate) fn stored(&self) -> Result<StoredWeight> {
        let value = self.value.get()?;
        match self.quantized {
            Some((format, shape)) => Ok(StoredWeight::Quantized { bytes: value, format, shape }),
            None => Ok(StoredWeight::Dense(value)),
        }
    }

    /// Returns the shape.
    pub fn dims(&self) -> &[usize] {
        match &self.quantized {
            Some((_, shape)) => shape,
            None => self.value.dims(),
        }
    }

    /// Returns the dtype of the elements: u8 for quantized ones.
    pub fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// Returns true if the elements are floats.
    pub(crate) fn is_dense(&self) -> bool {
        self.quantized.is_none()
    }

    /// Returns the gradient sink; `None` for a frozen weight.
    pub fn sink(&self) -> Option<&GradSink> {
        self.sink.as_ref()
    }

    /// Fails if the weight's shape is not what `op` needs, or differs from the sink's.
    pub(crate) fn check(&self, op: &str, want: &[usize]) -> Result<()> {
        if self.dims() != want {
            bail!("{op}: weight has shape {:?}, want {want:?}", self.dims())
        }
        if !self.value.is_contiguous() {
            bail!("{op}: the weight must be contiguous; its shape is {:?}, strided", self.dims())
        }
        match &self.sink {
            Some(sink) if sink.grad.dims().iter().product::<usize>() != want.iter().product::<usize>() => {
                bail!("{op}: weight has shape {want:?}, its gradient sink {:?}", sink.grad.dims())
            }
            _ => Ok(()),
        }
    }
}

/// A weight's elements on their device.
pub(crate) enum StoredWeight {
    Dense(Tensor),
    Quantized { bytes: Tensor, format: &'static QuantFormat, shape: [usize; 2] },
}

impl StoredWeight {
    /// Calls `read` with the elements as an operand of a CPU kernel.
    pub(crate) fn with_operand<R>(&self, op: &str, read: impl FnOnce(WeightOperand<'_>) -> R) -> Result<R> {
        match self {
            Self::Dense(value) => Ok(read(host(op, value)?.floats()?.into())),
            Self::Quantized { bytes, format, shape } => {
                let bytes = host(op, bytes)?;
                let rows = QuantizedRows::new(bytes.slice()?, format, format.shape(shape)?);
                Ok(read(WeightOperand::Quantized(rows)))
            }
        }
    }

    /// Returns the elements as floats; quantized ones are dequantized to `dtype`.
    pub(crate) fn dense(self, dtype: DType) -> Result<Tensor> {
        match self {
            Self::Dense(value) => Ok(value),
            Self::Quantized { bytes, format, shape } => dequantize(&bytes, format, &shape, dtype),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Tape;
    use crate::{OutputDtype, linear};
    use candle_core::Device;

    fn flat(values: &[f32]) -> Tensor {
        Tensor::new(values, &Device::Cpu).unwrap()
    }

    /// Backward reads a weight, and writes its gradient, in buffers that were released after the forward.
    #[test]
    fn backward_reads_weights_that_were_freed_and_gathered_again() {
        let (weights, grads) = (FlatBuffer::unallocated(7, DType::F32), FlatBuffer::unallocated(7, DType::F32));
        let sink = GradSink::new(grads.view(1, (2, 3)).unwrap()).unwrap();
        let w = Weight::trainable(weights.view(1, (2, 3)).unwrap(), sink);
        let x = flat(&[1.0, 2.0, 3.0]).reshape((1, 3)).unwrap();
        let forward = || linear(&x, &w, None, OutputDtype::SameAsInput);
        let error = forward().unwrap_err().to_string();
        assert!(error.contains("flat buffer of 7 F32 elements: used while it is released"), "{error}");

        let values = flat(&[9.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0]);
        weights.materialize(values.clone()).unwrap();
        let tape = Tape::record(&[&x], forward).unwrap();
        assert_eq!(tape.output().to_vec2::<f32>().unwrap(), [[1.0, 5.0]]);
        assert!(weights.release().is_some() && !weights.is_allocated());

        weights.materialize((values * 2.0).unwrap()).unwrap();
        grads.materialize(flat(&[0.5; 7])).unwrap();
        let dx = tape.backward(&flat(&[1.0, 10.0]).reshape((1, 2)).unwrap()).unwrap().remove(&x).unwrap();
        assert_eq!(dx.to_vec2::<f32>().unwrap(), [[2.0, 20.0, 20.0]]);
        assert_eq!(grads.data().unwrap().to_vec1::<f32>().unwrap(), [0.5, 1.5, 2.5, 3.5, 10.5, 20.5, 30.5]);
    }

    fn matrix(buffers: [&FlatBuffer; 2], start: usize, shape: (usize, usize)) -> Weight {
        let [values, grads] = buffers.map(|buffer| buffer.view(start, shape).unwrap());
        Weight::trainable(values, GradSink::new(grads).unwrap())
    }

    #[test]
    fn adjacent_weights_are_joined() {
        let buffers = [&FlatBuffer::from_tensor(flat(&[7.0; 12])), &FlatBuffer::from_tensor(flat(&[f32::NAN; 12]))];
        let (a, b, gap) = (matrix(buffers, 0, (2, 2)), matrix(buffers, 4, (1, 2)), matrix(buffers, 7, (1, 2)));
        let others = [&FlatBuffer::from_tensor(flat(&[7.0; 12])), buffers[1]];
        let frozen = Weight::frozen(buffers[0].view(4, (1, 2)).unwrap());
        let x = flat(&[1.0, 2.0]).reshape((1, 2)).unwrap();
        for apart in [&gap, &b, &matrix(others, 4, (1, 2)), &matrix(buffers, 4, (2, 1)), &frozen] {
            assert_eq!(Weight::joined(&[&a, apart], &x).is_some(), std::ptr::eq(apart, &b), "{apart:?}");
        }
    }

    #[test]
    fn weights_of_a_large_output_are_not_joined_on_the_cpu() {
        let buffers = [&FlatBuffer::from_tensor(flat(&[7.0; 6])), &FlatBuffer::from_tensor(flat(&[f32::NAN; 6]))];
        let (a, b) = (matrix(buffers, 0, (2, 2)), matrix(buffers, 4, (1, 2)));
        let most = JOINED_BYTES / 4 / 3;
        for (n_rows, want) in [(most, true), (most + 1, false)] {
            let x = Tensor::zeros((n_rows, 2), DType::F32, &candle_core::Device::Cpu).unwrap();
            assert_eq!(Weight::joined(&[&a, &b], &x).is_some(), want, "{n_rows}");
        }
    }

    /// Keeps what was added to one of the parts individually.
    #[test]
    fn a_joined_gradient_is_that_of_its_parts() {
        for added_alone in [false, true] {
            let buffers = [&FlatBuffer::from_tensor(flat(&[7.0; 6])), &FlatBuffer::from_tensor(flat(&[f32::NAN; 6]))];
            let parts = [matrix(buffers, 0, (2, 2)), matrix(buffers, 4, (1, 2))];
            parts.iter().for_each(|part| part.sink().unwrap().reset());
            if added_alone {
                parts[1].sink().unwrap().add("test", |grad| grad.fill(5.0)).unwrap();
            }
            let x = flat(&[1.0, 2.0]).reshape((1, 2)).unwrap();
            let joined = Weight::joined(&[&parts[0], &parts[1]], &x).unwrap();
            let tape = Tape::record(&[], || linear(&x, &joined, None, OutputDtype::SameAsInput)).unwrap();
            tape.backward(&flat(&[1.0, 10.0, 100.0]).reshape((1, 3)).unwrap()).unwrap();
            let old = if added_alone { 5.0 } else { 0.0 };
            let want = [1.0, 2.0, 10.0, 20.0, old + 100.0, old + 200.0];
            assert_eq!(buffers[1].data().unwrap().to_vec1::<f32>().unwrap(), want);
            assert_eq!(parts[1].sink().unwrap().grad().unwrap().to_vec2::<f32>().unwrap(), [want[4..].to_vec()]);
        }
    }

    #[test]
    fn a_buffer_refuses_a_tensor_of_another_size_or_dtype() {
        let buffer = FlatBuffer::unallocated(3, DType::F32);
        assert!(buffer.materialize(flat(&[0.0; 4])).is_err());
        assert!(buffer.materialize(flat(&[0.0; 3]).to_dtype(DType::BF16).unwrap()).is_err());
        assert!(buffer.view(2, 2).is_err());
        assert!(buffer.materialize(flat(&[0.0; 3])).is_ok());
    }
}
