//! Argument checks of a call, which every backend makes before it sends anything.

use candle_core::{DType, Device, Tensor};

use crate::element::DTYPES;
use crate::{Error, Recv, Result};

/// Largest number of dims in a call's header.
pub(crate) const MAX_DIMS: usize = 8;

/// Checks that a backend without GPU support can send tensors of `device`.
pub(crate) fn device(op: &'static str, device: &Device) -> Result<()> {
    match device.is_cpu() {
        true => Ok(()),
        false => {
            let what = format!("the tensor is on {:?}, and this backend sends CPU tensors only", device.location());
            Err(wrong(op, what))
        }
    }
}

/// Checks that a backend without GPU support can send `x`.
pub(crate) fn tensor(op: &'static str, x: &Tensor) -> Result<()> {
    device(op, x.device())?;
    dtype_and_rank(op, x.dtype(), x.dims())
}

/// Checks that a call's header can describe a tensor of this dtype and shape.
pub(crate) fn dtype_and_rank(op: &'static str, dtype: DType, shape: &[usize]) -> Result<()> {
    if !DTYPES.contains(&dtype) {
        return Err(wrong(
            op,
            format!("dtype {} is not supported; use one of {}", dtype.as_str(), DTYPES.map(|d| d.as_str()).join(", ")),
        ));
    }
    if shape.len() > MAX_DIMS {
        return Err(wrong(op, format!("{} dims, at most {MAX_DIMS} are supported", shape.len())));
    }
    Ok(())
}

/// Checks that `x` has a dim 0, and returns its size.
pub(crate) fn rows(op: &'static str, x: &Tensor) -> Result<usize> {
    x.dims().first().copied().ok_or_else(|| wrong(op, "a scalar has no dim 0".to_owned()))
}

/// Checks that dim 0 of `x` can be divided by `size`, and returns the rows of a shard.
pub(crate) fn shard_rows(x: &Tensor, size: usize) -> Result<usize> {
    let n_rows = rows("reduce_scatter", x)?;
    if !n_rows.is_multiple_of(size) {
        return Err(wrong("reduce_scatter", format!("{n_rows} rows cannot be divided by {size} ranks")));
    }
    Ok(n_rows / size)
}

/// Checks that each rank has a count, and that `send` adds up to the rows of `x`.
pub(crate) fn counts(x: &Tensor, send: &[usize], recv: &[usize], size: usize) -> Result<()> {
    let n_rows = rows("all_to_all", x)?;
    if send.len() != size || recv.len() != size {
        let why = format!("{} send counts and {} receive counts for {size} ranks", send.len(), recv.len());
        return Err(wrong("all_to_all", why));
    }
    let total = |counts: &[usize]| counts.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    if total(send) != Some(n_rows) {
        let why = match total(send) {
            Some(n_sent) => format!("the send counts add up to {n_sent}, and the tensor has {n_rows} rows"),
            None => format!("the send counts {send:?} add up to more than the tensor's {n_rows} rows"),
        };
        return Err(wrong("all_to_all", why));
    }
    let row_bytes = x.dims()[1..].iter().product::<usize>() * x.dtype().size_in_bytes();
    let n_bytes = total(recv).and_then(|n_rows| n_rows.checked_mul(row_bytes));
    if n_bytes.is_none_or(|n_bytes| n_bytes > isize::MAX as usize) {
        return Err(wrong(
            "all_to_all",
            format!("{recv:?} rows of {row_bytes} bytes to receive exceed the address space"),
        ));
    }
    Ok(())
}

/// Checks that `peer` is a rank of the group.
pub(crate) fn peer(op: &'static str, peer: usize, size: usize) -> Result<()> {
    if peer >= size {
        return Err(wrong(op, format!("rank {peer} is not in the group of {size} ranks")));
    }
    Ok(())
}

/// Checks that a sent tensor has a receiver, that the received tensor fits into memory, and that both peers are other ranks.
pub(crate) fn pair(x: Option<&Tensor>, to: Option<usize>, recv: Option<&Recv>, rank: usize, size: usize) -> Result<()> {
    for other in to.into_iter().chain(recv.map(|recv| recv.from)) {
        peer("send_recv", other, size)?;
        if other == rank {
            return Err(wrong("send_recv", format!("rank {rank} cannot exchange tensors with itself")));
        }
    }
    recv.map_or(Ok(()), receivable)?;
    match (x, to) {
        (Some(_), None) => Err(wrong("send_recv", "a tensor without a destination rank".to_owned())),
        (None, Some(to)) => Err(wrong("send_recv", format!("destination rank {to} without a tensor"))),
        _ => Ok(()),
    }
}

fn receivable(recv: &Recv) -> Result<()> {
    dtype_and_rank("send_recv", recv.dtype, &recv.shape)?;
    let n_bytes = recv.shape.iter().try_fold(recv.dtype.size_in_bytes(), |n, dim| n.checked_mul(*dim));
    if n_bytes.is_none_or(|n_bytes| n_bytes > isize::MAX as usize) {
        return Err(wrong("send_recv", format!("{recv} to receive exceeds the address space")));
    }
    Ok(())
}

/// Checks that `lists` contain each rank of the group once, and returns the index of the list with `rank`.
pub(crate) fn list_of(lists: &[Vec<usize>], rank: usize, size: usize) -> Result<usize> {
    let mut all: Vec<usize> = lists.concat();
    all.sort_unstable();
    if !all.iter().copied().eq(0..size) {
        return Err(wrong("split", format!("{lists:?} must contain each of the {size} ranks once")));
    }
    Ok(lists.iter().position(|list| list.contains(&rank)).expect("every rank was found above"))
}

fn wrong(op: &'static str, why: String) -> Error {
    Error::Call { op, why }
}
