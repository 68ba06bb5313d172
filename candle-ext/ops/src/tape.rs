//! Reverse-mode differentiation: what ops compute while a [`Tape`] records can be differentiated once.
//!
//! candle's own would do, but for three things: it keeps all that was saved until it is through, it starts each gradient
//! from zeros and adds to them, and it knows ops of at most three inputs only.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use candle_core::{DType, Result, Tensor, TensorId, bail};

use crate::add::add;
use crate::span::span;
use crate::weight::Weight;

/// A computation and the way back from its output to its inputs and to the trainable weights that it used.
pub struct Tape {
    output: Tensor,
    nodes: Vec<Node>,
}

/// Recomputation of gated activations (swiglu), whose outputs are the widest of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GatedOutputs {
    /// Computed again in the backward.
    #[default]
    Again,
    /// Kept: free where the backward follows its forward at once, as the first backward needs the output.
    Kept,
}

/// What an op computes from.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// An activation, whose gradient the op's backward returns.
    Activation(&'a Tensor),
    /// A weight, to whose sink the op's backward adds by itself.
    Weight(&'a Weight),
    /// Trainable weights that the op's backward reaches by itself.
    Trained,
}

/// The gradients that a tape gave.
#[derive(Debug)]
pub struct Grads(HashMap<TensorId, Tensor>);

struct Node {
    name: &'static str,
    inputs: Vec<Option<TensorId>>,
    output: TensorId,
    /// Whether it reads what ranks have exchanged.
    follows_exchange: bool,
    backward: Backward,
}

type Backward = Box<dyn FnOnce(&Tensor) -> Result<Vec<Option<Tensor>>>>;

/// The end of an exchange that has begun.
pub type Coming = Box<dyn FnOnce() -> Result<Tensor>>;

type Work = Box<dyn FnOnce() -> Result<()>>;

/// A tape that goes back, as the op sees it whose turn it is.
#[derive(Default)]
struct GoingBack {
    /// Whether work may be put off until an exchange is under way.
    puts_off: bool,
    put_off: Vec<Work>,
    /// What others that read the op's first input gave to its gradient.
    sum: Option<Tensor>,
}

#[derive(Default)]
struct Recording {
    tracked: HashSet<TensorId>,
    /// Outputs of exchanges.
    exchanged: HashSet<TensorId>,
    nodes: Vec<Node>,
    gated: GatedOutputs,
    /// What can be computed again at little cost.
    cheap: HashMap<TensorId, Rc<Cheap>>,
}

/// What an op keeps of an activation for its backward.
pub(crate) enum Kept {
    Tensor(Tensor),
    Cheap(Rc<Cheap>),
}

/// The way to an activation, and the activation itself from the first backward that asks for it to the last.
pub(crate) struct Cheap {
    make: Box<dyn Fn() -> Result<Tensor>>,
    made: RefCell<Option<Tensor>>,
}

thread_local! {
    /// The innermost is the last; `None` is a computation that is not to be recorded.
    static RECORDINGS: RefCell<Vec<Option<Recording>>> = const { RefCell::new(Vec::new()) };
    /// The innermost, if a tape goes back within another.
    static GOING_BACK: RefCell<GoingBack> = RefCell::default();
}

impl Tape {
    /// Runs `forward` and records how its output came from `inputs` and from trainable weights.
    pub fn record(inputs: &[&Tensor], forward: impl FnOnce() -> Result<Tensor>) -> Result<Self> {
        Self::record_keeping(GatedOutputs::Again, inputs, forward)
    }

    /// Records as [`Tape::record`] does, and keeps the outputs of gated activations or the way to them.
    pub fn record_keeping(
        gated: GatedOutputs,
        inputs: &[&Tensor],
        forward: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        let tracked = inputs.iter().map(|input| input.id()).collect();
        let (output, recording) = within(Some(Recording { tracked, gated, ..Recording::default() }), forward)?;
        let nodes = recording.map(|recording| recording.nodes).unwrap_or_default();
        Ok(Self { output, nodes })
    }

    /// Returns what was computed.
    pub fn output(&self) -> &Tensor {
        &self.output
    }

    /// True if nothing that was computed has a way back.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Goes back from the gradient `dy` of the output: adds to the weights' sinks and returns the inputs' gradients. What an
    /// op saved is freed as soon as its backward has run.
    pub fn backward(self, dy: &Tensor) -> Result<Grads> {
        let y = &self.output;
        if y.shape() != dy.shape() || y.dtype() != dy.dtype() {
            bail!(
                "backward: the gradient has shape {:?} and dtype {:?}, the output {:?} and {:?}",
                dy.shape(),
                dy.dtype(),
                y.shape(),
                y.dtype()
            )
        }
        let mut grads = HashMap::from([(y.id(), dy.clone())]);
        let _within = Within::begin();
        for node in self.nodes.into_iter().rev() {
            let Some(dy) = grads.remove(&node.output) else { continue };
            let _span = span(node.name, "backward");
            let first = node.inputs.first().copied().flatten();
            GOING_BACK.with_borrow_mut(|going| {
                going.puts_off = node.follows_exchange;
                going.sum = first.and_then(|id| grads.remove(&id));
            });
            let of_inputs = (node.backward)(&dy.contiguous()?)?;
            drop(dy);
            // Unless the op has added to it.
            let sum = GOING_BACK.with_borrow_mut(|going| going.sum.take());
            grads.extend(first.zip(sum));
            for (id, grad) in node.inputs.into_iter().zip(of_inputs) {
                let (Some(id), Some(grad)) = (id, grad) else { continue };
                let sum = match grads.remove(&id) {
                    Some(sum) => add(&sum, &grad)?,
                    None => grad,
                };
                grads.insert(id, sum);
            }
        }
        do_what_was_put_off()?;
        Ok(Grads(grads))
    }
}

/// Gives back, in the end, what the tape around this one had.
struct Within(GoingBack);

impl Within {
    fn begin() -> Self {
        Self(GOING_BACK.take())
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        GOING_BACK.set(std::mem::take(&mut self.0));
    }
}

/// The sum of the gradients that other ops gave to the first input of the op at work: an op that takes it returns the sum
/// of that and its own. `None` if there is nothing yet, or something of another shape or format, which is refused later.
pub(crate) fn take_sum(dtype: DType, shape: &[usize]) -> Result<Option<Tensor>> {
    let fits = |sum: &mut Tensor| sum.dtype() == dtype && sum.dims() == shape;
    let sum = GOING_BACK.with_borrow_mut(|going| going.sum.take_if(fits));
    sum.map(|sum| sum.contiguous()).transpose()
}

/// Does `work` in a backward: later, if the gradient that is on its way can be exchanged meanwhile.
pub(crate) fn put_off(work: impl FnOnce() -> Result<()> + 'static) -> Result<()> {
    if !puts_off() {
        return work();
    }
    GOING_BACK.with_borrow_mut(|going| going.put_off.push(Box::new(work)));
    Ok(())
}

/// True if [`put_off`] would not do it now.
pub(crate) fn puts_off() -> bool {
    GOING_BACK.with_borrow(|going| going.puts_off)
}

fn do_what_was_put_off() -> Result<()> {
    let works = GOING_BACK.with_borrow_mut(|going| std::mem::take(&mut going.put_off));
    works.into_iter().try_for_each(|work| work())
}

impl Grads {
    /// Returns the gradient of an input of the tape; `None` if the output does not depend on it.
    pub fn get(&self, input: &Tensor) -> Option<&Tensor> {
        self.0.get(&input.id())
    }

    /// The same, taken out.
    pub fn remove(&mut self, input: &Tensor) -> Option<Tensor> {
        self.0.remove(&input.id())
    }
}

impl<'a> From<&'a Tensor> for Input<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Activation(tensor)
    }
}

impl<'a> From<&'a Weight> for Input<'a> {
    fn from(weight: &'a Weight) -> Self {
        Self::Weight(weight)
    }
}

/// Says that `make` computes `x` anew, to the bit and at little cost: ops that need `x` in their backward keep the way to it.
pub(crate) fn make_cheap(x: &Tensor, make: impl Fn() -> Result<Tensor> + 'static) {
    with_innermost(|recording| {
        let cheap = Cheap { make: Box::new(make), made: RefCell::new(None) };
        recording.cheap.insert(x.id(), Rc::new(cheap));
    });
}

/// Calls [`make_cheap`] for the output of a gated activation, unless the tape keeps those.
pub(crate) fn make_gated_cheap(x: &Tensor, make: impl Fn() -> Result<Tensor> + 'static) {
    if with_innermost(|recording| recording.gated) != Some(GatedOutputs::Kept) {
        make_cheap(x, make);
    }
}

/// Keeps `x` for a backward: the tensor, or the way to it.
pub(crate) fn keep(x: &Tensor) -> Kept {
    match with_innermost(|recording| recording.cheap.get(&x.id()).cloned()).flatten() {
        Some(cheap) => Kept::Cheap(cheap),
        None => Kept::Tensor(x.clone()),
    }
}

impl Kept {
    /// Returns the activation.
    pub(crate) fn get(&self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::Cheap(cheap) => {
                let mut made = cheap.made.borrow_mut();
                if made.is_none() {
                    *made = Some((cheap.make)()?);
                }
                Ok(made.as_ref().expect("it was made above").clone())
            }
        }
    }
}

/// Runs `f` without recording, whatever is being recorded around it.
pub fn untracked<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    Ok(within(None, f)?.0)
}

/// True within [`Tape::record`], unless [`untracked`] stands between.
pub(crate) fn is_recording() -> bool {
    with_innermost(|_| ()).is_some()
}

/// True if `x` came from an input of the tape that records, or from a trainable weight: its gradient is wanted.
pub fn is_tracked(x: &Tensor) -> bool {
    with_innermost(|recording| recording.tracked.contains(&x.id())).unwrap_or(false)
}

/// Puts an op's output on the tape that records, with `backward` as its vjp.
///
/// `backward(dy)` gets the output's cotangent, contiguous, and returns a gradient for each input; `None` is zero, and right
/// for a weight. If no input is tracked and no weight trained, the closure is dropped here, with all that it saved.
pub fn record<const N: usize>(
    name: &'static str,
    inputs: [Input<'_>; N],
    output: Tensor,
    backward: impl FnOnce(&Tensor) -> Result<[Option<Tensor>; N]> + 'static,
) -> Tensor {
    with_innermost(|recording| {
        let ids = inputs.map(|input| match input {
            Input::Activation(x) => Some(x.id()).filter(|id| recording.tracked.contains(id)),
            Input::Weight(_) | Input::Trained => None,
        });
        let trains = |input: &Input<'_>| match input {
            Input::Activation(_) => false,
            Input::Weight(weight) => weight.sink().is_some(),
            Input::Trained => true,
        };
        if ids.iter().any(Option::is_some) || inputs.iter().any(trains) {
            recording.tracked.insert(output.id());
            let follows_exchange = ids.iter().flatten().any(|id| recording.exchanged.contains(id));
            let backward: Backward = Box::new(move |dy| Ok(backward(dy)?.into()));
            recording.nodes.push(Node { name, inputs: ids.into(), output: output.id(), follows_exchange, backward });
        }
    });
    output
}

/// Puts an exchange between ranks on the tape that records: y = `forward(x)`, a tensor of its own, and of its gradient what
/// `start(dy)` begins to exchange. While that is under way the gradients of weights are computed that the ops which read y
/// have put off.
///
/// What those ops keep of y is the way to it: backward calls `forward` again.
pub fn record_exchange(
    name: &'static str,
    x: &Tensor,
    forward: impl Fn(&Tensor) -> Result<Tensor> + 'static,
    start: impl FnOnce(&Tensor) -> Result<Coming> + 'static,
) -> Result<Tensor> {
    let y = forward(x)?;
    let kept = keep(x);
    make_cheap(&y, move || forward(&kept.get()?));
    let is_wanted = is_tracked(x);
    let y = record(name, [x.into()], y, move |dy| {
        let coming = start(dy)?;
        do_what_was_put_off()?;
        Ok([Some(coming()?)])
    });
    if is_wanted {
        with_innermost(|recording| recording.exchanged.insert(y.id()));
    }
    Ok(y)
}

fn with_innermost<T>(f: impl FnOnce(&mut Recording) -> T) -> Option<T> {
    RECORDINGS.with_borrow_mut(|recordings| recordings.last_mut().and_then(Option::as_mut).map(f))
}

/// Runs `f` with `recording` as the innermost and gives it back, also if `f` fails or panics.
fn within<T>(recording: Option<Recording>, f: impl FnOnce() -> Result<T>) -> Result<(T, Option<Recording>)> {
    struct Guard;
    impl Drop for Guard {
        fn drop(&mut self) {
            RECORDINGS.with_borrow_mut(Vec::pop);
        }
    }
    RECORDINGS.with_borrow_mut(|recordings| recordings.push(recording));
    let _guard = Guard;
    let output = f()?;
    let recording = RECORDINGS.with_borrow_mut(|recordings| recordings.last_mut().and_then(Option::take));
    Ok((output, recording))
}
