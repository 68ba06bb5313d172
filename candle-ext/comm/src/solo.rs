//! Process group of one rank.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::{Collective, Error, Pending, Recv, Reduce, Result, arguments};

/// Process group of one rank. Every operation returns its input.
///
/// A result shares the storage of its input, and is the same tensor if the input has no gradient.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Collective for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn check_device(&self, _device: &Device) -> Result<()> {
        Ok(())
    }

    fn leaves_tensors_in_place(&self) -> bool {
        true
    }

    fn start_all_reduce(&self, x: &Tensor, _op: Reduce) -> Result<Pending> {
        Ok(Pending::ready(x.detach()))
    }

    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        arguments::rows("all_gather", x)?;
        Ok(Pending::ready(x.detach()))
    }

    fn start_reduce_scatter(&self, x: &Tensor) -> Result<Pending> {
        arguments::shard_rows(x, 1)?;
        Ok(Pending::ready(x.detach()))
    }

    fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Pending> {
        arguments::counts(x, send, recv, 1)?;
        if send != recv {
            let why = format!("rank 0 sends itself {} rows and expects {}", send[0], recv[0]);
            return Err(Error::Call { op: "all_to_all", why });
        }
        Ok(Pending::ready(x.detach()))
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        arguments::peer("broadcast", root, 1)?;
        Ok(Pending::ready(x.detach()))
    }

    fn start_send_recv(
        &self,
        x: Option<&Tensor>,
        to: Option<usize>,
        recv: Option<Recv>,
    ) -> Result<Pending<Option<Tensor>>> {
        arguments::pair(x, to, recv.as_ref(), 0, 1)?;
        Ok(Pending::ready(None))
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn split(&self, _name: &str, lists: &[Vec<usize>]) -> Result<Arc<dyn Collective>> {
        arguments::list_of(lists, 0, 1)?;
        Ok(Arc::new(Self))
    }
}
