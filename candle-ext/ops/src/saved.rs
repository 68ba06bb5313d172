//! Tensors that ops save between forward and backward.

use std::any::{Any, type_name};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use candle_core::{Result, Tensor, bail};

/// Treatment of the outputs of gated activations (swiglu), the widest tensors of a block.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum GatedOutputs {
    /// Recomputed by backward.
    #[default]
    Recomputed,
    /// Saved. This costs no peak memory if backward follows its forward at once.
    Saved,
}

/// An activation saved for backward.
pub(crate) enum Saved {
    Tensor(Tensor),
    Recomputable(Rc<Recomputable>),
}

/// An activation that backward recomputes on first use and caches until its last use.
pub(crate) struct Recomputable {
    compute: Box<dyn Fn() -> Result<Tensor>>,
    cached: RefCell<Option<Tensor>>,
}

/// Outputs of expensive ops, saved by a block's first forward for its second forward, which records the tape.
///
/// They are keyed by the op's name and its occurrence in the forward.
#[derive(Default)]
pub struct SavedOutputs(BTreeMap<&'static str, VecDeque<SavedOutput>>);

type SavedOutput = (Tensor, Rc<dyn Any>);

/// Phase of a block's forward that runs twice.
pub(crate) enum ReplayPhase {
    /// First forward: saves outputs, records nothing.
    First(SavedOutputs),
    /// Second forward: takes saved outputs, is recorded.
    Second(SavedOutputs),
}

impl Saved {
    /// Returns the activation.
    pub(crate) fn get(&self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::Recomputable(recomputable) => recomputable.get(),
        }
    }
}

impl Recomputable {
    pub(crate) fn new(compute: impl Fn() -> Result<Tensor> + 'static) -> Self {
        Self { compute: Box::new(compute), cached: RefCell::new(None) }
    }

    fn get(&self) -> Result<Tensor> {
        let mut cached = self.cached.borrow_mut();
        match &*cached {
            Some(tensor) => Ok(tensor.clone()),
            None => Ok(cached.insert((self.compute)()?).clone()),
        }
    }
}

impl SavedOutputs {
    /// Saves the output of the next occurrence of `op`, with the state that its backward needs.
    pub(crate) fn save<S: 'static>(&mut self, op: &'static str, output: &Tensor, state: &Rc<S>) {
        self.0.entry(op).or_default().push_back((output.clone(), state.clone()));
    }

    /// Takes the output of the next occurrence of `op`; `None` if the first forward saved none.
    pub(crate) fn take<S: 'static>(&mut self, op: &str) -> Result<Option<(Tensor, Rc<S>)>> {
        let Some((output, state)) = self.0.get_mut(op).and_then(VecDeque::pop_front) else { return Ok(None) };
        match state.downcast() {
            Ok(state) => Ok(Some((output, state))),
            Err(_) => bail!("replay: {op} saved another state in the first forward than `{}`", type_name::<S>()),
        }
    }

    /// Fails if the second forward left outputs of the first.
    pub(crate) fn check_used(&self) -> Result<()> {
        let unused = self.0.iter().filter(|(_, outputs)| !outputs.is_empty());
        let unused: Vec<String> = unused.map(|(op, outputs)| format!("{} of {op}", outputs.len())).collect();
        if !unused.is_empty() {
            bail!("replay: the second forward left saved outputs unused: {}", unused.join(", "))
        }
        Ok(())
    }
}
