//! Dropout masks of a micro-batch.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, ColumnShard, Dropout, RowRanges};

/// The rows and columns of a micro-batch that a dropout mask is drawn for.
#[derive(Clone)]
pub(crate) struct DropoutScope {
    key: u64,
    /// The rows of the micro-batch.
    rows: RowRanges,
    /// The elements of these rows.
    columns: ColumnShard,
}

impl DropoutScope {
    pub(crate) fn new(key: u64, rows: &RowRanges) -> Self {
        Self { key, rows: rows.clone(), columns: ColumnShard::ALL }
    }

    /// Returns the scope of the rows from `row` of these on.
    pub(crate) fn at_row(&self, row: usize) -> Self {
        Self { rows: self.rows.skip(row), ..self.clone() }
    }

    /// Returns the scope of some columns of these rows.
    pub(crate) fn in_columns(&self, columns: ColumnShard) -> Self {
        Self { columns, ..self.clone() }
    }

    /// Drops inputs `x` of a module with probability `p`. The mask does not depend on how the rows are cut.
    pub(crate) fn apply(&self, module_hash: u64, p: f64, x: &Tensor) -> Result<Tensor> {
        let key = ops::derive_key(self.key, module_hash);
        ops::sharded_dropout(x, Dropout { p, key }, &self.rows, self.columns)
    }
}
