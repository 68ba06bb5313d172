//! How an op enters candle's autograd: the output is computed first, then recorded with a closure.
//!
//! candle knows custom ops with one to three inputs and one output, and no seed but ones:
//! [`record`] wraps the former, [`cotangent`] gives the latter.

use std::sync::{Mutex, PoisonError};

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, bail,
};

use crate::span::span;

/// Makes a tensor of an output that is already computed, with `backward` as its vjp.
///
/// `backward(y, dy)` gets the output and its cotangent and returns a gradient for each input.
/// `None` means zero. It runs only if an input is tracked; if none is, the result is untracked and
/// the closure, with all that it saved, is dropped here.
pub fn record<const N: usize>(
    name: &'static str,
    inputs: [&Tensor; N],
    out: (Storage, Shape),
    backward: impl Fn(&Tensor, &Tensor) -> Result<[Option<Tensor>; N]> + Send + Sync + 'static,
) -> Result<Tensor> {
    const { assert!(N >= 1 && N <= 3, "candle records ops of one to three inputs") };
    let op =
        Recorded { name, out: Mutex::new(Some(out)), backward: Box::new(move |y, dy| Ok(backward(y, dy)?.into())) };
    match inputs.as_slice() {
        [a] => a.apply_op1(op),
        [a, b] => a.apply_op2(b, op),
        [a, b, c] => a.apply_op3(b, c, op),
        _ => unreachable!("N was checked at compile time"),
    }
}

/// Gives a scalar whose backward seeds `y` with exactly `dy`. Scalars may be added to seed several.
///
/// Its value is zero. `backward()` on a candle tensor starts from ones, so this is the way in for a
/// gradient that comes from elsewhere.
pub fn cotangent(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    if y.shape() != dy.shape() || y.dtype() != dy.dtype() {
        bail!(
            "cotangent: the gradient has shape {:?} and dtype {:?}, the output {:?} and {:?}",
            dy.shape(),
            dy.dtype(),
            y.shape(),
            y.dtype()
        )
    }
    let zero = Tensor::zeros((), DType::F32, y.device())?;
    let storage = {
        let (storage, layout) = zero.storage_and_layout();
        storage.try_clone(layout)?
    };
    let dy = dy.detach();
    record("cotangent", [y], (storage, Shape::from(())), move |_, _| Ok([Some(dy.clone())]))
}

type Backward = Box<dyn Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync>;

struct Recorded {
    name: &'static str,
    /// Handed to candle once, by the forward that `apply_op` calls at once.
    out: Mutex<Option<(Storage, Shape)>>,
    backward: Backward,
}

impl Recorded {
    fn take(&self) -> Result<(Storage, Shape)> {
        let out = self.out.lock().unwrap_or_else(PoisonError::into_inner).take();
        match out {
            Some(out) => Ok(out),
            None => bail!("{}: a recorded op cannot be run a second time", self.name),
        }
    }

    fn take_cpu(&self) -> Result<(CpuStorage, Shape)> {
        match self.take()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => bail!("{}: the output is on another device than the inputs", self.name),
        }
    }

    fn take_cuda(&self) -> Result<(CudaStorage, Shape)> {
        match self.take()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => bail!("{}: the output is on another device than the inputs", self.name),
        }
    }

    /// Runs the closure and writes out the zeros that candle demands for tracked inner nodes.
    fn vjp<const N: usize>(&self, args: [&Tensor; N], y: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; N]> {
        let _span = span(self.name, "backward");
        let mut grads = (self.backward)(y, &dy.contiguous()?)?.into_iter();
        let mut filled = [const { None }; N];
        for (arg, slot) in args.into_iter().zip(&mut filled) {
            *slot = match grads.next().flatten() {
                Some(grad) => Some(grad),
                None if arg.track_op() && !arg.is_variable() => Some(arg.zeros_like()?.detach()),
                None => None,
            };
        }
        Ok(filled)
    }
}

impl CustomOp1 for Recorded {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.take_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.take_cuda()
    }

    fn bwd(&self, arg: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let [grad] = self.vjp([arg], y, dy)?;
        Ok(grad)
    }
}

impl CustomOp2 for Recorded {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.take_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.take_cuda()
    }

    fn bwd(&self, a: &Tensor, b: &Tensor, y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok(self.vjp([a, b], y, dy)?.into())
    }
}

impl CustomOp3 for Recorded {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.take_cuda()
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok(self.vjp([a, b, c], y, dy)?.into())
    }
}
