//! Specification of a mixture-of-experts MLP.

use candlewick_ops::{RouterSpec, WeightStorage};

use super::adapter::ExpertAdapterSpec;
use crate::linear_spec::layer_name;
use crate::mlp::SwiGluSpec;
use crate::{
    Config, Dim, DimSize, ExpertWeighting, HubLayout, HubTensor, HubTensors, Init, LinearSpec, MoeConfig,
    ParamGroupKind, ParamScope, ParamSpec,
};

/// Name of a router's expert bias.
const EXPERT_BIAS: &str = "e_score_correction_bias";

/// A mixture of experts: sum over the selected experts of weight * down(silu(gate(x)) * up(x)), plus a shared expert.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeSpec {
    /// Name of the layer in memory, such as `model.layers.0.mlp`.
    pub module: String,
    /// Number of routed experts.
    pub n_experts: usize,
    /// Intermediate size of a routed expert.
    pub expert_size: usize,
    /// Settings of the router.
    pub router: RouterSpec,
    /// Weight of the router [experts, hidden size].
    pub router_weight: LinearSpec,
    /// True if the router has an expert bias.
    pub expert_bias: bool,
    /// Gate and up projections of all experts.
    pub gate_up: ExpertMatrixSpec,
    /// Down projections of all experts.
    pub down: ExpertMatrixSpec,
    /// Place where the weights of experts multiply.
    pub weighting: ExpertWeighting,
    /// Expert that every token uses.
    pub shared_expert: Option<SharedExpertSpec>,
    /// Names of the tensors in Hub checkpoints.
    pub(crate) hub: HubNames,
}

/// One matrix of each expert, stored as one parameter [experts * out, input].
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertMatrixSpec {
    /// Name of the parameter, such as `model.layers.0.mlp.experts.gate_up_proj`.
    pub name: String,
    /// Number of experts.
    pub n_experts: usize,
    /// Output features of an expert's matrix.
    pub out: usize,
    /// Input features of an expert's matrix.
    pub input: DimSize,
    /// Storage of the weights.
    pub storage: WeightStorage,
    /// True if the experts multiply in FP8 during training.
    pub fp8: bool,
    /// LoRA adapters of the experts.
    pub adapters: Vec<ExpertAdapterSpec>,
    /// Meaning of the parameter's rows.
    pub(crate) rows: Dim,
}

/// The shared expert of an MoE layer.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedExpertSpec {
    /// Its MLP.
    pub mlp: SwiGluSpec,
    /// Sigmoid gate [1, hidden size] of its output.
    pub gate: Option<LinearSpec>,
}

/// Names of an MoE layer in Hub checkpoints.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HubNames {
    /// Name of the layer, such as `model.layers.0.block_sparse_moe`.
    pub(crate) module: String,
    /// Gate, up and down projection of an expert.
    pub(crate) linears: [&'static str; 3],
}

impl Config {
    /// Returns the specification of layer `layer_idx`'s mixture of experts.
    pub(crate) fn moe_spec(&self, moe: &MoeConfig, layer_idx: usize) -> MoeSpec {
        let family = self.typed.family.spec().moe.expect("a config with experts belongs to a family with experts");
        let module = format!("{}.mlp", layer_name(layer_idx));
        let embed = self.embed();
        let experts = DimSize { dim: Dim::Experts, len: moe.n_experts };
        let matrix = |name: &str, rows, out, input| ExpertMatrixSpec {
            name: format!("{module}.experts.{name}"),
            n_experts: moe.n_experts,
            out,
            input,
            rows,
            storage: WeightStorage::Dense,
            fp8: false,
            adapters: Vec::new(),
        };
        let ffn = DimSize { dim: Dim::Ffn, len: moe.expert_size };
        let shared_module = format!("{module}.{}", family.names.shared_expert);
        let one = DimSize { dim: Dim::HeadDim, len: 1 };
        MoeSpec {
            n_experts: moe.n_experts,
            expert_size: moe.expert_size,
            router: moe.router,
            router_weight: LinearSpec::new(format!("{module}.gate"), [experts, embed], false),
            expert_bias: moe.expert_bias,
            weighting: moe.weighting,
            gate_up: matrix(
                "gate_up_proj",
                Dim::ExpertFfn { n_matrices: 2 * moe.n_experts },
                2 * moe.expert_size,
                embed,
            ),
            down: matrix("down_proj", Dim::Experts, embed.len, ffn),
            shared_expert: moe.shared_expert.map(|shared| SharedExpertSpec {
                gate: shared.gated.then(|| LinearSpec::new(format!("{shared_module}_gate"), [one, embed], false)),
                mlp: self.swiglu(&shared_module, shared.intermediate_size),
            }),
            hub: HubNames {
                module: format!("{}.{}", layer_name(layer_idx), family.names.module),
                linears: family.names.linears,
            },
            module,
        }
    }
}

impl MoeSpec {
    /// Returns the name of the router's expert bias [experts]; `None` without one.
    pub(crate) fn bias_name(&self) -> Option<String> {
        self.expert_bias.then(|| format!("{}.{EXPERT_BIAS}", self.router_weight.module))
    }

    /// Returns the MLP of the shared expert; `None` without one.
    pub(super) fn shared_mlp(&self) -> Option<&SwiGluSpec> {
        self.shared_expert.as_ref().map(|shared| &shared.mlp)
    }

    /// Returns the gate of the shared expert; `None` without one.
    pub(crate) fn shared_expert_gate(&self) -> Option<&LinearSpec> {
        self.shared_expert.as_ref().and_then(|shared| shared.gate.as_ref())
    }

    /// Returns the parameters except those of the shared expert's MLP.
    pub(super) fn params(&self, std: f64) -> Vec<ParamSpec> {
        let init = Init::Normal { std, zero_row: None };
        let linear = |linear: &LinearSpec| {
            ParamSpec::matrix(linear.weight_name(), [linear.out, linear.input], ParamScope::ResidualStream, init)
        };
        let router = ParamSpec { hub: self.hub_router(), ..linear(&self.router_weight) };
        let mut params = vec![router];
        if let Some(name) = self.bias_name() {
            let bias = ParamSpec::vector(name, self.router_weight.out, ParamScope::ResidualStream, Init::Zeros);
            let hub = self.hub_expert_bias();
            params.push(ParamSpec { trainable: false, storage: WeightStorage::F32, hub, ..bias });
        }
        params.push(self.gate_up.param(self.hub_experts(&self.gate_up, &self.hub.linears[..2]), std));
        params.push(self.down.param(self.hub_experts(&self.down, &self.hub.linears[2..]), std));
        params.extend(self.shared_expert_gate().map(linear));
        params
    }

    /// Returns the module names of one linear layer of all experts, as in Hub checkpoints.
    pub(crate) fn expert_modules(&self, linear: &str) -> impl Iterator<Item = String> {
        (0..self.n_experts).map(move |expert_idx| format!("{}.experts.{expert_idx}.{linear}", self.hub.module))
    }

    /// Returns the router's module name in Hub checkpoints.
    pub(crate) fn hub_router_module(&self) -> String {
        format!("{}.gate", self.hub.module)
    }

    /// Returns the router's weight in Hub checkpoints if its name differs.
    fn hub_router(&self) -> Option<Box<HubTensors>> {
        let LinearSpec { out, input, .. } = &self.router_weight;
        self.of_hub_router("weight", vec![out.len, input.len])
    }

    /// Returns the router's expert bias in Hub checkpoints if its name differs.
    fn hub_expert_bias(&self) -> Option<Box<HubTensors>> {
        self.of_hub_router(EXPERT_BIAS, vec![self.n_experts])
    }

    fn of_hub_router(&self, param: &str, shape: Vec<usize>) -> Option<Box<HubTensors>> {
        let name = format!("{}.{param}", self.hub_router_module());
        (self.hub.module != self.module).then(|| {
            let tensors = vec![HubTensor { name, rows: 0..self.n_experts }];
            Box::new(HubTensors { fused_shape: shape, tensors, layout: HubLayout::Rows })
        })
    }

    /// Returns the Hub's tensors of a fused matrix: for each expert those of `linears`, one below the other.
    fn hub_experts(&self, matrix: &ExpertMatrixSpec, linears: &[&str]) -> HubTensors {
        let height = matrix.out / linears.len();
        let tensors = (0..matrix.n_experts).flat_map(|expert_idx| {
            linears.iter().enumerate().map(move |(i, linear)| {
                let first = expert_idx * matrix.out + i * height;
                let name = format!("{}.experts.{expert_idx}.{linear}.weight", self.hub.module);
                HubTensor { name, rows: first..first + height }
            })
        });
        HubTensors {
            fused_shape: vec![matrix.n_experts, matrix.out, matrix.input.len],
            tensors: tensors.collect(),
            layout: HubLayout::Rows,
        }
    }
}

impl ExpertMatrixSpec {
    /// Returns the number of elements of all matrices.
    pub fn n_weights(&self) -> usize {
        self.n_experts * self.out * self.input.len
    }

    /// Returns the parameter: the rows of the first expert, then those of the second, and so on.
    fn param(&self, hub: HubTensors, std: f64) -> ParamSpec {
        let rows = DimSize { dim: self.rows, len: self.n_experts * self.out };
        let init = Init::Normal { std, zero_row: None };
        ParamSpec {
            group: ParamGroupKind::Expert,
            hub: Some(Box::new(hub)),
            ..ParamSpec::matrix(self.name.clone(), [rows, self.input], ParamScope::Sublayer, init)
        }
    }
}
