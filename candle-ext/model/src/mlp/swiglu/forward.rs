//! A SwiGLU MLP: down(silu(gate(x)) * up(x)).
//!
//! Dimensions: t tokens (packed), d hidden size, f MLP intermediate size

use candle_core::{Result, Tensor};
use candlewick_ops::{self as ops, ColumnShard, NormCall, Weight};

use super::spec::SwiGluSpec;
use crate::mlp::Mlp;
use crate::{ForwardContext, Linear, TiledMlp, WeightLookup, dropout::DropoutScope};

/// Linear layers of a SwiGLU MLP.
#[derive(Clone)]
pub(crate) struct SwiGlu {
    gate_up: [Linear; 2],
    down: Linear,
}

/// Computes an MLP without biases and adapters as a layer does, [t, d] -> [t, d], from the weights of gate, up and down.
pub fn swiglu_mlp(x_td: &Tensor, weights: [&Weight; 3]) -> Result<Tensor> {
    let [gate, up, down] = weights.map(|weight| Linear::plain(weight.clone()));
    let mlp = SwiGlu { gate_up: [gate, up], down };
    mlp.project(mlp.start(x_td, None)?, None, ColumnShard::ALL)
}

/// An MLP sublayer before the collective that reduces its output.
pub(crate) enum StartedSwiGlu {
    /// Gated activation [t, f]; the down projection is still to compute.
    Gated(Tensor),
    /// Output of the down projection [t, d], of an MLP that computes in tiles or in one kernel.
    Projected(Tensor),
}

impl Mlp for SwiGlu {
    /// Computes [t, d] -> [t, d] between the collectives of a sublayer, in tiles as the context sets.
    fn forward(&self, normed_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        self.finish_sublayer(self.start_sublayer(normed_td, context)?, context)
    }

    fn forward_of_norm(&self, norm: NormCall<'_>, context: &ForwardContext) -> Result<Option<[Tensor; 2]>> {
        let [gate, up] = &self.gate_up;
        let reads_norm = context.tiled_mlp == TiledMlp::Off && !context.parallel_ops.tokens.exchanges_inputs();
        match Linear::plain_weights([gate, up, &self.down]).filter(|_| reads_norm) {
            Some(weights) => ops::fp8_normed_swiglu_mlp(norm, weights),
            None => Ok(None),
        }
    }
}

impl SwiGlu {
    pub(crate) fn build(spec: &SwiGluSpec, get: &mut WeightLookup) -> Result<Self> {
        let [gate, up] = &spec.gate_up;
        let gate_up = [Linear::build(gate, get)?, Linear::build(up, get)?];
        Ok(Self { gate_up, down: Linear::build(&spec.down, get)? })
    }

    /// Computes the first part of [`Mlp::forward`]: the gated activation, if not in tiles.
    pub(crate) fn start_sublayer(&self, x_td: &Tensor, context: &ForwardContext) -> Result<StartedSwiGlu> {
        let dropout = context.dropout();
        let x_td = &context.parallel_ops.tokens.copy_to_tp(x_td)?;
        match context.tiled_mlp {
            TiledMlp::Off => self.start(x_td, dropout.as_ref()),
            TiledMlp::On => {
                let (mlp, columns) = (self.clone(), context.parallel_ops.tokens.input_shard());
                let y_td = ops::tiled(x_td, ops::tile_rows(x_td.dim(0)?, x_td.dim(1)?), move |x_td, first_row| {
                    let dropout = dropout.as_ref().map(|dropout| dropout.at_row(first_row));
                    let started = mlp.start(x_td, dropout.as_ref())?;
                    mlp.project(started, dropout.as_ref(), columns)
                })?;
                Ok(StartedSwiGlu::Projected(y_td))
            }
        }
    }

    /// Computes the rest of [`Mlp::forward`]: the down projection and the sublayer's collective.
    pub(crate) fn finish_sublayer(&self, started: StartedSwiGlu, context: &ForwardContext) -> Result<Tensor> {
        let columns = context.parallel_ops.tokens.input_shard();
        context.parallel_ops.tokens.reduce_from_tp(&self.project(started, context.dropout().as_ref(), columns)?)
    }

    /// Computes the gated activation [t, d] -> [t, f], or the output if one kernel computes both.
    fn start(&self, x_td: &Tensor, dropout: Option<&DropoutScope>) -> Result<StartedSwiGlu> {
        let [gate, up] = &self.gate_up;
        if let Some(weights) = Linear::plain_weights([gate, up, &self.down])
            && let Some(y_td) = ops::fp8_swiglu_mlp(x_td, weights)?
        {
            return Ok(StartedSwiGlu::Projected(y_td));
        }
        let gated_tf = match Linear::forward_joined(&self.gate_up, x_td, dropout)? {
            Some(gate_up) => ops::swiglu_joined(&gate_up)?,
            None => ops::swiglu(&gate.forward(x_td, dropout)?, &up.forward(x_td, dropout)?)?,
        };
        Ok(StartedSwiGlu::Gated(gated_tf))
    }

    /// Computes the down projection, [t, f] -> [t, d]. `columns` are those of its input on this rank.
    fn project(&self, started: StartedSwiGlu, dropout: Option<&DropoutScope>, columns: ColumnShard) -> Result<Tensor> {
        match started {
            StartedSwiGlu::Projected(y_td) => Ok(y_td),
            StartedSwiGlu::Gated(gated_tf) => {
                self.down.forward(&gated_tf, dropout.map(|dropout| dropout.in_columns(columns)).as_ref())
            }
        }
    }
}
