//! What every engine asks of a call before anything is sent.

use candle_core::{DType, Device, Tensor};

use crate::element::DTYPES;
use crate::{Error, Recv, Result};

/// The most dims that a message's head has room for.
pub(crate) const MAX_DIMS: usize = 8;

/// Checks that what lies on `device` can be sent between processes without a GPU.
pub(crate) fn device(op: &'static str, device: &Device) -> Result<()> {
    match device.is_cpu() {
        true => Ok(()),
        false => {
            let what = format!("a tensor on {:?}: this engine moves tensors on the CPU", device.location());
            Err(wrong(op, what))
        }
    }
}

/// Checks that `x` can be sent between processes without a GPU.
pub(crate) fn travels(op: &'static str, x: &Tensor) -> Result<()> {
    device(op, x.device())?;
    form(op, x.dtype(), x.dims())
}

/// Checks that a message's head can tell of a tensor.
pub(crate) fn form(op: &'static str, dtype: DType, shape: &[usize]) -> Result<()> {
    if !DTYPES.contains(&dtype) {
        return Err(wrong(
            op,
            format!("{} does not travel; {} do", dtype.as_str(), DTYPES.map(|d| d.as_str()).join(", ")),
        ));
    }
    if shape.len() > MAX_DIMS {
        return Err(wrong(op, format!("{} dims, at most {MAX_DIMS} travel", shape.len())));
    }
    Ok(())
}

/// Checks that `x` has a dim 0 to be gathered or split along, and returns its rows.
pub(crate) fn rows(op: &'static str, x: &Tensor) -> Result<usize> {
    x.dims().first().copied().ok_or_else(|| wrong(op, "a scalar has no rows".to_owned()))
}

/// Checks that the rows of `x` can be shared out evenly, and returns the rows of a share.
pub(crate) fn shares(x: &Tensor, size: usize) -> Result<usize> {
    let n_rows = rows("reduce_scatter", x)?;
    if !n_rows.is_multiple_of(size) {
        return Err(wrong("reduce_scatter", format!("{n_rows} rows over {size} ranks: not divisible")));
    }
    Ok(n_rows / size)
}

/// Checks that there is a count for each rank and that `send` adds up to the rows of `x`.
pub(crate) fn counts(x: &Tensor, send: &[usize], recv: &[usize], size: usize) -> Result<()> {
    let n_rows = rows("all_to_all", x)?;
    if send.len() != size || recv.len() != size {
        let why = format!("{} counts to send and {} to receive for {size} ranks", send.len(), recv.len());
        return Err(wrong("all_to_all", why));
    }
    let total = |counts: &[usize]| counts.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    if total(send) != Some(n_rows) {
        let why = match total(send) {
            Some(n_sent) => format!("{n_sent} rows to send of a tensor with {n_rows}"),
            None => format!("{send:?} rows to send of a tensor with {n_rows}"),
        };
        return Err(wrong("all_to_all", why));
    }
    let row_bytes = x.dims()[1..].iter().product::<usize>() * x.dtype().size_in_bytes();
    let n_bytes = total(recv).and_then(|n_rows| n_rows.checked_mul(row_bytes));
    if n_bytes.is_none_or(|n_bytes| n_bytes > isize::MAX as usize) {
        return Err(wrong("all_to_all", format!("{recv:?} rows of {row_bytes} bytes to receive do not fit")));
    }
    Ok(())
}

/// Checks that `peer` is a rank of the group.
pub(crate) fn peer(op: &'static str, peer: usize, size: usize) -> Result<()> {
    if peer >= size {
        return Err(wrong(op, format!("rank {peer} of a group of {size}")));
    }
    Ok(())
}

/// Checks that what is sent has a receiver, that what is received can be, and that neither end is this rank itself.
pub(crate) fn pair(x: Option<&Tensor>, to: Option<usize>, recv: Option<&Recv>, rank: usize, size: usize) -> Result<()> {
    for other in to.into_iter().chain(recv.map(|recv| recv.from)) {
        peer("send_recv", other, size)?;
        if other == rank {
            return Err(wrong("send_recv", format!("rank {rank} with itself")));
        }
    }
    recv.map_or(Ok(()), receivable)?;
    match (x, to) {
        (Some(_), None) => Err(wrong("send_recv", "a tensor and nobody to send it to".to_owned())),
        (None, Some(to)) => Err(wrong("send_recv", format!("nothing to send to rank {to}"))),
        _ => Ok(()),
    }
}

fn receivable(recv: &Recv) -> Result<()> {
    form("send_recv", recv.dtype, &recv.shape)?;
    let n_bytes = recv.shape.iter().try_fold(recv.dtype.size_in_bytes(), |n, dim| n.checked_mul(*dim));
    if n_bytes.is_none_or(|n_bytes| n_bytes > isize::MAX as usize) {
        return Err(wrong("send_recv", format!("{recv} to receive does not fit into memory")));
    }
    Ok(())
}

/// Checks that `lists` hold each rank of the group once, and returns the index of the list that holds `rank`.
pub(crate) fn list_of(lists: &[Vec<usize>], rank: usize, size: usize) -> Result<usize> {
    let mut all: Vec<usize> = lists.concat();
    all.sort_unstable();
    if !all.iter().copied().eq(0..size) {
        return Err(wrong("split", format!("{lists:?} does not hold each of {size} ranks once")));
    }
    Ok(lists.iter().position(|list| list.contains(&rank)).expect("every rank was found above"))
}

fn wrong(op: &'static str, why: String) -> Error {
    Error::Call { op, why }
}
