//! Mixture of experts: a router, routed experts, and a shared expert.

mod adapter;
mod adapter_factors;
mod adapter_targets;
mod adapters_cost;
mod cost;
mod expert_linear;
mod experts;
mod experts_cost;
mod forward;
mod spec;

use candle_core::Result;

use super::{Mlp, MlpCost, MlpSpec};
use crate::lora::{AdapterNames, LoraTargets};
use crate::{AdapterSpec, LayerSizes, LinearGroup, LinearSpec, ModelError, ParamSpec, WeightLookup};
use forward::Moe;

pub use adapter::ExpertAdapterSpec;
pub use experts::{ExpertCall, ExpertPadding, ExpertTokens, Experts};
pub use experts_cost::ExpertExchange;
pub use spec::{ExpertMatrixSpec, MoeSpec, SharedExpertSpec};

impl MlpSpec for MoeSpec {
    fn kind(&self) -> &'static str {
        "mixture of experts"
    }

    fn linears(&self) -> Vec<&LinearSpec> {
        self.shared_mlp().map_or_else(Vec::new, MlpSpec::linears)
    }

    fn linears_mut(&mut self) -> Vec<&mut LinearSpec> {
        self.shared_expert.as_mut().map_or_else(Vec::new, |shared| shared.mlp.linears_mut())
    }

    fn own_params(&self, std: f64) -> Vec<ParamSpec> {
        self.params(std)
    }

    fn expert_matrices(&self) -> Vec<&ExpertMatrixSpec> {
        vec![&self.gate_up, &self.down]
    }

    fn expert_matrices_mut(&mut self) -> Vec<&mut ExpertMatrixSpec> {
        vec![&mut self.gate_up, &mut self.down]
    }

    fn router(&self) -> Option<&LinearSpec> {
        Some(&self.router_weight)
    }

    fn expert_bias_name(&self) -> Option<String> {
        self.bias_name()
    }

    fn adapters(&self) -> Vec<&AdapterSpec> {
        let linears = self.linears().into_iter().chain(self.shared_expert_gate()).chain([&self.router_weight]);
        let of_experts = self.expert_matrices().into_iter().flat_map(|matrix| &matrix.adapters);
        linears.filter_map(|linear| linear.adapter.as_ref()).chain(of_experts.map(|it| &it.adapter)).collect()
    }

    fn attach(&mut self, targets: &LoraTargets, layer_idx: usize) -> std::result::Result<Vec<ParamSpec>, ModelError> {
        adapter_targets::attach(self, targets, layer_idx)
    }

    fn adapter_names(&self) -> AdapterNames {
        adapter_targets::names(self)
    }

    /// Counts the router, the selected experts and the shared expert.
    fn n_active_weights(&self) -> usize {
        let of_expert = |matrix: &ExpertMatrixSpec| matrix.out * matrix.input.len;
        let selected = self.router.top_k * (of_expert(&self.gate_up) + of_expert(&self.down));
        let linears = self.linears().into_iter().chain([&self.router_weight]).chain(self.shared_expert_gate());
        selected + linears.map(LinearSpec::n_weights).sum::<usize>()
    }

    fn linear_groups(&self) -> Vec<LinearGroup<'_>> {
        self.shared_mlp().map_or_else(Vec::new, MlpSpec::linear_groups)
    }

    fn cost(&self, sizes: &LayerSizes) -> MlpCost {
        cost::cost(self, sizes)
    }

    fn build(&self, layer_idx: usize, get: &mut WeightLookup) -> Result<Box<dyn Mlp>> {
        Ok(Box::new(Moe::build(self, layer_idx, get)?))
    }
}
