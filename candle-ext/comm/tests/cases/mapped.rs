//! Process group that maps its inputs and outputs.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candlewick_comm::{Collective, Pending, Recv, Reduce, Result};

type Before = Arc<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;
type After = Arc<dyn Fn(Tensor) -> Result<Tensor> + Send + Sync>;

/// Process group that applies `before` to each input of `group` and `after` to each result.
pub(crate) struct MappedGroup {
    group: Arc<dyn Collective>,
    before: Before,
    after: After,
}

impl MappedGroup {
    pub(crate) fn new(
        group: Arc<dyn Collective>,
        before: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
        after: impl Fn(Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        Self { group, before: Arc::new(before), after: Arc::new(after) }
    }

    fn pass(&self, x: &Tensor, operation: impl FnOnce(&Tensor) -> Result<Pending>) -> Result<Pending> {
        let after = Arc::clone(&self.after);
        Ok(operation(&(self.before)(x)?)?.then(move |y| after(y)))
    }
}

impl Collective for MappedGroup {
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
        self.pass(x, |x| self.group.start_all_reduce(x, op))
    }

    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        self.pass(x, |x| self.group.start_all_gather(x))
    }

    fn start_reduce_scatter(&self, x: &Tensor) -> Result<Pending> {
        self.pass(x, |x| self.group.start_reduce_scatter(x))
    }

    fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Pending> {
        self.pass(x, |x| self.group.start_all_to_all(x, send, recv))
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        self.pass(x, |x| self.group.start_broadcast(x, root))
    }

    fn start_send_recv(
        &self,
        x: Option<&Tensor>,
        to: Option<usize>,
        recv: Option<Recv>,
    ) -> Result<Pending<Option<Tensor>>> {
        let (x, after) = (x.map(|x| (self.before)(x)).transpose()?, Arc::clone(&self.after));
        Ok(self.group.start_send_recv(x.as_ref(), to, recv)?.then(move |y| y.map(|y| after(y)).transpose()))
    }

    fn barrier(&self) -> Result<()> {
        self.group.barrier()
    }

    fn split(&self, name: &str, lists: &[Vec<usize>]) -> Result<Arc<dyn Collective>> {
        let (before, after) = (Arc::clone(&self.before), Arc::clone(&self.after));
        let group = self.group.split(name, lists)?;
        // A group of one returns its input unmapped.
        if group.size() == 1 {
            return Ok(group);
        }
        Ok(Arc::new(Self { group, before, after }))
    }
}
