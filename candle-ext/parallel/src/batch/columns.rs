//! Named columns of a micro-batch: values of tokens or sequences that an objective reads.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{Result, Tensor, bail};

/// The unit that has a row in a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnScope {
    /// A row per token.
    Token,
    /// A row per packed sequence.
    Sequence,
}

/// A column that an objective needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnSpec {
    /// Name.
    pub name: &'static str,
    /// Unit that has a row.
    pub scope: ColumnScope,
}

/// A column of a micro-batch, on the engine's device.
#[derive(Clone, Debug)]
pub struct MicroColumn {
    /// Unit that has a row.
    pub scope: ColumnScope,
    /// Values, [t, ..] or [s, ..] for t tokens and s sequences.
    pub values: Tensor,
}

/// MicroColumns of a micro-batch by name. Padding has zeros.
#[derive(Clone, Debug, Default)]
pub struct MicroColumns(BTreeMap<String, MicroColumn>);

impl MicroColumns {
    /// Adds a column, or replaces it.
    #[must_use]
    pub fn with(mut self, name: &str, column: MicroColumn) -> Self {
        self.0.insert(name.to_owned(), column);
        self
    }

    /// Returns the values of a column.
    ///
    /// # Errors
    ///
    /// If the micro-batch lacks the column.
    pub fn values(&self, name: &str) -> Result<&Tensor> {
        match self.0.get(name) {
            Some(column) => Ok(&column.values),
            None => bail!("the micro-batch has no column `{name}`; it has {:?}", self.0.keys().collect::<Vec<_>>()),
        }
    }

    /// Checks that the columns of an objective are there, and have a row per token or sequence.
    pub(super) fn check(&self, needed: &[ColumnSpec], n_tokens: usize, n_sequences: usize) -> Result<()> {
        for ColumnSpec { name, scope } in needed {
            let n_rows = self.values(name)?.dim(0)?;
            let (found, wanted) =
                (self.0[*name].scope, if *scope == ColumnScope::Token { n_tokens } else { n_sequences });
            if found != *scope || n_rows != wanted {
                bail!("column `{name}`: {n_rows} rows by {found:?}, but the objective needs {wanted} by {scope:?}")
            }
        }
        Ok(())
    }

    /// Appends `n_filler` tokens, which are a sequence of their own.
    pub(super) fn padded(&self, n_filler: usize) -> Result<Self> {
        self.map(|MicroColumn { scope, values }| {
            let n_rows = if *scope == ColumnScope::Token { n_filler } else { 1 };
            let shape: Vec<usize> = std::iter::once(n_rows).chain(values.dims()[1..].iter().copied()).collect();
            Tensor::cat(&[values, &Tensor::zeros(shape, values.dtype(), values.device())?], 0)
        })
    }

    /// Selects ranges of tokens, in their order. All sequences stay.
    pub(crate) fn of_tokens(&self, select: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.map(|MicroColumn { scope, values }| match scope {
            ColumnScope::Token => select(values),
            ColumnScope::Sequence => Ok(values.clone()),
        })
    }

    fn map(&self, change: impl Fn(&MicroColumn) -> Result<Tensor>) -> Result<Self> {
        let changed = |(name, column): (&String, &MicroColumn)| {
            Ok((name.clone(), MicroColumn { scope: column.scope, values: change(column)? }))
        };
        Ok(Self(self.0.iter().map(changed).collect::<Result<_>>()?))
    }
}

/// Returns the sequence of each token, from the starts of the sequences and the end of the last.
pub(super) fn sequence_of_tokens(ends: &[usize]) -> Vec<u32> {
    let lengths = ends.windows(2).map(|pair: &[usize]| Range { start: pair[0], end: pair[1] }.len());
    (0..).zip(lengths).flat_map(|(sequence, length)| std::iter::repeat_n(sequence, length)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn columns() -> MicroColumns {
        let column = |scope, values: &[f32]| MicroColumn { scope, values: Tensor::new(values, &Device::Cpu).unwrap() };
        let of_tokens = column(ColumnScope::Token, &[1.0, 2.0, 3.0]);
        MicroColumns::default().with("token", of_tokens).with("sequence", column(ColumnScope::Sequence, &[4.0, 5.0]))
    }

    fn values(columns: &MicroColumns) -> [Vec<f32>; 2] {
        ["token", "sequence"].map(|name| columns.values(name).unwrap().to_vec1().unwrap())
    }

    #[test]
    fn padding_is_a_sequence_with_zeros() {
        assert_eq!(values(&columns().padded(2).unwrap()), [vec![1.0, 2.0, 3.0, 0.0, 0.0], vec![4.0, 5.0, 0.0]]);
    }

    #[test]
    fn a_rank_of_context_parallelism_has_its_tokens_and_all_sequences() {
        let part = columns().of_tokens(|x| x.narrow(0, 1, 2)).unwrap();
        assert_eq!(values(&part), [vec![2.0, 3.0], vec![4.0, 5.0]]);
    }

    #[test]
    fn a_column_that_is_missing_or_has_other_rows_is_an_error() {
        let spec = |name, scope| [ColumnSpec { name, scope }];
        let check = |needed: [ColumnSpec; 1]| columns().check(&needed, 3, 2).map_err(|error| error.to_string());
        assert_eq!(check(spec("token", ColumnScope::Token)), Ok(()));
        assert_eq!(check(spec("sequence", ColumnScope::Sequence)), Ok(()));
        assert!(check(spec("token", ColumnScope::Sequence)).unwrap_err().contains("3 rows by Token"));
        assert!(check(spec("pair", ColumnScope::Sequence)).unwrap_err().contains("no column `pair`"));
        assert!(columns().check(&spec("token", ColumnScope::Token), 4, 2).is_err());
    }

    #[test]
    fn tokens_know_their_sequence() {
        assert_eq!(sequence_of_tokens(&[0, 2, 2, 5]), [0, 0, 2, 2, 2]);
    }
}
