//! Tensors that ops save between forward and backward.

use std::any::{Any, type_name};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use candle_core::{Result, Tensor, TensorId, bail};

#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::weight::Weight;

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
    /// Id of the activation in forward.
    id: TensorId,
    compute: Box<dyn Fn() -> Result<Tensor>>,
    cached: RefCell<Option<Tensor>>,
    /// Readers that wait for the backward of the op that computed the activation; `None` if that backward does not compute it.
    waiting: Option<RefCell<Vec<WaitingReader>>>,
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    norm: Option<NormInputs>,
}

/// Part of a reader's backward that reads an activation.
pub(crate) struct WaitingReader {
    /// Gradient of the activation after the reader's own was added. The reader allocated it and does not hold it.
    grad: TensorId,
    work: Box<dyn FnOnce() -> Result<()>>,
}

/// Inputs of a norm on a GPU, from which kernels compute its output where they quantize it.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) struct NormInputs {
    /// Input, contiguous, in the dtype of the output.
    pub(crate) x: Tensor,
    /// 1 / sqrt(mean(x^2) + eps) of each row, f32.
    pub(crate) rstd: Tensor,
    pub(crate) weight: Weight,
}

/// Outputs of expensive ops, saved by a block's first forward for its second forward, which records the tape.
///
/// They are keyed by the op's name and its occurrence in the forward.
#[derive(Default)]
pub struct SavedOutputs(BTreeMap<&'static str, VecDeque<SavedOutput>>);

type SavedOutput = (Tensor, Rc<dyn Any>);

/// Kind of an output that a first forward can save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayedOutput {
    /// An activation of the size of the block's input.
    Activation,
    /// Experts of tokens, and what ranks exchange about them: a few bytes for each selection.
    Routing,
}

/// Outputs that a first forward saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputsToSave {
    /// All that ops offer.
    All,
    /// Routing alone.
    Routing,
}

impl OutputsToSave {
    /// Returns true if outputs of this kind are saved.
    pub(crate) fn include(self, kind: ReplayedOutput) -> bool {
        self == Self::All || kind == ReplayedOutput::Routing
    }
}

/// Phase of a block's forward that runs twice.
pub(crate) enum ReplayPhase {
    /// First forward: saves outputs of these kinds, records nothing.
    First(SavedOutputs, OutputsToSave),
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

    /// Returns the activation without caching it, for a caller that keeps another form of it.
    pub(crate) fn get_once(&self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::Recomputable(recomputable) => match &*recomputable.cached.borrow() {
                Some(tensor) => Ok(tensor.clone()),
                None => (recomputable.compute)(),
            },
        }
    }

    /// Returns the activation if the backward of the op that computed it computes it again, and nothing has yet.
    pub(crate) fn awaited(&self) -> Option<Rc<Recomputable>> {
        match self {
            Self::Recomputable(recomputable)
                if recomputable.waiting.is_some() && recomputable.cached.borrow().is_none() =>
            {
                Some(recomputable.clone())
            }
            Self::Tensor(_) | Self::Recomputable(_) => None,
        }
    }

    /// Returns the id that the activation had in forward.
    pub(crate) fn id(&self) -> TensorId {
        match self {
            Self::Tensor(tensor) => tensor.id(),
            Self::Recomputable(recomputable) => recomputable.id,
        }
    }

    /// Returns the inputs of the norm whose output the activation is.
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    pub(crate) fn norm(&self) -> Option<&NormInputs> {
        match self {
            Self::Tensor(_) => None,
            Self::Recomputable(recomputable) => recomputable.norm.as_ref(),
        }
    }
}

impl WaitingReader {
    /// Returns true if only backward holds the activation's gradient `dy`, because the reader allocated it.
    pub(crate) fn allocated(&self, dy: &Tensor) -> bool {
        self.grad == dy.id()
    }
}

impl Recomputable {
    /// Creates the activation that had this id in forward.
    pub(crate) fn new(id: TensorId, compute: impl Fn() -> Result<Tensor> + 'static) -> Self {
        Self {
            id,
            compute: Box::new(compute),
            cached: RefCell::new(None),
            waiting: None,
            #[cfg(any(feature = "cuda", feature = "emulate"))]
            norm: None,
        }
    }

    #[cfg(any(feature = "cuda", feature = "emulate"))]
    pub(crate) fn of_norm(id: TensorId, norm: NormInputs, compute: impl Fn() -> Result<Tensor> + 'static) -> Self {
        Self { norm: Some(norm), ..Self::new(id, compute) }
    }

    /// Creates an activation that the backward of its op computes with its gradients. That backward calls
    /// [`take_waiting`](Self::take_waiting).
    pub(crate) fn in_backward(id: TensorId, compute: impl Fn() -> Result<Tensor> + 'static) -> Self {
        Self { waiting: Some(RefCell::default()), ..Self::new(id, compute) }
    }

    /// Leaves the part of a reader's backward that reads the activation until the backward of its op has computed it.
    pub(crate) fn wait(&self, grad: TensorId, work: impl FnOnce() -> Result<()> + 'static) -> Result<()> {
        let Some(waiting) = &self.waiting else { return work() };
        waiting.borrow_mut().push(WaitingReader { grad, work: Box::new(work) });
        Ok(())
    }

    /// Takes the readers that wait.
    pub(crate) fn take_waiting(&self) -> Vec<WaitingReader> {
        self.waiting.as_ref().map(RefCell::take).unwrap_or_default()
    }

    /// Runs the work of readers that waited for `activation`, and frees it.
    pub(crate) fn run(&self, readers: Vec<WaitingReader>, activation: Tensor) -> Result<()> {
        self.cached.replace(Some(activation));
        readers.into_iter().try_for_each(|reader| (reader.work)())?;
        self.cached.take();
        Ok(())
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
