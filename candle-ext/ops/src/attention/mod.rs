//! Attention: `softmax(scale q k^T + mask) v` over packed sequences, with memory linear in their length.
//!
//! t queries, s keys (of all sequences), hq query heads, hkv KV heads, k head dim. Query head i reads KV head i / (hq /
//! hkv).

mod backward;
mod choice;
mod chunk;
mod cost;
mod cu_seqlens;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
#[cfg(feature = "cudnn")]
mod cudnn;
#[cfg(any(feature = "cudnn", test))]
mod cudnn_faults;
#[cfg(feature = "flash-attn")]
mod flash;
mod forward;
#[cfg(any(feature = "cudnn", test))]
mod graphs;
mod layout;
mod merge;
#[cfg(any(feature = "cudnn", test))]
mod ragged;
mod reference;
mod spec;
mod tile;

use candle_core::{DType, Result, Storage, Tensor};

use crate::device::on_device;
use crate::floats::FloatBuf;
use crate::recording::{record, requires_grad, save};
use crate::replay::{compute_or_replay, saves_activations};
use crate::saved::{ReplayedOutput, Saved};
use crate::span::span;
use crate::storage::{self, host};
use choice::{AttentionKernel, choose};
pub use chunk::{ChunkInputs, PartialSoftmax, attention_chunk, attention_chunk_backward};
pub use cost::AttentionCost;
pub use cu_seqlens::{AttentionChunk, CuSeqlens};
use layout::{HeadCounts, by_row};
pub use spec::{AttentionChoice, AttentionHeads, AttentionImpl, AttentionPasses, AttentionSpec, ModelAttention};

/// Computes attention within each sequence: q [t, hq, k], k and v [s, hkv, k], result [t, hq, k].
///
/// The algorithm is FlashAttention's, in f32: tiles of keys with an online softmax. The forward saves each row's
/// log-sum-exp; the backward recomputes the scores tile by tile.
///
/// Both passes can be [replayed](compute_or_replay), except in the reference implementation.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, seqs: &CuSeqlens, spec: &AttentionSpec) -> Result<Tensor> {
    let _span = span("attention", "forward");
    let heads = HeadCounts::of([q, k, v], seqs, spec)?;
    let is_trained = [q, k, v].iter().any(|x| requires_grad(x)) || saves_activations();
    let passes = if is_trained { AttentionPasses::Both } else { AttentionPasses::Forward };
    let (kernel, _) = choose(q, seqs, spec, heads, passes)?;
    match kernel {
        AttentionKernel::Reference => return reference::attention([q, k, v], seqs, spec, heads),
        #[cfg(feature = "flash-attn")]
        AttentionKernel::Flash => return flash::attention([q, k, v], seqs, spec),
        _ => {}
    }
    let [q_saved, k_saved, v_saved] = [q, k, v].map(Tensor::contiguous);
    let saved = SavedAttention { qkv: [q_saved?, k_saved?, v_saved?], seqs: seqs.clone(), spec: *spec, heads };
    let (y, state) = compute_or_replay("attention", ReplayedOutput::Activation, || {
        let (out, state) = saved.forward(kernel)?;
        Ok((storage::tensor(out, q.shape()), state))
    })?;
    let (output, kept) = (y.clone(), saved.qkv.each_ref().map(save));
    let SavedAttention { seqs, spec, heads, .. } = saved;
    Ok(record("attention", [q.into(), k.into(), v.into()], y, move |d_o, _| {
        let [q, k, v] = kept.each_ref().map(Saved::get);
        let saved = SavedAttention { qkv: [q?, k?, v?], seqs, spec, heads };
        Ok(saved.backward(&output, d_o, &state)?.map(Some))
    }))
}

/// Inputs that backward needs.
struct SavedAttention {
    qkv: [Tensor; 3],
    seqs: CuSeqlens,
    spec: AttentionSpec,
    heads: HeadCounts,
}

/// Statistics of a forward that backward needs, by implementation.
enum ForwardState {
    /// Log-sum-exp of each row.
    Cpu(Vec<f32>),
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    Cuda(cuda::FusedForwardState),
    #[cfg(feature = "cudnn")]
    Cudnn(cudnn::CudnnForwardState),
}

impl SavedAttention {
    fn forward(&self, kernel: AttentionKernel) -> Result<(Storage, ForwardState)> {
        match kernel {
            #[cfg(feature = "cudnn")]
            AttentionKernel::Cudnn(plan) if choice::takes_addresses(self.spec.choice, &self.addresses()?) => {
                choice::or_fused(
                    self.spec.choice,
                    || {
                        let computed = cudnn::forward(plan, self.qkv.each_ref(), &self.seqs, self.heads)?;
                        Ok(computed.map(|(out, state)| (out.into_storage(), ForwardState::Cudnn(state))))
                    },
                    || self.forward_fused(),
                )
            }
            _ => self.forward_fused(),
        }
    }

    /// Computes the forward by the fused kernel.
    fn forward_fused(&self) -> Result<(Storage, ForwardState)> {
        on_device!("attention", self.qkv[0], {
            cpu => self.forward_cpu(),
            cuda => {
                let (out, state) = cuda::forward(self.qkv.each_ref(), &self.seqs, &self.spec, self.heads)?;
                Ok((out.into_storage(), ForwardState::Cuda(state)))
            },
        })
    }

    fn backward(&self, o: &Tensor, d_o: &Tensor, state: &ForwardState) -> Result<[Tensor; 3]> {
        #[cfg(any(feature = "cuda", feature = "emulate"))]
        let inputs = {
            let [q, k, v] = &self.qkv;
            cuda::BackwardInputs { q, k, v, o, d_o }
        };
        match state {
            ForwardState::Cpu(lse) => self.backward_cpu(o, d_o, lse),
            #[cfg(any(feature = "cuda", feature = "emulate"))]
            ForwardState::Cuda(state) => cuda::backward(&inputs, state),
            #[cfg(feature = "cudnn")]
            ForwardState::Cudnn(state) => choice::or_fused(
                self.spec.choice,
                || cudnn::backward(&inputs, state),
                || self.backward_of_another_forward(o, d_o),
            ),
        }
    }

    /// Computes the gradients by the fused kernels after a forward of another implementation.
    ///
    /// A second forward recomputes the log-sum-exp, so nothing is assumed about the other implementation's state.
    #[cfg(any(feature = "cudnn", test))]
    fn backward_of_another_forward(&self, o: &Tensor, d_o: &Tensor) -> Result<[Tensor; 3]> {
        let (_, state) = self.forward_fused()?;
        self.backward(o, d_o, &state)
    }

    #[cfg(feature = "cudnn")]
    fn addresses(&self) -> Result<[crate::cuda::DeviceAddress; 3]> {
        let [q, k, v] = self.qkv.each_ref().map(|x| crate::cuda::address("attention", x));
        Ok([q?, k?, v?])
    }

    fn forward_cpu(&self) -> Result<(Storage, ForwardState)> {
        let [q, k, v] = &self.qkv;
        let mut out = FloatBuf::unwritten(q.dtype(), q.elem_count())?;
        let (q, k, v) = (host("attention", q)?, host("attention", k)?, host("attention", v)?);
        let inputs = [q.floats()?, k.floats()?, v.floats()?];
        let lse = forward::run(inputs, out.view(), &self.seqs, &self.spec, self.heads);
        Ok((out.into_storage(), ForwardState::Cpu(lse)))
    }

    fn backward_cpu(&self, o: &Tensor, d_o: &Tensor, lse: &[f32]) -> Result<[Tensor; 3]> {
        let [q, k, v] = &self.qkv;
        let mut grads = [
            FloatBuf::unwritten(q.dtype(), q.elem_count())?,
            FloatBuf::unwritten(k.dtype(), k.elem_count())?,
            FloatBuf::unwritten(v.dtype(), v.elem_count())?,
        ];
        let hosts = (host("attention", q)?, host("attention", k)?, host("attention", v)?);
        let (o, d_o) = (host("attention", o)?, host("attention", d_o)?);
        let inputs = backward::CpuBackwardInputs {
            q: hosts.0.floats()?,
            k: hosts.1.floats()?,
            v: hosts.2.floats()?,
            o: o.floats()?,
            d_o: d_o.floats()?,
            lse,
        };
        let HeadCounts { n_kv, dim, .. } = self.heads;
        let by_head = backward::run(&inputs, &self.seqs, &self.spec, self.heads);
        for ((grad, out), n_heads) in by_head.iter().zip(&mut grads).zip([self.heads.n_query_heads(), n_kv, n_kv]) {
            by_row(grad, out.view(), n_heads, dim);
        }
        let [dq, dk, dv] = grads;
        Ok([storage::tensor(dq, q.shape()), storage::tensor(dk, k.shape()), storage::tensor(dv, v.shape())])
    }
}

/// Returns the dtype of a KV cache for keys like `k`. It is f32 on a CPU, so that kernels need no conversion.
pub fn kv_cache_dtype(k: &Tensor) -> DType {
    if k.device().is_cpu() { DType::F32 } else { k.dtype() }
}

#[cfg(test)]
#[cfg(feature = "emulate")]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::cuda::emulator::emulate;

    fn tensor(shape: (usize, usize, usize), step: f64, dtype: DType) -> Tensor {
        let n = shape.0 * shape.1 * shape.2;
        let values: Vec<f32> = (0..n).map(|i| (i as f64 * step).sin() as f32).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    #[track_caller]
    fn check(dtype: DType) {
        let (heads, dim) = (HeadCounts { n_kv: 2, group: 2, dim: 16 }, 16);
        let choice = AttentionChoice::default();
        let saved = SavedAttention {
            qkv: [4, 2, 2].map(|n_heads| tensor((11, n_heads, dim), 0.37 * n_heads as f64, dtype)),
            seqs: CuSeqlens::packed(vec![0, 7, 8, 11]).unwrap(),
            spec: AttentionSpec { scale: 0.25, causal: true, window: None, choice },
            heads,
        };
        let (out, state) = saved.forward(AttentionKernel::Fused).unwrap();
        let (o, d_o) = (storage::tensor(out, saved.qkv[0].shape()), tensor((11, 4, dim), 0.11, dtype));
        let want = saved.backward(&o, &d_o, &state).unwrap();
        let got = saved.backward_of_another_forward(&o, &d_o).unwrap();
        let values =
            |x: &Tensor| -> Vec<f32> { x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap() };
        got.iter().zip(&want).for_each(|(got, want)| assert_eq!(values(got), values(want)));
        assert!(want.iter().all(|x| values(x).iter().any(|x| *x != 0.0)));
    }

    #[test]
    fn the_backward_of_another_implementations_forward_is_that_of_ours() {
        check(DType::F32);
        emulate(|| [DType::F32, DType::BF16].into_iter().for_each(check));
    }
}
