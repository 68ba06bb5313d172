//! Embedding lookup: y_i = w[ids_i].

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Storage, Tensor, bail};

use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::recording::record;
use crate::span::span;
use crate::storage::{self, host};
use crate::weight::Weight;

/// Gathers rows of `w` [v, d]; `ids` is u32 [..], the result [.., d] in the table's dtype.
///
/// The backward adds each row's gradients to the sink in f32, in a deterministic order. The row `padding` gets no
/// gradient, as with torch's `padding_idx`.
///
/// On the CPU an id outside the table is an error. On CUDA its row becomes NaN and gets no gradient, because a check
/// would wait for the device.
pub fn embedding(ids: &Tensor, w: &Weight, padding: Option<u32>) -> Result<Tensor> {
    let _span = span("embedding", "forward");
    check(ids, w)?;
    let ids = ids.contiguous()?;
    let (y, weight) = (gather(&ids, w)?, w.clone());
    Ok(record("embedding", [w.into()], y, move |dy, _| {
        scatter_add(&ids, dy, &weight, padding)?;
        Ok([None])
    }))
}

/// Gathers rows from a shard of the table that starts at id `first`, for Megatron's vocab-parallel embedding.
///
/// Ids outside the shard give zero rows and no gradient. Summed over all shards (all-reduce), the outputs equal
/// [`embedding`]'s.
pub fn vocab_parallel_embedding(ids: &Tensor, w: &Weight, first: u32, padding: Option<u32>) -> Result<Tensor> {
    let _span = span("vocab_parallel_embedding", "forward");
    check(ids, w)?;
    let ids = ids.contiguous()?;
    let n_rows = w.dims()[0] as u32;
    let is_here = (ids.ge(first)? * ids.lt(first + n_rows)?)?;
    let fixed = |id: u32| Tensor::full(id, ids.shape(), ids.device());
    let local = (is_here.where_cond(&ids, &fixed(first)?)? - fixed(first)?)?;
    let y = only_where(&is_here, &gather(&local, w)?)?;
    // No table has a row of this index.
    let elsewhere = is_here.where_cond(&local, &fixed(u32::MAX)?)?;
    let (weight, padding) = (w.clone(), padding.and_then(|padding| padding.checked_sub(first)));
    Ok(record("vocab_parallel_embedding", [w.into()], y, move |dy, _| {
        scatter_add(&elsewhere, dy, &weight, padding)?;
        Ok([None])
    }))
}

/// Returns a row of the table for each id.
fn gather(ids: &Tensor, w: &Weight) -> Result<Tensor> {
    let table = w.value()?;
    let y = on_device!("embedding", table, {
        cpu => gather_cpu(ids, &table)?,
        cuda => cuda::gather(ids, &table)?.into_storage(),
    });
    let mut shape = ids.dims().to_vec();
    shape.push(w.dims()[1]);
    Ok(storage::tensor(y, shape))
}

/// Adds the rows of dy to the sink's rows `ids`, except for `padding`.
fn scatter_add(ids: &Tensor, dy: &Tensor, w: &Weight, padding: Option<u32>) -> Result<()> {
    let Some(sink) = w.sink() else { return Ok(()) };
    on_device!("embedding", dy, {
        cpu => {
            let (dy, ids) = (host("embedding", dy)?, host("embedding", ids)?);
            let (dy, ids) = (dy.floats()?, ids.slice::<u32>()?);
            sink.add_floats("embedding", |dw| cpu::scatter_add(ids, dy, dw, w.dims()[1], padding))
        },
        cuda => cuda::scatter_add(ids, dy, &sink.grad()?, w.dims()[0], padding),
    })
}

/// Returns the rows of x [.., d] where `kept` [..] is nonzero, and zeros elsewhere.
fn only_where(kept: &Tensor, x: &Tensor) -> Result<Tensor> {
    kept.unsqueeze(kept.rank())?.broadcast_as(x.shape())?.where_cond(x, &x.zeros_like()?)
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

fn check(ids: &Tensor, w: &Weight) -> Result<()> {
    if ids.dtype() != DType::U32 {
        bail!("embedding: ids are {:?}, want u32", ids.dtype())
    }
    check_dtype("embedding", "the table", w.dtype())?;
    let &[v, d] = w.dims() else { bail!("embedding: want a table [v, d], got {:?}", w.dims()) };
    w.check("embedding", &[v, d])
}
