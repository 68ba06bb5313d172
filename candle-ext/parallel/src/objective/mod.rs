//! Training objectives: the columns, reference, normalizer, loss and metrics of a kind of training.

mod causal;
mod list;
mod normalizer;

use std::cell::{OnceCell, RefCell};

use candle_core::{Result, Tensor, bail};

use crate::batch::{ColumnSpec, Micro};

pub use causal::CausalLm;
pub use list::OBJECTIVES;
pub use normalizer::LossNormalizer;

/// Name of the column with the reference's log-probability of each target, f32 [t]; 0 where there is no target.
pub const REFERENCE_LOG_PROBS: &str = "reference_log_probs";

/// Objective of training: its needs, and its loss.
///
/// Loss and metrics are sums over the units of [`Objective::normalizer`]. So they do not depend on how a global batch is cut.
pub trait Objective: Send + Sync {
    /// Returns the columns of micro-batches that the loss reads, without [`REFERENCE_LOG_PROBS`].
    fn columns(&self) -> &[ColumnSpec] {
        &[]
    }

    /// Returns the model that the loss compares with.
    fn reference(&self) -> ReferenceModel {
        ReferenceModel::None
    }

    /// Returns the unit over which the loss is a mean.
    fn normalizer(&self) -> LossNormalizer {
        LossNormalizer::TargetTokens
    }

    /// Returns the metrics that the loss emits.
    fn metrics(&self) -> &[MetricSpec] {
        &[]
    }

    /// Returns the loss of a micro-batch.
    ///
    /// Objectives that read no token losses need one pass over the output layer, others two.
    fn loss(&self, tokens: &TokenLosses<'_>) -> Result<MicroLoss>;
}

/// Model that an objective compares with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceModel {
    /// None.
    None,
    /// The model at the start of training. The engine adds its [`REFERENCE_LOG_PROBS`] to the micro-batches.
    Frozen,
}

/// Metric of an objective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricSpec {
    /// Name in the results of a step.
    pub name: &'static str,
    /// Reduction over micro-batches and ranks.
    pub reduction: MetricReduction,
}

/// Reduction of a metric over micro-batches and ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricReduction {
    /// Sum.
    Sum,
    /// Sum over the count of the objective's [`LossNormalizer`].
    Mean,
    /// Maximum.
    Max,
}

/// Loss of a micro-batch before normalization.
#[derive(Clone, Debug)]
pub enum MicroLoss {
    /// Sum of the token losses.
    SumOfTokens,
    /// A differentiable function of the token losses.
    Weighted {
        /// Loss, an f32 scalar on the engine's device.
        loss: Tensor,
        /// Derivatives of the loss with respect to each token loss, f32 [t] on the engine's device.
        weights: Tensor,
    },
}

/// Token losses of one micro-batch, computed on first use, and the metrics that its objective emits.
pub struct TokenLosses<'a> {
    micro: &'a Micro,
    compute: &'a dyn Fn() -> Result<Tensor>,
    losses: OnceCell<Tensor>,
    specs: &'a [MetricSpec],
    emitted: RefCell<Vec<(usize, Tensor)>>,
}

impl<'a> TokenLosses<'a> {
    pub(crate) fn new(micro: &'a Micro, specs: &'a [MetricSpec], compute: &'a dyn Fn() -> Result<Tensor>) -> Self {
        Self { micro, compute, losses: OnceCell::new(), specs, emitted: RefCell::default() }
    }

    /// Returns the whole micro-batch, even if context parallel ranks split it. Padding is a sequence without targets.
    pub fn micro(&self) -> &Micro {
        self.micro
    }

    /// Returns the cross-entropy of each target under the current weights, f32 [t]: -log p, or with label smoothing that
    /// loss. It is 0 where there is no target.
    ///
    /// Collective: all ranks that split the micro-batch must call it.
    pub fn losses(&self) -> Result<Tensor> {
        if let Some(losses) = self.losses.get() {
            return Ok(losses.clone());
        }
        let losses = (self.compute)()?;
        Ok(self.losses.get_or_init(|| losses).clone())
    }

    /// Adds to a metric, an f32 scalar on the engine's device. The ranks that split the micro-batch emit equal values, which
    /// count once.
    ///
    /// # Errors
    ///
    /// If the objective does not declare the metric.
    pub fn emit(&self, name: &str, value: Tensor) -> Result<()> {
        let Some(i) = self.specs.iter().position(|spec| spec.name == name) else {
            bail!("the objective emits `{name}`, which is not among its metrics")
        };
        self.emitted.borrow_mut().push((i, value));
        Ok(())
    }

    /// Returns the emitted values, by index of the metric.
    pub(crate) fn into_emitted(self) -> Vec<(usize, Tensor)> {
        self.emitted.into_inner()
    }
}

/// An auxiliary loss that layers compute, such as a load-balancing loss.
#[derive(Clone, Debug, PartialEq)]
pub struct AuxiliaryLoss {
    /// Name of the loss in layers and metrics.
    pub name: String,
    /// Coefficient of its mean.
    pub coefficient: f64,
    /// Divisor of its sum over layers, micro-batches and ranks, such as the step's tokens.
    pub normalizer: f64,
}

impl AuxiliaryLoss {
    /// Returns the mean of a sum of this loss.
    pub(crate) fn mean(&self, sum: f64) -> f64 {
        sum / self.normalizer.max(1.0)
    }
}
