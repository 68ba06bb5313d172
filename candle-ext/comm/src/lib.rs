//! Process groups: who tells whom what. Moves bytes between ranks and reduces them; computes nothing else.
//!
//! A group of one rank is [`Solo`], so that no caller asks whether it is alone.

pub mod store;

use candle_core::{Device, Result, Tensor};

/// How the contributions of the ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Adds them.
    Sum,
    /// Keeps the largest.
    Max,
}

/// A communicator over an ordered set of ranks. Every rank of a group calls the same operations in the same order.
pub trait Collective: Send + Sync {
    /// Returns this process's place in the group, `0..size`.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the group.
    fn size(&self) -> usize;

    /// Combines `x` over the ranks, element by element; every rank gets the result, of the shape and dtype of `x`.
    fn all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Tensor>;
}

/// A group of one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Collective for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_reduce(&self, x: &Tensor, _op: Reduce) -> Result<Tensor> {
        Ok(x.clone())
    }
}

/// Sums a number over a group. A count is exact up to 2^53.
pub fn sum(group: &dyn Collective, x: f64) -> Result<f64> {
    group.all_reduce(&Tensor::new(x, &Device::Cpu)?, Reduce::Sum)?.to_scalar()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_of_one_keeps_what_it_is_given() -> Result<()> {
        let x = Tensor::new(&[1f32, -2.0, 3.5], &Device::Cpu)?;
        for op in [Reduce::Sum, Reduce::Max] {
            assert_eq!(Solo.all_reduce(&x, op)?.to_vec1::<f32>()?, [1.0, -2.0, 3.5]);
        }
        assert_eq!((Solo.rank(), Solo.size()), (0, 1));
        Ok(())
    }

    #[test]
    fn a_count_survives_the_sum() -> Result<()> {
        assert_eq!(sum(&Solo, 9_007_199_254_740_991.0)? as u64, 9_007_199_254_740_991);
        Ok(())
    }
}
