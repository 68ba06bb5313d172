//! Split of a fused QKV projection into query, key and value heads: RMS norm of each query and key head, then RoPE.

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::{Result, Tensor, bail};

use super::head_rows::{HeadPart, HeadRows};
use super::heads::{HeadSlice, RopeHeads, RotationDirection};
use super::{check_table, cpu, rotated};
use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::recording::{OpInput, recompute_with, record};
use crate::span::span;
use crate::storage::{self, host};
use crate::weight::Weight;

/// Heads in each row of a fused QKV projection: queries, then keys, then values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QkvHeads {
    /// Number of query heads, h.
    pub n_q: usize,
    /// Number of KV heads, g.
    pub n_kv: usize,
    /// Elements of a head, k.
    pub dim: usize,
}

/// RMS norms of the heads of queries and keys (QK norm).
#[derive(Clone, Copy, Debug)]
pub struct QkNorms<'a> {
    /// Weights [k] of the queries' norm and of the keys'.
    pub weights: [&'a Weight; 2],
    /// Epsilon under the root.
    pub eps: f64,
}

/// Splits `qkv` [t, (h + 2 g) k] into q [t, h, k], k [t, g, k] and v [t, g, k]. Computes [`rms_norm`](crate::rms_norm()) of
/// each head of q and k if there are norms, and then [`rope`](super::rope). The bits equal those of the separate ops.
///
/// Backward writes the gradients into one tensor, so all three outputs must have a gradient. It recomputes the statistics of
/// norms. With norms, it reads `qkv`, so backward copies v from there again.
pub fn split_qkv(
    qkv: &Tensor,
    heads: QkvHeads,
    norms: Option<QkNorms<'_>>,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<[Tensor; 3]> {
    let _span = span("split_qkv", "forward");
    check(qkv, heads, norms, cos, sin)?;
    let x = qkv.contiguous()?;
    let rows = HeadRows {
        n_tokens: x.dim(0)?,
        stride: heads.width(),
        parts: heads.parts(norms.map(|norms| norms.weights)).into(),
        table: [cos.contiguous()?, sin.contiguous()?],
        eps: norms.map_or(0.0, |norms| norms.eps as f32),
    };
    let Ok([q, k, v]) = <[Tensor; 3]>::try_from(rows.split(&x)?) else { bail!("split_qkv: a tensor for each part") };
    if norms.is_some() {
        let (x, values) = (x.clone(), rows.parts[2].clone());
        recompute_with(&v, move || rotated((&x, values.slice), None, values.heads, RotationDirection::Forward));
    }
    let backward = Rc::new(SplitBackward { x: norms.is_some().then_some(x), rows, grads: RefCell::default() });
    let [norm_q, norm_k] = norms.map_or([OpInput::from(qkv); 2], |norms| norms.weights.map(OpInput::from));
    let mut part_idx = 0..;
    Ok([q, k, v].map(|y| {
        let (backward, part_idx) = (backward.clone(), part_idx.next().unwrap_or_default());
        record("split_qkv", [qkv.into(), norm_q, norm_k], y, move |dy, _| {
            Ok([backward.add_part(part_idx, dy)?, None, None])
        })
    }))
}

/// Computes [`rms_norm`](crate::rms_norm()) of each head of x [t, n, k], with weight [k], and then [`rope`](super::rope). The
/// bits equal those of the separate ops.
pub fn rms_norm_rope(x: &Tensor, weight: &Weight, eps: f64, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let _span = span("rms_norm_rope", "forward");
    let heads = super::check(x, cos, sin)?;
    check_norm("rms_norm_rope", x, weight, heads.dim)?;
    let saved = x.contiguous()?;
    let rows = HeadRows {
        n_tokens: x.dim(0)?,
        stride: heads.n * heads.dim,
        parts: vec![HeadPart { heads, slice: heads.slice(), is_rotated: true, norm: Some(weight.clone()) }],
        table: [cos.contiguous()?, sin.contiguous()?],
        eps: eps as f32,
    };
    let Some(y) = rows.split(&saved)?.pop() else { bail!("rms_norm_rope: one part has one tensor") };
    Ok(record("rms_norm_rope", [x.into(), weight.into()], y, move |dy, _| {
        Ok([Some(rows.join_grads(Some(&saved), std::slice::from_ref(dy))?.reshape(saved.shape())?), None])
    }))
}

impl QkvHeads {
    fn width(self) -> usize {
        (self.n_q + 2 * self.n_kv) * self.dim
    }

    /// Returns the parts: queries, keys and values.
    fn parts(self, norms: Option<[&Weight; 2]>) -> [HeadPart; 3] {
        let Self { n_q, n_kv, dim } = self;
        let [of_q, of_k] = norms.map_or([None, None], |norms| norms.map(|weight| Some(weight.clone())));
        let part = |first, n, is_rotated, norm| HeadPart {
            heads: RopeHeads { n, dim },
            slice: HeadSlice { first: first * dim, stride: self.width() },
            is_rotated,
            norm,
        };
        [part(0, n_q, true, of_q), part(n_q, n_kv, true, of_k), part(n_q + n_kv, n_kv, false, None)]
    }
}

impl HeadRows {
    /// Returns the heads of each part, [t, n, k].
    fn split(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        on_device!("split_qkv", x, {
            cpu => self.split_cpu(x),
            cuda => super::cuda::split::split(self, x),
        })
    }

    /// Adds the gradients of the norms' weights to their sinks, and returns the gradient of the joined rows. `x` is needed for norms
    /// alone.
    fn join_grads(&self, x: Option<&Tensor>, grads: &[Tensor]) -> Result<Tensor> {
        on_device!("split_qkv", grads[0], {
            cpu => self.join_grads_cpu(x, grads),
            cuda => super::cuda::split::join_grads(self, x, grads),
        })
    }

    fn split_cpu(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let x_host = host("split_qkv", x)?;
        let each = self.parts.iter().map(|part| {
            let mut y = FloatBuf::unwritten(x.dtype(), self.n_tokens * part.heads.n * part.heads.dim)?;
            self.on_cpu(part, |part| {
                cpu::split::split(x_host.floats()?, part, y.view());
                Ok(())
            })?;
            Ok(storage::tensor(y, (self.n_tokens, part.heads.n, part.heads.dim)))
        });
        each.collect()
    }

    fn join_grads_cpu(&self, x: Option<&Tensor>, grads: &[Tensor]) -> Result<Tensor> {
        let mut dx = FloatBuf::unwritten(grads[0].dtype(), self.n_tokens * self.stride)?;
        let x_host = x.map(|x| host("split_qkv", x)).transpose()?;
        for (part, dy) in self.parts.iter().zip(grads) {
            let dy = host("split_qkv", dy)?;
            let x = x_host.as_ref().map(|x| x.floats()).transpose()?;
            self.on_cpu(part, |cpu_part| {
                let of_part = cpu::split::PartGrad { x, dy: dy.floats()?, part: cpu_part };
                if let Some(sink) = part.norm.as_ref().and_then(Weight::sink) {
                    sink.add("split_qkv", |dw| of_part.add_grad_weight(dw))?;
                }
                of_part.write(dx.view())
            })?;
        }
        Ok(storage::tensor(dx, (self.n_tokens, self.stride)))
    }

    /// Calls `f` with a part as CPU kernels read it.
    fn on_cpu(&self, part: &HeadPart, f: impl FnOnce(cpu::split::CpuPart<'_>) -> Result<()>) -> Result<()> {
        let table = part.is_rotated.then_some(&self.table);
        super::with_table(table, |table| {
            let weight = part.norm.as_ref().map(Weight::value).transpose()?;
            let weight = weight.as_ref().map(|weight| host("split_qkv", weight)).transpose()?;
            let weight = weight.as_ref().map(|weight| weight.floats()).transpose()?;
            f(cpu::split::CpuPart { heads: part.heads, slice: part.slice, table, weight, eps: self.eps })
        })
    }
}

/// Backward of a split, which receives the gradients one part at a time.
struct SplitBackward {
    /// Joined rows, if a part has a norm.
    x: Option<Tensor>,
    rows: HeadRows,
    grads: RefCell<[Option<Tensor>; 3]>,
}

impl SplitBackward {
    /// Keeps the gradient of a part. Backward visits the queries last and then returns the gradient of the joined rows.
    fn add_part(&self, part_idx: usize, dy: &Tensor) -> Result<Option<Tensor>> {
        self.grads.borrow_mut()[part_idx] = Some(dy.clone());
        if part_idx > 0 {
            return Ok(None);
        }
        let grads: Vec<Tensor> = self.grads.take().into_iter().flatten().collect();
        if grads.len() < self.rows.parts.len() {
            bail!("split_qkv: of the gradients of q, k and v there are {}; use all three outputs", grads.len())
        }
        self.rows.join_grads(self.x.as_ref(), &grads).map(Some)
    }
}

fn check(qkv: &Tensor, heads: QkvHeads, norms: Option<QkNorms<'_>>, cos: &Tensor, sin: &Tensor) -> Result<()> {
    check_dtype("split_qkv", "the input", qkv.dtype())?;
    let t = match qkv.dims2() {
        Ok((t, width)) if width == heads.width() && heads.dim.is_multiple_of(2) => t,
        _ => bail!("split_qkv: want an input [t, {}] with an even head dim, got {:?}", heads.width(), qkv.dims()),
    };
    norms.into_iter().flat_map(|norms| norms.weights).try_for_each(|w| check_norm("split_qkv", qkv, w, heads.dim))?;
    check_table(t, heads.dim, cos, sin)
}

fn check_norm(op: &str, x: &Tensor, weight: &Weight, dim: usize) -> Result<()> {
    if weight.dtype() != x.dtype() {
        bail!("{op}: want a norm in the dtype of the heads, {:?}, got {:?}", x.dtype(), weight.dtype())
    }
    weight.check(op, &[dim])
}
