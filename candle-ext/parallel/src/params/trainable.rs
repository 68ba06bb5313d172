//! The flat buffers of a unit's trainable parameters, and AdamW's step on them.
//!
//! Masters and moments lie with the weights, or on the host if a GPU has no room for them: then gradients come down,
//! AdamW updates the masters there, and what the ops read goes up.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};
use candlewick_ops::{AdamW, AdamWState, GradScaler, HostCopy, adamw, copy_into, send_into, sum_of_squares};

use super::flat::{Grads, Weights};
use super::sharing::Sharing;
use super::{Formats, Home, Homes};

/// A flat run of trained weights with all that training keeps of this rank's share.
pub(crate) struct Trainable {
    /// What the ops read.
    pub(crate) weights: Weights,
    pub(crate) grads: Grads,
    /// This rank's share, as are the moments. It is the weights' own where they have one format and place.
    pub(crate) master: Tensor,
    pub(crate) exp_avg: Tensor,
    pub(crate) exp_avg_sq: Tensor,
    pub(crate) homes: Homes,
    /// Where this rank's share lies in the run.
    pub(crate) own: Range<usize>,
    /// The elements of the run of which other tensor parallel ranks have others.
    pub(crate) parts: Vec<Range<usize>>,
    /// Those whose gradients are to be summed over these ranks.
    pub(crate) summed: Vec<Range<usize>>,
    /// Where the parameters without weight decay begin in the run.
    n_decayed: usize,
}

impl Trainable {
    /// Allocates buffers for `n` elements, all zero.
    pub(crate) fn zeros(
        n: usize,
        n_decayed: usize,
        formats: Formats,
        (device, homes): (&Device, Homes),
        sharing: &Sharing,
    ) -> Result<Self> {
        let Formats { compute, masters, moments } = formats;
        if ![DType::F32, compute].contains(&masters) {
            bail!("master weights in {masters:?} cannot be computed with in {compute:?}")
        }
        let state_device = homes.optimizer.memory(device);
        let own = sharing.own(n);
        let is_one = compute == masters && homes.weights == homes.optimizer;
        let weights = Weights::zeros(n, compute, device, homes.weights, sharing)?;
        let master = if is_one { weights.own.clone() } else { Tensor::zeros(own.len(), masters, state_device)? };
        let moment = || Tensor::zeros(own.len(), moments, state_device);
        let grads = Grads::zeros(n, masters, device, sharing)?;
        let (exp_avg, exp_avg_sq, parts, summed) = (moment()?, moment()?, Vec::new(), Vec::new());
        Ok(Self { weights, grads, master, exp_avg, exp_avg_sq, homes, own, parts, summed, n_decayed })
    }

    /// Returns views of this rank's share of the gradients of which each tensor parallel rank has computed a part.
    pub(crate) fn parts_of_sums(&self) -> Result<Vec<Tensor>> {
        let sums = self.grads.sums()?;
        self.within(&self.summed).map(|piece| sums.narrow(0, piece.start, piece.len())).collect()
    }

    /// Returns the sum of the squares of this rank's share of the gradients, f64: of all of it, or of what no other tensor
    /// parallel rank has.
    pub(crate) fn squares(&self, is_first: bool) -> Result<Tensor> {
        let sums = self.grads.sums()?;
        if is_first {
            return sum_of_squares(&sums);
        }
        let none = Tensor::zeros((), DType::F64, sums.device())?;
        let parts = self.within(&self.parts);
        parts
            .map(|piece| sum_of_squares(&sums.narrow(0, piece.start, piece.len())?))
            .try_fold(none, |sum, part| sum + part?)
    }

    /// What of these ranges of the run lies in this rank's share, counted from its beginning.
    fn within<'a>(&'a self, ranges: &'a [Range<usize>]) -> impl Iterator<Item = Range<usize>> + 'a {
        let Range { start, end } = self.own;
        let pieces = ranges.iter().map(move |range| range.start.max(start)..range.end.min(end));
        pieces.filter(|piece| !piece.is_empty()).map(move |piece| piece.start - start..piece.end - start)
    }

    /// Rewrites what the ops read from the masters.
    pub(crate) fn refresh(&self, sharing: &Sharing) -> Result<()> {
        let own = &self.weights.own;
        match self.homes.optimizer {
            _ if self.has_one_copy() => {}
            Home::Host => send_into(own, &self.master.to_dtype(own.dtype())?)?,
            Home::OnDevice => copy_into(own, &self.master)?,
        }
        self.weights.publish(sharing)
    }

    /// Whether the ops read what the optimizer updates.
    pub(crate) fn has_one_copy(&self) -> bool {
        self.weights.own.dtype() == self.master.dtype() && self.homes.weights == self.homes.optimizer
    }

    /// Returns the masters of the whole run, on their device.
    pub(crate) fn whole_master(&self, sharing: &Sharing) -> Result<Tensor> {
        Ok(sharing.shards.all_gather(&self.master)?)
    }

    /// Takes the step where the weights are.
    pub(crate) fn step(&self, hyper: &AdamW, scaler: &GradScaler) -> Result<()> {
        let own = &self.weights.own;
        let compute = (!self.has_one_copy()).then_some(own);
        self.update(hyper, scaler, &self.grads.sums()?, compute)
    }

    /// Updates masters and moments by `grad`, and their copy in another format if there is one beside them.
    fn update(&self, hyper: &AdamW, scaler: &GradScaler, grad: &Tensor, compute: Option<&Tensor>) -> Result<()> {
        let exempt = AdamW { weight_decay: 0.0, ..*hyper };
        let border = self.n_decayed.clamp(self.own.start, self.own.end) - self.own.start;
        for (hyper, range) in [(hyper, 0..border), (&exempt, border..self.own.len())] {
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
            None => HostCopy::start(&flat.grads.sums()?)?,
        };
        coming = flats.get(i + 1).map(|next| HostCopy::start(&next.grads.sums()?)).transpose()?;
        let grad = copy.into_host()?;
        let own = &flat.weights.own;
        if flat.homes.weights == Home::Host {
            flat.update(hyper, &scaler, &grad, (!flat.has_one_copy()).then_some(own))?;
        } else if own.dtype() == flat.master.dtype() {
            flat.update(hyper, &scaler, &grad, None)?;
            send_into(own, &flat.master)?;
        } else {
            let compute = Tensor::zeros(own.shape(), own.dtype(), &Device::Cpu)?;
            flat.update(hyper, &scaler, &grad, Some(&compute))?;
            send_into(own, &compute)?;
        }
    }
    Ok(())
}
