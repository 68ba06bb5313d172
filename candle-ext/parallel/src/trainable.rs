//! The flat buffers of a unit's trainable parameters, and AdamW's step on them.
//!
//! Masters and moments lie with the weights, or on the host if a GPU has no room for them: then gradients come down,
//! AdamW updates the masters there, and what the ops read goes up.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};
use candlewick_ops::{AdamW, AdamWState, GradScaler, HostCopy, adamw, copy_into, send_into};

use crate::store::Formats;

/// Where masters and moments are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    /// On the device that computes.
    WithTheWeights,
    /// In the host's memory.
    Host,
}

pub(crate) struct Trainable {
    pub(crate) master: Tensor,
    /// The copy that the ops read: the master itself where it has that format and lies there.
    pub(crate) compute: Tensor,
    pub(crate) grad: Tensor,
    pub(crate) exp_avg: Tensor,
    pub(crate) exp_avg_sq: Tensor,
    pub(crate) home: Home,
    /// Where the parameters without weight decay begin.
    n_decayed: usize,
}

impl Trainable {
    /// Allocates buffers for `n` elements, all zero.
    pub(crate) fn new(n: usize, n_decayed: usize, formats: Formats, device: &Device, home: Home) -> Result<Self> {
        if ![DType::F32, formats.compute].contains(&formats.masters) {
            bail!("master weights in {:?} cannot be computed with in {:?}", formats.masters, formats.compute)
        }
        let state_device = match home {
            Home::WithTheWeights => device,
            Home::Host => &Device::Cpu,
        };
        let master = Tensor::zeros(n, formats.masters, state_device)?;
        let compute = match home {
            Home::WithTheWeights if formats.compute == formats.masters => master.clone(),
            _ => Tensor::zeros(n, formats.compute, device)?,
        };
        let moment = || Tensor::zeros(n, formats.moments, state_device);
        let grad = Tensor::zeros(n, formats.masters, device)?;
        Ok(Self { master, compute, grad, exp_avg: moment()?, exp_avg_sq: moment()?, home, n_decayed })
    }

    /// Rewrites what the ops read of `range` from the masters.
    pub(crate) fn refresh(&self, range: &Range<usize>) -> Result<()> {
        let part = |flat: &Tensor| flat.narrow(0, range.start, range.len());
        let (compute, master) = (part(&self.compute)?, part(&self.master)?);
        match self.home {
            Home::Host => send_into(&compute, &master.to_dtype(compute.dtype())?),
            Home::WithTheWeights if compute.dtype() != master.dtype() => copy_into(&compute, &master),
            Home::WithTheWeights => Ok(()),
        }
    }

    /// Takes the step where the weights are.
    pub(crate) fn step(&self, hyper: &AdamW, scaler: &GradScaler) -> Result<()> {
        let compute = (self.compute.dtype() != self.master.dtype()).then_some(&self.compute);
        self.update(hyper, scaler, &self.grad, compute)
    }

    /// Updates masters and moments by `grad`, and their copy in another format if there is one beside them.
    fn update(&self, hyper: &AdamW, scaler: &GradScaler, grad: &Tensor, compute: Option<&Tensor>) -> Result<()> {
        let exempt = AdamW { weight_decay: 0.0, ..*hyper };
        let n = self.master.elem_count();
        for (hyper, range) in [(hyper, 0..self.n_decayed), (&exempt, self.n_decayed..n)] {
            if range.is_empty() {
                continue;
            }
            let part = |flat: &Tensor| flat.narrow(0, range.start, range.len());
            let compute = compute.map(part).transpose()?;
            let state = AdamWState {
                master: &part(&self.master)?,
                grad: &part(grad)?,
                exp_avg: &part(&self.exp_avg)?,
                exp_avg_sq: &part(&self.exp_avg_sq)?,
                compute: compute.as_ref(),
            };
            adamw(hyper, scaler, state)?;
        }
        Ok(())
    }
}

/// Takes the step of what lies on the host. The verdict is waited for once; while one gradient is used, the next one is
/// on its way.
pub(crate) fn step_on_host(flats: &[&Trainable], hyper: &AdamW, scaler: &GradScaler) -> Result<()> {
    if flats.is_empty() {
        return Ok(());
    }
    let Some(scaler) = scaler.on_host()? else { return Ok(()) };
    let mut coming = None;
    for (i, flat) in flats.iter().enumerate() {
        let copy = match coming.take() {
            Some(copy) => copy,
            None => HostCopy::start(&flat.grad)?,
        };
        coming = flats.get(i + 1).map(|next| HostCopy::start(&next.grad)).transpose()?;
        let grad = copy.into_host()?;
        if flat.compute.dtype() == flat.master.dtype() {
            flat.update(hyper, &scaler, &grad, None)?;
            send_into(&flat.compute, &flat.master)?;
        } else {
            let compute = Tensor::zeros(flat.compute.shape(), flat.compute.dtype(), &Device::Cpu)?;
            flat.update(hyper, &scaler, &grad, Some(&compute))?;
            send_into(&flat.compute, &compute)?;
        }
    }
    Ok(())
}
