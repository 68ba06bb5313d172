//! One matrix of each routed expert, with its LoRA adapters.
//!
//! Dimensions: n rows sorted by expert, e experts, r LoRA rank

use std::ops::Range;

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, Dropout, GroupedCall, TokensPerCall, Weight};

use super::adapter::ExpertAdapterSpec;
use super::spec::ExpertMatrixSpec;
use crate::param::{FNV_START, fnv1a};
use crate::{AdapterSpec, ExpertDropout, WeightLookup};

/// A linear layer per expert: y = x W_i^T for the rows of expert i, plus the adapters' outputs.
#[derive(Clone, Debug)]
pub(crate) struct ExpertLinear {
    /// Matrices of all experts [e * out, in].
    weight: Weight,
    adapters: Vec<ExpertLora>,
}

/// A LoRA adapter on some output columns of each expert: scaling * (dropout(x) A_i^T) B_i^T.
#[derive(Clone, Debug)]
struct ExpertLora {
    /// Factors A_i of all experts [e * r, in].
    a: Weight,
    /// Factors B_i of all experts [e * columns, r].
    b: Weight,
    scaling: f64,
    columns: ExpertColumns,
    /// Probability of dropout, and the key of the module's masks.
    dropout: Dropout,
}

/// Output columns to which an adapter adds. A rank may hold a part of them.
#[derive(Clone, Copy, Debug)]
enum ExpertColumns {
    All,
    /// Columns of the gate projection.
    First,
    /// Columns of the up projection.
    Last,
}

impl ExpertLinear {
    /// Builds the layer from the parameters that `get` returns by name.
    pub(crate) fn build(spec: &ExpertMatrixSpec, get: &mut WeightLookup) -> Result<Self> {
        let weight = get(&spec.name)?;
        let adapters =
            spec.adapters.iter().map(|adapter| ExpertLora::build(adapter, spec.out, get)).collect::<Result<_>>()?;
        Ok(Self { weight, adapters })
    }

    /// Returns true if an adapter has dropout.
    pub(crate) fn has_dropout(&self) -> bool {
        self.adapters.iter().any(|adapter| adapter.dropout.p > 0.0)
    }

    /// Computes [n, in] -> [n, out]. `offsets` u32 [e + 1] are the first rows of the experts. Adapters, which are narrow,
    /// have the default implementation. `dropout` has keys of rows.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        offsets: &Tensor,
        call: GroupedCall,
        dropout: Option<ExpertDropout>,
    ) -> Result<Tensor> {
        let base = ops::grouped_linear(x, &self.weight, offsets, call)?;
        // An expert parallel rank may receive no rows.
        if x.dim(0)? == 0 {
            return Ok(base);
        }
        self.adapters.iter().try_fold(base, |sum, adapter| {
            let x = match dropout {
                Some(ExpertDropout { keys, columns }) => ops::row_dropout(x, keys, adapter.dropout, columns)?,
                None => x.clone(),
            };
            adapter.add_to(&sum, &x, offsets, call.tokens)
        })
    }
}

impl ExpertLora {
    /// Builds the adapter of a matrix with `n_columns` output columns.
    fn build(spec: &ExpertAdapterSpec, n_columns: usize, get: &mut WeightLookup) -> Result<Self> {
        let AdapterSpec { scaling, dropout: p, ref module, .. } = spec.adapter;
        let (a, b) = (get(&spec.adapter.a_name())?, get(&spec.adapter.b_name())?);
        let dropout = Dropout { p, key: fnv1a(FNV_START, module) };
        Ok(Self { a, b, scaling, columns: ExpertColumns::of(&spec.columns, n_columns), dropout })
    }

    /// Adds the adapter's output for the rows `x` to its columns of `sum`.
    fn add_to(&self, sum: &Tensor, x: &Tensor, offsets: &Tensor, tokens: TokensPerCall) -> Result<Tensor> {
        let down = ops::grouped_linear(x, &self.a, offsets, tokens)?;
        let down = ops::scale(&down, self.scaling, x.dtype())?;
        let up = ops::grouped_linear(&down, &self.b, offsets, tokens)?;
        match self.columns {
            ExpertColumns::All => ops::add(sum, &up),
            ExpertColumns::First => ops::add_columns(sum, &up, 0),
            ExpertColumns::Last => ops::add_columns(sum, &up, sum.dim(1)? - up.dim(1)?),
        }
    }
}

impl ExpertColumns {
    /// Returns the variant for some of the `n` columns of a whole matrix.
    fn of(columns: &Range<usize>, n: usize) -> Self {
        match (columns.start, columns.end == n) {
            (0, true) => Self::All,
            (0, false) => Self::First,
            _ => Self::Last,
        }
    }
}
