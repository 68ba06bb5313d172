//! What is computed once where a forward runs twice: backward runs a block's forward again that has kept no tape, and what took
//! long in it need not be computed another time.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use candle_core::{Result, Tensor, bail};

/// What a forward computed that is not to be computed again, in its order.
#[derive(Default)]
pub struct Outputs(VecDeque<(Tensor, Rc<dyn Any>)>);

/// A forward that runs: for the first time, or again with what was kept of that.
struct Turn {
    is_first: bool,
    outputs: Outputs,
}

thread_local! {
    static TURN: RefCell<Option<Turn>> = const { RefCell::new(None) };
}

/// Runs a forward for the first time, and returns besides its result what [`computed_once`] computed.
pub fn keep_outputs<T>(forward: impl FnOnce() -> Result<T>) -> Result<(T, Outputs)> {
    within(Turn { is_first: true, outputs: Outputs::default() }, forward)
}

impl Outputs {
    /// Runs the forward again. What there is of its first time is not computed; it fails if something is left of that.
    pub fn give_to<T>(self, forward: impl FnOnce() -> Result<T>) -> Result<T> {
        let (result, left) = within(Turn { is_first: false, outputs: self }, forward)?;
        if !left.0.is_empty() {
            bail!("a forward ran again and left {} outputs of its first time", left.0.len())
        }
        Ok(result)
    }
}

/// Computes an output and what its backward needs, unless both are there from the first time.
pub fn computed_once<K: 'static>(compute: impl FnOnce() -> Result<(Tensor, K)>) -> Result<(Tensor, Rc<K>)> {
    let known = TURN.with_borrow_mut(|turn| match turn {
        Some(Turn { is_first: false, outputs }) => outputs.0.pop_front(),
        _ => None,
    });
    if let Some((output, kept)) = known {
        return Ok((output, kept.downcast().expect("a forward computes the second time what it did the first")));
    }
    let (output, kept) = compute()?;
    let kept = Rc::new(kept);
    TURN.with_borrow_mut(|turn| {
        if let Some(Turn { is_first: true, outputs }) = turn {
            outputs.0.push_back((output.clone(), kept.clone()));
        }
    });
    Ok((output, kept))
}

/// True in a forward that runs for the first time of two: a backward will follow, though nothing is recorded.
pub(crate) fn is_first_of_two() -> bool {
    TURN.with_borrow(|turn| matches!(turn, Some(Turn { is_first: true, .. })))
}

/// Runs `forward` in its turn and returns the outputs that are there then; what was around it comes back, also if it fails or panics.
fn within<T>(turn: Turn, forward: impl FnOnce() -> Result<T>) -> Result<(T, Outputs)> {
    struct Around(Option<Turn>);
    impl Drop for Around {
        fn drop(&mut self) {
            TURN.set(self.0.take());
        }
    }
    let _around = Around(TURN.replace(Some(turn)));
    let result = forward()?;
    Ok((result, TURN.take().expect("a turn ends where it began").outputs))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::Cell;

    use candle_core::Device;

    use super::*;

    #[test]
    fn what_a_first_time_computed_is_there_the_second_in_its_order() {
        let n_computed = Cell::new(0);
        let forward = || -> Result<[(f32, f32); 2]> {
            let one = |value: f32| -> Result<(f32, f32)> {
                let compute = || {
                    n_computed.set(n_computed.get() + 1);
                    Ok((Tensor::new(value, &Device::Cpu)?, value * 2.0))
                };
                let (output, kept) = computed_once(compute)?;
                Ok((output.to_scalar::<f32>()?, *kept))
            };
            Ok([one(1.0)?, one(2.0)?])
        };
        let want = [(1.0, 2.0), (2.0, 4.0)];
        assert_eq!(forward().unwrap(), want);
        let (first, outputs) = keep_outputs(forward).unwrap();
        assert_eq!((first, n_computed.get()), (want, 4));
        assert_eq!(outputs.give_to(forward).unwrap(), want);
        assert_eq!(n_computed.get(), 4);
        // Nothing was kept: all of it is computed.
        assert_eq!(Outputs::default().give_to(forward).unwrap(), want);
        assert_eq!(n_computed.get(), 6);
    }

    #[test]
    fn what_is_left_over_is_an_error() {
        let zero = || computed_once(|| Ok((Tensor::new(0f32, &Device::Cpu)?, ())));
        let (_, outputs) = keep_outputs(|| Ok([zero()?, zero()?])).unwrap();
        let error = outputs.give_to(zero).unwrap_err().to_string();
        assert!(error.contains("left 1 outputs of its first time"), "{error}");
    }

    #[test]
    fn a_forward_that_fails_leaves_nothing_behind() {
        let failed: Result<((), Outputs)> = keep_outputs(|| bail!("no"));
        assert!(failed.is_err() && !is_first_of_two());
    }
}
