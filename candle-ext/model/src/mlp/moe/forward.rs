//! A mixture-of-experts MLP.
//!
//! Dimensions: t tokens, d hidden size, e experts, k selected experts of a token, n rows sorted by expert, f intermediate
//! size of an expert

use candle_core::{DType, Result, Tensor};
use candlewick_ops::{self as ops, RouterSpec, Routing, Weight};

use super::expert_linear::ExpertLinear;
use super::experts::{ExpertCall, Experts};
use super::spec::{MoeSpec, SharedExpertSpec};
use crate::mlp::Mlp;
use crate::mlp::swiglu::{StartedSwiGlu, SwiGlu};
use crate::router::{RouterLogits, select};
use crate::{ForwardContext, Linear, TokenExchange, WeightLookup};

/// Router, routed experts and shared expert of a layer.
pub(super) struct Moe {
    layer_idx: usize,
    router: RouterSpec,
    router_linear: Linear,
    expert_bias: Option<Weight>,
    experts: Experts,
    shared_expert: Option<SharedExpert>,
}

/// Expert that every token uses.
struct SharedExpert {
    mlp: SwiGlu,
    gate: Option<Linear>,
}

impl Moe {
    /// Builds the layer from the parameters that `get` returns by name.
    pub(super) fn build(spec: &MoeSpec, layer_idx: usize, get: &mut WeightLookup) -> Result<Self> {
        Ok(Self {
            layer_idx,
            router: spec.router,
            router_linear: Linear::build(&spec.router_weight, get)?,
            expert_bias: spec.bias_name().map(|name| get(&name)).transpose()?,
            experts: Experts {
                gate_up: ExpertLinear::build(&spec.gate_up, get)?,
                down: ExpertLinear::build(&spec.down, get)?,
                weighting: spec.weighting,
            },
            shared_expert: spec.shared_expert.as_ref().map(|shared| SharedExpert::build(shared, get)).transpose()?,
        })
    }

    /// Returns the keys of the experts' dropout masks, i64 [t, k]; `None` without dropout.
    fn dropout_keys(&self, x_td: &Tensor, context: &ForwardContext) -> Result<Option<Tensor>> {
        let n_tokens = x_td.dim(0)?;
        let scope = context.residual_dropout(n_tokens).filter(|_| self.experts.have_dropout());
        scope.map(|scope| scope.expert_keys([n_tokens, self.router.top_k], x_td.device())).transpose()
    }

    /// Selects the experts of each token, and adds the router's losses to the tape.
    fn route(&self, x_td: &Tensor, context: &ForwardContext) -> Result<Routing> {
        let x_td = &context.router.jittered(x_td, self.layer_idx)?;
        let dropout = context.residual_dropout(x_td.dim(0)?);
        let logits_te = self.router_linear.router_logits(x_td, context.router.settings.dtype, dropout.as_ref())?;
        let bias = self.expert_bias.as_ref().map(|bias| bias.value()?.to_dtype(DType::F32)).transpose()?;
        let (layer_idx, logits, bias, spec) = (self.layer_idx, &logits_te, bias.as_ref(), self.router);
        select(&RouterLogits { layer_idx, logits, bias, spec }, &context.router, context.parallel_ops.tokens)
    }
}

impl Mlp for Moe {
    fn forward(&self, x_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let routing = self.route(x_td, context)?;
        let padding = context.router.padding(self.router, routing.assignment.n_experts());
        let (experts, implementation, tiled_mlp) = (&self.experts, context.experts_implementation, context.tiled_mlp);
        let dropout_keys = self.dropout_keys(x_td, context)?;
        let dropout_keys = dropout_keys.as_ref();
        let call = ExpertCall { x: x_td, routing: &routing, experts, implementation, padding, tiled_mlp, dropout_keys };
        let (mut started, mut shared_td) = (None, None);
        let mut compute_shared = |exchange| {
            let Some(shared) = &self.shared_expert else { return Ok(()) };
            match exchange {
                TokenExchange::Dispatch => started = Some(shared.mlp.start_sublayer(x_td, context)?),
                TokenExchange::Combine => {
                    let finish = |started| shared.finish(started, x_td, context);
                    shared_td = started.take().map(finish).transpose()?;
                }
            }
            Ok(())
        };
        let routed_td = context.parallel_ops.tokens.experts(&call, &mut compute_shared)?;
        shared_td.map_or(Ok(routed_td.clone()), |shared_td| ops::add(&routed_td, &shared_td))
    }
}

impl SharedExpert {
    fn build(spec: &SharedExpertSpec, get: &mut WeightLookup) -> Result<Self> {
        let gate = spec.gate.as_ref().map(|gate| Linear::build(gate, get)).transpose()?;
        Ok(Self { mlp: SwiGlu::build(&spec.mlp, get)?, gate })
    }

    /// Computes the rest of the MLP, and its gate: the output [t, d] for the input `x_td`.
    fn finish(&self, started: StartedSwiGlu, x_td: &Tensor, context: &ForwardContext) -> Result<Tensor> {
        let y_td = self.mlp.finish_sublayer(started, context)?;
        match &self.gate {
            Some(gate) => {
                let dropout = context.residual_dropout(x_td.dim(0)?);
                ops::sigmoid_gate(&y_td, &gate.forward(x_td, dropout.as_ref())?)
            }
            None => Ok(y_td),
        }
    }
}
