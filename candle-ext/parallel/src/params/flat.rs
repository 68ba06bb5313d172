//! A flat run of weights as the ops read them, and the gradients of one.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::Pending;
use candlewick_ops::{Buffer, GradSink, add, copy_into, send_into, zero_};

use super::Home;
use super::sharing::{Sharded, Sharing};

/// A flat run of weights: whole all the time, or gathered from the shares of all ranks, and from the host, when it is wanted.
pub(crate) struct Weights {
    /// What ops have views of.
    pub(crate) all: Buffer,
    /// This rank's share: a part of `all` where that stays. It may be in the host's memory.
    pub(crate) own: Tensor,
    stays: bool,
    /// What computes.
    device: Device,
    coming: Mutex<Option<Pending>>,
}

impl Weights {
    /// Makes a run of `n` zeros, padded as `sharing` wants it.
    pub(crate) fn zeros(n: usize, dtype: DType, device: &Device, home: Home, sharing: &Sharing) -> Result<Self> {
        let own = sharing.own(n);
        let stays = sharing.sharded != Sharded::Weights && home == Home::OnDevice;
        let (all, own) = match stays {
            true => {
                let all = Tensor::zeros(n, dtype, device)?;
                let own = all.narrow(0, own.start, own.len())?;
                (Buffer::of(all), own)
            }
            false => (Buffer::away(n, dtype), Tensor::zeros(own.len(), dtype, home.memory(device))?),
        };
        Ok(Self { all, own, stays, device: device.clone(), coming: Mutex::default() })
    }

    /// Begins to gather what is away.
    pub(crate) fn prefetch(&self, sharing: &Sharing) -> Result<()> {
        let mut coming = self.coming.lock().unwrap_or_else(PoisonError::into_inner);
        if coming.is_none() && !self.all.is_at_hand() {
            *coming = Some(sharing.shards.start_all_gather(&self.own_on_device()?)?);
        }
        Ok(())
    }

    /// Tells whether all of the run is on the device all the time.
    pub(crate) fn stays(&self) -> bool {
        self.stays
    }

    fn own_on_device(&self) -> Result<Tensor> {
        if self.own.device().same_device(&self.device) {
            return Ok(self.own.clone());
        }
        let own = Tensor::zeros(self.own.shape(), self.own.dtype(), &self.device)?;
        send_into(&own, &self.own)?;
        Ok(own)
    }

    /// Sees to it that all of it is at hand.
    pub(crate) fn fetch(&self, sharing: &Sharing) -> Result<()> {
        self.prefetch(sharing)?;
        match self.coming.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(coming) => self.all.put(coming.wait()?),
            None => Ok(()),
        }
    }

    /// Lets go of what the other ranks have, or the host has.
    pub(crate) fn release(&self) {
        if !self.stays {
            self.all.take();
        }
    }

    /// Tells the other ranks that this one's share has changed, and learns what theirs is now.
    pub(crate) fn publish(&self, sharing: &Sharing) -> Result<()> {
        if !self.stays {
            // What is gathered or on its way is of before.
            self.coming.lock().unwrap_or_else(PoisonError::into_inner).take();
            self.all.take();
            return Ok(());
        }
        let gathered = sharing.shards.all_gather(&self.own)?;
        // Alone, a rank gets back what it gave.
        if gathered.id() == self.own.id() { Ok(()) } else { copy_into(&self.all.get()?, &gathered) }
    }
}

/// The gradients of a flat run of weights.
pub(crate) struct Grads {
    /// Where backward adds: this rank's gradients, of the whole run.
    pub(crate) all: Buffer,
    /// This rank's share of their sums over the ranks: a part of `all` where that stays, else made when it is wanted.
    pub(crate) own: Buffer,
    /// Gradients of matrices, which ops overwrite in the first micro-batch of a step. All lie before `n_matrices`.
    matrices: Vec<GradSink>,
    n_matrices: usize,
    stays: bool,
    n: usize,
    dtype: DType,
    device: Device,
}

impl Grads {
    pub(crate) fn zeros(n: usize, dtype: DType, device: &Device, sharing: &Sharing) -> Result<Self> {
        let own = sharing.own(n);
        let stays = sharing.sharded == Sharded::Optimizer;
        let (all, own) = if stays {
            let all = Tensor::zeros(n, dtype, device)?;
            let own = all.narrow(0, own.start, own.len())?;
            (Buffer::of(all), Buffer::of(own))
        } else {
            (Buffer::away(n, dtype), Buffer::away(own.len(), dtype))
        };
        let (matrices, n_matrices) = (Vec::new(), 0);
        Ok(Self { all, own, matrices, n_matrices, stays, n, dtype, device: device.clone() })
    }

    /// Leaves it to the ops to overwrite these gradients, the first `n_elements` of the run: they are not zeroed before a step.
    /// Gradients that do not stay are new zeros in every micro-batch.
    pub(crate) fn overwrite(&mut self, matrices: Vec<GradSink>, n_elements: usize) {
        if self.stays {
            (self.matrices, self.n_matrices) = (matrices, n_elements);
        }
    }

    /// Tells whether this rank's gradients add up in place, so that they need to be summed over the ranks but once a step.
    pub(crate) fn stay(&self) -> bool {
        self.stays
    }

    /// Discards all gradients: the next backward writes them.
    pub(crate) fn clear(&self) -> Result<()> {
        if !self.stays {
            self.own.take();
            return Ok(());
        }
        self.matrices.iter().for_each(GradSink::reset);
        let n_others = self.n - self.n_matrices;
        if n_others == 0 { Ok(()) } else { zero_(&self.all.get()?.narrow(0, self.n_matrices, n_others)?) }
    }

    /// Zeroes the gradients of matrices that no op has written.
    fn complete(&self) -> Result<()> {
        self.matrices.iter().try_for_each(|matrix| matrix.grad().map(drop))
    }

    /// Sees to it that backward has where to add.
    pub(crate) fn open(&self) -> Result<()> {
        match self.all.is_at_hand() {
            true => Ok(()),
            false => self.all.put(Tensor::zeros(self.n, self.dtype, &self.device)?),
        }
    }

    /// Takes what backward has added, to be summed over the ranks.
    pub(crate) fn close(&self) -> Result<Tensor> {
        self.complete()?;
        let all = self.all.get()?;
        if !self.stays {
            self.all.take();
        }
        Ok(all)
    }

    /// Takes this rank's share of the sum of what [`Grads::close`] gave on each rank.
    pub(crate) fn settle(&self, sum: Tensor) -> Result<()> {
        if self.stays {
            // Alone, a rank gets back what it gave.
            return if sum.id() == self.all.get()?.id() { Ok(()) } else { copy_into(&self.own.get()?, &sum) };
        }
        match self.own.take() {
            Some(before) => self.own.put(add(&before, &sum)?),
            None => self.own.put(sum),
        }
    }

    /// Returns this rank's share of the sums: zeros if there was no gradient.
    pub(crate) fn sums(&self) -> Result<Tensor> {
        self.complete()?;
        if !self.own.is_at_hand() {
            self.own.put(Tensor::zeros(self.own.len(), self.dtype, &self.device)?)?;
        }
        self.own.get()
    }
}
