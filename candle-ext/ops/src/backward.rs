//! State of a running backward pass, and the view of it that an op's backward gets.

use std::collections::HashMap;

use candle_core::{DType, Result, Tensor, TensorId, bail};

/// Backward of one op: takes the contiguous gradient of its output and returns the gradients of its inputs.
pub(crate) type BackwardFn = Box<dyn FnOnce(&Tensor, &mut BackwardContext<'_>) -> Result<Vec<Option<Tensor>>>>;

/// Continuation of a started exchange: waits for it and returns the received tensor.
pub type PendingExchange = Box<dyn FnOnce() -> Result<Tensor>>;

type DeferredWork = Box<dyn FnOnce() -> Result<()>>;

/// State of one backward pass. A tape that runs its backward inside another tape's op has a state of its own.
pub(crate) struct BackwardState {
    /// Gradients accumulated so far, by tensor.
    pub(crate) grads: HashMap<TensorId, Tensor>,
    /// Gradients that an exchange in flight brings, by tensor, in the order of the exchanges.
    pending: Vec<(TensorId, PendingExchange)>,
    deferred: Vec<DeferredWork>,
}

/// An op's view of the running backward pass.
pub struct BackwardContext<'a> {
    state: &'a mut BackwardState,
    /// Tracked inputs of the op.
    inputs: &'a [Option<TensorId>],
    /// True for an op that reads the output of an exchange.
    defers: bool,
    /// Inputs whose accumulated gradient the op has taken.
    taken: Vec<usize>,
}

impl BackwardState {
    /// Starts from the gradient of the tape's output.
    pub(crate) fn new(output: TensorId, dy: Tensor) -> Self {
        Self { grads: HashMap::from([(output, dy)]), pending: Vec::new(), deferred: Vec::new() }
    }

    /// Waits for the next gradient in flight, of tensor `id` or of any, and returns it with its tensor.
    pub(crate) fn receive(&mut self, id: Option<TensorId>) -> Result<Option<(TensorId, Tensor)>> {
        let position = self.pending.iter().position(|(of, _)| id.is_none_or(|id| id == *of));
        let Some((id, pending)) = position.map(|position| self.pending.remove(position)) else { return Ok(None) };
        Ok(Some((id, pending()?)))
    }

    /// Runs the deferred work, in the order of its deferral.
    pub(crate) fn run_deferred(&mut self) -> Result<()> {
        std::mem::take(&mut self.deferred).into_iter().try_for_each(|work| work())
    }
}

impl<'a> BackwardContext<'a> {
    pub(crate) fn new(state: &'a mut BackwardState, inputs: &'a [Option<TensorId>], defers: bool) -> Self {
        Self { state, inputs, defers, taken: Vec::new() }
    }

    /// Takes the gradient already accumulated for input `input_idx`. The op must add its own gradient and return the
    /// sum.
    ///
    /// Returns `None` if there is no gradient yet, or if its dtype or shape differs.
    pub fn accumulated(&mut self, input_idx: usize, dtype: DType, shape: &[usize]) -> Result<Option<Tensor>> {
        let Some(id) = self.inputs.get(input_idx).copied().flatten() else { return Ok(None) };
        let fits = |grad: &Tensor| grad.dtype() == dtype && grad.dims() == shape;
        if !self.state.grads.get(&id).is_some_and(fits) {
            return Ok(None);
        }
        self.taken.push(input_idx);
        self.state.grads.remove(&id).map(|grad| grad.contiguous()).transpose()
    }

    /// Runs `work` while the next gradient exchange is in flight, or at once if no exchange follows.
    pub fn defer(&mut self, work: impl FnOnce() -> Result<()> + 'static) -> Result<()> {
        if !self.defers {
            return work();
        }
        self.state.deferred.push(Box::new(work));
        Ok(())
    }

    /// Returns true if [`defer`](Self::defer) runs its work later.
    pub fn defers(&self) -> bool {
        self.defers
    }

    /// Leaves the gradient of input `input_idx` to a started exchange; the op must return `None` for that input. Backward waits
    /// for the exchange when an op needs the gradient. Independent ops between compute meanwhile.
    pub fn receive_later(&mut self, input_idx: usize, pending: PendingExchange) -> Result<()> {
        match self.inputs.get(input_idx).copied().flatten() {
            Some(id) => self.state.pending.push((id, pending)),
            // Nothing needs the gradient, but the other ranks take part in the exchange.
            None => drop(pending()?),
        }
        Ok(())
    }

    pub(crate) fn run_deferred(&mut self) -> Result<()> {
        self.state.run_deferred()
    }

    /// Fails if the op took an accumulated gradient and returns none for that input.
    pub(crate) fn check_returned(&self, op: &str, grads: &[Option<Tensor>]) -> Result<()> {
        match self.taken.iter().find(|&&input_idx| grads[input_idx].is_none()) {
            Some(input_idx) => bail!("{op}: backward took the gradient of input {input_idx} and returned none"),
            None => Ok(()),
        }
    }
}
