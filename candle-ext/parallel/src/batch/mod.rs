//! Micro-batches of a step.

mod columns;

use std::borrow::Cow;
use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};
use candlewick_ops::{CuSeqlens, to_host, upload};

pub use columns::{ColumnScope, ColumnSpec, MicroColumn, MicroColumns};

use columns::sequence_of_tokens;

/// A micro-batch of packed sequences.
#[derive(Clone)]
pub struct Micro {
    /// Token ids, u32 `[t]`.
    pub ids: Tensor,
    /// Target token of each position, i64 `[t]` on the CPU, or [`Micro::IGNORED`].
    pub targets: Tensor,
    /// Position of each token in its sequence, t of them.
    pub positions: Vec<u32>,
    /// Boundaries of the packed sequences.
    pub seqs: CuSeqlens,
    /// Pad tokens within the sequences: disjoint ranges in ascending order, of the whole micro-batch. They are computed, and routers
    /// do not count them.
    pub padding: Vec<Range<usize>>,
    /// MicroColumns that the objective reads.
    pub columns: MicroColumns,
}

/// Micro-batches of this rank in a step.
#[derive(Clone, Copy)]
pub struct StepMicros<'a> {
    /// Micro-batches; their number is equal on all ranks.
    pub micros: &'a [Micro],
    /// The most tokens that any rank has in each micro-batch. Experts are padded to the capacity for them; `None` pads
    /// none.
    pub most_tokens: Option<&'a [usize]>,
}

impl<'a, M: AsRef<[Micro]> + ?Sized> From<&'a M> for StepMicros<'a> {
    fn from(micros: &'a M) -> Self {
        Self { micros: micros.as_ref(), most_tokens: None }
    }
}

impl StepMicros<'_> {
    /// Returns the most tokens of a rank in each micro-batch, if ranks split micro-batches into `n_parts` equal parts.
    ///
    /// # Errors
    ///
    /// If the number of micro-batches differs, or if one has more tokens.
    pub(crate) fn most_tokens_of_parts(&self, n_parts: usize) -> Result<Vec<Option<usize>>> {
        let Some(most_tokens) = self.most_tokens else { return Ok(vec![None; self.micros.len()]) };
        let n_tokens: Vec<usize> = self.micros.iter().map(|micro| micro.seqs.n_tokens()).collect();
        if most_tokens.len() != n_tokens.len() || n_tokens.iter().zip(most_tokens).any(|(own, most)| own > most) {
            bail!("the most tokens of any rank by micro-batch are {most_tokens:?}, but this rank has {n_tokens:?}")
        }
        Ok(most_tokens.iter().map(|most| Some(most.div_ceil(n_parts))).collect())
    }
}

impl Micro {
    /// Target of a position without loss, as torch's `ignore_index`.
    pub const IGNORED: i64 = -100;

    /// Returns the micro-batch with the next token and target of each position. The last position of a sequence keeps its
    /// token and has no target.
    pub(crate) fn shifted(&self) -> Result<Self> {
        let n_tokens = self.seqs.n_tokens();
        let mut next: Vec<u32> = (1..=n_tokens as u32).collect();
        let lasts = self.seqs.cu_seqlens_q().windows(2).filter(|ends| ends[0] < ends[1]).map(|ends| ends[1] - 1);
        let targets = to_host(&self.targets)?.to_vec1::<i64>()?;
        let mut targets: Vec<i64> = targets.into_iter().skip(1).chain([Self::IGNORED]).collect();
        for last in lasts {
            (next[last], targets[last]) = (last as u32, Self::IGNORED);
        }
        let next = upload(&next, n_tokens, self.ids.device())?;
        Ok(Self {
            ids: self.ids.index_select(&next, 0)?,
            targets: Tensor::from_vec(targets, n_tokens, &Device::Cpu)?,
            positions: self.positions.clone(),
            seqs: self.seqs.clone(),
            padding: self.padding.clone(),
            columns: MicroColumns::default(),
        })
    }

    /// Returns the number of tokens; 0 for a micro-batch without targets, which only keeps a rank busy.
    pub(crate) fn n_valid_tokens(&self) -> Result<usize> {
        let has_targets = to_host(&self.targets)?.to_vec1::<i64>()?.iter().any(|target| *target != Self::IGNORED);
        Ok(if has_targets { self.seqs.n_tokens() } else { 0 })
    }

    /// Returns true if a token is padding within a sequence.
    pub(crate) fn is_padding(&self, token: usize) -> bool {
        let after = self.padding.partition_point(|range| range.end <= token);
        self.padding.get(after).is_some_and(|range| range.contains(&token))
    }

    /// Returns the micro-batch padded to a multiple of `multiple` tokens. Padding is a sequence of its own without
    /// targets.
    pub(crate) fn padded(&self, multiple: usize) -> Result<Cow<'_, Self>> {
        let n_tokens = self.seqs.n_tokens();
        let n_filler = n_tokens.next_multiple_of(multiple) - n_tokens;
        if n_filler == 0 {
            return Ok(Cow::Borrowed(self));
        }
        let filler = |x: &Tensor| Tensor::zeros(n_filler, x.dtype(), x.device());
        let ignored = (filler(&self.targets)? + Self::IGNORED as f64)?;
        let ends = self.seqs.cu_seqlens_q().iter().copied().chain([n_tokens + n_filler]);
        Ok(Cow::Owned(Self {
            ids: Tensor::cat(&[&self.ids, &filler(&self.ids)?], 0)?,
            targets: Tensor::cat(&[&self.targets, &ignored], 0)?,
            positions: self.positions.iter().copied().chain(0..n_filler as u32).collect(),
            seqs: CuSeqlens::packed(ends.collect())?,
            padding: self.padding.clone(),
            columns: self.columns.padded(n_filler)?,
        }))
    }

    /// Checks the columns of an objective.
    pub(crate) fn check_columns(&self, needed: &[ColumnSpec]) -> Result<()> {
        self.columns.check(needed, self.seqs.n_tokens(), self.n_sequences())
    }

    /// Returns the number of packed sequences.
    pub fn n_sequences(&self) -> usize {
        self.seqs.cu_seqlens_q().len() - 1
    }

    /// Sums values of tokens by sequence, f32 [t] -> f32 [s].
    pub fn sum_by_sequence(&self, of_tokens: &Tensor) -> Result<Tensor> {
        let zeros = Tensor::zeros(self.n_sequences(), of_tokens.dtype(), of_tokens.device())?;
        zeros.index_add(&self.sequences(of_tokens.device())?, of_tokens, 0)
    }

    /// Gives each token the value of its sequence, [s] -> [t].
    pub fn to_tokens(&self, of_sequences: &Tensor) -> Result<Tensor> {
        of_sequences.index_select(&self.sequences(of_sequences.device())?, 0)
    }

    /// Returns the sequence of each token, u32 [t].
    fn sequences(&self, device: &Device) -> Result<Tensor> {
        let sequences = sequence_of_tokens(self.seqs.cu_seqlens_q());
        upload(&sequences, sequences.len(), device)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::DType;

    use super::*;

    fn micro(n_tokens: usize) -> Micro {
        Micro {
            ids: Tensor::zeros(n_tokens, DType::U32, &Device::Cpu).unwrap(),
            targets: Tensor::zeros(n_tokens, DType::I64, &Device::Cpu).unwrap(),
            positions: (0..n_tokens as u32).collect(),
            seqs: CuSeqlens::packed(vec![0, n_tokens]).unwrap(),
            padding: Vec::new(),
            columns: MicroColumns::default(),
        }
    }

    #[test]
    fn the_most_tokens_of_a_rank_are_split_like_its_micro_batches() {
        let micros = [micro(5), micro(3)];
        assert_eq!(StepMicros::from(&micros).most_tokens_of_parts(2).unwrap(), [None, None]);
        let of = |most_tokens: &[usize]| {
            let step = StepMicros { micros: &micros, most_tokens: Some(most_tokens) };
            step.most_tokens_of_parts(2).map_err(|error| error.to_string())
        };
        assert_eq!(of(&[5, 8]), Ok(vec![Some(3), Some(4)]));
        for wrong in [&[4, 8][..], &[5], &[5, 8, 8]] {
            assert!(of(wrong).unwrap_err().contains("this rank has [5, 3]"), "{wrong:?}");
        }
    }

    #[test]
    fn a_shift_stays_in_its_sequence() {
        let micro = Micro {
            ids: Tensor::new(&[10u32, 11, 12, 13, 14, 15], &Device::Cpu).unwrap(),
            targets: Tensor::new(&[0i64, 1, 2, 3, 4, 5], &Device::Cpu).unwrap(),
            positions: vec![0, 1, 2, 0, 0, 1],
            seqs: CuSeqlens::packed(vec![0, 3, 4, 6]).unwrap(),
            padding: Vec::new(),
            columns: MicroColumns::default(),
        };
        let of = |micro: &Micro| (micro.ids.to_vec1::<u32>().unwrap(), micro.targets.to_vec1::<i64>().unwrap());
        let (once, none) = (micro.shifted().unwrap(), Micro::IGNORED);
        assert_eq!(of(&once), (vec![11, 12, 12, 13, 15, 15], vec![1, 2, none, none, 5, none]));
        let twice = once.shifted().unwrap();
        assert_eq!(of(&twice), (vec![12, 12, 12, 13, 15, 15], vec![2, none, none, none, none, none]));
        assert_eq!(twice.positions, micro.positions);
    }
}
