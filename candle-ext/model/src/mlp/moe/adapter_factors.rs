//! Factors of adapters on experts: their parameters, their tensors in an adapter folder, and their merge.
//!
//! Dimensions: e experts, r rank, w adapted output columns of an expert's matrix

use std::ops::Range;

use candle_core::{DType, Result, Tensor};

use super::adapter::{ExpertAdapterFiles, ExpertAdapterSpec};
use super::spec::ExpertMatrixSpec;
use crate::{Dim, DimSize, HubLayout, HubTensor, HubTensors, Init, ParamGroupKind, ParamScope, ParamSpec};

impl ExpertAdapterSpec {
    /// Returns the factors A [e * r, input] and B [e * w, r] on a matrix of the experts, sorted by expert.
    pub(crate) fn params(&self, matrix: &ExpertMatrixSpec) -> [ParamSpec; 2] {
        let rows = |dim, n: usize| DimSize { dim, len: matrix.n_experts * n };
        let rank = DimSize { dim: Dim::Rank, len: self.adapter.r };
        let bound = (matrix.input.len as f64).powf(-0.5);
        let factor = |name, (dim, n_rows), columns: DimSize, init, layout| ParamSpec {
            group: ParamGroupKind::Expert,
            hub: Some(Box::new(self.hub(name, n_rows, [matrix.n_experts, columns.len], layout))),
            ..ParamSpec::matrix(self.factor_name(name), [rows(dim, n_rows), columns], ParamScope::Sublayer, init)
        };
        let in_columns = match self.files {
            ExpertAdapterFiles::PerExpert(_) => HubLayout::Rows,
            ExpertAdapterFiles::Parameter(_) => HubLayout::ExpertsInColumns { n_experts: matrix.n_experts },
        };
        [
            factor("lora_A", (Dim::Experts, self.adapter.r), matrix.input, Init::Uniform { bound }, HubLayout::Rows),
            factor("lora_B", (matrix.rows_of(self.columns.len()), self.columns.len()), rank, Init::Zeros, in_columns),
        ]
    }

    fn factor_name(&self, factor: &str) -> String {
        format!("{}.{factor}.weight", self.adapter.module)
    }

    /// Returns the tensors of a factor with `n_rows` rows for each expert.
    fn hub(&self, factor: &str, n_rows: usize, [n_experts, width]: [usize; 2], layout: HubLayout) -> HubTensors {
        let tensor = |module: &String, rows| HubTensor { name: format!("{module}.{factor}.weight"), rows };
        let tensors = match &self.files {
            ExpertAdapterFiles::Parameter(module) => vec![tensor(module, 0..n_experts * n_rows)],
            ExpertAdapterFiles::PerExpert(modules) => {
                let rows = (0..n_experts).map(|i| i * n_rows..(i + 1) * n_rows);
                modules.iter().zip(rows).map(|(module, rows)| tensor(module, rows)).collect()
            }
        };
        HubTensors { fused_shape: vec![n_experts, n_rows, width], tensors, layout }
    }
}

impl ExpertMatrixSpec {
    /// Returns the meaning of the rows of a matrix with `n_columns` of this matrix's output columns for each expert.
    fn rows_of(&self, n_columns: usize) -> Dim {
        match self.rows {
            Dim::ExpertFfn { n_matrices } => Dim::ExpertFfn { n_matrices: n_matrices * n_columns / self.out },
            other => other,
        }
    }

    /// Returns `base` [e * out, input] with all adapters merged: W_i + scaling B_i A_i for each expert i, in f32.
    ///
    /// `read` returns the value of a factor by its name.
    pub(crate) fn merged(&self, base: &Tensor, read: impl Fn(&str) -> Result<Tensor>) -> Result<Tensor> {
        let by_expert = (self.n_experts, self.out, self.input.len);
        let mut sum = base.to_dtype(DType::F32)?.reshape(by_expert)?;
        for ExpertAdapterSpec { adapter, columns, .. } in &self.adapters {
            let factor = |name: String, shape: (usize, usize, usize)| read(&name)?.to_dtype(DType::F32)?.reshape(shape);
            let a = factor(adapter.a_name(), (self.n_experts, adapter.r, self.input.len))?;
            let b = factor(adapter.b_name(), (self.n_experts, columns.len(), adapter.r))?;
            let delta = b.matmul(&a)?.affine(adapter.scaling, 0.0)?;
            let adapted = (sum.narrow(1, columns.start, columns.len())? + delta)?;
            let [before, after] = [0..columns.start, columns.end..self.out];
            let rest = |rows: Range<usize>| sum.narrow(1, rows.start, rows.len());
            sum = Tensor::cat(&[&rest(before)?, &adapted, &rest(after)?], 1)?;
        }
        sum.reshape((self.n_experts * self.out, self.input.len))
    }
}
