//! Inverted dropout whose mask is a function of a key: a recomputed forward drops the same elements.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
mod mask;
mod rows;

use std::rc::Rc;

use candle_core::{DType, Result, Tensor, bail};

use crate::cost::{Cost, bytes};
use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::recording::{recompute_with, record, save};
use crate::span::span;
use crate::storage::{self, host};
pub use mask::{Dropout, derive_key};
pub(crate) use mask::{key_after, random};
use rows::DropoutSpan;
pub use rows::{ColumnShard, RowRanges};

/// Computes `y = x mask / (1 - p)` for x of any shape; each element is dropped with probability p.
///
/// Nothing of x is saved for backward; the mask is generated again.
pub fn dropout(x: &Tensor, spec: Dropout) -> Result<Tensor> {
    dropped(x, spec, vec![DropoutSpan::flat(0..x.elem_count(), 0)])
}

/// Computes [`dropout`] of a shard of a tensor: some rows (dim 0) and some columns.
///
/// The shard loses the elements that it would lose in the whole tensor.
pub fn sharded_dropout(x: &Tensor, spec: Dropout, rows: &RowRanges, columns: ColumnShard) -> Result<Tensor> {
    let n_rows = x.dim(0)?;
    let width = x.elem_count() / n_rows.max(1);
    let runs = rows.runs(n_rows)?.into_iter();
    dropped(
        x,
        spec,
        runs.map(|(local, global_start)| DropoutSpan::of_rows(local, global_start, width, columns)).collect(),
    )
}

/// Computes dropout of a shard of columns of x [n, d], whose rows have masks of their own: `keys` i64 [n].
///
/// The mask of a row depends on its key, on `spec.key` and on the columns. So rows may have any order, on any rank.
pub fn row_dropout(x: &Tensor, keys: &Tensor, spec: Dropout, columns: ColumnShard) -> Result<Tensor> {
    let (n_rows, width) = x.dims2()?;
    if keys.dtype() != DType::I64 || keys.dims() != [n_rows] {
        bail!("dropout: want i64 keys [{n_rows}], got {:?} {:?}", keys.dtype(), keys.dims())
    }
    let (keys, first_column) = (keys.contiguous()?, columns.index * width);
    dropped_by(x, spec, move |x| masked_rows(x, &keys, spec, first_column))
}

/// Computes dropout of x, whose elements are the `runs`.
fn dropped(x: &Tensor, spec: Dropout, runs: Vec<DropoutSpan>) -> Result<Tensor> {
    dropped_by(x, spec, move |x| masked(x, spec, &runs))
}

/// Computes dropout by a function that applies the mask.
fn dropped_by(x: &Tensor, spec: Dropout, masked: impl Fn(&Tensor) -> Result<Tensor> + 'static) -> Result<Tensor> {
    let _span = span("dropout", "forward");
    check_dtype("dropout", "the input", x.dtype())?;
    if !(0.0..1.0).contains(&spec.p) {
        bail!("dropout: want a probability in [0, 1), got {}", spec.p)
    }
    if spec.p == 0.0 {
        return Ok(x.clone());
    }
    let x = &x.contiguous()?;
    let y = masked(x)?;
    let (saved, masked) = (save(x), Rc::new(masked));
    let again = Rc::clone(&masked);
    recompute_with(&y, move || again(&saved.get()?));
    Ok(record("dropout", [x.into()], y, move |dy, _| Ok([Some(masked(dy)?)])))
}

/// Returns the memory cost of a backward with `n_elements` elements: the masked gradient or the recomputed output.
///
/// The forward saves nothing.
pub fn dropout_backward_cost(n_elements: u64, dtype: DType) -> Cost {
    Cost { scratch_bytes: bytes(n_elements, dtype), ..Cost::default() }
}

fn masked(x: &Tensor, spec: Dropout, runs: &[DropoutSpan]) -> Result<Tensor> {
    let shape = x.shape();
    on_device!("dropout", x, {
        cpu => {
            let mut y = FloatBuf::unwritten(x.dtype(), x.elem_count())?;
            let x = host("dropout", x)?;
            for run in runs {
                cpu::apply(x.floats()?.slice(run.local.clone()), y.view().slice(run.local.clone()), spec, run);
            }
            Ok(storage::tensor(y, shape))
        },
        cuda => Ok(cuda::apply(x, spec, runs)?.into_tensor(shape)),
    })
}

/// Applies the masks of rows. The first column of x is `first_column` of the whole tensor.
fn masked_rows(x: &Tensor, keys: &Tensor, spec: Dropout, first_column: usize) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let shape = x.shape();
    on_device!("dropout", x, {
        cpu => {
            let mut y = FloatBuf::unwritten(x.dtype(), x.elem_count())?;
            let (x, keys) = (host("dropout", x)?, host("dropout", keys)?);
            cpu::apply_rows(x.floats()?, y.view(), spec, keys.slice()?, first_column);
            Ok(storage::tensor(y, shape))
        },
        cuda => Ok(cuda::apply_rows(x, keys, spec, first_column)?.into_tensor(shape)),
    })
}
