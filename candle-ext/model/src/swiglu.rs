//! A SwiGLU MLP: down(silu(gate(x)) * up(x)).
//!
//! Dimensions: t tokens (packed), d hidden size, f MLP intermediate size

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, ColumnShard, OutputDtype, Weight};

use crate::{ForwardContext, Linear, SwiGluSpec, TiledMlp, dropout::DropoutScope};

/// Linear layers of a SwiGLU MLP.
#[derive(Clone)]
pub(crate) struct SwiGlu {
    gate_up: [Linear; 2],
    down: Linear,
}

impl SwiGlu {
    pub(crate) fn build(spec: &SwiGluSpec, get: &mut impl FnMut(&str) -> Result<Weight>) -> Result<Self> {
        let [gate, up] = &spec.gate_up;
        let gate_up = [Linear::build(gate, get)?, Linear::build(up, get)?];
        Ok(Self { gate_up, down: Linear::build(&spec.down, get)? })
    }

    /// Computes [t, d] -> [t, d] between the collectives of a sublayer, in tiles as the context sets.
    pub(crate) fn forward_sublayer(&self, x_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let (dropout, columns) = (context.dropout(), context.parallel_ops.input_shard());
        let x_td = &context.parallel_ops.copy_to_tp(x_td)?;
        let y_td = match context.tiled_mlp {
            TiledMlp::Off => self.forward(x_td, dropout.as_ref(), columns)?,
            TiledMlp::On => {
                let mlp = self.clone();
                ops::tiled(x_td, ops::tile_rows(x_td.dim(0)?, x_td.dim(1)?), move |x_td, first_row| {
                    let dropout = dropout.as_ref().map(|dropout| dropout.at_row(first_row));
                    mlp.forward(x_td, dropout.as_ref(), columns)
                })?
            }
        };
        context.parallel_ops.reduce_from_tp(&y_td)
    }

    /// Computes [t, d] -> [t, d]. `columns` are those of the down projection's input on this rank.
    fn forward(&self, x_td: &Tensor, dropout: Option<&DropoutScope>, columns: ColumnShard) -> Result<Tensor> {
        let [gate, up] = &self.gate_up;
        if let Some(weights) = Linear::plain_weights([gate, up, &self.down]) {
            return ops::swiglu_mlp(x_td, weights);
        }
        let gated_tf = match Linear::joined(&self.gate_up, x_td) {
            Some(joined) => ops::swiglu_joined(&ops::linear(x_td, &joined, None, OutputDtype::SameAsInput)?)?,
            None => ops::swiglu(&gate.forward(x_td, dropout)?, &up.forward(x_td, dropout)?)?,
        };
        self.down.forward(&gated_tf, dropout.map(|dropout| dropout.in_columns(columns)).as_ref())
    }
}
