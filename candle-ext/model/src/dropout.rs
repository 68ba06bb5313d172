//! Dropout masks of a micro-batch.

use candle_core::{Device, Result, Tensor};
use candlewick_ops::{self as ops, ColumnShard, Dropout, RowRanges, upload};

/// Rows and columns of a micro-batch that a dropout mask covers.
#[derive(Clone)]
pub struct DropoutScope {
    key: u64,
    /// Rows of the micro-batch.
    rows: RowRanges,
    /// Columns of these rows.
    columns: ColumnShard,
}

/// Dropout masks of the adapters of experts.
#[derive(Clone, Copy)]
pub struct ExpertDropout<'a> {
    /// Key of each slot, i64 [t, k]; of each row, i64 [n], where rows are sorted by expert.
    pub keys: &'a Tensor,
    /// Columns of the down projections' input on this rank.
    pub columns: ColumnShard,
}

impl DropoutScope {
    pub(crate) fn new(key: u64, rows: &RowRanges) -> Self {
        Self { key, rows: rows.clone(), columns: ColumnShard::ALL }
    }

    /// Returns the scope that begins `row` rows later.
    pub(crate) fn at_row(&self, row: usize) -> Self {
        Self { rows: self.rows.skip(row), ..self.clone() }
    }

    /// Returns the scope restricted to `columns`.
    pub fn in_columns(&self, columns: ColumnShard) -> Self {
        Self { columns, ..self.clone() }
    }

    /// Returns the keys of the masks of the tokens' `k` experts, i64 [t, k], for t rows from this scope's first row on.
    ///
    /// A key depends on the token's position in the micro-batch and on the rank of the expert among the token's experts.
    pub(crate) fn expert_keys(&self, [t, k]: [usize; 2], device: &Device) -> Result<Tensor> {
        let slots = self.rows.positions(t)?.into_iter().flat_map(|token| (0..k).map(move |slot| token * k + slot));
        let keys: Vec<i64> = slots.map(|slot| ops::derive_key(self.key, slot as u64) as i64).collect();
        upload(&keys, (t, k), device)
    }

    /// Applies dropout with probability `p` to `x`. The mask does not depend on tiling or sharding.
    pub(crate) fn apply(&self, module_hash: u64, p: f64, x: &Tensor) -> Result<Tensor> {
        let key = ops::derive_key(self.key, module_hash);
        ops::sharded_dropout(x, Dropout { p, key }, &self.rows, self.columns)
    }
}
