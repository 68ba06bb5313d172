//! A group of which one operation lies: it gives a result that only this rank's part went into.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candlewick_comm::{Collective, Pending, Reduce, Result, Solo};

/// What lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    AllReduce,
    ReduceScatter,
    AllGather,
    AllToAll,
    /// Zeros arrive.
    SendRecv,
}

pub(crate) struct Lying {
    pub(crate) group: Arc<dyn Collective>,
    pub(crate) lie: Option<Lie>,
}

impl Lying {
    /// What an operation gives that asked nobody.
    fn made_up(x: &Tensor) -> Result<Pending> {
        Solo.start_all_reduce(x, Reduce::Sum)
    }
}

impl Collective for Lying {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn check_device(&self, device: &Device) -> Result<()> {
        self.group.check_device(device)
    }

    fn start_all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Pending> {
        match self.lie {
            Some(Lie::AllReduce) => Self::made_up(x),
            _ => self.group.start_all_reduce(x, op),
        }
    }

    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        match self.lie {
            Some(Lie::AllGather) => Self::made_up(&Tensor::cat(&vec![x; self.size()], 0)?),
            _ => self.group.start_all_gather(x),
        }
    }

    fn start_reduce_scatter(&self, x: &Tensor) -> Result<Pending> {
        match self.lie {
            Some(Lie::ReduceScatter) => {
                let share = x.dim(0)? / self.size();
                Self::made_up(&x.narrow(0, self.rank() * share, share)?)
            }
            _ => self.group.start_reduce_scatter(x),
        }
    }

    fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Pending> {
        match self.lie {
            Some(Lie::AllToAll) => Self::made_up(x),
            _ => self.group.start_all_to_all(x, send, recv),
        }
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        self.group.start_broadcast(x, root)
    }

    fn start_send_recv(
        &self,
        x: Option<&Tensor>,
        to: Option<usize>,
        from: Option<usize>,
    ) -> Result<Pending<Option<Tensor>>> {
        match (self.lie, x) {
            (Some(Lie::SendRecv), Some(x)) => self.group.start_send_recv(Some(&x.zeros_like()?), to, from),
            _ => self.group.start_send_recv(x, to, from),
        }
    }

    fn barrier(&self) -> Result<()> {
        self.group.barrier()
    }

    fn split(&self, name: &str, lists: &[Vec<usize>]) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(Self { group: self.group.split(name, lists)?, lie: self.lie }))
    }
}
