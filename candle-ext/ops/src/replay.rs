//! Forward passes that run twice: activation checkpointing that skips expensive ops in the second run.

use std::rc::Rc;

use candle_core::{Result, Tensor};

use crate::saved::{OutputsToSave, ReplayPhase, ReplayedOutput, SavedOutputs};
use crate::scope::{Scope, with_replay, within};

/// Runs the first forward, unrecorded. Returns its result, and the outputs of `what` that [`compute_or_replay`] saved.
pub fn save_outputs<T>(what: OutputsToSave, forward: impl FnOnce() -> Result<T>) -> Result<(T, SavedOutputs)> {
    let scope = Scope { recording: None, replay: Some(ReplayPhase::First(SavedOutputs::default(), what)) };
    let (result, Scope { replay, .. }) = within(scope, forward)?;
    match replay {
        Some(ReplayPhase::First(outputs, _)) => Ok((result, outputs)),
        _ => unreachable!("a scope keeps its phase"),
    }
}

/// Computes the output of `op` and the state that its backward needs, or takes both from the first forward.
///
/// Saved outputs are keyed by `op` and its occurrence, and an op has one `kind`. Fails if the saved state has another type.
pub fn compute_or_replay<S: 'static>(
    op: &'static str,
    kind: ReplayedOutput,
    compute: impl FnOnce() -> Result<(Tensor, S)>,
) -> Result<(Tensor, Rc<S>)> {
    let saved = with_replay(|phase| match phase {
        ReplayPhase::First(..) => Ok(None),
        ReplayPhase::Second(outputs) => outputs.take(op),
    });
    if let Some(saved) = saved.transpose()?.flatten() {
        return Ok(saved);
    }
    let (output, state) = compute()?;
    let state = Rc::new(state);
    with_replay(|phase| match phase {
        ReplayPhase::First(outputs, what) if what.include(kind) => outputs.save(op, &output, &state),
        ReplayPhase::First(..) | ReplayPhase::Second(_) => {}
    });
    Ok((output, state))
}

/// Returns true in the first of two forwards if backward reads its activations, although nothing is recorded.
pub(crate) fn saves_activations() -> bool {
    with_replay(|phase| matches!(phase, ReplayPhase::First(_, OutputsToSave::All))).unwrap_or(false)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::Cell;

    use candle_core::{Device, bail};

    use super::*;
    use crate::{Tape, no_grad};

    /// Counter of computed ops.
    #[derive(Default)]
    struct Ops {
        n_computed: Cell<usize>,
    }

    impl Ops {
        /// Returns `value`, and its double from the state.
        fn run(&self, op: &'static str, value: f32) -> Result<[f32; 2]> {
            let compute = || {
                self.n_computed.set(self.n_computed.get() + 1);
                Ok((Tensor::new(value, &Device::Cpu)?, value * 2.0))
            };
            let (output, double) = compute_or_replay(op, ReplayedOutput::Activation, compute)?;
            Ok([output.to_scalar::<f32>()?, *double])
        }
    }

    /// Runs a second forward that returns numbers.
    fn replay<const N: usize>(saved: SavedOutputs, forward: impl FnOnce() -> Result<[f32; N]>) -> Result<[f32; N]> {
        let numbers = Cell::new([0.0; N]);
        Tape::replay(saved, &[], || {
            numbers.set(forward()?);
            Tensor::new(0f32, &Device::Cpu)
        })?;
        Ok(numbers.get())
    }

    #[test]
    fn a_second_forward_takes_the_outputs_of_the_first() {
        let ops = Ops::default();
        let forward = || Ok([ops.run("op", 1.0)?[1], ops.run("op", 2.0)?[1]]);
        assert_eq!(forward().unwrap(), [2.0, 4.0]);
        let (first, saved) = save_outputs(OutputsToSave::All, forward).unwrap();
        assert_eq!((first, ops.n_computed.get()), ([2.0, 4.0], 4));
        assert_eq!(replay(saved, forward).unwrap(), [2.0, 4.0]);
        assert_eq!(ops.n_computed.get(), 4);
    }

    #[test]
    fn a_forward_may_save_the_outputs_of_routers_alone() {
        let n_computed = Cell::new(0);
        let forward = || {
            let compute = || {
                n_computed.set(n_computed.get() + 1);
                Ok((Tensor::new(1f32, &Device::Cpu)?, n_computed.get()))
            };
            let routing = compute_or_replay("route", ReplayedOutput::Routing, compute)?.1;
            Ok([*routing as f32, *compute_or_replay("attention", ReplayedOutput::Activation, compute)?.1 as f32])
        };
        let (first, saved) = save_outputs(OutputsToSave::Routing, forward).unwrap();
        assert_eq!(first, [1.0, 2.0]);
        assert_eq!(replay(saved, forward).unwrap(), [1.0, 3.0]);
    }

    #[test]
    fn outputs_that_were_not_saved_are_computed() {
        let ops = Ops::default();
        let (_, saved) = save_outputs(OutputsToSave::All, || ops.run("saved", 1.0)).unwrap();
        let forward = || Ok([ops.run("another", 3.0)?[1], ops.run("saved", 1.0)?[1], ops.run("saved", 5.0)?[1]]);
        assert_eq!(replay(saved, forward).unwrap(), [6.0, 2.0, 10.0]);
        assert_eq!(ops.n_computed.get(), 3);
    }

    #[test]
    fn the_order_of_different_ops_does_not_matter() {
        let ops = Ops::default();
        let (_, saved) =
            save_outputs(OutputsToSave::All, || Ok([ops.run("a", 1.0)?, ops.run("b", 2.0)?, ops.run("a", 3.0)?]))
                .unwrap();
        // Other values than in the first forward would reveal a recomputed or misplaced output.
        let forward = || Ok([ops.run("b", 0.0)?[0], ops.run("a", 0.0)?[0], ops.run("a", 0.0)?[0]]);
        assert_eq!(replay(saved, forward).unwrap(), [2.0, 1.0, 3.0]);
    }

    #[test]
    fn scopes_inside_see_the_saved_outputs() {
        let ops = Ops::default();
        let forward = || no_grad(|| ops.run("op", 1.0));
        let (_, saved) = save_outputs(OutputsToSave::All, forward).unwrap();
        assert_eq!(replay(saved, forward).unwrap(), [1.0, 2.0]);
        assert_eq!(ops.n_computed.get(), 1);
    }

    #[test]
    fn outputs_that_are_left_are_an_error_that_names_their_ops() {
        let ops = Ops::default();
        let first = || Ok([ops.run("a", 1.0)?, ops.run("b", 2.0)?, ops.run("b", 3.0)?]);
        let (_, saved) = save_outputs(OutputsToSave::All, first).unwrap();
        let error = replay(saved, || ops.run("b", 2.0)).unwrap_err().to_string();
        assert!(error.contains("left saved outputs unused: 1 of a, 1 of b"), "{error}");
    }

    #[test]
    fn a_state_of_another_type_is_an_error() {
        let ops = Ops::default();
        let (_, saved) = save_outputs(OutputsToSave::All, || ops.run("op", 1.0)).unwrap();
        let other = || {
            compute_or_replay("op", ReplayedOutput::Activation, || Ok((Tensor::new(1f32, &Device::Cpu)?, 1u8)))?;
            Ok([])
        };
        let error = replay(saved, other).unwrap_err().to_string();
        assert!(error.contains("op saved another state in the first forward than `u8`"), "{error}");
    }

    #[test]
    fn a_forward_that_fails_ends_its_scope() {
        let failed: Result<((), SavedOutputs)> = save_outputs(OutputsToSave::All, || bail!("no"));
        assert!(failed.is_err() && !saves_activations());
    }
}
