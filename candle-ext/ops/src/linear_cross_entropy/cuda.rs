//! `linear_cross_entropy` on CUDA: cuBLASLt computes a chunk's logits, `kernel.cu` their losses and gradients.

use candle_core::{DType, Result, Tensor};

use super::args::{LabelSmoothing, Reduction, Sizes, Target, TokenScores};
use super::chunk::rows_per_chunk;
use super::vocab_shard::VocabShard;
use crate::cost::DeviceKind;
use crate::cuda::gemm::{Gemm, Matrix};
use crate::cuda::{Arg, DeviceAddress, Gpu, Out, address, gpu, kernels, same_dtype, suffix};
use crate::gemm::Accumulate;
use crate::gemm_output::with_output;
use crate::transfer::{to_host, upload};

kernels!("linear_cross_entropy");

const OP: &str = "linear_cross_entropy";
/// Threads of a block that reads a row of logits.
const THREADS: usize = 1024;
/// Threads of a block that copies a row or sums the losses.
const COPIERS: usize = 256;

/// Hidden states and LM head weight.
pub(super) struct CudaLmHead<'a> {
    x: &'a Tensor,
    w: &'a Tensor,
    sizes: Sizes,
    gpu: Gpu<'a>,
    targets: &'a [Target],
    /// Rows of the targets and their classes, u32 on the device.
    rows: Tensor,
    classes: Tensor,
    tokens_per_chunk: usize,
    smoothing: LabelSmoothing,
    shard: Option<&'a VocabShard<'a>>,
}

/// Inputs of the backward: d(objective) / d(loss) of each target, and the sink of w's gradient.
pub(super) struct Gradients<'a> {
    pub(super) weights: &'a [f32],
    /// Factor on the weights, an f32 scalar on the device.
    pub(super) factor: Option<&'a Tensor>,
    pub(super) dw: Option<&'a (Tensor, Accumulate)>,
}

/// Chunk of the targets: start and length.
#[derive(Clone, Copy)]
struct Chunk {
    start: usize,
    len: usize,
}

impl<'a> CudaLmHead<'a> {
    pub(super) fn new(
        x: &'a Tensor,
        w: &'a Tensor,
        targets: &'a [Target],
        sizes: Sizes,
        chunk: usize,
        shard: Option<&'a VocabShard<'a>>,
    ) -> Result<Self> {
        same_dtype(OP, x, w)?;
        let upload = |of: fn(&Target) -> usize| {
            let mut numbers: Vec<u32> = targets.iter().map(|target| of(target) as u32).collect();
            // CUDA cannot allocate zero bytes; allocate one element instead.
            numbers.resize(targets.len().max(1), 0);
            upload(&numbers, numbers.len(), x.device())
        };
        let (rows, classes) = (upload(|target| target.row)?, upload(|target| target.class)?);
        let v = shard.map_or(sizes.v, |shard| shard.max_shard_rows);
        let tokens_per_chunk = rows_per_chunk(DeviceKind::Gpu, targets.len(), v, chunk);
        let smoothing = LabelSmoothing::OFF;
        Ok(Self { x, w, sizes, gpu: gpu(OP, x)?, targets, rows, classes, tokens_per_chunk, smoothing, shard })
    }

    /// Sets the label smoothing; the default is none.
    pub(super) fn with_smoothing(self, smoothing: LabelSmoothing) -> Self {
        Self { smoothing, ..self }
    }

    /// Returns the loss of each target, f32 [n], and dx if `gradients` are given.
    pub(super) fn run(&self, gradients: Option<&Gradients>) -> Result<(Tensor, Option<Tensor>)> {
        if let Some(shard) = self.shard {
            return self.run_shard(shard, gradients);
        }
        let (n, dtype) = (self.targets.len(), self.x.dtype());
        let losses = Out::new(self.gpu, DType::F32, n)?;
        let Some(Gradients { weights, factor, dw }) = gradients else {
            for chunk in self.chunks() {
                let x = self.gather(chunk)?;
                let logits = self.logits(&x, chunk)?;
                let args = [
                    Arg::Address(logits.address),
                    Arg::Address(self.class_of(chunk)?),
                    Arg::Address(losses.address + 4 * chunk.start as DeviceAddress),
                    Arg::I32(self.sizes.v as i32),
                    Arg::I32(self.stride() as i32),
                    Arg::F32(self.smoothing.factor),
                ];
                // SAFETY: there are chunk.len rows of logits, and as many classes and losses from its start on.
                unsafe { KERNELS.launch(self.gpu, "losses", [chunk.len, 1, 1], THREADS, &args)? };
            }
            return Ok((losses.into_tensor(n), None));
        };
        let weights = self.weights(weights, *factor)?;
        let dx = Tensor::zeros(self.x.shape(), dtype, self.x.device())?;
        for chunk in self.chunks() {
            let x = self.gather(chunk)?;
            let logits = self.logits(&x, chunk)?;
            let d_logits = self.room_for_gradients(chunk)?;
            let d_logits = d_logits.as_ref().unwrap_or(&logits);
            let start = 4 * chunk.start as DeviceAddress;
            let args = [
                Arg::Address(logits.address),
                Arg::Address(self.class_of(chunk)?),
                Arg::Address(address(OP, &weights)? + start),
                Arg::Address(losses.address + start),
                Arg::Address(d_logits.address),
                Arg::I32(self.sizes.v as i32),
                Arg::I32(self.stride() as i32),
                Arg::F32(self.smoothing.factor),
                Arg::F32(self.smoothing.per_class()),
            ];
            let name = format!("gradients_{}", suffix(OP, dtype)?);
            // SAFETY: as above, and there are as many weights and rows of gradients.
            unsafe { KERNELS.launch(self.gpu, &name, [chunk.len, 1, 1], THREADS, &args)? };
            self.scatter_dx(d_logits, chunk, &dx)?;
            if let Some(dw) = dw {
                self.grad_w(d_logits, &x, chunk, dw)?;
            }
        }
        Ok((losses.into_tensor(n), Some(dx)))
    }

    /// Computes [`CudaLmHead::run`] for a vocabulary shard: merges the shards' softmax statistics chunk by chunk.
    fn run_shard(&self, shard: &VocabShard, gradients: Option<&Gradients>) -> Result<(Tensor, Option<Tensor>)> {
        let (n, v, dtype) = (self.targets.len(), self.sizes.v as i32, self.x.dtype());
        let (stride, n_statistics) = (self.stride() as i32, VocabShard::n_statistics(self.smoothing));
        let with_dx = gradients.map(|gradients| {
            let weights = self.weights(gradients.weights, gradients.factor)?;
            Ok::<_, candle_core::Error>((weights, Tensor::zeros(self.x.shape(), dtype, self.x.device())?, gradients.dw))
        });
        let with_dx = with_dx.transpose()?;
        let mut losses = Vec::new();
        for chunk in self.chunks() {
            let x = self.gather(chunk)?;
            let logits = self.logits(&x, chunk)?;
            let known = Out::new(self.gpu, DType::F32, n_statistics * chunk.len)?;
            let args = [
                Arg::Address(logits.address),
                Arg::Address(self.class_of(chunk)?),
                Arg::Address(known.address),
                Arg::I32(chunk.len as i32),
                Arg::I32(v),
                Arg::I32(stride),
                Arg::I32(n_statistics as i32),
            ];
            // SAFETY: there are chunk.len rows of logits and as many classes; the output has n_statistics numbers per row.
            unsafe { KERNELS.launch(self.gpu, "known", [chunk.len, 1, 1], THREADS, &args)? };
            let merged = shard.merge(&known.into_tensor((n_statistics, chunk.len)), self.smoothing)?;
            losses.push(merged.loss.clone());
            let Some((weights, dx, dw)) = &with_dx else { continue };
            let (max, sum) = (merged.max.contiguous()?, merged.sum.contiguous()?);
            let d_logits = self.room_for_gradients(chunk)?;
            let d_logits = d_logits.as_ref().unwrap_or(&logits);
            let args = [
                Arg::Address(logits.address),
                Arg::Address(self.class_of(chunk)?),
                Arg::Address(address(OP, weights)? + 4 * chunk.start as DeviceAddress),
                Arg::Address(address(OP, &max)?),
                Arg::Address(address(OP, &sum)?),
                Arg::Address(d_logits.address),
                Arg::I32(v),
                Arg::I32(stride),
                Arg::F32(self.smoothing.factor),
                Arg::F32(self.smoothing.per_class()),
            ];
            let name = format!("part_gradients_{}", suffix(OP, dtype)?);
            // SAFETY: as above, and there are as many weights, largest logits, sums and rows of gradients.
            unsafe { KERNELS.launch(self.gpu, &name, [chunk.len, 1, 1], THREADS, &args)? };
            self.scatter_dx(d_logits, chunk, dx)?;
            if let Some(dw) = dw {
                self.grad_w(d_logits, &x, chunk, dw)?;
            }
        }
        let losses = match losses.is_empty() {
            true => Out::new(self.gpu, DType::F32, n)?.into_tensor(n),
            false => Tensor::cat(&losses, 0)?,
        };
        Ok((losses, with_dx.map(|(_, dx, _)| dx)))
    }

    /// Returns the targets' weights on the device, multiplied by `factor`.
    fn weights(&self, weights: &[f32], factor: Option<&Tensor>) -> Result<Tensor> {
        let weights = if weights.is_empty() { &[0.0] } else { weights };
        let weights = upload(weights, weights.len(), self.x.device())?;
        factor.map_or(Ok(weights.clone()), |factor| weights.broadcast_mul(factor))
    }

    /// Allocates the gradient of a chunk's logits; `None` in f32, where it overwrites the logits.
    fn room_for_gradients(&self, chunk: Chunk) -> Result<Option<Out>> {
        match self.x.dtype() {
            DType::F32 => Ok(None),
            dtype => Ok(Some(Out::new(self.gpu, dtype, chunk.len * self.stride())?)),
        }
    }

    /// Returns the log-probability of each target, and whether greedy decoding would choose it.
    pub(super) fn scores(&self) -> Result<TokenScores> {
        let n = self.targets.len();
        let (losses, is_greedy) = (Out::new(self.gpu, DType::F32, n)?, Out::new(self.gpu, DType::F32, n)?);
        for chunk in self.chunks() {
            let x = self.gather(chunk)?;
            let logits = self.logits(&x, chunk)?;
            let start = 4 * chunk.start as DeviceAddress;
            let args = [
                Arg::Address(logits.address),
                Arg::Address(self.class_of(chunk)?),
                Arg::Address(losses.address + start),
                Arg::Address(is_greedy.address + start),
                Arg::I32(self.sizes.v as i32),
                Arg::I32(self.stride() as i32),
            ];
            // SAFETY: there are chunk.len rows of logits, and as many classes, losses and marks from its start on.
            unsafe { KERNELS.launch(self.gpu, "scores", [chunk.len, 1, 1], THREADS, &args)? };
        }
        let [losses, is_greedy] = [losses, is_greedy].map(|x| to_host(&x.into_tensor(n))?.to_vec1::<f32>());
        let (losses, is_greedy) = (losses?, is_greedy?);
        Ok(losses.into_iter().zip(is_greedy).map(|(loss, is_greedy)| (-loss, is_greedy != 0.0)).collect())
    }

    /// Reduces the losses of the targets, on the device.
    pub(super) fn reduce(&self, losses: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let n = self.targets.len();
        if reduction == Reduction::None {
            let rows = Tensor::zeros(self.sizes.t, DType::F32, self.x.device())?;
            self.copy_rows(
                "scatter",
                [address(OP, losses)?, address(OP, &self.rows)?, address(OP, &rows)?],
                n,
                1,
                DType::F32,
            )?;
            return Ok(rows);
        }
        let scale = if reduction == Reduction::Mean { 1.0 / n.max(1) as f32 } else { 1.0 };
        let total = Out::new(self.gpu, DType::F32, 1)?;
        let args =
            [Arg::Address(address(OP, losses)?), Arg::Address(total.address), Arg::I32(n as i32), Arg::F32(scale)];
        // SAFETY: there are n losses; the output has one element.
        unsafe { KERNELS.launch(self.gpu, "total", [1, 1, 1], COPIERS, &args)? };
        Ok(total.into_tensor(()))
    }

    /// Returns the row stride of logits: a multiple of the vector width, so that each row allows vector loads.
    fn stride(&self) -> usize {
        const PACK: usize = 8;
        const LINE: usize = 64;
        let v = self.sizes.v;
        if v.is_multiple_of(PACK) { v } else { v.next_multiple_of(LINE) }
    }

    fn chunks(&self) -> impl Iterator<Item = Chunk> + use<> {
        let (n, at_once) = (self.targets.len(), self.tokens_per_chunk);
        (0..n).step_by(at_once).map(move |start| Chunk { start, len: at_once.min(n - start) })
    }

    fn class_of(&self, chunk: Chunk) -> Result<DeviceAddress> {
        Ok(address(OP, &self.classes)? + 4 * chunk.start as DeviceAddress)
    }

    fn row_of(&self, chunk: Chunk) -> Result<DeviceAddress> {
        Ok(address(OP, &self.rows)? + 4 * chunk.start as DeviceAddress)
    }

    /// Gathers the chunk's rows of x.
    fn gather(&self, chunk: Chunk) -> Result<Out> {
        let d = self.sizes.d;
        let x = Out::new(self.gpu, self.x.dtype(), chunk.len * d)?;
        let addresses = [address(OP, self.x)?, self.row_of(chunk)?, x.address];
        self.copy_rows("gather", addresses, chunk.len, d, self.x.dtype())?;
        Ok(x)
    }

    fn copy_rows(
        &self,
        how: &str,
        [from, rows, to]: [DeviceAddress; 3],
        n: usize,
        d: usize,
        dtype: DType,
    ) -> Result<()> {
        let args = [Arg::Address(from), Arg::Address(rows), Arg::Address(to), Arg::I32(d as i32)];
        let name = format!("{how}_{}", suffix(OP, dtype)?);
        // SAFETY: the callers pass n rows of d elements, and n valid row indices.
        unsafe { KERNELS.launch(self.gpu, &name, [n, 1, 1], COPIERS, &args) }
    }

    fn logits(&self, x: &Out, chunk: Chunk) -> Result<Out> {
        let logits = Out::new(self.gpu, DType::F32, chunk.len * self.stride())?;
        let gemm = Gemm {
            a: Matrix::plain(x.address),
            b: Matrix::transposed(address(OP, self.w)?),
            c: logits.address,
            c_stride: Some(self.stride()),
            c_dtype: DType::F32,
            ..Gemm::new([chunk.len, self.sizes.v, self.sizes.d], self.x.dtype())
        };
        // SAFETY: x is [len, d], w [v, d], the logits a new [len, v].
        unsafe { gemm.run(self.gpu)? };
        Ok(logits)
    }

    fn scatter_dx(&self, d_logits: &Out, chunk: Chunk, dx: &Tensor) -> Result<()> {
        let Sizes { v, d, .. } = self.sizes;
        let dx_chunk = Out::new(self.gpu, self.x.dtype(), chunk.len * d)?;
        let gemm = Gemm {
            a: Matrix::plain(d_logits.address).with_row_stride(self.stride()),
            b: Matrix::plain(address(OP, self.w)?),
            c: dx_chunk.address,
            ..Gemm::new([chunk.len, d, v], self.x.dtype())
        };
        // SAFETY: d_logits is [len, v], w [v, d], dx_chunk a new [len, d].
        unsafe { gemm.run(self.gpu)? };
        let addresses = [dx_chunk.address, self.row_of(chunk)?, address(OP, dx)?];
        self.copy_rows("scatter", addresses, chunk.len, d, self.x.dtype())
    }

    /// Computes dw = [dw +] d_logits^T x. The first chunk overwrites a stale gradient.
    fn grad_w(&self, d_logits: &Out, x: &Out, chunk: Chunk, (dw, accumulate): &(Tensor, Accumulate)) -> Result<()> {
        let adds = *accumulate == Accumulate::Add || chunk.start > 0;
        with_output(self.x.dtype(), dw, |dw| {
            let gemm = Gemm {
                a: Matrix::transposed(d_logits.address).with_row_stride(self.stride()),
                b: Matrix::plain(x.address),
                c: address(OP, dw)?,
                c_dtype: dw.dtype(),
                plus: adds.then(|| address(OP, dw)).transpose()?,
                ..Gemm::new([self.sizes.v, self.sizes.d, chunk.len], self.x.dtype())
            };
            // SAFETY: d_logits is [len, v], x [len, d], dw a gradient [v, d].
            unsafe { gemm.run(self.gpu) }
        })
    }
}
