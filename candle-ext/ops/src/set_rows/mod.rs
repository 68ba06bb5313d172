//! Row-wise writes into a persistent buffer, such as the keys and values of new tokens into a KV cache.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{Result, Tensor, bail};

use crate::device::on_device;
use crate::floats::check_dtype;
use crate::span::span;
use crate::storage::{host, same_storage, update};

const OP: &str = "set_rows";

/// Writes dst[rows[i]] = src[i] over the first dim, in place, as torch's `index_copy_`.
///
/// `dst` is contiguous, another buffer than `src`, and `rows` has no duplicates. The CPU rounds to the dtype of `dst`;
/// on CUDA the dtypes must agree.
pub fn set_rows(dst: &Tensor, rows: &[u32], src: &Tensor) -> Result<()> {
    let _span = span(OP, "");
    let src = src.contiguous()?;
    let d = check(dst, rows, &src)?;
    on_device!(OP, dst, {
        cpu => {
            let src = host(OP, &src)?;
            let src = src.floats()?;
            update(dst, OP, |dst| {
                cpu::set_rows(dst, rows, src, d);
                Ok(())
            })
        },
        cuda => cuda::set_rows(dst, rows, &src, d),
    })
}

/// Returns the elements of a row. Fails unless the tensors and rows agree.
fn check(dst: &Tensor, rows: &[u32], src: &Tensor) -> Result<usize> {
    check_dtype(OP, "the destination", dst.dtype())?;
    check_dtype(OP, "the source", src.dtype())?;
    let (Some((n, row)), Some((n_src, src_row))) = (dst.dims().split_first(), src.dims().split_first()) else {
        bail!("{OP}: want tensors of rows, got {:?} and {:?}", dst.dims(), src.dims())
    };
    if row != src_row || *n_src != rows.len() {
        bail!("{OP}: {:?} does not give {} rows of {:?}", src.dims(), rows.len(), dst.dims())
    }
    if let Some(beyond) = rows.iter().find(|row| **row as usize >= *n) {
        bail!("{OP}: row {beyond} of {n}")
    }
    if same_storage(dst, src) {
        bail!("{OP}: the source is the destination's own buffer")
    }
    Ok(row.iter().product())
}
