//! FP8 training in a plan.

use candlewick_model::Config;
use candlewick_ops::{
    AmaxHistoryPolicy, DelayedScaling, Fp8Config, Fp8Formats, Fp8Operand, Fp8Recipe, Fp8Rounding, ScaleRule, derive_key,
};
use serde::Serialize;

use crate::recipe::{AmaxComputeAlgo, Fp8FormatName, Fp8TensorName, GradientRounding};

/// Settings of FP8 training.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fp8Plan {
    /// Recipe of the scales.
    pub recipe: Fp8RecipePlan,
    /// Formats of the operands.
    pub format: Fp8FormatName,
    /// Rounding of the gradients of outputs.
    pub gradient_rounding: GradientRounding,
    /// First and last decoder layers that stay in the compute dtype.
    pub layers_in_bf16: [usize; 2],
    /// Number of steps between statistics; 0 without them.
    #[serde(skip)]
    pub stats_interval: usize,
    /// Texts in the names of modules that have statistics; empty for all.
    #[serde(skip)]
    pub stats_modules: Vec<String>,
    /// Tensors that have statistics.
    #[serde(skip)]
    pub stats_tensors: Vec<Fp8TensorName>,
    /// True if ZeRO stage 3 gathers weights that multiply in FP8 as codes. It changes no result.
    #[serde(skip)]
    pub param_gather: bool,
    /// True if layers that are slower in FP8 on the run's device stay in the compute dtype.
    pub exclude_slower_modules: bool,
    /// True if linear layers multiply the values of FP8 codes in the compute dtype.
    pub fake_quantize: bool,
    /// True if routed experts multiply in FP8, too.
    pub quantize_experts: bool,
    /// Texts in the names of linear layers that stay in the compute dtype.
    pub exclude_modules: Vec<String>,
}

/// Recipe of the scales.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fp8RecipePlan {
    /// Delayed scaling.
    Delayed {
        /// Scales are divided by 2^margin.
        margin: i32,
        /// Number of steps whose amaxes are kept.
        amax_history_len: usize,
        /// Choice of the amax from the history.
        amax_compute_algo: AmaxComputeAlgo,
    },
    /// Current scaling.
    Current(ScaleRulePlan),
    /// Blockwise scaling.
    Blockwise(ScaleRulePlan),
}

impl Fp8RecipePlan {
    /// Returns the recipe's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Delayed { .. } => "delayed",
            Self::Current(_) => "current",
            Self::Blockwise(_) => "blockwise",
        }
    }
}

/// Rule of a scale from an amax.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ScaleRulePlan {
    /// True if scales are rounded down to powers of two.
    pub power_of_two_scales: bool,
    /// Smaller amaxes count as this one.
    pub amax_epsilon: f32,
}

/// Part of the seed of stochastic rounding.
const ROUNDING: u64 = 0xf8;

impl Fp8Plan {
    /// Returns the engine's settings. `seed` seeds stochastic rounding.
    pub fn config(&self, seed: u64) -> Fp8Config {
        let recipe = match self.recipe {
            Fp8RecipePlan::Delayed { margin, amax_history_len, amax_compute_algo } => {
                let amax_compute = match amax_compute_algo {
                    AmaxComputeAlgo::Max => AmaxHistoryPolicy::Max,
                    AmaxComputeAlgo::MostRecent => AmaxHistoryPolicy::MostRecent,
                };
                Fp8Recipe::Delayed(DelayedScaling { margin, amax_history_len, amax_compute })
            }
            Fp8RecipePlan::Current(rule) => Fp8Recipe::Current(rule.into()),
            Fp8RecipePlan::Blockwise(rule) => Fp8Recipe::Blockwise(rule.into()),
        };
        let formats = match self.format {
            Fp8FormatName::Hybrid => Fp8Formats::Hybrid,
            Fp8FormatName::E4m3 => Fp8Formats::E4m3,
        };
        let gradient_rounding = match self.gradient_rounding {
            GradientRounding::Nearest => Fp8Rounding::Nearest,
            GradientRounding::Stochastic => Fp8Rounding::Stochastic { key: derive_key(seed, ROUNDING) },
        };
        Fp8Config { recipe, formats, gradient_rounding, fake_quantize: self.fake_quantize }
    }

    /// Returns true if a step has statistics.
    pub fn has_stats(&self, step: usize) -> bool {
        self.stats_interval > 0 && step.is_multiple_of(self.stats_interval)
    }

    /// Returns true if a module's operand has statistics.
    pub fn measures(&self, module: &str, operand: Fp8Operand) -> bool {
        let is_named = |text: &String| module.contains(text.as_str());
        let is_module = self.stats_modules.is_empty() || self.stats_modules.iter().any(is_named);
        is_module && self.stats_tensors.iter().any(|tensor| Fp8Operand::from(*tensor) == operand)
    }

    /// Returns the names of the linear layers and routed experts that multiply in FP8.
    pub(crate) fn modules(&self, config: &Config) -> Vec<String> {
        let [at_start, at_end] = self.layers_in_bf16;
        let layers = at_start..config.n_layers().saturating_sub(at_end);
        let is_excluded = |name: &String| self.exclude_modules.iter().any(|text| name.contains(text.as_str()));
        let names = layers.flat_map(|layer_idx| {
            let layer = config.layer(layer_idx);
            let linears = layer.linears().map(|linear| linear.module.clone());
            let experts = layer.expert_matrices().filter(|_| self.quantize_experts);
            linears.chain(experts.map(|matrix| matrix.name.clone())).collect::<Vec<_>>()
        });
        names.filter(|name| !is_excluded(name)).collect()
    }
}

impl From<Fp8TensorName> for Fp8Operand {
    fn from(name: Fp8TensorName) -> Self {
        match name {
            Fp8TensorName::Input => Self::Input,
            Fp8TensorName::Weight => Self::Weight,
            Fp8TensorName::GradOutput => Self::GradOutput,
        }
    }
}

impl From<ScaleRulePlan> for ScaleRule {
    fn from(plan: ScaleRulePlan) -> Self {
        Self { power_of_two: plan.power_of_two_scales, amax_epsilon: plan.amax_epsilon }
    }
}
