//! `swiglu` on CUDA: launches of `kernel.cu`.

use candle_core::{Result, Tensor};

use super::output_grad::OutputGrad;
use super::source::{GateUp, Gated};
use crate::cuda::{Arg, DeviceAddress, FLAT_THREADS, Gpu, Out, address, gpu, kernels, suffix};

kernels!("swiglu");

const OP: &str = "swiglu";
/// Elements per thread, approximately.
const PER_THREAD: usize = 8;
/// Most blocks along the rows of a grid.
const MOST_ROWS: usize = 65_535;

/// Returns y.
pub(super) fn forward(source: &GateUp) -> Result<Out> {
    let (on, like, gated) = (gpu(OP, source.tensor())?, source.tensor(), source.gated());
    let y = Out::new(on, like.dtype(), gated.n_rows * gated.width)?;
    let [gate, up] = addresses(source)?;
    let args = [Arg::Address(gate), Arg::Address(up), Arg::Address(y.address)];
    // SAFETY: gate and up have n_rows rows of `width` elements, `stride` apart; y is contiguous.
    unsafe { launch(on, &format!("forward_{}", suffix(OP, like.dtype())?), &args, gated)? };
    Ok(y)
}

/// Returns the gradient of each tensor of the source. y may overwrite dy.
pub(super) fn backward(source: &GateUp, dy: &Tensor, output_grad: OutputGrad) -> Result<Vec<Tensor>> {
    let (on, like, gated) = (gpu(OP, source.tensor())?, source.tensor(), source.gated());
    let outs: Vec<Out> = source.tensors().map(|x| Out::new(on, x.dtype(), x.elem_count())).collect::<Result<_>>()?;
    let [gate, up] = addresses(source)?;
    let d_gate = outs[0].address;
    let d_up = outs.get(1).map_or_else(|| d_gate + (up - gate), |d_up| d_up.address);
    let dy = address(OP, dy)?;
    let y = if output_grad == OutputGrad::BecomesOutput { dy } else { 0 };
    let args = [gate, up, dy, d_gate, d_up, y].map(Arg::Address);
    // SAFETY: as above; the gradients have the layout of gate and up, dy and y that of the output. A zero address means none.
    unsafe { launch(on, &format!("backward_{}", suffix(OP, like.dtype())?), &args, gated)? };
    Ok(outs.into_iter().zip(source.tensors()).map(|(out, x)| out.into_tensor(x.shape())).collect())
}

/// Returns the addresses of gate and up.
fn addresses(source: &GateUp) -> Result<[DeviceAddress; 2]> {
    match source {
        GateUp::Two(gate, up) => Ok([address(OP, gate)?, address(OP, up)?]),
        GateUp::Joined(joined) => {
            let gate = address(OP, joined)?;
            Ok([gate, gate + (source.gated().width * joined.dtype().size_in_bytes()) as DeviceAddress])
        }
    }
}

/// Launches a kernel over all rows.
///
/// # Safety
///
/// `args` must be the kernel's parameters before its sizes.
unsafe fn launch(on: Gpu, name: &str, args: &[Arg], Gated { n_rows, width, stride }: Gated) -> Result<()> {
    let sizes = [Arg::I32(n_rows as i32), Arg::I64(width as i64), Arg::I64(stride as i64)];
    let grid = [width.div_ceil(PER_THREAD * FLAT_THREADS), n_rows.min(MOST_ROWS), 1];
    // SAFETY: the caller's contract.
    unsafe { KERNELS.launch(on, name, grid, FLAT_THREADS, &[args, &sizes].concat()) }
}
