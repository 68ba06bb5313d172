//! Dropout masks of a micro-batch.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, Columns, Dropout, Rows};

/// Rows and columns of a micro-batch that a dropout mask covers.
#[derive(Clone)]
pub(crate) struct DropoutScope {
    key: u64,
    /// Rows of the micro-batch.
    rows: Rows,
    /// Columns of these rows.
    columns: Columns,
}

impl DropoutScope {
    pub(crate) fn new(key: u64, rows: &Rows) -> Self {
        Self { key, rows: rows.clone(), columns: Columns::ALL }
    }

    /// Returns the scope that begins `row` rows later.
    pub(crate) fn at_row(&self, row: usize) -> Self {
        Self { rows: self.rows.after(row), ..self.clone() }
    }

    /// Returns the scope restricted to `columns`.
    pub(crate) fn in_columns(&self, columns: Columns) -> Self {
        Self { columns, ..self.clone() }
    }

    /// Applies dropout with probability `p` to `x`. The mask does not depend on tiling or sharding.
    pub(crate) fn apply(&self, module_hash: u64, p: f64, x: &Tensor) -> Result<Tensor> {
        let key = ops::derive_key(self.key, module_hash);
        ops::dropout_part(x, Dropout { p, key }, &self.rows, self.columns)
    }
}
