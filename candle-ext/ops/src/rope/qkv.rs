//! Split of a fused QKV projection into rotated query, key and value heads.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use candle_core::{Result, Shape, Tensor, bail};

use super::heads::{HeadSlice, RopeHeads, RotationDirection};
use super::{check_table, rotate_into, rotated};
use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::recording::record;
use crate::span::span;
use crate::storage;

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

/// Splits `qkv` [t, (h + 2 g) k] into q [t, h, k], k [t, g, k] and v [t, g, k]; rotates q and k as
/// [`rope`](super::rope).
///
/// Backward writes their gradients into one tensor, so all three outputs must have a gradient.
pub fn split_qkv(qkv: &Tensor, heads: QkvHeads, cos: &Tensor, sin: &Tensor) -> Result<[Tensor; 3]> {
    let _span = span("split_qkv", "forward");
    check(qkv, heads, cos, sin)?;
    let table = [cos.contiguous()?, sin.contiguous()?];
    let joined = qkv.contiguous()?;
    let grad = Rc::new(JoinedGrad { shape: joined.shape().clone(), grad: RefCell::default(), n_written: Cell::new(0) });
    let [q, k, v]: [Result<Tensor>; 3] = heads.parts().map(|part| {
        let (table, grad) = (part.is_rotated.then(|| table.clone()), grad.clone());
        let y = rotated((&joined, part.slice), table.as_ref(), part.heads, RotationDirection::Forward)?;
        Ok(record("split_qkv", [qkv.into()], y, move |dy, _| Ok([grad.write(dy, table.as_ref(), part)?])))
    });
    Ok([q?, k?, v?])
}

/// Part of each row: queries, keys or values.
#[derive(Clone, Copy)]
struct Part {
    heads: RopeHeads,
    slice: HeadSlice,
    is_rotated: bool,
}

impl QkvHeads {
    fn width(self) -> usize {
        (self.n_q + 2 * self.n_kv) * self.dim
    }

    /// Returns the parts: queries, keys and values.
    fn parts(self) -> [Part; 3] {
        let Self { n_q, n_kv, dim } = self;
        [(0, n_q, true), (n_q, n_kv, true), (n_q + n_kv, n_kv, false)].map(|(first, n, is_rotated)| Part {
            heads: RopeHeads { n, dim },
            slice: HeadSlice { first: first * dim, stride: self.width() },
            is_rotated,
        })
    }
}

/// Gradient of the fused projection, written part by part.
struct JoinedGrad {
    shape: Shape,
    grad: RefCell<Option<Tensor>>,
    n_written: Cell<usize>,
}

impl JoinedGrad {
    /// Writes the gradient of a part. Backward visits the queries last and then returns the whole gradient.
    fn write(&self, dy: &Tensor, table: Option<&[Tensor; 2]>, part: Part) -> Result<Option<Tensor>> {
        let mut grad = self.grad.borrow_mut();
        let all = match &*grad {
            Some(grad) => grad.clone(),
            None => grad.insert(unwritten(dy, &self.shape)?).clone(),
        };
        rotate_into(dy, table, (&all, part.slice), part.heads, RotationDirection::Inverse)?;
        self.n_written.set(self.n_written.get() + 1);
        match (part.slice.first, self.n_written.get()) {
            (0, 3) => Ok(grad.take()),
            (0, n) => bail!("split_qkv: of the gradients of q, k and v there are {n}; use all three outputs"),
            _ => Ok(None),
        }
    }
}

/// Allocates an uninitialised tensor with the dtype and device of x.
fn unwritten(x: &Tensor, shape: &Shape) -> Result<Tensor> {
    on_device!("split_qkv", x, {
        cpu => Ok(storage::tensor(FloatBuf::unwritten(x.dtype(), shape.elem_count())?, shape)),
        cuda => Ok(super::cuda::unwritten(x, shape.elem_count())?.into_tensor(shape)),
    })
}

fn check(qkv: &Tensor, heads: QkvHeads, cos: &Tensor, sin: &Tensor) -> Result<()> {
    check_dtype("split_qkv", "the input", qkv.dtype())?;
    let t = match qkv.dims2() {
        Ok((t, width)) if width == heads.width() && heads.dim.is_multiple_of(2) => t,
        _ => bail!("split_qkv: want an input [t, {}] with an even head dim, got {:?}", heads.width(), qkv.dims()),
    };
    check_table(t, heads.dim, cos, sin)
}
