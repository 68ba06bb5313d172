//! The weights of one unit at hand: name -> value and gradient sink, with the adapters that sit on its linear layers.

use std::collections::HashMap;

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, Columns, Dropout, Precision, Rows, Weight};

use crate::{
    Adapter, Unit,
    param::{FNV_START, fnv1a},
};

/// Name -> weight for one unit: what it owns and what it borrows.
#[derive(Clone)]
pub struct Weights {
    weights: HashMap<String, Weight>,
    adapters: HashMap<String, Adapter>,
}

/// What dropout drops of the rows at hand.
#[derive(Clone)]
pub(crate) struct Dropped {
    key: u64,
    /// Which of the micro-batch's rows they are.
    rows: Rows,
    /// Which of their elements.
    columns: Columns,
}

impl Dropped {
    pub(crate) fn new(key: u64, rows: &Rows) -> Self {
        Self { key, rows: rows.clone(), columns: Columns::ALL }
    }

    /// What is dropped of the rows from `row` of these on.
    pub(crate) fn at_row(&self, row: usize) -> Self {
        Self { rows: self.rows.after(row), ..self.clone() }
    }

    /// What is dropped of a part of the elements of these rows.
    pub(crate) fn in_columns(&self, columns: Columns) -> Self {
        Self { columns, ..self.clone() }
    }

    /// The inputs `x` of a module without what is dropped: the same whether its rows come in one piece or in several.
    fn of(&self, module: &str, p: f64, x: &Tensor) -> Result<Tensor> {
        let key = ops::derive_key(self.key, fnv1a(FNV_START, module));
        ops::dropout_part(x, Dropout { p, key }, &self.rows, self.columns)
    }
}

impl Weights {
    /// Gathers the weights of `unit`; every one it owns or borrows must be among `weights`.
    pub fn new(unit: &Unit, weights: impl IntoIterator<Item = (String, Weight)>) -> Result<Self> {
        let weights: HashMap<_, _> = weights.into_iter().collect();
        let names = unit.params.iter().map(|p| &p.name).chain(unit.shared.iter().map(|s| &s.name));
        if let Some(missing) = names.into_iter().find(|name| !weights.contains_key(*name)) {
            candle_core::bail!("the weights of {} lack `{missing}`", unit.name);
        }
        let adapters = unit.adapters.iter().map(|a| (a.module.clone(), a.clone())).collect();
        Ok(Self { weights, adapters })
    }

    /// Returns the weight called `name`.
    pub fn get(&self, name: &str) -> Result<&Weight> {
        match self.weights.get(name) {
            Some(weight) => Ok(weight),
            None => candle_core::bail!("there is no weight `{name}` in this unit"),
        }
    }

    /// Returns the weights of several modules as one, if one matmul with `x` is as good and there is nothing else to add.
    pub(crate) fn joined(&self, modules: &[String], x: &Tensor) -> Option<Weight> {
        let is_plain = |module: &String| {
            !self.adapters.contains_key(module) && !self.weights.contains_key(&format!("{module}.bias"))
        };
        let weight = |module: &String| self.weights.get(&format!("{module}.weight")).filter(|_| is_plain(module));
        Weight::joined(&modules.iter().map(weight).collect::<Option<Vec<_>>>()?, x)
    }

    /// y = x W^T + b, plus scaling * (dropout(x) A^T) B^T where the module has an adapter.
    pub(crate) fn linear(&self, module: &str, x: &Tensor, dropped: Option<&Dropped>) -> Result<Tensor> {
        let part = |name: &str| self.weights.get(&format!("{module}.{name}"));
        let base = ops::linear(x, self.get(&format!("{module}.weight"))?, part("bias"), Precision::Compute)?;
        let Some(adapter) = self.adapters.get(module) else { return Ok(base) };
        let x = match dropped {
            Some(dropped) => dropped.of(module, adapter.dropout, x)?,
            None => x.clone(),
        };
        // Scaled while it is small and unrounded.
        let down = ops::linear(&x, self.get(&format!("{module}.lora_A.weight"))?, None, Precision::Full)?;
        let down = ops::scale(&down, adapter.scaling, x.dtype())?;
        let up = ops::linear(&down, self.get(&format!("{module}.lora_B.weight"))?, None, Precision::Compute)?;
        ops::add(&base, &up)
    }
}
