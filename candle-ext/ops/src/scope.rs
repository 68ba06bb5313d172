//! Recording scopes of a thread.
//!
//! The stack is a thread-local: `Tape::record` pushes a scope around its forward, and each op inside finds the tape
//! there.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use candle_core::{Result, Tensor, TensorId};

use crate::backward::BackwardFn;
use crate::saved::{GatedOutputs, Recomputable, ReplayPhase};

/// Recording scope; a forward sees the innermost one.
#[derive(Default)]
pub(crate) struct Scope {
    /// Tape under construction; `None` in a scope that records nothing.
    pub(crate) recording: Option<Recording>,
    /// Phase of a forward that runs twice; `None` inherits that of the enclosing scope.
    pub(crate) replay: Option<ReplayPhase>,
}

/// Tape under construction.
#[derive(Default)]
pub(crate) struct Recording {
    /// Tensors whose gradient is needed.
    pub(crate) tracked: HashSet<TensorId>,
    /// Outputs of exchanges.
    pub(crate) exchanged: HashSet<TensorId>,
    pub(crate) nodes: Vec<TapeNode>,
    /// Auxiliary losses by name, f32 scalars.
    pub(crate) auxiliary: Vec<(&'static str, Tensor)>,
    pub(crate) gated: GatedOutputs,
    pub(crate) recomputable: HashMap<TensorId, Rc<Recomputable>>,
    /// Bytes that saving a tensor would hold, which no other op saves.
    pub(crate) saved_by_readers: HashMap<TensorId, usize>,
}

/// One op on a tape.
pub(crate) struct TapeNode {
    pub(crate) name: &'static str,
    /// Tracked inputs; `None` for a weight or an untracked input.
    pub(crate) inputs: Vec<Option<TensorId>>,
    pub(crate) output: TensorId,
    /// True if an input is the output of an exchange.
    pub(crate) follows_exchange: bool,
    pub(crate) backward: BackwardFn,
}

thread_local! {
    /// Stack of scopes, the innermost last.
    static SCOPES: RefCell<Vec<Scope>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` inside `scope` and returns the scope. The scope also ends if `f` fails or panics.
pub(crate) fn within<T>(scope: Scope, f: impl FnOnce() -> Result<T>) -> Result<(T, Scope)> {
    struct Guard {
        depth: usize,
    }
    impl Drop for Guard {
        fn drop(&mut self) {
            drop(SCOPES.with_borrow_mut(|scopes| scopes.split_off(self.depth)));
        }
    }
    let _guard = Guard { depth: SCOPES.with_borrow(Vec::len) };
    SCOPES.with_borrow_mut(|scopes| scopes.push(scope));
    let output = f()?;
    let scope = SCOPES.with_borrow_mut(Vec::pop).expect("inner scopes have ended");
    Ok((output, scope))
}

/// Calls `f` with the innermost scope's tape, if that scope records.
pub(crate) fn with_recording<T>(f: impl FnOnce(&mut Recording) -> T) -> Option<T> {
    SCOPES.with_borrow_mut(|scopes| scopes.last_mut()?.recording.as_mut().map(f))
}

/// Calls `f` with the phase of the innermost forward that runs twice, if there is one.
pub(crate) fn with_replay<T>(f: impl FnOnce(&mut ReplayPhase) -> T) -> Option<T> {
    SCOPES.with_borrow_mut(|scopes| scopes.iter_mut().rev().find_map(|scope| scope.replay.as_mut()).map(f))
}
