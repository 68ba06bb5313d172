//! Routers and experts in a step of the engine: the inputs of each micro-batch, the counts that pipeline stages exchange, records
//! of selections, and updates of biases.

mod bias;
mod counts_over_layers;
mod replay;
mod rows;
mod step_routing;

use candle_core::{Device, Result, Tensor, bail};
use candlewick_model::{
    ExpertCountsSummedOverLayers, ForwardContext, GlobalExpertCounts, LayerOutputs, LayerSpec, Model, ReplayedExperts,
    RouterContext, RouterRows, RouterSettings, RoutingRecord, TokenParallel,
};
use candlewick_ops::{GroupedGemmImpl, derive_key};

use crate::batch::Micro;
use crate::expert_parallel::{ExpertParallel, ExpertParallelOps};

pub(crate) use replay::RoutingReadback;
pub use step_routing::{RoutedMicro, StepRouting};

/// Part of the seed of the routers' noise in a micro-batch.
const ROUTER_NOISE: u64 = 0x726f_7574_6572;

/// Settings of routers and experts in an engine.
#[derive(Clone, Default)]
pub(crate) struct EngineRouting {
    settings: RouterSettings,
    /// Settings in inference.
    inference: RouterSettings,
    experts: Option<ExpertParallel>,
    implementation: GroupedGemmImpl,
}

/// Routers during a step.
pub(crate) struct RoutingStep<'a> {
    routing: &'a EngineRouting,
    global_counts: GlobalExpertCounts,
    /// Counts summed over layers, if a loss reads them.
    counts_over_layers: Option<ExpertCountsSummedOverLayers>,
    /// Record of the selections, if the step records them.
    record: Option<RoutingRecord>,
    /// Experts of each micro-batch that replace the routers' selections.
    given: Option<&'a [Option<RoutedMicro>]>,
    device: Device,
}

/// A padded micro-batch of this rank.
pub(crate) struct RankTokens<'a> {
    pub(crate) micro: &'a Micro,
    pub(crate) micro_idx: usize,
    /// Tokens before the padding.
    pub(crate) n_tokens: usize,
    /// Tokens before the padding; 0 for a micro-batch without targets.
    pub(crate) n_valid_tokens: usize,
    /// The most rows of any rank's residual stream, if experts are padded.
    pub(crate) most_rows: Option<usize>,
    /// Returns the token of each row of this rank's residual stream.
    pub(crate) tokens_of_rows: &'a dyn Fn() -> Result<Vec<usize>>,
}

/// Inputs of the routers in a micro-batch.
pub(crate) struct MicroRouting {
    micro_idx: usize,
    /// Rows of this rank's residual stream that routers count.
    rows: Option<RouterRows>,
    most_rows: Option<usize>,
    /// Experts that replace the routers' selections.
    replayed: Option<ReplayedExperts>,
}

impl EngineRouting {
    /// Sets the settings of the routers. Inference has [`RouterSettings::of_evaluation`].
    pub(crate) fn with_settings(self, settings: RouterSettings) -> Self {
        Self { inference: settings.of_evaluation(), settings, ..self }
    }

    /// Sets the expert parallel groups.
    pub(crate) fn with_experts(self, experts: ExpertParallel) -> Self {
        Self { experts: Some(experts), ..self }
    }

    /// Sets the implementation of the experts' matmuls on a GPU.
    pub(crate) fn with_implementation(self, implementation: GroupedGemmImpl) -> Self {
        Self { implementation, ..self }
    }

    /// Calls `f` with the operations of this rank, which are `inner` but for those of experts.
    pub(crate) fn with_token_parallel<T>(
        &self,
        inner: &dyn TokenParallel,
        f: impl FnOnce(&dyn TokenParallel) -> T,
    ) -> T {
        match &self.experts {
            None => f(inner),
            Some(experts) => f(&ExpertParallelOps { experts, inner }),
        }
    }

    /// Returns operations that exchange tokens, if ranks do.
    pub(crate) fn exchange_ops<'o>(&'o self, inner: &'o dyn TokenParallel) -> Option<ExpertParallelOps<'o>> {
        let experts = self.experts.as_ref().filter(|experts| experts.exchanges_tokens());
        experts.map(|experts| ExpertParallelOps { experts, inner })
    }

    /// Adds the settings of inference to a context.
    pub(crate) fn in_inference<'c>(&'c self, context: ForwardContext<'c>) -> ForwardContext<'c> {
        let router = RouterContext { settings: &self.inference, ..RouterContext::default() };
        ForwardContext { experts_implementation: self.implementation, router, ..context }
    }

    /// Begins a step.
    pub(crate) fn begin_step<'a>(&'a self, model: &Model, choice: StepRouting<'a>, device: &Device) -> RoutingStep<'a> {
        let given = match choice {
            StepRouting::Replay(micros) => Some(micros),
            StepRouting::Select | StepRouting::Record => None,
        };
        RoutingStep {
            routing: self,
            global_counts: GlobalExpertCounts::default(),
            counts_over_layers: self.counts_over_layers(model),
            record: matches!(choice, StepRouting::Record).then(RoutingRecord::default),
            given,
            device: device.clone(),
        }
    }
}

impl RoutingStep<'_> {
    /// Begins a micro-batch, whose layers on this rank are `own_layers`.
    pub(crate) fn begin_micro(
        &self,
        model: &Model,
        own_layers: impl Fn() -> Vec<usize>,
        tokens: &RankTokens<'_>,
    ) -> Result<MicroRouting> {
        let given = self.given.and_then(|micros| micros[tokens.micro_idx].as_ref());
        let replayed = given.map(|given| self.replayed(model, &own_layers(), tokens, given)).transpose()?;
        let RankTokens { micro_idx, most_rows, .. } = *tokens;
        Ok(MicroRouting { micro_idx, rows: self.rows(tokens)?, most_rows, replayed })
    }

    /// Adds the routers' inputs to a training context. Selections are counted in `outputs`, and recorded, only with `outputs`.
    pub(crate) fn in_context<'c>(
        &'c self,
        context: ForwardContext<'c>,
        of_micro: &'c MicroRouting,
        outputs: Option<&'c LayerOutputs>,
    ) -> ForwardContext<'c> {
        let router = RouterContext {
            settings: &self.routing.settings,
            rows: of_micro.rows.as_ref(),
            outputs,
            global_counts: Some(&self.global_counts),
            expert_counts_summed_over_layers: self.counts_over_layers.as_ref(),
            record: outputs.and(self.record.as_ref()),
            replayed: of_micro.replayed.as_ref(),
            micro_idx: of_micro.micro_idx,
            noise_key: derive_key(context.dropout_key.unwrap_or_default(), ROUTER_NOISE),
            most_tokens: of_micro.most_rows,
        };
        ForwardContext { router, ..context }
    }

    /// Returns the factors of an auxiliary loss that are known once all layers have counted: one for each expert, f32 [e]. `None`
    /// for a loss that is a scalar.
    pub(crate) fn deferred_factors(&self, micro_idx: usize, loss: &Tensor) -> Result<Option<Tensor>> {
        let counts = self.counts_over_layers.as_ref().filter(|_| loss.rank() == 1);
        counts.map(|counts| counts.factors(micro_idx)).transpose()
    }
}

/// Returns the number of matrices of a linear layer or of routed experts. Fails if the model has no such module.
pub(crate) fn n_matrices(model: &Model, module: &str) -> Result<usize> {
    let of_layer = |layer: &LayerSpec| {
        let experts = layer.expert_matrices().find(|matrix| matrix.name == module).map(|matrix| matrix.n_experts);
        experts.or_else(|| layer.linears().any(|linear| linear.module == module).then_some(1))
    };
    match model.layers().find_map(of_layer) {
        Some(n) => Ok(n),
        None => bail!("the model has no linear layer or experts {module}, for which there are FP8 scales"),
    }
}
