//! A linear layer as a value: its weight, bias and adapter are found once, when the layer is built.

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, Columns, Dropout, Precision, Rows, Weight};

use crate::{LinearSpec, lora::Lora};

/// y = x W^T + b, plus what the adapter adds.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Weight>,
    adapter: Option<Adapter>,
}

/// A trained change of a frozen linear layer.
#[derive(Clone, Debug)]
pub enum Adapter {
    /// Low-rank adaptation.
    Lora(Lora),
}

/// The rows and columns of a micro-batch that a dropout mask is drawn for.
#[derive(Clone)]
pub(crate) struct DropoutScope {
    key: u64,
    /// The rows of the micro-batch.
    rows: Rows,
    /// The elements of these rows.
    columns: Columns,
}

impl Linear {
    /// Builds the layer from the parameters that `get` returns by name.
    pub(crate) fn build(spec: &LinearSpec, get: &mut impl FnMut(&str) -> Result<Weight>) -> Result<Self> {
        Ok(Self {
            weight: get(&spec.weight_name())?,
            bias: spec.bias.then(|| get(&spec.bias_name())).transpose()?,
            adapter: spec.adapter.as_ref().map(|adapter| Lora::build(adapter, get).map(Adapter::Lora)).transpose()?,
        })
    }

    /// Computes [.., inputs] -> [.., outputs]. Adapters drop no inputs without a dropout scope.
    pub(crate) fn forward(&self, x: &Tensor, dropout: Option<&DropoutScope>) -> Result<Tensor> {
        let base = ops::linear(x, &self.weight, self.bias.as_ref(), Precision::Compute)?;
        match &self.adapter {
            None => Ok(base),
            Some(adapter) => adapter.add_to(&base, x, dropout),
        }
    }

    /// Returns the number of outputs on this rank.
    pub(crate) fn n_outputs(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Joins the weights of layers into one, if one matmul with `x` is as good and the layers have neither bias nor adapter.
    pub(crate) fn joined(layers: &[Self], x: &Tensor) -> Option<Weight> {
        let is_plain = |layer: &&Self| layer.bias.is_none() && layer.adapter.is_none();
        let weights = layers.iter().map(|layer| Some(layer).filter(is_plain).map(|layer| &layer.weight));
        Weight::joined(&weights.collect::<Option<Vec<_>>>()?, x)
    }
}

impl Adapter {
    /// Adds what the adapter computes from `x` to the output `base` of the frozen layer.
    fn add_to(&self, base: &Tensor, x: &Tensor, dropout: Option<&DropoutScope>) -> Result<Tensor> {
        match self {
            Self::Lora(lora) => lora.add_to(base, x, dropout),
        }
    }
}

impl DropoutScope {
    pub(crate) fn new(key: u64, rows: &Rows) -> Self {
        Self { key, rows: rows.clone(), columns: Columns::ALL }
    }

    /// Returns the scope of the rows from `row` of these on.
    pub(crate) fn at_row(&self, row: usize) -> Self {
        Self { rows: self.rows.after(row), ..self.clone() }
    }

    /// Returns the scope of some columns of these rows.
    pub(crate) fn in_columns(&self, columns: Columns) -> Self {
        Self { columns, ..self.clone() }
    }

    /// Drops inputs `x` of a module with probability `p`. The mask does not depend on how the rows are cut.
    pub(crate) fn apply(&self, module_hash: u64, p: f64, x: &Tensor) -> Result<Tensor> {
        let key = ops::derive_key(self.key, module_hash);
        ops::dropout_part(x, Dropout { p, key }, &self.rows, self.columns)
    }
}
