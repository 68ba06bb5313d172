//! `permute` and `unpermute` on CUDA: launches of `permute.cuh`.

use candle_core::{DType, Result, Tensor};

use crate::cuda::{Arg, Out, address, gpu, suffix};
use crate::moe::KERNELS;
use crate::moe::assignment::ExpertAssignment;

const OP: &str = "permute";
const THREADS: usize = 256;

/// Direction of a permutation.
#[derive(Clone, Copy)]
pub(super) enum Direction {
    /// From tokens or slots to rows.
    ToRows,
    /// From rows to tokens or slots.
    FromRows,
}

/// Copies the rows of tokens to those of their slots, or sums the rows of slots per token.
pub(super) fn moved(x: &Tensor, assignment: &ExpertAssignment, direction: Direction) -> Result<Tensor> {
    let (on, d) = (gpu(OP, x)?, x.dims()[1]);
    let (name, index, n_out) = match direction {
        Direction::ToRows => ("gather", &assignment.order, assignment.n_rows()),
        Direction::FromRows => ("sum_slots", &assignment.rows, assignment.n_tokens()),
    };
    let y = Out::new(on, x.dtype(), n_out * d)?;
    let args = [
        Arg::Address(address(OP, x)?),
        Arg::Address(address(OP, index)?),
        Arg::Address(address(OP, &assignment.offsets)?),
        Arg::Address(y.address),
        Arg::I32(assignment.n_experts() as i32),
        Arg::I32(assignment.top_k() as i32),
        Arg::I32(d as i32),
    ];
    let threads = (d / 8).next_multiple_of(32).clamp(32, THREADS);
    let name = format!("{name}_{}", suffix(OP, x.dtype())?);
    // SAFETY: x has a row of d elements per token or row, y one per row or token; the assignment names those of x.
    unsafe { KERNELS.launch(on, &name, [n_out, 1, 1], threads, &args)? };
    Ok(y.into_tensor((n_out, d)))
}

/// Moves one f32 per slot or row.
pub(super) fn moved_values(values: &Tensor, assignment: &ExpertAssignment, direction: Direction) -> Result<Tensor> {
    let on = gpu(OP, values)?;
    let (name, index, n_out) = match direction {
        Direction::ToRows => ("values_of_rows", &assignment.order, assignment.n_rows()),
        Direction::FromRows => ("values_of_slots", &assignment.rows, assignment.n_slots()),
    };
    let out = Out::new(on, DType::F32, n_out)?;
    let args = [
        Arg::Address(address(OP, values)?),
        Arg::Address(address(OP, index)?),
        Arg::Address(address(OP, &assignment.offsets)?),
        Arg::Address(out.address),
        Arg::I32(n_out as i32),
        Arg::I32(assignment.n_experts() as i32),
    ];
    // SAFETY: there is a value per slot or row; the assignment names them.
    unsafe { KERNELS.launch(on, name, [n_out.div_ceil(THREADS), 1, 1], THREADS, &args)? };
    Ok(out.into_tensor(n_out))
}
