//! Permutation of tokens into rows sorted by expert, and back.
//!
//! t tokens, k experts per token, n = t * k rows, width d

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use super::assignment::ExpertAssignment;
use crate::cost::{Cost, bytes};
use crate::device::on_device;
use crate::floats::{FloatBuf, Floats, FloatsMut, check_dtype};
use crate::recording::{recompute_from, record, save};
use crate::span::span;
use crate::storage::{self, host};
use cpu::Permutation;

/// Copies each token's row of x [t, d] to the rows of its experts: y [n, d], sorted by expert.
///
/// Dropped slots get zeros. The backward sums the gradients of a token's slots in slot order, in f32 and rounded once.
///
/// Nothing of size n * d is saved: backward permutes again.
pub fn permute(x: &Tensor, assignment: &ExpertAssignment) -> Result<Tensor> {
    let _span = span("permute", "forward");
    check("permute", x, assignment.n_tokens())?;
    let x = &x.contiguous()?;
    let y = gather(x, assignment)?;
    let (saved, again) = (save(x), assignment.clone());
    recompute_from(x, &y, move || gather(&saved.get()?, &again));
    let assignment = assignment.clone();
    Ok(record("permute", [x.into()], y, move |dy, _| Ok([Some(sum_slots(dy, &assignment)?)])))
}

/// Sums the rows of each token's slots: y [n, d] becomes [t, d]. Sums are f32, in slot order, and rounded once.
///
/// Dropped slots add nothing. Backward saves nothing but the assignment.
pub fn unpermute(y: &Tensor, assignment: &ExpertAssignment) -> Result<Tensor> {
    let _span = span("unpermute", "forward");
    check("unpermute", y, assignment.n_rows())?;
    let sum = sum_slots(&y.contiguous()?, assignment)?;
    let assignment = assignment.clone();
    Ok(record("unpermute", [y.into()], sum, move |dy, _| Ok([Some(gather(dy, &assignment)?)])))
}

/// Sorts router weights, f32 [t, k], by expert: f32 [n], 0 for dropped slots.
pub fn permute_weights(weights: &Tensor, assignment: &ExpertAssignment) -> Result<Tensor> {
    let (t, k) = (assignment.n_tokens(), assignment.top_k());
    if weights.dtype() != DType::F32 || weights.dims() != [t, k] {
        bail!("permute_weights: want f32 weights [{t}, {k}], got {:?} {:?}", weights.dtype(), weights.dims())
    }
    let sorted = values_of_rows(&weights.contiguous()?, assignment)?;
    let assignment = assignment.clone();
    Ok(record("permute_weights", [weights.into()], sorted, move |dy, _| {
        Ok([Some(values_of_slots(dy, &assignment)?.reshape((t, k))?)])
    }))
}

/// Sorts the keys of slots, i64 [t, k], by expert: i64 [n]. A row of padding gets the key of any slot.
pub fn permute_dropout_keys(keys: &Tensor, assignment: &ExpertAssignment) -> Result<Tensor> {
    let (t, k) = (assignment.n_tokens(), assignment.top_k());
    if keys.dtype() != DType::I64 || keys.dims() != [t, k] {
        bail!("permute_dropout_keys: want i64 keys [{t}, {k}], got {:?} {:?}", keys.dtype(), keys.dims())
    }
    if t * k == 0 {
        return Tensor::zeros(assignment.n_rows(), DType::I64, keys.device());
    }
    keys.flatten_all()?.index_select(&assignment.order.minimum((t * k - 1) as u32)?, 0)
}

/// Returns the cost of `permute`'s forward or backward with `n_elements` = n * d elements: the recomputed output.
///
/// Its input is saved by the ops that made it; [`LinearInput::Recomputed`](crate::LinearInput) describes its output.
pub fn permute_cost(n_elements: u64, dtype: DType) -> Cost {
    Cost { scratch_bytes: bytes(n_elements, dtype), ..Cost::default() }
}

fn gather(x: &Tensor, assignment: &ExpertAssignment) -> Result<Tensor> {
    let n_rows = assignment.n_rows();
    on_device!("permute", x, {
        cpu => moved("permute", x, assignment, n_rows, cpu::gather),
        cuda => cuda::moved(x, assignment, cuda::Direction::ToRows),
    })
}

fn sum_slots(x: &Tensor, assignment: &ExpertAssignment) -> Result<Tensor> {
    let n_tokens = assignment.n_tokens();
    on_device!("unpermute", x, {
        cpu => moved("unpermute", x, assignment, n_tokens, cpu::sum_slots),
        cuda => cuda::moved(x, assignment, cuda::Direction::FromRows),
    })
}

/// Computes an output of `n_rows` rows as wide as those of x, on the CPU.
fn moved(
    op: &'static str,
    x: &Tensor,
    assignment: &ExpertAssignment,
    n_rows: usize,
    kernel: impl FnOnce(Floats<'_>, FloatsMut<'_>, usize, Permutation<'_>),
) -> Result<Tensor> {
    let d = x.dims()[1];
    let mut y = FloatBuf::unwritten(x.dtype(), n_rows * d)?;
    let x = host(op, x)?;
    let x = x.floats()?;
    with_permutation(assignment, |permutation| {
        kernel(x, y.view(), d, permutation);
        Ok(())
    })?;
    Ok(storage::tensor(y, (n_rows, d)))
}

fn values_of_rows(of_slots: &Tensor, assignment: &ExpertAssignment) -> Result<Tensor> {
    on_device!("permute_weights", of_slots, {
        cpu => moved_values(of_slots, assignment, cpu::values_of_rows),
        cuda => cuda::moved_values(of_slots, assignment, cuda::Direction::ToRows),
    })
}

fn values_of_slots(of_rows: &Tensor, assignment: &ExpertAssignment) -> Result<Tensor> {
    on_device!("permute_weights", of_rows, {
        cpu => moved_values(of_rows, assignment, cpu::values_of_slots),
        cuda => cuda::moved_values(of_rows, assignment, cuda::Direction::FromRows),
    })
}

/// Computes one f32 per row or slot on the CPU.
fn moved_values(
    values: &Tensor,
    assignment: &ExpertAssignment,
    kernel: impl FnOnce(&[f32], Permutation<'_>) -> Vec<f32>,
) -> Result<Tensor> {
    let host = host("permute_weights", values)?;
    let from = host.slice()?;
    let moved = with_permutation(assignment, |permutation| Ok(kernel(from, permutation)))?;
    let n = moved.len();
    Tensor::from_vec(moved, n, values.device())
}

/// Calls `f` with the elements of an assignment on the CPU.
fn with_permutation<T>(assignment: &ExpertAssignment, f: impl FnOnce(Permutation<'_>) -> Result<T>) -> Result<T> {
    const OP: &str = "permute";
    let [order, rows, offsets] = [&assignment.order, &assignment.rows, &assignment.offsets].map(|x| host(OP, x));
    let (order, rows, offsets) = (order?, rows?, offsets?);
    let n_kept = offsets.slice::<u32>()?.last().map_or(0, |end| *end as usize);
    f(Permutation { order: order.slice()?, rows: rows.slice()?, n_kept, top_k: assignment.top_k() })
}

fn check(op: &str, x: &Tensor, n_rows: usize) -> Result<()> {
    check_dtype(op, "the input", x.dtype())?;
    if x.rank() != 2 || x.dims()[0] != n_rows {
        bail!("{op}: want an input [{n_rows}, d] for this assignment, got {:?}", x.dims())
    }
    Ok(())
}
