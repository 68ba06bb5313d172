//! Rotary position embedding (RoPE), half-split: element i of a head is paired with element i + r/2.
//!
//! t tokens, h query heads, g KV heads, k head dim, r rotated elements of a head

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
mod head_rows;
mod heads;
mod split;

use candle_core::{DType, Result, Tensor, bail};

use crate::cost::{Cost, bytes};
use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::recording::record;
use crate::span::span;
use crate::storage::{self, host};
use heads::{HeadSlice, RopeHeads, RotationDirection};
pub use split::{QkNorms, QkvHeads, rms_norm_rope, split_qkv};

/// Rotates each pair `(a, b) = (x_i, x_{i + r/2})` of `x` [t, h, k] to `(a cos - b sin, b cos + a sin)`.
///
/// `cos` and `sin` are f32 [t, r/2]. The elements of a head from r on are copied (partial rotary embedding).
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let _span = span("rope", "forward");
    let heads = check(x, cos, sin)?;
    let table = [cos.contiguous()?, sin.contiguous()?];
    let y = rotated((&x.contiguous()?, heads.slice()), Some(&table), heads, RotationDirection::Forward)?;
    Ok(record("rope", [x.into()], y, move |dy, _| {
        Ok([Some(rotated((dy, heads.slice()), Some(&table), heads, RotationDirection::Inverse)?)])
    }))
}

/// Returns the cost of a forward. The f32 tables [t, r/2] are saved once for all calls that share them.
pub fn rope_cost(n_tokens: u64, rotary_dim: u64) -> Cost {
    Cost { saved_bytes: bytes(n_tokens * rotary_dim, DType::F32), ..Cost::default() }
}

/// Returns heads of a tensor [t, ..] as [t, n, dim], rotated if there is a table.
fn rotated(
    (x, from): (&Tensor, HeadSlice),
    table: Option<&[Tensor; 2]>,
    heads: RopeHeads,
    direction: RotationDirection,
) -> Result<Tensor> {
    let shape = (x.dim(0)?, heads.n, heads.dim);
    on_device!("rope", x, {
        cpu => {
            let mut y = FloatBuf::unwritten(x.dtype(), shape.0 * heads.n * heads.dim)?;
            with_table(table, |table| {
                cpu::rotate((host("rope", x)?.floats()?, from), table, (y.view(), heads.slice()), heads, direction);
                Ok(())
            })?;
            Ok(storage::tensor(y, shape))
        },
        cuda => {
            let table = table.map(|[cos, sin]| [cos, sin]);
            Ok(cuda::rotated((x, from), table, shape.0, heads, direction)?.into_tensor(shape))
        },
    })
}

/// Calls `f` with the elements of cosines and sines.
fn with_table(table: Option<&[Tensor; 2]>, f: impl FnOnce(Option<cpu::RopeTable>) -> Result<()>) -> Result<()> {
    let Some([cos, sin]) = table else { return f(None) };
    let n_pairs = cos.dim(1)?;
    let (cos, sin) = (host("rope", cos)?, host("rope", sin)?);
    f(Some(cpu::RopeTable { cos: cos.slice::<f32>()?, sin: sin.slice::<f32>()?, n_pairs }))
}

fn check(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<RopeHeads> {
    check_dtype("rope", "the input", x.dtype())?;
    let (t, n, dim) = match x.dims3() {
        Ok((t, n, dim)) if dim % 2 == 0 => (t, n, dim),
        _ => bail!("rope: want an input [t, h, k] with an even k, got {:?}", x.dims()),
    };
    check_table(t, dim, cos, sin)?;
    Ok(RopeHeads { n, dim })
}

/// Checks the tables of heads of `dim` elements. All of these are rotated, or fewer if both tables are narrower.
fn check_table(t: usize, dim: usize, cos: &Tensor, sin: &Tensor) -> Result<()> {
    let n_pairs = cos.dims2().map_or(dim / 2, |(_, n_pairs)| n_pairs.min(dim / 2));
    let shape = [t, n_pairs];
    for (name, table) in [("cos", cos), ("sin", sin)] {
        if table.dims() != shape || table.dtype() != DType::F32 {
            bail!("rope: {name} is {:?} {:?}, want f32 {shape:?}", table.dtype(), table.dims())
        }
    }
    Ok(())
}
