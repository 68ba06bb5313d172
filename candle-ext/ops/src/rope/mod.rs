//! Rotary position embedding, half-split: element i of a head is paired with element i + k/2.
//!
//! t tokens, h heads, k head dim

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::span::span;
use crate::storage::{self, host};
use crate::tape::record;

/// Rotates each pair (a, b) = (x_i, x_{i + k/2}) of `x` [t, h, k] to
/// (a cos - b sin, b cos + a sin), with f32 `cos` and `sin` [t, k/2].
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let _span = span("rope", "forward");
    check(x, cos, sin)?;
    let (cos, sin) = (cos.contiguous()?, sin.contiguous()?);
    let y = rotate(&x.contiguous()?, &cos, &sin, Turn::Forward)?;
    Ok(record("rope", [x.into()], y, move |dy| Ok([Some(rotate(dy, &cos, &sin, Turn::Back)?)])))
}

/// Which way to turn. The backward of a rotation is the rotation back.
#[derive(Clone, Copy)]
enum Turn {
    Forward,
    Back,
}

impl Turn {
    /// What the sine is multiplied by.
    fn sign(self) -> f32 {
        match self {
            Self::Forward => 1.0,
            Self::Back => -1.0,
        }
    }
}

fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor, turn: Turn) -> Result<Tensor> {
    let shape = x.shape();
    on_device!("rope", x, {
        cpu => {
            let (_, h, k) = x.dims3()?;
            let mut y = FloatBuf::unwritten(x.dtype(), x.elem_count())?;
            let (x, cos, sin) = (host("rope", x)?, host("rope", cos)?, host("rope", sin)?);
            let table = (cos.slice::<f32>()?, sin.slice::<f32>()?);
            cpu::rotate(x.floats()?, table, y.view(), (h, k), turn);
            Ok(storage::tensor(y, shape))
        },
        cuda => Ok(cuda::rotate(x, cos, sin, turn)?.into_tensor(shape)),
    })
}

fn check(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<()> {
    check_dtype("rope", "the input", x.dtype())?;
    let (t, _, k) = match x.dims3() {
        Ok((t, h, k)) if k % 2 == 0 => (t, h, k),
        _ => bail!("rope: want an input [t, h, k] with an even k, got {:?}", x.dims()),
    };
    for (name, table) in [("cos", cos), ("sin", sin)] {
        if table.dims() != [t, k / 2] || table.dtype() != DType::F32 {
            bail!("rope: {name} is {:?} {:?}, want f32 {:?}", table.dtype(), table.dims(), [t, k / 2])
        }
    }
    Ok(())
}
