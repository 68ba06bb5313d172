//! SwiGLU: down(silu(gate(x)) * up(x)).

mod cost;
mod forward;
mod spec;

use candle_core::Result;

use super::{Mlp, MlpCost, MlpSpec};
use crate::{LayerSizes, LinearFusion, LinearGroup, LinearSpec, WeightLookup};

pub use forward::swiglu_mlp;
pub use spec::SwiGluSpec;

pub(crate) use cost::SwiGluCost;
pub(crate) use forward::{StartedSwiGlu, SwiGlu};

impl MlpSpec for SwiGluSpec {
    fn kind(&self) -> &'static str {
        "SwiGLU"
    }

    fn linears(&self) -> Vec<&LinearSpec> {
        self.gate_up.iter().chain([&self.down]).collect()
    }

    fn linears_mut(&mut self) -> Vec<&mut LinearSpec> {
        self.gate_up.iter_mut().chain([&mut self.down]).collect()
    }

    fn linear_groups(&self) -> Vec<LinearGroup<'_>> {
        if self.linears().iter().all(|linear| linear.fp8 && linear.is_plain()) {
            return vec![LinearGroup { linears: self.linears(), fusion: LinearFusion::GatedMlp }];
        }
        let joined = self.gate_up.iter().all(LinearSpec::is_plain);
        let fusion = LinearFusion::SharedInput { joined, quantizes_norm: false };
        vec![LinearGroup { linears: self.gate_up.iter().collect(), fusion }, LinearGroup::single(&self.down)]
    }

    fn cost(&self, sizes: &LayerSizes) -> MlpCost {
        let cost = SwiGluCost { spec: self, sizes };
        let (saved, forward) = (cost.saved(), cost.forward());
        MlpCost {
            saved,
            saved_by_all: 0,
            forward,
            recorded_forward: forward,
            backward: saved + cost.backward(sizes.rounded_grad_bytes()),
            end_of_backward: 0,
            kept_by_threads: 0,
            matmuls: cost.matmuls(),
        }
    }

    fn build(&self, _: usize, get: &mut WeightLookup) -> Result<Box<dyn Mlp>> {
        Ok(Box::new(SwiGlu::build(self, get)?))
    }
}
