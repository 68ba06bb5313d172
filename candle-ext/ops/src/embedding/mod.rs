//! y_i = w[ids_i]: a row of the table for each id.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Storage, Tensor, bail};

use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::span::span;
use crate::storage::{self, host};
use crate::tape::record;
use crate::weight::Weight;

/// Gathers rows of `w` [v, d]; `ids` is u32 [..], the result [.., d] in the table's dtype.
///
/// The backward adds each row's gradients, in an order that only the ids decide, to the sink in f32. The row of `padding`
/// gets none from here, as in torch.
///
/// An id that is not in the table is an error on the CPU. CUDA would have to wait for the device to tell: there its row
/// is NaN, and adds to no gradient.
pub fn embedding(ids: &Tensor, w: &Weight, padding: Option<u32>) -> Result<Tensor> {
    let _span = span("embedding", "forward");
    let d = check(ids, w)?;
    let ids = ids.contiguous()?;
    let table = w.value()?;
    let y = on_device!("embedding", table, {
        cpu => gather_cpu(&ids, &table)?,
        cuda => cuda::gather(&ids, &table)?.into_storage(),
    });
    let mut shape = ids.dims().to_vec();
    shape.push(d);
    let weight = w.clone();
    Ok(record("embedding", [w.into()], storage::tensor(y, shape), move |dy| {
        if let Some(sink) = weight.sink() {
            let dy = &without_padding(dy, &ids, padding)?;
            on_device!("embedding", dy, {
                cpu => {
                    let (dy, ids) = (host("embedding", dy)?, host("embedding", &ids)?);
                    let (dy, ids) = (dy.floats()?, ids.slice::<u32>()?);
                    sink.add("embedding", |dw| cpu::scatter_add(ids, dy, dw, d))?;
                },
                cuda => cuda::scatter_add(&ids, dy, &sink.grad()?, weight.dims()[0])?,
            });
        }
        Ok([None])
    }))
}

/// dy [.., d] with zeros where the id is that of padding.
fn without_padding(dy: &Tensor, ids: &Tensor, padding: Option<u32>) -> Result<Tensor> {
    let Some(padding) = padding else { return Ok(dy.clone()) };
    let is_token = ids.ne(padding)?.unsqueeze(ids.rank())?.broadcast_as(dy.shape())?;
    is_token.where_cond(dy, &dy.zeros_like()?)
}

fn gather_cpu(ids: &Tensor, table: &Tensor) -> Result<Storage> {
    let (v, d) = table.dims2()?;
    let mut y = FloatBuf::unwritten(table.dtype(), ids.elem_count() * d)?;
    let (ids, table) = (host("embedding", ids)?, host("embedding", table)?);
    let ids = ids.slice::<u32>()?;
    if let Some(position) = ids.iter().position(|&id| id as usize >= v) {
        bail!("embedding: id {} at position {position} is not in the table of {v} rows", ids[position])
    }
    cpu::gather(ids, table.floats()?, y.view(), d);
    Ok(y.into_storage())
}

fn check(ids: &Tensor, w: &Weight) -> Result<usize> {
    if ids.dtype() != DType::U32 {
        bail!("embedding: ids are {:?}, want u32", ids.dtype())
    }
    check_dtype("embedding", "the table", w.dtype())?;
    let &[v, d] = w.dims() else { bail!("embedding: want a table [v, d], got {:?}", w.dims()) };
    w.check("embedding", &[v, d])?;
    Ok(d)
}
